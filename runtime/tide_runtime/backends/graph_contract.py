"""Check of the segment contract: a compiled graph's inputs and outputs must be those that the runtime binds."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence

from tide_runtime.bundle.calibration import DraftHeadInfo
from tide_runtime.bundle.manifest import (
    ADVANCE,
    DRAFT,
    HEAD,
    LOOP,
    SCORE,
    STATES,
    UNCUT,
    GraphInfo,
    Manifest,
    exit_graphs,
)
from tide_runtime.errors import BundleError

Shape = Sequence[int | str | None]
ADAPTER_ROWS = "adapter_rows"  # the adapter of each token: 0 without one, else its number from 1 on
_POSITIONS: dict[str, Shape] = {  # regular expression of the name → shape; position_ids has the shape of input_ids
    "write_index": (None,),
    "seqlens_k": (None,),
    "total_sequence_length": (),
    "query_seqlens": (None,),
    "padded_rows": (None, None, 2),
    "packed_rows": (1, None, 2),
    "padded_position_ids": (None, None),
    "row_mask": (None, None),
    ADAPTER_ROWS: (1, None),
}

_POSITION_IDS = "position_ids"
_PACKED = {"padded_rows", "packed_rows"}  # index arrays of graphs with packed tokens
# Kind of a state → what advancing it takes of each token: always, and where the rule of the recurrence reads it.
_OPERANDS = {"convolution": ({"rows"}, set[str]()), "recurrence": ({"key", "value", "decay"}, {"beta"})}


def decoder_layers(manifest: Manifest, graphs: Container[str]) -> dict[str, int]:
    """Name → number of decoder layers, for every graph that a target with ``graphs`` can run."""
    layers = {g.name: g.layers[1] - g.layers[0] if g.layers else 0 for g in manifest.graphs}
    model = manifest.model
    optional = {UNCUT: model.num_layers, LOOP: model.num_layers // model.loops, DRAFT: 0, ADVANCE: 0}
    return layers | {name: count for name, count in optional.items() if name in graphs}


def check_interface(
    manifest: Manifest,
    name: str,
    file: str,
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    host_picks: bool = False,
) -> None:
    """Raise BundleError unless the ``inputs`` and ``outputs`` (name → shape) compiled into ``file`` fit the manifest.

    Args:
        name: a graph, one that the manifest does not list too, as the uncut graph.
        host_picks: the host reads the logits, so that graphs may leave ``token`` to it.

    Names must be those of the manifest and of the contract; dimensions fixed in the graph must be the model's.
    """
    packed = name == DRAFT or not _PACKED.isdisjoint(inputs)
    listed_as = next((g for g in manifest.graphs if g.name == name), None)
    graph = listed_as or _formed(manifest, name)
    wanted_inputs, wanted_outputs = _contract(manifest, graph, packed) if name != DRAFT else _draft(manifest, file)
    if name == UNCUT and any(DRAFT in target.graphs for target in manifest.targets.values()):
        wanted_outputs[STATES] = (1, None, _draft_head(manifest, file).width)
    if name.startswith(SCORE):  # a router may read the logits alone
        wanted_inputs = {n: shape for n, shape in wanted_inputs.items() if n in inputs}
    # Lowering chooses which position inputs its kernel reads, and a model whether its embedding does.
    if name == DRAFT or (name != ADVANCE and any(n.startswith(("key_cache_", "state_")) for n in wanted_inputs)):
        positions = _POSITIONS | {_POSITION_IDS: (1 if packed else None, None)}
        wanted_inputs |= {n: shape for n in inputs for known, shape in positions.items() if re.fullmatch(known, n)}
    operands = _operands(manifest, file, graph, inputs if name == ADVANCE else outputs)
    (wanted_inputs if name == ADVANCE else wanted_outputs).update(operands)
    listed_inputs = {tensor.name for tensor in listed_as.inputs} if listed_as else set(inputs)
    listed_inputs = {n for n in listed_inputs if not _is_position(n)} | {n for n in inputs if _is_position(n)}
    listed_outputs = {tensor.name for tensor in listed_as.outputs} | set(operands) if listed_as else set(outputs)
    if "logits" in wanted_outputs and (host_picks or "token" in outputs):  # the target chose, and the manifest lists the first's
        listed_outputs = listed_outputs - {"token"} | {"token"} & set(outputs)
        if "token" not in outputs:
            del wanted_outputs["token"]
    for kind, wanted, listed, found in (
        ("inputs", wanted_inputs, listed_inputs, inputs),
        ("outputs", wanted_outputs, listed_outputs, outputs),
    ):
        if set(found) != set(wanted) or listed != set(wanted):
            odd = sorted(set(found) ^ set(wanted)) or sorted(listed ^ set(wanted))
            raise BundleError(
                f"{file} does not have the {kind} that {name} needs (missing or unexpected: {', '.join(odd)}): "
                "the manifest belongs to other files; export the bundle again"
            )
        for tensor, shape in wanted.items():
            _check_shape(file, tensor, shape, found[tensor])


def _is_position(name: str) -> bool:
    return name == _POSITION_IDS or any(re.fullmatch(known, name) for known in _POSITIONS)


def _formed(manifest: Manifest, name: str) -> GraphInfo:
    """The segment, or a graph that the manifest does not list."""
    every = [0, manifest.model.num_layers]
    loop = [0, manifest.model.num_layers // manifest.model.loops]
    layers = {UNCUT: every, ADVANCE: every, LOOP: loop, DRAFT: None}
    others = [GraphInfo(graph, run, 0, [], []) for graph, run in layers.items()]
    return next(g for g in (*manifest.segments, *others) if name == g.name)


def _contract(manifest: Manifest, graph: GraphInfo, packed: bool) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Inputs and outputs of ``graph`` by name; None is a dynamic dimension. ``packed``: tokens are [1, T], else [B, S]."""
    model = manifest.model
    batch = 1 if packed else None
    tokens, hidden = (batch, None), (batch, None, manifest.hidden_width)
    if graph.name == HEAD:
        return {"hidden": hidden}, {"logits": (None, None, manifest.logits_size), "token": tokens}
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    for info in exits:
        if graph.name in (made := exit_graphs(info)):
            read = {"logits": (*tokens, manifest.logits_size)} if graph.name.startswith(SCORE) else {}
            return {"hidden": hidden, **read}, {name: tokens if name == "score" else hidden for name in made[graph.name]}
    assert graph.layers is not None
    kept = _states(manifest, range(*graph.layers))
    if graph.name == ADVANCE:
        kept = {name: (1, *shape[1:]) for name, shape in kept.items()}
        return kept, _written(kept)
    caches = _caches(manifest, range(*graph.layers)) | kept
    inputs: dict[str, Shape] = {"input_ids": tokens} if graph.layers[0] == 0 else {"hidden": hidden}
    outputs: dict[str, Shape] = {"hidden_out": hidden}
    if graph.name == LOOP:
        inputs |= {"hidden": hidden, "first_loop": (batch, None, 1), "logits_index": (None,)}
        outputs |= {"logits": (1, None, manifest.logits_size), "token": (1, None)}
    elif graph.layers[1] == model.num_layers:
        inputs["logits_index"], outputs = (None,), {"logits": (1, None, manifest.logits_size), "token": (1, None)}
    return inputs | caches, outputs | _written(caches)


def _draft(manifest: Manifest, file: str) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """`_contract` of the draft head."""
    head = _draft_head(manifest, file)
    layer = manifest.model.num_layers
    tokens = (1, None)
    states = (*tokens, head.width)
    caches = _caches(manifest, range(layer, layer + 1))
    chosen: dict[str, Shape] = {"logits_index": (None,)} if caches else {}
    inputs: dict[str, Shape] = {"input_ids": tokens, "before": states}
    outputs: dict[str, Shape] = {STATES: states, "token": tokens, "score": tokens}
    return inputs | chosen | caches, outputs | _written(caches)


def _draft_head(manifest: Manifest, file: str) -> DraftHeadInfo:
    if manifest.draft_head is None:
        raise BundleError(f"the manifest has no draft head, which {file} belongs to; export the bundle again")
    return manifest.draft_head


def _caches(manifest: Manifest, layers: range) -> dict[str, Shape]:
    caches: dict[str, Shape] = {}
    for layer in layers:
        kv = manifest.caches.get(manifest.kv_sources.get(layer, layer))
        if kv is not None:
            caches[f"key_cache_{layer}"] = (None, kv.heads, None, kv.key_dim)
            caches[f"value_cache_{layer}"] = (None, kv.heads, None, kv.value_dim)
    return caches


def _states(manifest: Manifest, layers: range) -> dict[str, Shape]:
    return {f"state_{layer}_{n}": (None, *info.shape) for (layer, n), info in manifest.states.items() if layer in layers}


def _operands(manifest: Manifest, file: str, graph: GraphInfo, found: Mapping[str, Shape]) -> dict[str, Shape]:
    """What steps with drafts keep of each token so that states can be advanced: name → shape of those among ``found``.

    Raises BundleError when some are missing.
    """
    operands: dict[str, Shape] = {}
    for (layer, n), info in manifest.states.items() if graph.layers is not None else ():
        if layer in range(*graph.layers or ()):
            always, sometimes = _OPERANDS[info.kind]
            there = {kind for kind in always | sometimes if undo_operand(layer, n, kind) in found}
            if not there >= always:
                raise BundleError(
                    f"{file} lacks {', '.join(undo_operand(layer, n, kind) for kind in sorted(always - there))}, without which "
                    "rejected drafts cannot be undone; export the bundle again"
                )
            # A recurrence's operands have the shapes that its operator takes, with any number of key heads.
            operands |= {name: found[name] for name in (undo_operand(layer, n, kind) for kind in there)}
            if info.kind == "convolution":
                operands[undo_operand(layer, n, "rows")] = (1, None, info.shape[-1])
    return operands


def undo_operand(layer: int, number: int, kind: str) -> str:
    """Name of what advancing state ``number`` of ``layer`` reads: [1, T, …], packed rows."""
    return f"undo_{layer}_{number}_{kind}"


def written_name(name: str) -> str:
    """The graph output for what the input ``name`` becomes: ``key_cache_out_3``, ``state_out_3_0``."""
    return re.sub(r"^(key_cache|value_cache|state)_", r"\1_out_", name)


def read_name(output: str) -> str:
    """The graph input whose memory ``output`` may be written to, see `written_name`."""
    return re.sub(r"^(key_cache|value_cache|state)_out_", r"\1_", output)


def _written(caches: dict[str, Shape]) -> dict[str, Shape]:
    return {written_name(name): shape for name, shape in caches.items()}


def hidden_states(manifest: Manifest, graph: str) -> tuple[int, int]:
    """Which of the step's ``hidden`` arrays ``graph`` reads and writes, by index.

    Array i holds the output of segment i. The last segment and ``uncut`` write logits instead, so the last array is free: it is
    the input of ``head``. An exit writes its translated state where its head goes on: into the input of the last segment
    (``tail:k``) or into that of ``head``.
    """
    names = [segment.name for segment in manifest.segments]
    if graph in names:
        number = names.index(graph)
        return number - 1, number  # segment_0 reads token ids instead
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    for info in exits:
        if graph in exit_graphs(info):
            return manifest.checkpoints.index(info.checkpoint), len(names) - (2 if info.tail_layers else 1)
    return len(names) - 1, len(names) - 1


def _check_shape(file: str, name: str, wanted: Shape, found: Shape) -> None:
    fits = len(found) == len(wanted) and all(
        not isinstance(have, int) or have == need for have, need in zip(found, wanted, strict=False)
    )
    if not fits:
        raise BundleError(
            f"{name} of {file} has the shape {list(found)}, the manifest makes it {list(wanted)}: the two do not belong "
            "together; export the bundle again"
        )
