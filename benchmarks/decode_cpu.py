"""Decode speed on the CPU: TIDE `full` against HF eager, HF torch.compile and onnxruntime-genai on the same weights, fp32.

    python benchmarks/decode_cpu.py                                # both models, every arm, batch 1 and 8
    python benchmarks/decode_cpu.py --models demo --batch 1 --arms tide,eager,genai
    python benchmarks/decode_cpu.py --json build/decode_cpu.json

Each arm gets the same prompts, decodes greedily, ignores end-of-sequence ids, and lives in a process of its own. TIDE
meets one other arm at a time and they take turns (A B A B …), so a ratio compares neighbours in time, and a model is in
memory twice at most (the unsplit arm needs it once more while it loads). Before anything is timed each arm's tokens are
compared with HF eager's.
Needs the `[export]` and `[bench]` extras. Weights and engines are kept in build/bench-cache (13 GB for the 1.1B model).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arms import ARMS, OURS, REFERENCE
from tide_bench.arms.base import Timing
from tide_bench.arms.genai import build_model_folder
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.bundles import build_unsplit, export_bundle
from tide_bench.other_load import OtherLoad
from tide_bench.report import Report

from benchmarks.models.model_folders import MODELS, BenchModel

CACHE = Path(__file__).resolve().parents[1] / "build" / "bench-cache"
SETTLE_S = 0.3  # thread pools spin for a while after their last work
WARM_UPS = 2  # after the check run: compiled code settles on its second call

# What an arm loads: made from (weights, identity, folder) if need be.
PREPARE: dict[str, Callable[[Path, str, Path], Path]] = {
    OURS: export_bundle,
    REFERENCE: lambda weights, identity, folder: weights,
    "unsplit": build_unsplit,
    "compile": lambda weights, identity, folder: weights,
    "genai": build_model_folder,
}

console = Console(width=max(110, Console().width))  # piped output would wrap the table at 80


@dataclass(frozen=True)
class Plan:
    """What to run on one model: ``others`` are the arms that TIDE meets, in order."""

    model: BenchModel
    batches: list[int]
    ours: bool
    others: list[str]
    new_tokens: int
    repeats: int


@dataclass
class Samples:
    """Timed repetitions of one arm at one batch size, in one meeting; ``agreement``: share of eager's tokens, if known."""

    arm: str
    batch: int
    timings: list[Timing]
    agreement: float | None

    @property
    def step_ms(self) -> list[float]:
        return [timing.decode_ms_per_token for timing in self.timings]


class ModelRun:
    """All meetings on one model."""

    def __init__(self, plan: Plan, cache: Path) -> None:
        self.plan = plan
        self.cache = cache
        self.samples: list[Samples] = []
        self.ratios: dict[tuple[str, int], float] = {}  # (other arm, batch) → its time / our time
        self.failures: dict[str, str] = {}
        self.overhead: dict[int, float] = {}
        self.other_load: dict[tuple[str, int], float] = {}  # (last arm of the meeting, batch) → CPU share of others
        self._expected: dict[int, list[list[int]]] = {}

    def run(self) -> None:
        with _phase(f"{self.plan.model.name}: weights"):
            weights = self.plan.model.weights(self.cache)
        ours = self._start(OURS, weights) if self.plan.ours else None
        for name in self.plan.others:
            other = self._start(name, weights)
            if other is not None:
                self._meet([arm for arm in (ours, other) if arm is not None])
                other.close()
        if ours is not None:
            self._alone(ours)
            ours.close()

    def _start(self, name: str, weights: Path) -> ArmProcess | None:
        folder = self.cache / self.plan.model.name / name
        try:
            with _phase(f"{self.plan.model.name}: prepare {name}"):
                ready = PREPARE[name](weights, self.plan.model.identity(), folder)
            with _phase(f"{self.plan.model.name}: load {name}"):
                return ArmProcess(name, ready)
        except Exception as error:  # an arm that cannot run is a row of the table, not the end of the benchmark
            self.failures[name] = str(error)
            return None

    def _meet(self, arms: list[ArmProcess]) -> None:
        """One arm against another, or one alone, at every batch size."""
        for batch in self.plan.batches:
            try:
                with _phase(f"{self.plan.model.name}: {' against '.join(a.name for a in arms)}, batch {batch}"):
                    self._compare(arms, batch)
            except ArmError as error:
                self.failures[arms[-1].name] = f"batch {batch}: {error}"
                return

    def _compare(self, arms: list[ArmProcess], batch: int) -> None:
        prompts = self.plan.model.prompts(batch, self.plan.model.prompt_tokens)
        met = [Samples(arm.name, batch, [], None) for arm in arms]
        for arm, samples in sorted(zip(arms, met, strict=True), key=lambda pair: pair[0].name != REFERENCE):
            samples.agreement = self._check(arm, prompts)
            for _ in range(WARM_UPS):
                arm.generate(prompts, self.plan.new_tokens)
        load = OtherLoad(arm.pid for arm in arms)
        for _ in range(self.plan.repeats):
            for arm, samples in zip(arms, met, strict=True):
                time.sleep(SETTLE_S)
                samples.timings.append(arm.generate(prompts, self.plan.new_tokens))
        self.samples += met
        self.other_load[arms[-1].name, batch] = load.share()
        if len(met) == 2:
            self.ratios[met[1].arm, batch] = float(np.median(met[1].step_ms) / np.median(met[0].step_ms))

    def _check(self, arm: ArmProcess, prompts: list[list[int]]) -> float | None:
        """The arm's tokens against the reference's, whose own become the reference."""
        tokens = arm.generate(prompts, self.plan.new_tokens).tokens
        if arm.name == REFERENCE:
            self._expected[len(prompts)] = tokens
        expected = self._expected.get(len(prompts))
        return None if expected is None else float(np.mean(np.equal(tokens, expected)))

    def _alone(self, ours: ArmProcess) -> None:
        if not self.samples:
            self._meet([ours])
        for batch in self.plan.batches:
            prompts = self.plan.model.prompts(batch, self.plan.model.prompt_tokens)
            try:
                shares = [ours.call("loop_overhead", prompts, self.plan.new_tokens) for _ in range(3)]
            except ArmError as error:
                console.print(f"loop overhead not measured: {error}")
                return
            self.overhead[batch] = float(np.median(shares))

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each batch size and arm."""
        names = ([OURS] if self.plan.ours else []) + self.plan.others
        for batch in self.plan.batches:
            for name in names:
                yield {"model": self.plan.model.name, "batch": batch, "arm": name, **self._figures(name, batch)}

    def _figures(self, name: str, batch: int) -> dict[str, Any]:
        samples = [s for s in self.samples if (s.arm, s.batch) == (name, batch)]
        note = {"note": self.failures[name]} if name in self.failures else {}
        if not samples:
            return note
        steps = [ms for s in samples for ms in s.step_ms]
        first = [1e3 * timing.first_token_s for s in samples for timing in s.timings]
        return {
            "decode_ms_per_token": float(np.median(steps)),
            "decode_ms_p10": float(np.percentile(steps, 10)),
            "decode_ms_p90": float(np.percentile(steps, 90)),
            "tokens_per_s": 1e3 * batch / float(np.median(steps)),
            "first_token_ms": float(np.median(first)),
            "repeats": len(steps),
            "other_load": self.other_load.get((name, batch)),
            "agreement": next((s.agreement for s in samples if s.agreement is not None), None),
            "full_is_faster_by": self.ratios.get((name, batch)),
            **note,
        }


def add_results(report: Report, run: ModelRun) -> None:
    model = run.plan.model.name
    for (other, batch), ratio in run.ratios.items():
        report.add(f"{model}_full_vs_{other}_b{batch}", ratio)
    for row in run.rows():
        if row["arm"] != REFERENCE and row.get("agreement") is not None:
            name = "full" if row["arm"] == OURS else row["arm"]
            report.add(f"{model}_{name}_agreement_b{row['batch']}", row["agreement"])
    for batch, share in run.overhead.items():
        report.add(f"{model}_loop_overhead_b{batch}", share)
    report.rows += run.rows()


def print_table(run: ModelRun) -> None:
    plan = run.plan
    table = Table(
        title=f"{plan.model.title}, fp32, {plan.model.prompt_tokens} prompt + {plan.new_tokens} new tokens a row",
        caption="ms/token: median (p10–p90) of one decode step; first token: until every row has one; "
        "TIDE ×: that arm's time / TIDE's, medians of interleaved repetitions",
    )
    for heading in ("batch", "arm", "ms/token", "tokens/s", "first token", "TIDE ×", "tokens as eager"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in run.rows():
        table.add_row(str(row["batch"]), ARMS[row["arm"]].title, *_cells(row))
    console.print(table)
    for name, reason in run.failures.items():
        console.print(f"{ARMS[name].title} could not run: {reason}", style="yellow", markup=False)
    if run.other_load:
        console.print(f"Other processes took {max(run.other_load.values()):.0%} of the CPU at most while arms were timed")
    for batch, share in run.overhead.items():
        console.print(f"TIDE, batch {batch}: {share:.1%} of the time is spent outside ONNX Runtime")


def _cells(row: dict[str, Any]) -> list[str]:
    if "decode_ms_per_token" not in row:
        return ["could not run", "", "", "", ""]
    ratio, agreement = row["full_is_faster_by"], row["agreement"]
    return [
        f"{row['decode_ms_per_token']:.2f} ({row['decode_ms_p10']:.2f}–{row['decode_ms_p90']:.2f})",
        f"{row['tokens_per_s']:.1f}",
        f"{row['first_token_ms']:.0f} ms",
        "" if ratio is None else f"{ratio:.2f}",
        "not checked" if agreement is None else f"{agreement:.1%}" + ("" if agreement == 1 else " DIFFERS"),
    ]


@contextmanager
def _phase(title: str) -> Iterator[None]:
    start = time.perf_counter()
    with console.status(title):
        yield
    console.print(f"{title}: {time.perf_counter() - start:.1f} s", style="dim", markup=False)


def _split(text: str, known: list[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"{what} {', '.join(unknown) or 'missing'}; choose from: {', '.join(known)}")
    return names


def _batches(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"batch is {text!r}; give sizes such as 1,8")
    return [int(part) for part in parts]


def main(
    models: Annotated[str, typer.Option(help=f"Models, of {','.join(MODELS)}.")] = ",".join(MODELS),
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    arms: Annotated[str, typer.Option(help=f"Arms, of {','.join(PREPARE)}.")] = ",".join(PREPARE),
    new_tokens: Annotated[int | None, typer.Option(min=2, help="New tokens a sequence; default: 64 (demo), 12 (1b).")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions; three were too few at 1.1B.")] = 9,
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare decode speed on this machine's CPU."""
    chosen, batches = _split(arms, list(PREPARE), "arm"), _batches(batch)
    others = sorted((name for name in chosen if name != OURS), key=lambda name: name != REFERENCE)
    report = Report("decode_cpu", models=models, batch=batch, arms=chosen, new_tokens=new_tokens, repeats=repeats)
    for name in _split(models, list(MODELS), "model"):
        model = MODELS[name]
        plan = Plan(model, batches, OURS in chosen, others, new_tokens or model.new_tokens, repeats)
        run = ModelRun(plan, cache)
        run.run()
        print_table(run)
        add_results(report, run)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
