"""Speed of a hybrid in 4 bits beside llama.cpp on the same file, and what part of a step its recurrent layers take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tide_bench.arms import OTHER_ARMS, ArmSpec
from tide_bench.build_cache import run_in_process
from tide_runtime.bundle.manifest import read_manifest

from benchmarks.arms.plans import Plan, PlannedPlace, PlanRun, pair_ratios
from benchmarks.models.random_gguf import RandomModel

SLOTS, _PROMPT, _LONG, _TOKENS = 1024, 64, 512, 32
RECURRENT = ("LinearAttention", "Conv", "ReorderInput", "ReorderOutput")  # the last three are convolutions
PLAN = Plan(
    arms=(ArmSpec("source", "TIDE", "tide", "rounded"), OTHER_ARMS["llamacpp"]),
    places=(PlannedPlace("b1", 1, _PROMPT), PlannedPlace("prefill", 1, _LONG, "prefill")),
    pairs=(("source", "llamacpp"),),
    pivot="source",
    new_tokens=_TOKENS,
)


@dataclass(frozen=True)
class Speeds:
    """``rows``: of the comparison. ``ratios``: place → TIDE's speed over llama.cpp's. ``recurrent``: share of a step, 0 … 1."""

    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    ratios: dict[str, float]
    recurrent: float


def compare(model: RandomModel, minutes: float, rounds: int) -> Speeds:
    """Both engines in turn."""
    manifest = read_manifest(model.bundle)
    vocabulary = manifest.model.vocab_size
    run = PlanRun(
        PLAN,
        manifest,
        lambda process: model.file if process == "llamacpp" else model.bundle,
        lambda count, tokens: token_ids(count, tokens, vocabulary),
        minutes,
        rounds,
    )
    run.run()
    ratios = {where: ratio for (where, _, _), ratio in pair_ratios(PLAN, run.rows).items()}
    return Speeds(run.rows, run.settings, ratios, run_in_process(recurrent_share, model.bundle, vocabulary))


def token_ids(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random token ids [count][tokens], none of the first, which may be special."""
    return np.random.default_rng(0).integers(300, vocabulary, (count, tokens)).tolist()


def recurrent_share(bundle: Path, vocabulary: int) -> float:
    """Time of recurrences and convolutions over that of all nodes of decoding steps, by ONNX Runtime's profiler."""
    import onnxruntime as ort

    profiled: list[ort.InferenceSession] = []
    make = ort.InferenceSession

    def with_profile(model: Any, options: ort.SessionOptions, **more: Any) -> ort.InferenceSession:
        options.enable_profiling = True
        options.profile_file_prefix = str(bundle.parent / "profile")
        profiled.append(make(model, options, **more))
        return profiled[-1]

    ort.InferenceSession = with_profile
    from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

    options = EngineOptions(threads=ThreadOptions(shared=True), prefix_cache=False, verify=False, policy="full", max_batch=1)
    with Engine.load(bundle, options, device="cpu") as engine:
        engine.generate(token_ids(1, 1, vocabulary), GenerationParams(max_new_tokens=2 * _TOKENS, ignore_eos=True))
        files = [Path(session.end_profiling()) for session in profiled]
    return share_of([json.loads(file.read_text(encoding="utf-8")) for file in files])


def share_of(profiles: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Share of `RECURRENT` in the time of all nodes of ``profiles``, as ONNX Runtime writes them."""
    times = [
        (event["args"].get("op_name", ""), event["dur"])
        for events in profiles
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]
    total = sum(time for _, time in times)
    return sum(time for kind, time in times if kind in RECURRENT) / total if total else 0.0
