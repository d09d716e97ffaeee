"""Where policy `exit` differs from the model: after the same text, against its certificate, and in texts of its own.

    python -m benchmarks.policy_quality                               # both demo models, certified at 1% and 5%
    python -m benchmarks.policy_quality --bundles FOLDER --json build/policy_quality.json

*Forced*: held-out files are read token by token; where does the likeliest next token differ from `full`'s? That is what the
certificate bounds, a document's mean. *Free*: both continue the same prompt, up to the first difference. Perplexity is of
the held-out text. `exact` writes `full`'s tokens, so it has `full`'s perplexity; that its texts are `full`'s is checked here too.
Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track
from tide_bench.arms.base import with_limitation
from tide_bench.arms.tide import Reading, limitation, read_text
from tide_bench.output_checks import disagreement_rate
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.held_out import held_out_prompts
from benchmarks.models.calibrated_bundles import PERCENTS, calibrated_bundles
from benchmarks.models.model_folders import CACHE

PROMPT_TOKENS = 64  # of a window; what follows is read, or written
FULL = "full"
WAYS = {
    "exit": EngineOptions(policy="exit"),
    "exact": EngineOptions(policy="exact"),
}
COLUMNS = ("model", "policy", "certified", "after the same text", "in its own text", "perplexity", "layers/token")


@dataclass(frozen=True)
class Texts:
    """What one policy made of every window. ``readings``: empty for `exact`, which has no answer before the text is known."""

    readings: list[Reading]
    written: list[list[int]]


def run_policy(engine: Engine, windows: Sequence[list[int]], what: str) -> Texts:
    """Read every window, and write as much behind its prompt."""
    params = GenerationParams(max_new_tokens=len(windows[0]) - PROMPT_TOKENS, ignore_eos=True)
    readings, written = [], []
    for window in track(windows, description=what, transient=True):
        if what.split()[-1] != "exact":
            readings.append(read_text(engine, window, PROMPT_TOKENS))
        written.append(list(engine.generate(window[:PROMPT_TOKENS], params)[0].token_ids))
    return Texts(readings, written)


def figures(own: Texts, full: Texts) -> dict[str, Any]:
    """``forced``: mean over documents of the share of answers that are not `full`'s, ``interval`` its 95% half-width."""
    found: dict[str, Any] = {"free": disagreement_rate(own.written, full.written)}
    if not own.readings:
        return found
    shares = [np.mean(np.not_equal(r.answers, f.answers)) for r, f in zip(own.readings, full.readings, strict=True)]
    tokens = sum(len(reading.answers) for reading in own.readings)
    return found | {
        "forced": float(np.mean(shares)),
        "interval": float(1.96 * np.std(shares, ddof=1) / np.sqrt(len(shares))),
        "perplexity": float(np.exp(np.mean(np.concatenate([reading.nats for reading in own.readings])))),
        "layers_per_token": sum(reading.layers for reading in own.readings) / tokens,
    }


def measure(report: Report, model: str, bundles: dict[int, Path], windows: Sequence[list[int]], threads: ThreadOptions) -> None:
    """Rows and figures of one model; `full` is the first bundle's, as it is in every one."""
    with Engine.load(bundles[PERCENTS[0]], EngineOptions(policy=FULL, threads=threads)) as engine:
        full = run_policy(engine, windows, f"{model} {FULL}")
    _add(report, model, FULL, FULL, figures(full, full), None)
    for percent, bundle in bundles.items():
        for way, options in WAYS.items():
            if way == "exact" and percent != PERCENTS[0]:
                continue  # certificates are nothing to it
            with Engine.load(bundle, EngineOptions(policy=options.policy, depth=options.depth, threads=threads)) as engine:
                calibration = engine.manifest.calibration
                assert calibration is not None
                certificate = calibration.certificate
                own = run_policy(engine, windows, f"{model} at {percent}% {way}")
                title = with_limitation(way.replace("exit", f"exit{percent}"), limitation(engine))
            certified = certificate.max_disagreement if certificate is not None and way == "exit" else None
            _add(report, model, way.replace("exit", f"exit{percent}"), title, figures(own, full), certified)


def _add(report: Report, model: str, way: str, title: str, found: dict[str, Any], certified: float | None) -> None:
    report.rows.append({"model": model, "policy": way, "title": title, "certified": certified, **found})
    for name in ("forced", "free", "perplexity"):
        if name in found:
            report.add(f"{name}_{way}_{model}", found[name])


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"],
        f"`{row['title'].replace('_', ', ')}`",
        f"{row['certified']:.0%}" if row["certified"] else "",
        f"{row['forced']:.2%} ± {row['interval']:.2%}" if "forced" in row else "",
        f"{row['free']:.2%}",
        f"{row['perplexity']:.3f}" if "perplexity" in row else "",
        f"{row['layers_per_token']:.1f}" if "layers_per_token" in row else "",
    ]


def main(
    models: Annotated[str, typer.Option(help="Demo models, of layerskip,stock.")] = "layerskip,stock",
    documents: Annotated[int, typer.Option(min=2, help="Held-out files, one window of each.")] = 48,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens that are read, or written, behind a prompt.")] = 128,
    bundles: Annotated[Path | None, typer.Option(help="Take MODEL_1 and MODEL_5 from this folder; do not calibrate.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Compare policy exit with the model and with its certificates."""
    report = Report("policy_quality", documents=documents, tokens=tokens, prompt_tokens=PROMPT_TOKENS)
    windows = [prompt.ids for prompt in held_out_prompts(documents, PROMPT_TOKENS + tokens, "library")]
    for model in models.split(","):
        made = {p: bundles / f"{model}_{p}" for p in PERCENTS} if bundles is not None else calibrated_bundles(model, cache)
        measure(report, model, made, windows, ThreadOptions(shared=True))
    caption = (
        f"share of tokens that are not `full`'s, {documents} held-out documents of {tokens} tokens. In its own text: per "
        "token, up to the first difference."
    )
    report.table("How often `exit` differs", COLUMNS, map(_cells, report.rows), caption)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
