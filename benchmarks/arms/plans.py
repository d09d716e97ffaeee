"""Comparisons of several models under tide-bench's engine: which arms, at which places, and which ratios are results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tide_bench.arm_pool import ArmPool, RunningArm
from tide_bench.arms import ArmSpec
from tide_bench.arms.process import ArmError
from tide_bench.comparison import Comparison, Place
from tide_bench.config import BenchConfig
from tide_bench.counters import EnergyMeter
from tide_bench.report import Phases, Report
from tide_bench.results import ratio_cell, spread_cell
from tide_bench.tables import console
from tide_runtime.bundle.manifest import Manifest

Row = dict[str, Any]
T = TypeVar("T", ArmSpec, "PlannedPlace")
SPEEDS, LAST = ("tokens/s", "ms per token (p10–p90)"), ("as fp32", "memory", "load and first token")


@dataclass(frozen=True)
class PlannedPlace:
    """``batch`` prompts of ``prompt_tokens`` each are continued; ``mode``: ``decode`` or ``prefill``, whichever is timed."""

    name: str
    batch: int
    prompt_tokens: int
    mode: str = "decode"


@dataclass(frozen=True)
class Plan:
    """Arms that are in memory together.

    Args:
        arms: in the order of the tables; each may have a model of its own (`ArmSpec.model`).
        pairs: (arm, baseline) whose ratios are results.
        pivot: the arm whose texts the others' are compared with.
        suffix: of the arm in names of results.
    """

    arms: tuple[ArmSpec, ...]
    places: tuple[PlannedPlace, ...]
    pairs: tuple[tuple[str, str], ...]
    pivot: str
    new_tokens: int
    suffix: str = ""

    def restricted(self, arms: Sequence[str] | None, places: Sequence[str] | None) -> Plan:
        """The named arms and places only. Raises ValueError for a name that the plan does not have."""
        return replace(self, arms=_named(self.arms, arms, "arms"), places=_named(self.places, places, "places"))


def _named(known: tuple[T, ...], names: Sequence[str] | None, what: str) -> tuple[T, ...]:
    by_name = {one.name: one for one in known}
    if unknown := [name for name in names or () if name not in by_name]:
        raise ValueError(f"{what} {', '.join(unknown)}; choose from: {', '.join(by_name)}")
    return tuple(by_name[name] for name in names or by_name)


class PlanRun:
    """One run of a plan. ``rows``: a row for each place and arm; ``failures``: arm → why it could not run.

    Args:
        folder: makes what an arm loads, given `ArmSpec.process`.
        prompts: number and length in tokens → prompts.
        minutes: for all turns together.
        rounds: turns of each arm at most.
        figures: further figures of an arm, measured once after the turns; it may raise ArmError.
    """

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        folder: Callable[[str], Path],
        prompts: Callable[[int, int], list[list[int]]],
        minutes: float,
        rounds: int,
        figures: Callable[[RunningArm], Mapping[str, float]] = lambda entry: {},
    ) -> None:
        self._plan, self._manifest, self._prompts, self._figures = plan, manifest, prompts, figures
        self._minutes, self._rounds = minutes, rounds
        self.phases = Phases(lambda text: console().print(text, style="dim", markup=False))
        self._pool = ArmPool(folder, 1, self.phases)
        self.rows: list[Row] = []
        self.settings: dict[str, Any] = {"phases": self.phases.seconds}

    def run(self) -> None:
        """Time all arms at all places, and load each once more."""
        with closing(self._pool):
            modes = dict.fromkeys(place.mode for place in self._plan.places)
            for mode in modes:
                self.rows += self._compared(mode)
            found = {entry.spec.name: self._after_turns(entry) for entry in self._pool.start(self._plan.arms)}
        for row in self.rows:
            row |= found.get(row["arm"], {})
        self.settings["other_load"] = max((row["other_load"] for row in self.rows), default=0.0)

    def _compared(self, mode: str) -> list[Row]:
        planned = [place for place in self._plan.places if place.mode == mode]
        baselines = dict.fromkeys(baseline for _, baseline in self._plan.pairs)
        config = BenchConfig(
            mode=mode,
            new_tokens=self._plan.new_tokens,
            rounds=self._rounds,
            minutes=self._minutes * len(planned) / len(self._plan.places),
            pivot=self._plan.pivot,
            baselines=tuple(baselines),
        )
        places = [Place(one.prompt_tokens, one.batch, self._groups(one)) for one in planned]
        compared = Comparison(self._pool, self._plan.arms, places, self._manifest, config, EnergyMeter(), self.phases)
        names = {(one.prompt_tokens, one.batch): one.name for one in planned}
        order = [spec.name for spec in self._plan.arms]
        rows = compared.run(len(self._plan.arms))
        for row in rows:
            row["place"] = names[row["prompt_tokens"], row["batch"]]
        places_in_order = list(names.values())
        return sorted(rows, key=lambda row: (places_in_order.index(row["place"]), order.index(row["arm"])))

    def _groups(self, place: PlannedPlace) -> list[list[list[int]]]:
        prompts = self._prompts(self._rounds * place.batch, place.prompt_tokens)
        return [prompts[i : i + place.batch] for i in range(0, len(prompts), place.batch)]

    def _after_turns(self, entry: RunningArm) -> dict[str, float]:
        """Seconds to load the arm again, and its further figures; empty where it fails."""
        try:
            with self.phases("load again", entry.spec.title):
                seconds = entry.load_seconds()
            if entry.spec.kind == "llamacpp":
                self.settings["llamacpp"] = entry.process.call("build")
            with self.phases("further figures", entry.spec.title):
                return {"load_s": seconds, **self._figures(entry)}
        except ArmError as error:
            self._pool.note_failure(entry.spec, str(error))
            return {}


def pair_ratios(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], float]:
    """(place, arm, baseline) → speed of the arm over the baseline, for all of the plan's pairs that ran."""
    found = {(row["place"], row["arm"]): row for row in rows}
    return {
        (place.name, arm, baseline): row[f"vs_{baseline}"]
        for place in plan.places
        for arm, baseline in plan.pairs
        if f"vs_{baseline}" in (row := found.get((place.name, arm), {}))
    }


def add_plan_tables(
    report: Report, plan: Plan, rows: Sequence[Row], baselines: Mapping[str, str], title: str, caption: str
) -> None:
    """A table for each place. ``baselines``: arm → its name in the heading of a column of ratios."""
    for place in plan.places:
        own = [row for row in rows if row["place"] == place.name]
        further = ["perplexity"] if any("perplexity" in row for row in own) else []
        where = f"batch {place.batch}, {place.prompt_tokens} prompt tokens{', prompts alone' if place.mode == 'prefill' else ''}"
        decodes = place.mode == "decode"
        report.table(
            f"{title}, {where}",
            [
                "arm",
                *(SPEEDS if decodes else ()),
                "first token",
                *(f"× {name} (95%)" for name in baselines.values()),
                *further,
                *LAST,
            ],
            [_cells(row, tuple(baselines), further, decodes) for row in own],
            caption,
            [f"{row['title']} could not run: {row['note']}" for row in own if "note" in row],
        )


def _cells(row: Row, baselines: Sequence[str], further: Sequence[str], decodes: bool) -> list[str]:
    if "rounds" not in row:
        return [row["title"], "could not run", *[""] * (len(baselines) + len(further) + len(LAST) + len(SPEEDS) * decodes)]
    speeds = [f"{row['tokens_per_s']:.0f}", spread_cell(row, "ms_per_token")] if decodes else []
    ratios = [ratio_cell(row, baseline) for baseline in baselines]
    same = f"{row['agreement']:.0%}" if "agreement" in row else ""
    load = f"{row['load_s']:.2f} s" if "load_s" in row else ""
    measured = [f"{row[name]:.2f}" if name in row else "" for name in further]
    memory = f"{row['peak_mib']:.0f} MiB"
    return [row["title"], *speeds, spread_cell(row, "first_token_ms", " ms"), *ratios, *measured, same, memory, load]
