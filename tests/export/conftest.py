"""Bundles of tiny random models, one per architecture, exported once per session."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
from export.architectures import FEW_LAYERS, MAX_POSITIONS, tiny_model
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.bundle.manifest import Manifest
from transformers import PreTrainedModel

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.trace.trace_model import TracedModel, trace


@dataclass(frozen=True)
class Exported:
    """An eager model, its traced model, and the manifest and engine of its bundle."""

    model: PreTrainedModel
    manifest: Manifest
    engine: Engine
    traced: TracedModel

    @cached_property
    def on_torch(self) -> Engine:
        """The engine of target torch, on the processor."""
        return Engine.load(self.engine.bundle.directory, EngineOptions(target="torch", threads=ThreadOptions(1), device="cpu"))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Exported]]:
    """``exported(architecture)``: a bundle of two segments of one layer in fp32."""
    made: dict[str, Exported] = {}

    def make(name: str) -> Exported:
        if name not in made:
            model = tiny_model(name, layers=FEW_LAYERS)
            directory: Path = tmp_path_factory.mktemp(name)
            config = ExportConfig(checkpoints="1", max_seq_len=MAX_POSITIONS // 2, verify=False, targets=("cpu", "torch"))
            traced = trace(model)
            copy = replace(traced, model=traced.model.clone())  # lowering works in place; tests need the trace too
            manifest, _ = write_bundle(LoadedModel(model, None, name), directory, config, ExportProgress(quiet=True), traced=copy)
            made[name] = Exported(model, manifest, Engine.load(directory, EngineOptions(target="cpu")), traced)
        return made[name]

    yield make
    for item in made.values():
        item.engine.close()
