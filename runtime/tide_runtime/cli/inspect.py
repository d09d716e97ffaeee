"""``tide-inspect``: the contents of a bundle as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tide_runtime.backends.onnxruntime.activation_bits import activation_bits
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import UNCUT, Manifest
from tide_runtime.cli.device_table import device_facts, device_tables
from tide_runtime.cli.engines_table import engine_facts, engines_table
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.form import APP, COMMAND
from tide_runtime.cli.tables import human_size, pairs_table, titled_table
from tide_runtime.cli.weight_purposes import byte_purposes
from tide_runtime.engine_options import EngineOptions
from tide_runtime.targets.target_choice import targets_here

app = typer.Typer(**APP)
_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
_BAR_CHARACTERS = 48
_MODEL = (
    "name", "source", "revision", "architecture", "model_type", "parameters", "num_layers", "loops", "code", "hidden_size",
    "vocab_size", "max_position_embeddings", "fingerprint",
)  # fmt: skip


@app.command(**COMMAND)
def inspect(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory, as `tide-export --out` wrote it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as one JSON object.")] = False,
    verify: Annotated[bool, typer.Option(help="Compare the bundle's files with their SHA-256.")] = True,
    device: Annotated[bool, typer.Option("--device", help="Show what each target takes of a GPU's memory.")] = False,
    max_batch: Annotated[int, typer.Option(help="With --device: sequences that run at once.", min=1)] = EngineOptions.max_batch,
    context: Annotated[
        int | None, typer.Option(help="With --device: tokens of the longest sequence.", min=1, show_default="max_seq_len")
    ] = None,
) -> None:
    """Show a bundle: model, segments, checkpoints, exits and their certificate, targets, tokenizer, generation defaults."""
    opened = Bundle.open(bundle, verify=verify)
    facts = bundle_facts(opened.manifest)
    for name, validity in targets_here(opened).items():
        facts["targets"][name] |= {"here": validity, "bytes_by_purpose": byte_purposes(opened, name)}
    if device:
        facts["device_memory"] = device_facts(opened, max_batch, context)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=1))
        return
    console = Console(markup=False, highlight=False, emoji=False)  # [brackets] in names are text, not markup
    for table in device_tables(facts["device_memory"]) if device else _tables(facts):
        console.print(table)


def bundle_facts(manifest: Manifest) -> dict[str, Any]:
    """The facts as JSON values; sizes in bytes, cache sizes per sequence."""
    return {
        "model": _facts(manifest.model, _MODEL),
        "schema": manifest.schema,
        "created": manifest.created,
        "dtype": manifest.dtype,
        "max_seq_len": manifest.max_seq_len,
        "kv_cache_dtype": manifest.cache_dtype,
        "kv_cache_bytes_per_token": kv_cache_bytes(manifest, tokens=1),
        "kv_cache_bytes_per_row": kv_cache_bytes(manifest, manifest.max_seq_len),
        "bundle_bytes": sum(info.bytes for info in manifest.files.values()),
        "checkpoints": manifest.checkpoints,
        "calibration": _facts(manifest.calibration),
        "embedding": _facts(manifest.embedding),
        "draft_head": _facts(manifest.draft_head),
        "rounding": _facts(manifest.rounding),
        "graphs": [
            {
                "name": graph.name,
                "layers": graph.layers,
                "parameters": graph.parameters,
                "inputs": len(graph.inputs),
                "outputs": len(graph.outputs),
                "file_bytes": {name: _graph_bytes(manifest, name, graph.name) for name in manifest.targets},
            }
            for graph in manifest.graphs
        ],
        "targets": {name: _target_facts(manifest, name) for name in manifest.targets},
        "tokenizer": _facts(manifest.tokenizer, ("file", "chat_template", "special_tokens")),
        "generation": _facts(manifest.generation),
        "tools": manifest.tools,
    }


def _facts(info: Any, names: Sequence[str] = ()) -> dict[str, Any] | None:
    """The fields of a part of the manifest: ``names``, or all; None: there is no such part."""
    if info is None:
        return None
    facts = asdict(info)
    return {name: facts[name] for name in names or facts}


def kv_cache_bytes(manifest: Manifest, tokens: int) -> int:
    """KV cache bytes of one sequence of ``tokens``, all layers and the draft head."""
    per_token = sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in manifest.caches.values())
    return per_token * tokens * _DTYPE_BYTES[manifest.cache_dtype]


def _graph_bytes(manifest: Manifest, target: str, graph: str) -> int:
    """Size of a graph's file in the target; 0: it has none."""
    files = manifest.targets[target].graphs
    return manifest.files[files[graph]].bytes if graph in files else 0


def _target_facts(manifest: Manifest, name: str) -> dict[str, Any]:
    target = manifest.targets[name]
    graphs = {file for file in (*target.graphs.values(), target.products) if file is not None}
    sizes = {graph: manifest.files[file].bytes for graph, file in target.graphs.items()}
    folders = {Path(file).parent for file in graphs}
    others = [other for other in manifest.targets.values() if other is not target]
    of_others = {file for other in others for file in (*other.graphs.values(), other.products, other.weights)} - {target.weights}
    # External weights are in the folder of the graphs that refer to them.
    weights = sorted(f for f in manifest.files if Path(f).parent in folders and f not in graphs | of_others)
    return {
        "backend": target.backend,
        "files": sorted(graphs) + weights,
        "graph_bytes": sum(manifest.files[file].bytes for file in graphs),
        "uncut_bytes": _graph_bytes(manifest, name, UNCUT),
        "weight_bytes": sum(manifest.files[file].bytes for file in weights),
        "passes": target.passes,
        "verified": target.verified,
        **(engine_facts(target, sizes) if target.engines else {}),
    }


def _tables(facts: dict[str, Any]) -> list[Table]:
    model, targets = facts["model"], facts["targets"]
    return [
        pairs_table(
            "Model",
            {
                "name": model["name"],
                "source": model["source"] + (f" @ {model['revision']}" if model["revision"] else ""),
                "architecture": f"{model['architecture']} ({model['model_type']})",
                "parameters": f"{model['parameters']:,}",
                "layers × hidden": f"{model['num_layers']} × {model['hidden_size']}"
                + (
                    f", {model['num_layers'] // model['loops']} stored layers run {model['loops']} times"
                    if model["loops"] > 1
                    else ""
                ),
                "vocabulary": f"{model['vocab_size']:,} tokens",
                **_embedding_row(facts["embedding"]),
                "dtype": facts["dtype"],
                **_rounding_row(facts["rounding"]),
                "max_seq_len": f"{facts['max_seq_len']:,} tokens (model: {model['max_position_embeddings']:,})",
                "KV cache": f"{facts['kv_cache_dtype']}, {human_size(facts['kv_cache_bytes_per_token'])} per token, "
                f"{human_size(facts['kv_cache_bytes_per_row'])} per sequence at max_seq_len",
                "bundle": f"{human_size(facts['bundle_bytes'])}, schema {facts['schema']}, made {facts['created']}",
                "fingerprint": model["fingerprint"],
            },
        ),
        _segments_table(facts),
        pairs_table("Checkpoints", {"depth": depth_bar(model["num_layers"], facts["checkpoints"])}),
        *_calibration_tables(facts["calibration"]),
        pairs_table("Draft head", _draft_head_rows(facts["draft_head"])),
        _targets_table(targets),
        *(
            pairs_table(f"Bytes of target {name}", {purpose: human_size(size) for purpose, size in sizes.items()})
            for name, target in targets.items()
            if (sizes := target["bytes_by_purpose"])
        ),
        pairs_table("Verified", {name: _verified(target["verified"]) for name, target in targets.items()}),
        pairs_table("Runs here", {name: target["here"] for name, target in targets.items()}),
        *engines_table(targets),
        pairs_table("Tokenizer", _tokenizer_rows(facts["tokenizer"])),
        pairs_table("Generation defaults", {name: _listed(value) for name, value in facts["generation"].items()}),
        pairs_table("Made with", facts["tools"]),
    ]


def _rounding_row(info: dict[str, Any] | None) -> dict[str, str]:
    if info is None:
        return {}
    eight, seven = (info[f"perplexity_{bits}"] / info["perplexity"] - 1 for bits in (8, 7))
    here = f"{activation_bits().bits} bits on this processor"
    return {"activations": f"{here}; perplexity {eight:+.1%} with 8 bits, {seven:+.1%} with 7, on {info['text']}"}


def _embedding_row(info: dict[str, Any] | None) -> dict[str, str]:
    if info is None:
        return {}
    pooled = "the state of the last token" if info["pooling"] == "last" else "the mean of all states"
    return {"embeds texts": pooled + (", normalised" if info["normalized"] else "")}


def _verified(found: str) -> str:
    if not found:
        return "not recorded: the bundle is of an older version"
    return found if found.startswith("not ") else f"held to the eager model {found}"


def _segments_table(facts: dict[str, Any]) -> Table:
    files = [name for name, target in facts["targets"].items() if "engines" not in target]  # engines are in their own table
    columns = ["graph", "layers", "parameters", *(f"{name} file" for name in files), "inputs", "outputs"]
    table = titled_table("Segments", columns, right=columns[2:])
    for graph in facts["graphs"]:
        layers = "" if graph["layers"] is None else f"{graph['layers'][0]}–{graph['layers'][1] - 1}"
        sizes = [human_size(graph["file_bytes"][name]) for name in files]
        table.add_row(graph["name"], layers, f"{graph['parameters']:,}", *sizes, str(graph["inputs"]), str(graph["outputs"]))
    return table


def _calibration_tables(calibration: dict[str, Any] | None) -> list[Table]:
    if calibration is None:
        none = "none: every token takes every layer; tide-calibrate makes some, tide-export --calibration compiles them"
        return [pairs_table("Exits", {"exits": none})]
    columns = ["after layer", "head", "router", "exact ≥", "exit ≥", "MLP ≥"]
    title = "Exits: a token stops where the router's score is high enough"
    exits = titled_table(title, columns, right=(columns[0], *columns[3:]))
    for info in calibration["exits"]:
        thresholds = (info["exact_threshold"], info["exit_threshold"], info["mlp_threshold"])
        exits.add_row(
            str(info["checkpoint"]), info["head"], info["router"], *("–" if t is None else f"{t:.3f}" for t in thresholds)
        )
    return [exits, pairs_table("Calibration", _calibration_rows(calibration))]


def _calibration_rows(calibration: dict[str, Any]) -> dict[str, str]:
    ranges = {name: f" ({low:.2f}–{high:.2f})" for name, (low, high) in calibration["predicted_range"].items()}
    predicted = _listed(f"{name} {ratio:.2f}x{ranges.get(name, '')}" for name, ratio in calibration["predicted"].items())
    costs = calibration["costs"]
    return {
        "recommended policy": calibration["recommended"],
        "predicted speedup": f"{predicted} (over the uncut model, one row, greedy)" if calibration["predicted"] else "none",
        "draft limit": f"{calibration['draft_limit']} tokens",
        "certificate of exit": _certificate(calibration["certificate"]),
        "costs measured on": "not measured" if costs is None else f"{costs['machine']}, target {costs['target']}",
    }


def _draft_head_rows(info: dict[str, Any] | None) -> dict[str, str]:
    if info is None:
        return {"draft head": "none"}
    return {
        "kind": info["kind"] + (f", from {info['source']}" if info["source"] else ""),
        "reads the states after": f"layers {_listed(info['layers'])}, of {'all tokens' if info['kv'] else 'the last token'}",
        "vocabulary": f"{info['vocabulary']:,} tokens",
        "1st, 2nd, … guesses right": ", ".join(f"{share:.0%}" for share in info["acceptance"]),
    }


def _certificate(certificate: dict[str, Any] | None) -> str:
    if certificate is None:
        return "none: no threshold keeps the promise, so policy exit has nowhere to stop"
    alone = f", {certificate['full_disagreement']:.2%} without exits" if certificate["reference"] else ""
    return (
        f"with {certificate['confidence']:.0%} confidence at most {certificate['max_disagreement']:.2%} of tokens differ from "
        f"{certificate['reference'] or 'the full model'}'s, on text like the calibration data (measured "
        f"{certificate['measured']:.2%}{alone}; "
        f"{certificate['documents']:,} documents, {certificate['tokens']:,} tokens, counted by {certificate['unit']}; "
        f"{certificate['method']}; data SHA-256 {certificate['data_sha256'][:16]}…; {certificate['date']})"
    )


def _targets_table(targets: dict[str, Any]) -> Table:
    table = titled_table("Targets", ["target", "backend", "files", "graphs", "weights", "passes (times applied)"])
    for name, target in targets.items():
        passes = ", ".join(f"{label} {count}" for label, count in target["passes"].items())
        sizes = human_size(target["graph_bytes"]), human_size(target["weight_bytes"])
        table.add_row(name, target["backend"], str(len(target["files"])), *sizes, passes)
    return table


def _tokenizer_rows(tokenizer: dict[str, Any] | None) -> dict[str, str]:
    if tokenizer is None:
        return {"tokenizer": "none: give token ids instead of text"}
    return {
        "file": tokenizer["file"],
        "chat template": tokenizer["chat_template"] or "none",
        "special tokens": _listed(f"{name} {token}" for name, token in tokenizer["special_tokens"].items()),
    }


def depth_bar(num_layers: int, checkpoints: list[int]) -> str:
    """A bar of the layers, split at the checkpoints: ``━━┃━━``, with the line ``4 layers, checkpoints after 2`` below."""
    width = max(1, _BAR_CHARACTERS // num_layers)
    edges = [0, *checkpoints, num_layers]
    bar = "┃".join("━" * (width * (end - first)) for first, end in pairwise(edges))
    after = f"checkpoints after {_listed(checkpoints)}" if checkpoints else "no checkpoints"
    return f"{bar}\n{num_layers} layers, {after}"


def _listed(values: Any) -> str:
    if isinstance(values, str | int | float):
        return str(values)
    return ", ".join(map(str, values)) or "none"


def main() -> None:
    """Entry point of ``tide-inspect``."""
    run_app(app)


if __name__ == "__main__":
    main()
