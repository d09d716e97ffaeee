"""Compile a graph file into an engine; attentions without a fused kernel are decomposed and announced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tide_runtime.bundle.manifest import ProfileInfo
from tide_runtime.errors import TargetError

from tide_export.progress import ExportProgress, Steps
from tide_export.targets.attention_checks import attentions
from tide_export.targets.engine_network import EngineNetwork, add_profiles, require_no_errors

# Part of the builder's error for an attention without a fused kernel (fp32, odd head sizes).
_NO_FUSED_KERNEL = "decompos"


@dataclass(frozen=True)
class BuiltEngine:
    """``plan``: the serialized engine; ``attention``: ``fused``, ``decomposed`` or ``none``."""

    plan: bytes
    build_seconds: float
    attention: str


@dataclass(frozen=True)
class BuildSettings:
    """``configure``: sets a target's options on a builder configuration of the given module."""

    profiles: list[ProfileInfo]
    configure: Callable[[Any, Any], None]
    fused_routers: bool = False


def build_engine(
    engine: EngineNetwork, reparse: Callable[[], EngineNetwork], settings: BuildSettings, progress: ExportProgress, title: str
) -> BuiltEngine:
    """Build ``engine``. If its attentions have no fused kernel, build the network of ``reparse`` with decomposable attentions.

    Raises TargetError with the builder's message.
    """
    try:
        return _build(engine, settings, progress, title, "fused" if engine.attentions else "none")
    except TargetError as error:
        if not engine.attentions or _NO_FUSED_KERNEL not in str(error):
            raise
    progress.note(f"{title}: no fused kernel for its attentions; they are decomposed into products, which is slower")
    engine = reparse()
    for attention in attentions(engine.trt, engine.network):
        attention.decomposable = True
    return _build(engine, settings, progress, title, "decomposed")


def _build(engine: EngineNetwork, settings: BuildSettings, progress: ExportProgress, title: str, attention: str) -> BuiltEngine:
    config = engine.builder.create_builder_config()
    config.max_aux_streams = 0  # the runtime runs and captures everything on one stream
    config.profiling_verbosity = engine.trt.ProfilingVerbosity.DETAILED  # for the engine inspector
    settings.configure(engine.trt, config)
    add_profiles(engine, config, settings.profiles)
    start = perf_counter()
    with progress.steps(title) as steps:
        config.progress_monitor = build_progress(engine.trt, steps)
        plan = engine.builder.build_serialized_network(engine.network, config)
    require_no_errors(engine.log, f"building {title}")
    if plan is None:
        raise TargetError(f"building {title}: TensorRT made no engine and gave no reason. Please report the model's config")
    return BuiltEngine(bytes(plan), round(perf_counter() - start, 2), attention)


def build_progress(trt: Any, steps: Steps) -> Any:
    """A progress monitor of module ``trt`` that moves ``steps`` with the outermost phase in progress.

    It raises nothing, because the builder is C++: an interrupted build ends after its current step.
    """

    class BuildProgress(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.outermost: str | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with suppress(KeyboardInterrupt):
                if self.outermost is None:
                    self.outermost = phase_name
                    steps.reach(0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with suppress(KeyboardInterrupt):
                if phase_name == self.outermost:
                    steps.reach(step + 1)
            return not steps.interrupted

        def phase_finish(self, phase_name: str) -> None:
            if phase_name == self.outermost:
                self.outermost = None

    return BuildProgress()
