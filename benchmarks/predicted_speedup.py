"""Speedups that `tide-calibrate` predicts, next to measurements: layerskip, batch 1, greedy, fp32 on this CPU.

    python -m benchmarks.predicted_speedup                 # about 3 minutes; calibrates the demo model first when need be
    python -m benchmarks.predicted_speedup --bundles DIR   # with calibration_1, calibration_5, bundle_1 and bundle_5 in DIR

``exit`` runs with the thresholds certified at 1% and at 5%, and with those in the middle between them; ``exact`` with each
drafter. All arms run beside the uncut model, on the same weights in memory, in one process, on held-out prompts of as many
tokens as the calibration's, continued as far. Three speeds over the uncut model for each, of summed times:

predicted   by the calibration's cost model on the calibration's own continuations, as in the manifest
replayed    by the same cost model on the texts that the arm wrote here: what it is off by is the model's own error
measured    on the clock
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arms.tide import load_second
from tide_bench.in_process import run_in_process
from tide_bench.other_load import OtherLoad
from tide_bench.report import Report
from tide_runtime import GenerationParams

from benchmarks.arms.engine_arm import EngineArm, LoggedEngine
from benchmarks.arms.policy_arms import uncut_beside
from benchmarks.arms.policy_cases import Case, make_case, policy_cases
from benchmarks.arms.turns import Group, Turn, take_turns
from benchmarks.held_out import SOURCES, held_out_prompts
from benchmarks.models.calibrated_bundles import PERCENTS, calibrated_bundles
from benchmarks.models.demo import DEMO_MODELS

CACHE = Path(__file__).resolve().parents[1] / "build" / "bench-cache"
MODEL = "layerskip"
PROMPT_TOKENS, NEW_TOKENS = 64, 96  # the calibration's defaults
RESAMPLES = 2000

console = Console(width=max(120, Console().width))


def measure(bundle: Path, cases: Mapping[str, Case], groups: Sequence[Group]) -> dict[str, list[Turn]]:
    """Every case's turns, side by side with the baseline."""
    engine = LoggedEngine(load_second(bundle))
    baseline = uncut_beside(engine)
    arms = {name: EngineArm(engine, make_case(case, engine.manifest)) for name, case in cases.items()}
    params = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for arm in (baseline, *arms.values()):
        arm.turn(groups[0], params, 1)
    _, turns = take_turns(baseline, arms, groups, params, 1)
    return turns


def model_speeds(calibration: Path, cases: Mapping[str, Case], texts: Mapping[str, Group]) -> dict[str, tuple[float, float]]:
    """Case → its speedup by the cost model, on the calibration's own continuations and on its ``texts``.

    For a process of its own, as it brings torch.
    """
    from benchmarks.exits.recalled_exits import RecalledExits

    recalled = RecalledExits.load(DEMO_MODELS / MODEL, calibration)
    own = recalled.own_continuations()
    return {
        name: (recalled.speedup(case, own), recalled.speedup(case, recalled.texts(texts[name], PROMPT_TOKENS)))
        for name, case in cases.items()
    }


def total_ratio(turns: Sequence[Turn]) -> tuple[float, float, float]:
    """Summed time of the baseline beside the turns over theirs, and its 95% interval (percentile bootstrap over prompts)."""
    seconds = np.array([[turn.base_seconds, turn.seconds] for turn in turns])
    drawn = np.random.default_rng(0).integers(0, len(seconds), (RESAMPLES, len(seconds)))
    sums = seconds[drawn].sum(axis=1)
    total = seconds.sum(axis=0)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], (2.5, 97.5))
    return float(total[0] / total[1]), float(low), float(high)


def add_results(report: Report, modelled: Mapping[str, tuple[float, float]], turns: Mapping[str, Sequence[Turn]]) -> None:
    """A row of the table, and the figures, of each policy; then how far off the worst of them is."""
    table = Table(title="speed over the uncut model, one row", title_justify="left")
    for heading in ("policy", "predicted", "replayed", "measured (95%)", "predicted / measured", "replayed / measured"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for name, own in turns.items():
        (predicted, replayed), (measured, low, high) = modelled[name], total_ratio(own)
        off = {"predicted": predicted / measured, "replayed": replayed / measured}
        for kind, ratio in off.items():
            report.add(f"{kind}_over_measured_{name}", ratio)
        layers = float(np.mean([turn.layers_per_token for turn in own if turn.layers_per_token is not None]))
        report.rows.append(
            {"policy": name, "predicted": predicted, "replayed": replayed, "measured": measured, "measured_low": low,
             "measured_high": high, "layers_per_token": layers}
        )  # fmt: skip
        interval = f"{measured:.2f} ({low:.2f}–{high:.2f})"
        table.add_row(name, f"{predicted:.2f}", f"{replayed:.2f}", interval, *(f"{ratio:.3f}" for ratio in off.values()))
    for kind in ("predicted", "replayed"):
        errors = [abs(report.results[f"{kind}_over_measured_{name}"] - 1) for name in turns]
        report.add(f"{kind}_worst_error_pct", 100 * max(errors))
    console.print(table)


def main(
    prompts: Annotated[int, typer.Option(min=2, help=f"Held-out prompts of {PROMPT_TOKENS} tokens.")] = 64,
    data: Annotated[str, typer.Option(help=f"Where they come from, of {','.join(SOURCES)}.")] = "library",
    bundles: Annotated[
        Path | None, typer.Option(help="Take calibrations and bundles from this folder; do not calibrate.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare the predictions of the calibration with measurements."""
    low, high = PERCENTS
    folder = bundles or calibrated_bundles(MODEL, cache)[low].parent
    cases = policy_cases(*(folder / f"bundle_{percent}" for percent in (low, high)))
    given = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, data)]
    report = Report(
        "predicted_speedup", model=MODEL, prompts=prompts, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, data=data
    )
    load = OtherLoad(())
    turns = measure(folder / f"bundle_{low}", cases, [[ids] for ids in given])
    report.add("other_load_pct", 100 * load.share())
    texts = {name: [[*ids, *turn.tokens[0]] for ids, turn in zip(given, own, strict=True)] for name, own in turns.items()}
    modelled = run_in_process(model_speeds, folder / f"calibration_{low}", cases, texts)
    add_results(report, modelled, turns)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
