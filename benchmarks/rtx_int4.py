"""Engines with int4 weights for every GPU that TensorRT-RTX compiles for, built here without any GPU, and what is in them.

    python -m benchmarks.rtx_int4 --json docs/results/DATE-rtx_int4.json        # about 5 minutes with an empty engine cache

The demo model is quantised (`tide-export --weights int4`, rounding to nearest) and compiled for each target. TensorRT's engine
inspector loads an engine, which takes a GPU, so the serialized plans are read (`benchmarks.lowered_graphs`). An engine counts if

- its int4 constants are all matrices of its layers, by the sizes in the checkpoint, and it holds none but the embedding in fp16;
- every matrix is multiplied by a kernel that dequantises on the way, in each optimization profile;
- a step copies nothing between host and device.

`rtx_int4_weight_pct`: bytes of the matrices, scales and shifts included, in percent of fp16. `rtx_int4_max_dlogit_pct`: the same
graph in fp32 on ONNX Runtime's CPU kernels against the eager model with dequantised weights, in percent of the largest logit.
Turing has no int4: its target compiles dense weights, and the row holds TensorRT's answer to a graph with int4 weights.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors import safe_open
from tide_bench.report import Report
from tide_runtime.backends.tensorrt.package import RTX
from tide_runtime.bundle.manifest import Manifest, TargetInfo
from tide_runtime.errors import TargetError

from benchmarks.lowered_graphs import EnginePlan, logits_on_cpu
from tide_export import export
from tide_export.config import ExportConfig
from tide_export.cut import CutGraph
from tide_export.export import quantize_loaded
from tide_export.load import LoadedModel, load_model
from tide_export.lower import lower, prepare
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.targets import TARGETS
from tide_export.targets.engine_build import BuildSettings, build_engine
from tide_export.targets.engine_network import read_network
from tide_export.targets.engines import step_profiles
from tide_export.targets.graph_files import write_graph_file
from tide_export.targets.rtx import RTX_TARGETS
from tide_export.trace import trace

MODEL = Path(__file__).resolve().parents[1] / "examples" / "demo_model" / "layerskip"
SLOTS, STEPS = 512, (24, 1, 1, 5)  # tokens of the steps that are compared with the eager model
PROFILES = 2  # decode, prefill
_MATRIX = re.compile(r"model\.layers\.(\d+)\..*_proj\.weight")


def main(json: Annotated[Path | None, typer.Option(help="Where to write the results.")] = None) -> None:
    """Build, inspect, compare; exits with an error if an engine with int4 weights does not count."""
    report = Report("rtx_int4", model=MODEL.name, weights="int4 rtn", dtype="fp16", slots=SLOTS)
    with tempfile.TemporaryDirectory(prefix="rtx_int4.") as folder:
        bundle = Path(folder) / "bundle"
        config = ExportConfig(
            dtype="fp16", weights="int4", max_seq_len=SLOTS, targets=tuple(t.name for t in RTX_TARGETS), verify=False
        )
        manifest = export(str(MODEL), bundle, config, progress=ExportProgress())
        report.rows += [row(bundle, manifest, name, info) for name, info in manifest.targets.items()]
    graph, difference = whole_graph()
    for entry in report.rows:
        if not TARGETS[entry["target"]].low_bits:
            entry["refusal"] = refusal(graph, TARGETS[entry["target"]].machine.compute[0])
    low = [entry for entry in report.rows if "refusal" not in entry]
    report.add("rtx_int4_engines", sum(entry["counted"] for entry in low))
    report.add("rtx_int4_targets", sum(entry["counted"] == entry["engines"] for entry in low))
    report.add("rtx_int4_weight_pct", max(entry["weight_pct"] for entry in low))
    report.add("rtx_int4_host_copies", sum(entry["host_copies"] for entry in report.rows))
    report.add("rtx_int4_max_dlogit_pct", 100 * difference)
    shown = ("target", "counted", "int4_mib", "scales_mib", "weight_pct", "fused_products", "host_copies", "mib")
    cells = [[*(str(entry[name]) for name in shown), entry.get("refusal", "")] for entry in report.rows]
    report.table("Engines with int4 weights", [*(name.replace("_", " ") for name in shown), "refusal"], cells)
    report.finish(json)
    if any(entry["counted"] != entry["engines"] for entry in low):
        raise SystemExit("an engine does not hold its weights in int4: see the rows")


def row(bundle: Path, manifest: Manifest, name: str, info: TargetInfo) -> dict[str, Any]:
    """One target: ``engines`` of its segments, and ``counted``, those that pass; ``mib``: of their files."""
    segments = [graph for graph in manifest.segments if graph.name in info.engines]
    plans = {graph.name: EnginePlan(bundle.joinpath(info.graphs[graph.name]).read_bytes()) for graph in segments}
    sizes = {graph.name: matrix_sizes(range(*graph.layers)) for graph in segments if graph.layers}
    held = Counter[str]()
    for graph, plan in plans.items():
        held += _weight_bytes(plan, sizes[graph])
    share = (held["int4"] + held["scales"]) / (2 * sum(map(sum, sizes.values())))
    return {
        "target": name,
        "tool": info.tool,
        "engines": len(plans),
        "counted": sum(holds_int4(plan, sizes[graph]) for graph, plan in plans.items()),
        "int4_mib": round(held["int4"] / 2**20, 2),
        "scales_mib": round(held["scales"] / 2**20, 2),
        "weight_pct": round(100 * share, 1) if held["int4"] else None,
        "fused_products": sum(plan.fused_int4_products for plan in plans.values()),
        "host_copies": sum(plan.host_copies for plan in plans.values()),
        "mib": round(sum(manifest.files[file].bytes for file in info.graphs.values()) / 2**20, 1),
    }


@cache
def parameter_sizes() -> dict[str, int]:
    """Name → number of values, from the checkpoint's header."""
    with safe_open(MODEL / "model.safetensors", "np") as file:
        return {name: prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118, a handle, no mapping


def matrix_sizes(layers: range) -> list[int]:
    """Numbers of values of the matrices of ``layers``."""
    matrices = [(_MATRIX.fullmatch(name), size) for name, size in parameter_sizes().items()]
    return [size for match, size in matrices if match and int(match[1]) in layers]


def holds_int4(plan: EnginePlan, sizes: list[int]) -> bool:
    """Whether the engine multiplies with matrices of ``sizes`` values in int4, in every profile, and copies nothing."""
    found = [prod(constant.dims) for constant in plan.constants() if constant.kind == "int4"]
    embedding = parameter_sizes()["model.embed_tokens.weight"]  # and the head, which is tied
    half = [prod(constant.dims) for constant in plan.constants() if constant.kind == "half"]
    dense = [size for size in half if size >= min(sizes) and size != embedding]
    kernels = plan.fused_int4_products == PROFILES * len(sizes)
    return sorted(found) == sorted(PROFILES * sizes) and not dense and kernels and plan.host_copies == 0


def _weight_bytes(plan: EnginePlan, sizes: list[int]) -> Counter[str]:
    """Bytes of a profile's int4 constants, and of ``scales``: fp16 with one row for each block, scales and shifts."""
    held = Counter[str]()
    for constant in plan.constants():
        if constant.kind == "int4":
            held["int4"] += constant.bytes
        elif constant.kind == "half" and len(constant.dims) == 2 and prod(constant.dims) < min(sizes):
            held["scales"] += constant.bytes
    return Counter({kind: count // PROFILES for kind, count in held.items()})


def whole_graph() -> tuple[CutGraph, float]:
    """The model as one fp32 graph for GPUs with int4, and its largest difference from the eager model's logits, relative to the
    largest logit."""
    quiet, target = ExportProgress(quiet=True), TARGETS["rtx-sm_80"]
    loaded: LoadedModel = quantize_loaded(load_model(str(MODEL), "fp32"), "int4", "rtn", quiet)
    traced, context = trace(loaded.model), LoweringContext(SLOTS, loaded.quantized)
    prepare(traced, target, context)
    graph = lower(traced, target, [], context).graphs[0]
    ids = np.random.default_rng(0).integers(3, loaded.model.config.vocab_size, sum(STEPS))
    with torch.no_grad():
        expected = loaded.model(torch.from_numpy(ids[None])).logits[0].numpy()
    difference = np.abs(logits_on_cpu(graph.model, ids, STEPS, SLOTS) - expected).max()
    return graph, float(difference / np.abs(expected).max())


def refusal(graph: CutGraph, compute: int) -> str:
    """TensorRT-RTX's message for ``graph``, which has int4 weights, on GPUs of that compute capability (times ten); empty if it
    builds."""
    trt = RTX.load()

    def configure(trt: Any, config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{compute}"), 0)

    with tempfile.TemporaryDirectory() as folder:
        network = read_network(trt, write_graph_file(graph, Path(folder)))
        settings = BuildSettings(step_profiles(1, 0, SLOTS), configure)
        try:
            build_engine(network, lambda: network, settings, ExportProgress(quiet=True), f"int4 for sm_{compute}")
        except TargetError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    typer.run(main)
