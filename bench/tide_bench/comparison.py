"""The comparison: groups of arms in memory together, each checked when it starts, warmed up, and then timed in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tide_runtime.bundle.manifest import Manifest

from tide_bench.arm_pool import ArmPool, RunningArm, meetings
from tide_bench.arms import ArmSpec, is_ours
from tide_bench.arms.process import ArmError
from tide_bench.config import BenchConfig
from tide_bench.counters import OtherLoad
from tide_bench.figures import decode_seconds, prefill_seconds, ratio_row, settled, speed_row, text_row
from tide_bench.output_checks import Terms, broken_promise
from tide_bench.report import Phases
from tide_bench.rounds import Group, TimedRun, run_rounds

REFERENCE = "eager"


@dataclass(frozen=True)
class Place:
    """Where arms are compared: ``groups`` are the prompts of the rounds, ``batch`` sequences of ``prompt_tokens`` each."""

    prompt_tokens: int
    batch: int
    groups: list[Group]

    @property
    def title(self) -> str:
        return f"batch {self.batch}, {self.prompt_tokens} prompt tokens"


@dataclass
class _Record:
    """The results of the arms at one place. ``checked``: their texts of the first group."""

    turns: dict[str, list[TimedRun]] = field(default_factory=dict)
    checked: dict[str, list[list[int]]] = field(default_factory=dict)
    other_load: float = 0.0


class Comparison:
    """Runs the arms ``specs`` at ``places``."""

    def __init__(
        self,
        pool: ArmPool,
        specs: Sequence[ArmSpec],
        places: Sequence[Place],
        manifest: Manifest,
        config: BenchConfig,
        phases: Phases,
    ) -> None:
        self._pool = pool
        self._specs = specs
        self._places = places
        self._config = config
        self._manifest, self._phases = manifest, phases
        self._records = [_Record() for _ in places]
        self._seconds = prefill_seconds if config.mode == "prefill" else decode_seconds
        self.new_tokens = 2 if config.mode == "prefill" else config.new_tokens

    def run(self, max_in_memory: int) -> list[dict[str, Any]]:
        """A row for each place and arm. ``max_in_memory``: processes that fit."""
        planned = meetings(list(dict.fromkeys(spec.process for spec in self._specs)), max_in_memory)
        share = 60 * self._config.minutes / (len(planned) * len(self._places))
        for number, in_memory in enumerate(planned):
            entries = self._pool.start([c for c in self._specs if c.process in in_memory], self._rehearse)
            for place, record in zip(self._places, self._records, strict=True):
                self._meet(entries, place, record, number, share)
            if number + 1 < len(planned):
                self._pool.stop(in_memory[1:])
        with self._phases("hold texts to their promises"):
            return [row for place, record in zip(self._places, self._records, strict=True) for row in self._rows(place, record)]

    def _rehearse(self, entry: RunningArm) -> None:
        """Generate at every place, a text to compare with the reference later; what compiles at a first call does so now."""
        spec = entry.spec
        for place, record in zip(self._places, self._records, strict=True):
            if spec.name not in record.checked:
                with self._phases("check", spec.title):
                    tokens = self._generate(entry, place)
                if tokens is not None:
                    record.checked[spec.name] = tokens

    def _generate(self, entry: RunningArm, place: Place) -> list[list[int]] | None:
        try:
            return entry.generate(place.groups[0], self.new_tokens).tokens
        except ArmError as error:
            self._pool.note_failure(entry.spec, f"batch {place.batch}: {error}")
            return None

    def _meet(self, entries: Sequence[RunningArm], place: Place, record: _Record, number: int, seconds: float) -> None:
        """Time the arms that are in memory together at one place; those that failed their first text there are left out."""
        present = [entry for entry in entries if entry.spec.name in record.checked]
        present = [entry for entry in present if self._warm_up(entry, place)]
        load = OtherLoad(self._pool.pids)
        with self._phases("turns", place.title):
            turns = run_rounds(present, place.groups, self.new_tokens, seconds, number, self._pool.note_failure, self._settled)
        record.other_load = max(record.other_load, load.share())
        for name, own in turns.items():
            record.turns.setdefault(name, []).extend(own)

    def _warm_up(self, entry: RunningArm, place: Place) -> bool:
        with self._phases("warm up", entry.spec.title):
            return self._generate(entry, place) is not None

    def _settled(self, turns: dict[str, list[TimedRun]]) -> bool:
        return settled(turns, self._seconds, self._config)

    def _rows(self, place: Place, record: _Record) -> list[dict[str, Any]]:
        where = {"prompt_tokens": place.prompt_tokens, "batch": place.batch, "other_load": record.other_load}
        rows = []
        for spec in self._specs:
            row = {**where, "arm": spec.name, "title": spec.title}
            turns = record.turns.get(spec.name)
            if turns:
                row |= self._figures(spec, place, record, turns)
            elif spec.name in self._pool.failures:
                row["note"] = self._pool.failures[spec.name]
            rows.append(row)
        return _ranked(rows)

    def _figures(self, spec: ArmSpec, place: Place, record: _Record, turns: list[TimedRun]) -> dict[str, Any]:
        row = {**speed_row(spec.title, turns, self._seconds), **ratio_row(spec.name, record.turns, self._seconds, self._config)}
        if spec.all_layers and self._seconds is decode_seconds:
            row["layers_per_token"] = float(self._manifest.model.num_layers)
        if self._config.pivot in record.turns:
            row |= text_row(turns, record.turns[self._config.pivot])
        if record.turns.get(REFERENCE):
            row["as_eager"] = text_row(turns, record.turns[REFERENCE])["agreement"]
        return row | {"mark": self._mark(spec, place, record, turns)}

    def _mark(self, spec: ArmSpec, place: Place, record: _Record, turns: list[TimedRun]) -> str:
        """Why the arm is not ranked, from its first texts and from all timed ones; empty when it keeps its promise."""
        names = [REFERENCE, self._config.pivot]
        if self._manifest.weights and is_ours(spec.process):  # products in few bits round their inputs, the eager model does not
            names.reverse()
        reference = next((name for name in names if record.turns.get(name) and name in record.checked), None)
        if reference is None:
            return ""
        known = {turn.round: turn.timing.tokens for turn in record.turns[reference]}
        prompts = list(place.groups[0])
        texts = list(record.checked[spec.name])
        references = list(record.checked[reference])
        for turn in turns:
            if turn.round in known:
                prompts += place.groups[turn.round]
                texts, references = texts + turn.timing.tokens, references + known[turn.round]
        return broken_promise(spec.promise, prompts, texts, references, self._pool.gap, Terms.of(self._manifest))


def _ranked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fastest first with ``rank`` from 1; then those that are marked, then those that could not run."""
    speed = "ms_per_token" if any("ms_per_token" in row for row in rows) else "first_token_ms"
    able = [row for row in rows if speed in row]
    ranked = sorted((row for row in able if not row["mark"]), key=lambda row: row[speed])
    for rank, row in enumerate(ranked, 1):
        row["rank"] = rank
    marked = sorted((row for row in able if row["mark"]), key=lambda row: row[speed])
    return [*ranked, *marked, *(row for row in rows if speed not in row)]
