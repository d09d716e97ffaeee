"""Speeds of a calibration's policies, measured where it was made: the calibrated bundle continues held-out prompts for real.

Step costs choose the exits that are worth a measurement, but they do not price everything that a policy does: text drafts, the
draft head, the scheduler, threads. So what is promised is measured: `full` and each policy continue the same prompts in turn, and
the ratio of the summed times is the predicted speedup. Where a draft head drafts for `exact`, `exact` without it takes its turn
as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.errors import TideError

from tide_calibrate.costs.model_costs import in_own_process
from tide_calibrate.measured_target import CPU
from tide_calibrate.placement.candidates import EXACT
from tide_calibrate.temporary_bundle import TemporaryBundle

POLICIES = {
    "exact": ("exact", DepthOptions()),
    "exit": ("exit", DepthOptions()),
    EXACT: ("exact", DepthOptions(draft="router")),
}
WITHOUT_HEAD = "exact, no draft head"  # text drafts alone, and exits where there are any
DRAFT_HEAD = "draft head"  # `exact` over `WITHOUT_HEAD`
MIN_PROMPTS = 8
_RESAMPLES = 2000
_COVERED = (2.5, 97.5)  # percentiles of the range


@dataclass(frozen=True)
class Rehearsal:
    """A policy's speed over `full`.

    Args:
        speedup: summed time of `full` over the policy's.
        low, high: range that holds the ratio of as many other prompts of the same kind, in 95% of cases.
        prompts: measured.
    """

    speedup: float
    low: float
    high: float
    prompts: int


def rehearse(
    bundle: TemporaryBundle, prompts: Sequence[Sequence[int]], new_tokens: int, policies: Sequence[str], seconds: float
) -> dict[str, Rehearsal]:
    """Policy → its speed on the calibrated ``bundle``, of those that it can run; with a draft head also `WITHOUT_HEAD` and
    `DRAFT_HEAD`.

    Args:
        prompts: token ids; as many of them are continued as there is time for.
        new_tokens: tokens of each continuation, fewer after an end token.
        policies: names of `POLICIES`.
        seconds: for each policy and `full` beside it.

    Raises CalibrationError where the process that measures fails.
    """
    path = bundle.path()
    asked = {"prompts": prompts, "new_tokens": new_tokens, "policies": policies, "seconds": seconds, "target": bundle.target}
    request = path.with_name("rehearsal-request.json")
    out = path.with_name("rehearsal.json")
    request.write_text(json.dumps(asked), encoding="utf-8")
    arguments = [str(path), str(request), str(out)]
    in_own_process("tide_calibrate.rehearsal", arguments, "the policies' speeds could not be measured")
    return {name: Rehearsal(**speed) for name, speed in json.loads(out.read_text(encoding="utf-8")).items()}


def measure_policies(
    bundle: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    policies: Sequence[str],
    seconds: float,
    threads: ThreadOptions | None = None,
    target: str = CPU,
) -> dict[str, Rehearsal]:
    """`rehearse` in this process; at least `MIN_PROMPTS` prompts, and more for ``seconds``.

    ``threads``: the commands run with ``ThreadOptions(shared=True)``.
    """
    options = EngineOptions(target=target, policy="full", max_batch=1, threads=threads or ThreadOptions())
    speeds: dict[str, Rehearsal] = {}
    with Engine.load(bundle, options) as full:
        for name in policies:
            policy, depth = POLICIES[name]
            try:
                own = full.with_options(replace(options, policy=policy, depth=depth))
            except TideError:  # no exit has a certified threshold, say
                continue
            with ExitStack() as stack:
                engines = [full, stack.enter_context(own)]
                judged = name == "exact" and own.policy.uses_draft_head
                if judged:
                    engines.append(stack.enter_context(_without_head(own)))
                times = _in_turn(engines, prompts, new_tokens, policy, seconds)
            speeds[name] = _rehearsal(times[:, :2])
            if judged:
                speeds |= {WITHOUT_HEAD: _rehearsal(times[:, [0, 2]]), DRAFT_HEAD: _rehearsal(times[:, [2, 1]])}
    return speeds


def _without_head(engine: Engine) -> Engine:
    """An engine of the same options and weights that has no draft head."""
    bundle = replace(engine.bundle, manifest=replace(engine.manifest, draft_head=None))
    return Engine(bundle, engine.options, backend=engine.backend)


def _in_turn(
    engines: Sequence[Engine], prompts: Sequence[Sequence[int]], new_tokens: int, policy: str, seconds: float
) -> NDArray[np.float64]:
    """[prompts, engines]: seconds of decoding. ``seconds``: that two engines may take, and three in proportion."""
    # Texts of `exit` end elsewhere than those of `full`, which would compare unequal texts.
    params = GenerationParams(max_new_tokens=new_tokens, ignore_eos=policy == "exit")
    for engine in engines:
        engine.generate([list(prompts[0])], replace(params, cache_salt="warm"))
    times = list[list[float]]()
    begin = perf_counter()
    for number, prompt in enumerate(prompts):
        if number >= MIN_PROMPTS and perf_counter() - begin > seconds * len(engines) / 2:
            break
        row = [0.0] * len(engines)
        for place in range(len(engines)):
            turn = (number + place) % len(engines)
            # A salt for each prompt: earlier outputs would draft for later ones more than strangers' requests do.
            reply = engines[turn].generate([list(prompt)], replace(params, cache_salt=f"{number}"))[0]
            row[turn] = reply.stats.decode_time
        times.append(row)
    return np.array(times)


def _rehearsal(times: NDArray[np.float64]) -> Rehearsal:
    base, own = times.sum(0)
    drawn = np.random.default_rng(0).integers(0, len(times), (2, _RESAMPLES, len(times)))
    sums = np.log(times[drawn].sum(2))
    ratios = sums[..., 0] - sums[..., 1]
    # The range is of another sample's ratio: its own scatter and this sample's add up.
    low, high = np.exp(np.log(base / own) + np.percentile(ratios[0] - ratios[1], _COVERED))
    return Rehearsal(round(base / own, 4), round(float(low), 4), round(float(high), 4), len(times))


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    measured = measure_policies(Path(sys.argv[1]), threads=ThreadOptions(shared=True), **asked)
    Path(sys.argv[3]).write_text(json.dumps({name: vars(speed) for name, speed in measured.items()}), encoding="utf-8")
