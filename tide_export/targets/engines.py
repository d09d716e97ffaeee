"""Build the engines of one target, one per graph; unchanged ones come from the cache."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from tide_runtime.bundle.manifest import EngineInfo, ProfileInfo, TargetInfo
from tide_runtime.machine_cache import key_name

from tide_export.graphs.cut import LoweredModel
from tide_export.targets.base import BuildJob, Target
from tide_export.targets.engine_build import BuildSettings, BuiltEngine, build_engine
from tide_export.targets.engine_network import read_network
from tide_export.targets.graph_files import GraphFile

ENGINE_FOLDER = "engines"
# Part of every engine's key. Raise it if the same graph must become another engine (builder settings).
BUILD_VERSION = 2
_MAX_DRAFTS = 12  # drafts that `exact` verifies in one step, text drafts included, unless the calibration has more
_PROMPT_TOKENS = 512  # prompt tokens of one step of the runtime


def build_engines(
    target: Target,
    trt: Any,
    tool: str,
    configure: Callable[[Any, Any], None],
    lowered: LoweredModel,
    job: BuildJob,
    fused_routers: bool = False,
) -> TargetInfo:
    """Build all graphs of ``lowered`` with module ``trt`` into ``engines/<target>/``.

    Args:
        tool: package and exact version; part of the cache key.
        configure: sets the target's options on a builder configuration.
        fused_routers: whether routers become TIDE's plugins, as ``tool`` then says.
    """
    folder = job.directory / ENGINE_FOLDER / target.name
    folder.mkdir(parents=True)
    settings = BuildSettings(job.profiles, configure, fused_routers)
    graphs = {}
    engines = {}
    reused = 0
    start = perf_counter()
    for file in job.files(lowered):
        built, info, cached = _engine(target, trt, tool, settings, file, job)
        graphs[file.name] = f"{ENGINE_FOLDER}/{target.name}/{file.name}.engine"
        (job.directory / graphs[file.name]).write_bytes(built.plan)
        engines[file.name] = info
        reused += cached
    job.progress.done(
        f"{target.name}: {len(engines)} engines" + (f", {reused} from the cache" if reused else ""), perf_counter() - start
    )
    compute = list(target.machine.compute)
    return TargetInfo(target.backend, graphs, None, lowered.applied, compute, tool, job.profiles, engines)


def _engine(
    target: Target, trt: Any, tool: str, settings: BuildSettings, file: GraphFile, job: BuildJob
) -> tuple[BuiltEngine, EngineInfo, bool]:
    """The engine of one graph, its manifest entry, and whether it came from the cache."""
    profiles = json.dumps([dataclasses.asdict(profile) for profile in settings.profiles])
    compute = json.dumps(target.machine.compute)
    key = key_name([str(BUILD_VERSION), tool, target.name, compute, job.dtype, profiles, file.digest])
    cached = None if job.rebuild else job.cache.load(key)
    network = read_network(trt, file, settings.fused_routers)
    if cached is not None:
        facts, plan = cached
        built = BuiltEngine(plan, **facts)
    else:
        reparse = partial(read_network, trt, file, settings.fused_routers)
        built = build_engine(network, reparse, settings, job.progress, f"{target.name} {file.name}")
        job.cache.store(key, {"build_seconds": built.build_seconds, "attention": built.attention}, built.plan)
    attention, count = (built.attention, network.attentions) if network.attentions else _decomposed(file)
    info = EngineInfo(built.build_seconds, attention, count, network.inputs, network.outputs, network.aliases)
    return built, info, cached is not None


def _decomposed(file: GraphFile) -> tuple[str, int]:
    """Kind and number of attentions of a graph without Attention operators: one per layer, none if it only fills caches."""
    caches = sum(1 for name in file.dims if name.startswith("key_cache_out_"))
    attends = any("_cache_" not in name for name in list(file.dims)[file.inputs :])
    return ("decomposed", caches) if caches and attends else ("none", 0)


def step_profiles(max_batch: int, draft_limit: int, max_seq_len: int) -> list[ProfileInfo]:
    """Profiles ``decode`` and ``prefill`` for up to ``max_batch`` sequences; a decode step has one token more than drafts."""
    drafts = min(max(draft_limit, _MAX_DRAFTS) + 1, max_seq_len)
    prompt = min(_PROMPT_TOKENS, max_seq_len)
    return [
        ProfileInfo("decode", [1, 1, max_batch], [1, 1, drafts]),
        ProfileInfo("prefill", [1, 1, max_batch], [1, prompt, prompt]),
    ]
