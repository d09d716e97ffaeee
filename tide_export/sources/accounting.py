"""Hold a loaded model against the tensors of its files: each parameter is one tensor's, and each tensor is used or named.

transformers fills a parameter without a tensor with random numbers, and drops a tensor without a parameter. Verification
compares a bundle with that same model, so the difference shows nowhere but here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tide_runtime.errors import ModelFilesError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

# Tensors without effect on the model, and why.
_LEFTOVERS = {
    r"(^|\.)rotary_emb\.inv_freq$": "older releases saved the rotary frequencies, which the config gives",
    r"(^|\.)rotary_emb\.(cos|sin)_cached$": "a cache of the rotary embedding",
    r"(^|\.)position_ids$": "the numbers 0, 1, 2, …",
}
_CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.(bias|masked_bias)$")
_LAYER = re.compile(r"^(?:model\.|transformer\.)?(?:language_model\.)?(?:layers|h)\.(\d+)\.")
_DRAFT_MODULE = re.compile(r"(^|\.)mtp(_\w+)?\.")
# How configs of several families call the number of layers that draft further tokens.
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_OWN_KEYS = re.compile(r"\.self_attn\.[kv]_(proj|norm)\.")
_ENCODER = re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision|embed_audio)\.")
_PACKED = re.compile(r"\.(qweight|qzeros|weight_packed|weight_scale(_inv)?|SCB|weight\.(absmax|quant_state\..*))$")
_FLOATS = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
_REMEDY = "the files were changed or belong to another config: download the model again, or save it with save_pretrained"


@dataclass(frozen=True)
class TensorHeader:
    """``dtype``: safetensors' name of it, such as BF16."""

    shape: tuple[int, ...]
    dtype: str


def weight_files(source: str, revision: str | None) -> tuple[Path, ...]:
    """The files that hold the weights of a directory or hub id; those of a hub model are cached once it was loaded.

    AutoGPTQ named its only file after bits and group size. Empty if a hub model's file has another name (a converted pull
    request).
    """
    whole, index = (
        cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    )
    if whole:
        return (Path(whole),)
    if index:
        return tuple(Path(file) for file in get_checkpoint_shard_files(source, index, revision=revision)[0])
    return tuple(sorted(Path(source).glob("*.safetensors")))


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Every tensor by name.

    Raises ModelFilesError for a damaged file, and if two files hold one tensor: loaders take either, and they may differ.
    """
    headers: dict[str, TensorHeader] = {}
    holder: dict[str, Path] = {}
    for file in files:
        for name, header in _headers_of(file).items():
            if name in holder:
                raise ModelFilesError(
                    f"{file.name} and {holder[name].name} both hold {name}; delete the shards of an older save, or download "
                    "the model again"
                )
            holder[name], headers[name] = file, header
    return headers


def _headers_of(file: Path) -> dict[str, TensorHeader]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: TensorHeader(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(f"cannot load {file} ({error}): it was cut short or changed; download it again") from error


@dataclass
class TensorUses:
    """Which tensors fill which parameter. ``by_target``: parameter → source pattern (or the tensor) → tensors."""

    by_target: dict[str, dict[str, list[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    filled: set[str] = field(default_factory=set)
    unused: list[str] = field(default_factory=list)


def check_names(
    source: str, model: PreTrainedModel, stored: Mapping[str, TensorHeader], config: PreTrainedConfig | None = None
) -> list[str]:
    """Sentences on tensors that a text model has no use for.

    Args:
        model: its values are not read.
        stored: all tensors of the files.
        config: the checkpoint's, where the model has only a part of it.

    Raises ModelFilesError with the names unless each parameter and persistent buffer has one tensor (or its experts' tensors),
    and each tensor is used.
    """
    uses = tensor_uses(model, stored)
    expected = model.state_dict()
    missing = expected.keys() - uses.filled - _tied(model, uses.filled)
    notes: dict[str, list[str]] = defaultdict(list)
    unexpected = []
    for name in uses.unused:
        if note := _without_use(name, model, config or model.config):
            notes[note].append(name)
        elif not _is_leftover(name, stored[name]):
            unexpected.append(name)
    if missing or unexpected:
        raise ModelFilesError(_complaint(source, model, missing, unexpected))
    for target, tensors in uses.by_target.items():
        _check_single(source, target, tensors, stored)
    _check_floats(source, model, uses, stored)
    return [f"{len(names)} tensors were left out, such as {min(names)}: {note}." for note, names in sorted(notes.items())]


def check_values(source: str, model: PreTrainedModel, report: Mapping[str, Collection[Any]], names_checked: bool = True) -> None:
    """Raise ModelFilesError where a loaded model's parameter was not filled, or is tied to one of other values.

    ``report``: transformers' loading info. ``names_checked``: whether `check_names` has judged the tensors that were not used.
    """
    check_shapes(source, report["mismatched_keys"])
    unexpected = () if names_checked else report["unexpected_keys"]
    if report["missing_keys"] or unexpected:
        raise ModelFilesError(_complaint(source, model, report["missing_keys"], unexpected))
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(name) is not model.get_parameter(other):
            raise ModelFilesError(
                f"{source} holds {name} and {other} with different values, and its config.json ties them: set "
                f"tie_word_embeddings to false if both are meant, or delete {name}"
            )


def tensors_by_parameter(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, list[str]]:
    """Parameter → the tensors that fill it, of those with the names ``stored``."""
    found = tensor_uses(model, stored).by_target
    return {target: [name for names in tensors.values() for name in names] for target, tensors in found.items()}


def check_shapes(source: str, shapes: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Raise ModelFilesError for a parameter (name, shape found, shape wanted) of another shape than the model's."""
    for name, found, wanted in sorted(shapes):
        if tuple(found) != tuple(wanted):
            raise ModelFilesError(
                f"{source} does not fit its config: {name} has shape {tuple(found)}, expected {tuple(wanted)}; {_REMEDY}"
            )


def tensor_uses(model: PreTrainedModel, stored: Iterable[str]) -> TensorUses:
    """Follow transformers' renaming of each tensor."""
    expected = model.state_dict()
    uses = TensorUses()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": expected}
    for name in stored:
        target, pattern = rename_source_key(name, renamings, converters, **names)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], **names)
        if target not in expected:
            uses.unused.append(name)
            continue
        uses.by_target[target][pattern or name].append(name)
        targets = by_pattern[pattern].target_patterns if pattern is not None else [""]
        uses.filled.update(target.replace(targets[0], other) if targets[0] else target for other in targets)
    return uses


def _tied(model: PreTrainedModel, filled: set[str]) -> set[str]:
    """Parameters that are one with a filled one."""
    groups = [set(pair) for pair in model.get_expanded_tied_weights_keys(all_submodels=True).items()]
    shared: dict[int, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared[id(parameter)].add(name)
    return {name for names in (*groups, *shared.values()) if filled & names for name in names}


def first_names(model: nn.Module) -> dict[str, str]:
    """Parameter name → the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(one), name) for name, one in model.named_parameters(remove_duplicate=False)}


def _is_leftover(name: str, header: TensorHeader) -> bool:
    if _CAUSAL_MASK.search(name):  # a projection's bias has one dimension and more than one number
        return header.shape in ((), (1,)) or (len(header.shape) == 4 and header.shape[:2] == (1, 1))
    return any(re.search(pattern, name) for pattern in _LEFTOVERS)


def _without_use(name: str, model: PreTrainedModel, config: PreTrainedConfig) -> str | None:
    """Why a text model that runs layer by layer has no use for a tensor that its config or its class declares."""
    text = config.get_text_config()
    layer = _LAYER.match(name)
    if drafts(name, model, config):
        return "they draft further tokens, and the model's own output does not depend on them"
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if layer and _OWN_KEYS.search(name) and 0 < text.num_hidden_layers - int(layer[1]) <= shared:
        return "their layers read the keys and values of earlier ones"
    if text is not config and _ENCODER.search(name):
        return "they read images or sound, and the bundle reads text"
    return None


def drafts(name: str, model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Whether a tensor belongs to the layers that draft further tokens, which the model itself runs without."""
    text = config.get_text_config()
    layer = _LAYER.match(name)
    declared = max(getattr(text, key, None) or 0 for key in _DRAFT_LAYERS)
    ignored = any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ())
    beyond = layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < declared
    return bool(declared or ignored) and (bool(_DRAFT_MODULE.search(name)) or beyond)


def _complaint(source: str, model: PreTrainedModel, missing: Collection[str], unexpected: Collection[str]) -> str:
    packed = [name for name in unexpected if _PACKED.search(name)]
    if packed:
        return (
            f"{source} holds packed weights ({_some(packed)}), and nothing says how: neither a quantization_config in "
            "config.json nor quantize_config.json or quant_config.json; add the file from where the model came"
        )
    layers = model.config.get_text_config().num_hidden_layers
    beyond = [name for name in unexpected if (found := _LAYER.match(name)) and int(found[1]) >= layers]
    parts = []
    if missing:
        parts.append(f"it lacks {_some(missing)}")
    if beyond:
        parts.append(f"it has more than the config's {layers} layers ({_some(beyond)})")
    elif unexpected:
        parts.append(f"it has unknown {_some(unexpected)}")
    remedy = _REMEDY
    if not unexpected and all(name.startswith("lm_head.") for name in missing):
        remedy = "if its head is its embedding, set tie_word_embeddings to true in config.json; else download it again"
    return f"{source} does not fit its config: {', and '.join(parts)}; {remedy}"


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _check_single(source: str, target: str, tensors: Mapping[str, list[str]], stored: Mapping[str, TensorHeader]) -> None:
    """Raise ModelFilesError where several tensors fill ``target``, other than the numbered experts 0, 1, 2, … of one shape."""
    every = [name for names in tensors.values() for name in names]
    if len(every) > 1 and any(pattern == name for pattern, names in tensors.items() for name in names):
        raise ModelFilesError(f"{source} holds {' and '.join(sorted(every))}, which are both {target}; delete one")
    most = max(len(names) for names in tensors.values())
    for pattern, names in tensors.items():
        shapes = {stored[name].shape for name in names}
        if len(names) not in (1, most) or (len(names) > 1 and not _numbered(names)) or len(shapes) > 1:
            raise ModelFilesError(
                f"{source} holds {len(names)} tensors {pattern} for {target} ({_some(names)}), expected the numbers 0 to "
                f"{most - 1} in one shape, found {', '.join(map(str, sorted(shapes)))}; {_REMEDY}"
            )


def _numbered(names: Collection[str]) -> bool:
    """Whether the names differ by one number, which takes each value from 0 on once."""
    rows = [re.findall(r"\d+", name) for name in names]
    columns = zip(*rows, strict=False)
    varying = [sorted(map(int, column)) for column in columns if len(set(column)) > 1]
    return len({len(row) for row in rows}) == 1 and varying == [list(range(len(names)))]


def _check_floats(source: str, model: PreTrainedModel, uses: TensorUses, stored: Mapping[str, TensorHeader]) -> None:
    """Raise ModelFilesError where integers would be taken for the floating-point numbers that they stand for."""
    expected = model.state_dict()
    for target, tensors in uses.by_target.items():
        for name in [name for names in tensors.values() for name in names if stored[name].dtype not in _FLOATS]:
            if expected[target].is_floating_point():
                raise ModelFilesError(
                    f"{source} holds {name} as {stored[name].dtype}, and no settings that say how to make floating-point "
                    "numbers of it; take the original model, or add the file with the quantisation settings"
                )
