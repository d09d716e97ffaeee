"""The unsplit graph: same model, same lowering, one ONNX graph, run by the same runtime loop. The baseline of every figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
from tide_runtime import Engine
from tide_runtime.backends.onnxruntime_cpu import OnnxRuntimeBackend
from tide_runtime.backends.threads import session_options
from tide_runtime.manifest import Manifest
from tide_runtime.policies.full import FullDepth

from benchmarks.arms import Timing
from benchmarks.build_cache import cached_folder
from benchmarks.in_process import run_in_process
from benchmarks.tide_arm import export_key, load_engine, timed_generate
from tide_export.bundle_writer import WEIGHTS_NAME
from tide_export.config import ExportConfig
from tide_export.export import write_lowered
from tide_export.load import LoadedModel, load_model
from tide_export.lower import lower, lower_several_rows, lower_unsplit, prepare
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.targets import find_target
from tide_export.trace import trace
from tide_export.weights import WeightFile

GRAPH = "unsplit"


def write_arms(loaded: LoadedModel, directory: Path, segment_counts: Sequence[int], max_seq_len: int) -> None:
    """One trace, several cuts: ``directory``/unsplit and a bundle ``directory``/segments_N for each count."""
    context, target = LoweringContext(max_seq_len), find_target("cpu", "fp32")
    traced = trace(loaded.model)
    reports = prepare(traced, target, context)
    progress = ExportProgress(quiet=True)
    unsplit = lower_unsplit(traced, target, context)
    folder = directory / GRAPH
    folder.mkdir(parents=True)
    several_rows, _ = lower_several_rows(unsplit, target, context)
    with WeightFile(folder / WEIGHTS_NAME) as weights:
        for model in (unsplit, several_rows):
            weights.externalise(model)
            ir.save(model, folder / f"{model.graph.name}.onnx")
    for count in segment_counts:
        layers = traced.num_layers
        checkpoints = [round(i * layers / count) for i in range(1, count)]
        bundle = directory / f"segments_{count}"
        bundle.mkdir()
        lowered = lower(traced, target, checkpoints, context)
        config = ExportConfig(max_seq_len=max_seq_len, verify=False)
        write_lowered(loaded, traced, reports, lowered, bundle, config, progress)


class UnsplitDepth(FullDepth):
    """``full`` with the whole model as its only graph."""

    name = "unsplit"

    def __init__(self, manifest: Manifest, prefill_chunk: int = 256) -> None:
        super().__init__(manifest, prefill_chunk)
        self.body, self.head = [GRAPH], []


def load_unsplit(directory: Path, manifest: Manifest, options: ort.SessionOptions) -> OnnxRuntimeBackend:
    """The unsplit graph behind the real backend's caches and bindings; ``manifest``: of any bundle of the same model."""

    def load(name: str) -> ort.InferenceSession:
        return ort.InferenceSession(str(directory / GRAPH / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])

    return OnnxRuntimeBackend(manifest, {GRAPH: manifest.model.num_layers}, load)


def build_unsplit(weights: Path, identity: str, folder: Path) -> Path:
    """The unsplit graph of the model in ``weights``, made again when the weights or the exporter change."""
    return cached_folder(folder, export_key(identity), lambda f: run_in_process(_build, str(weights), f / "arms")) / "arms"


def _build(weights: str, folder: Path) -> None:
    write_arms(load_model(weights, "fp32"), folder, [1], max_seq_len=1024)


def unsplit_engine(folder: Path) -> Engine:
    """The unsplit graph driven by TIDE's engine and loop, with one shared thread pool like TIDE's own arm."""
    engine = load_engine(folder / "segments_1")
    engine.backend = load_unsplit(folder, engine.manifest, session_options(engine.options.threads))
    engine.policy = UnsplitDepth(engine.manifest)
    return engine


class UnsplitArm:
    """`unsplit_engine` as an arm of its own process."""

    def __init__(self, folder: Path) -> None:
        self._engine = unsplit_engine(folder)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        return timed_generate(self._engine, prompts, new_tokens)
