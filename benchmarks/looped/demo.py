"""The looped demo model under `exact` and `exit`, beside `full` on the same weights, and whether its certificate holds."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tide_bench.counters import OtherLoad
from tide_calibrate.certificate.risk import fit_family
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import ModelInfo, read_manifest

from benchmarks.arms.policy_arms import BASELINE, policy_arms, speed_figures
from benchmarks.arms.turns import Group, Turn, take_turns
from benchmarks.certificate import pooled
from benchmarks.exits.exit_traces import ROUTER, exit_traces
from benchmarks.exits.resplits import ARMS, Outcome, judge, resplits
from benchmarks.policy_quality import figures, run_policy
from benchmarks.tasks.task_run import differing_tokens

MODEL = "looped"
EXACT, LOOPS, EXIT = "exact_both", "exact_router", "exit5"  # of POLICIES; LOOPS drafts with no text
PERCENT = 5
CONFIDENCE = 0.95
_SHARE, _REPEATS = 0.25, 200  # as benchmarks.certificate
_HEAD = "identity"  # at a loop's end that is the model's own norm and head


def run_batch(bundles: Mapping[int, Path], batch: int, prompts: Group, new_tokens: int) -> list[dict[str, Any]]:
    """A row for `full` and each policy: ``prompts`` in groups of ``batch``, the policies in turn with `full`."""
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    params = GenerationParams(max_new_tokens=new_tokens, ignore_eos=True)
    model = read_manifest(bundles[PERCENT]).model
    with policy_arms(dict(bundles), [BASELINE, EXACT, LOOPS, EXIT], batch) as arms:
        for arm in arms.values():
            arm.turn([prompt[::-1] for prompt in groups[0]], params)  # binds every shape
        load = OtherLoad(())
        base, turns = take_turns(arms[BASELINE], {name: arms[name] for name in (EXACT, LOOPS, EXIT)}, groups, params)
        share = load.share()
        return [
            {
                "arm": name,
                "title": arms[name].title,
                "batch": batch,
                "other_load": share,
                **speed_figures(own),
                **loop_figures(own, model),
                "differing_tokens": differing(own, base),
            }
            for name, own in {BASELINE: base, **turns}.items()
        ]


def loop_figures(turns: Sequence[Turn], model: ModelInfo) -> dict[str, float]:
    """``loops``: mean loops after which a token was final; ``launched``: loops launched for a token of a sequence."""
    layers = model.num_layers / model.loops
    tokens = sum(turn.decoded for turn in turns)
    return {
        "loops": sum(turn.depth * turn.decoded for turn in turns) / tokens / layers,
        "launched": sum(turn.layers_per_token * turn.decoded for turn in turns) / tokens / layers,
    }


def differing(turns: Sequence[Turn], reference: Sequence[Turn]) -> int:
    """Places at which a text has another token than the reference's."""
    pairs = zip(turns, reference, strict=True)
    return sum(differing_tokens(*rows) for own, base in pairs for rows in zip(own.tokens, base.tokens, strict=True))


def read_held_out(bundle: Path, windows: Sequence[list[int]]) -> dict[str, Any]:
    """How often `exit` chooses another token than `full` behind the same held-out text: see `benchmarks.policy_quality`."""
    texts = {}
    for policy in ("full", "exit"):
        # An engine for several sequences evaluates exits where a batch of them gains, and else runs `full`.
        options = EngineOptions(policy=policy, max_batch=1, threads=ThreadOptions(shared=True))
        with Engine.load(bundle, options, device="cpu") as engine:
            texts[policy] = run_policy(engine, windows, f"{MODEL} {policy}")
    return figures(texts["exit"], texts["full"])


def violations(loop_ends: Sequence[int], windows: int) -> Outcome:
    """Certificates at `PERCENT` % from a quarter of the held-out documents, judged on the others."""
    with tempfile.TemporaryDirectory() as folder:
        train, held_out = exit_traces(MODEL, "library", loop_ends, _HEAD, windows, Path(folder))
    family = fit_family(train, [(depth, _HEAD, ROUTER) for depth in loop_ends])
    pool = pooled(held_out, family, "document")
    parts = partial(resplits, share=_SHARE, repeats=_REPEATS, seed=0)
    return judge(pool, ARMS["ltt"], parts(len(pool.tokens)), PERCENT / 100, CONFIDENCE)
