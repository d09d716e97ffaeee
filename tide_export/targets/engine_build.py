"""Compile a graph file into an engine; attentions without a fused kernel are decomposed and announced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from tide_runtime.bundle.manifest import ProfileInfo
from tide_runtime.errors import TargetError

from tide_export.progress import ExportProgress
from tide_export.targets.attention_checks import attentions
from tide_export.targets.build_log import require_no_errors
from tide_export.targets.build_progress import build_progress
from tide_export.targets.engine_cache import BuiltEngine
from tide_export.targets.engine_network import EngineNetwork, add_profiles

# Part of the builder's error for an attention without a fused kernel (fp32, odd head sizes).
_NO_FUSED_KERNEL = "decompos"


@dataclass(frozen=True)
class BuildSettings:
    """``configure``: sets a target's options on a builder configuration of the given module."""

    profiles: list[ProfileInfo]
    configure: Callable[[Any, Any], None]


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
