"""How much faster `exact` and `exit` decode the looped demo model than `full`, and whether its certificate holds.

    python -m benchmarks.looped                  # 12 minutes on 2 cores, and 10 to calibrate
    python -m benchmarks.looped --quick          # fewer prompts, no certificates

The demo is calibrated and exported with default options. Policies take turns with `full` on the same weights, greedily, on
prompts that neither the model nor its calibration has seen. `exit` is certified at 5%: held-out files are read token by token;
where its token differs from `full`'s is what the certificate bounds, a document's mean. The certificate is also chosen anew on
random quarters of the held-out documents and judged on the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tide_bench.arms.tide import Reading, read_text
from tide_bench.counters import OtherLoad
from tide_bench.report import Report
from tide_calibrate.certificate.risk import fit_family
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import ModelInfo, read_manifest

from benchmarks.arms.policy_arms import BASELINE, policy_arms, speed_figures
from benchmarks.arms.turns import Group, Turn, take_turns
from benchmarks.certificate import pooled
from benchmarks.exits.exit_traces import ROUTER, exit_traces
from benchmarks.exits.resplits import ARMS, Outcome, judge, resplits
from benchmarks.held_out import held_out_prompts
from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.models.model_folders import CACHE
from benchmarks.tasks.task_run import differing_tokens

MODEL = "looped"
EXACT, LOOPS, EXIT = "exact_both", "exact_router", "exit5"  # of POLICIES; LOOPS drafts with no text
PERCENT = 5
CONFIDENCE = 0.95
_SHARE, _REPEATS = 0.25, 200  # as benchmarks.certificate
_HEAD = "identity"  # the model's own norm and head, which fit at the end of a loop
PROMPT_TOKENS, NEW_TOKENS = 64, 96
READ_TOKENS = 128  # tokens of a held-out document that follow its prompt
QUICK_PROMPTS = 16
HEADINGS = ("batch", "policy", "× full (95%)", "× total", "tokens/s", "loops of a token", "launched", "drafts kept", "differ")


def run_batch(bundles: Mapping[int, Path], batch: int, prompts: Group, new_tokens: int) -> list[dict[str, Any]]:
    """A row for `full` and each policy: ``prompts`` in groups of ``batch``, the policies in turn with `full`."""
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    params = GenerationParams(max_new_tokens=new_tokens, ignore_eos=True)
    model = read_manifest(bundles[PERCENT]).model
    with policy_arms(dict(bundles), [BASELINE, EXACT, LOOPS, EXIT], batch) as arms:
        for arm in arms.values():
            arm.turn([prompt[::-1] for prompt in groups[0]], params)  # binds every shape
        load = OtherLoad(())
        base, turns = take_turns(arms[BASELINE], {name: arms[name] for name in (EXACT, LOOPS, EXIT)}, groups, params)
        share = load.share()
        return [
            {
                "arm": name,
                "title": arms[name].title,
                "batch": batch,
                "other_load": share,
                **speed_figures(own),
                **loop_figures(own, model),
                "differing_tokens": differing(own, base),
            }
            for name, own in {BASELINE: base, **turns}.items()
        ]


def loop_figures(turns: Sequence[Turn], model: ModelInfo) -> dict[str, float]:
    """``loops``: mean loops after which a token was final; ``launched``: loops launched for a token of a sequence."""
    layers = model.num_layers / model.loops
    tokens = sum(turn.decoded for turn in turns)
    return {
        "loops": sum(turn.depth * turn.decoded for turn in turns) / tokens / layers,
        "launched": sum(turn.layers_per_token * turn.decoded for turn in turns) / tokens / layers,
    }


def differing(turns: Sequence[Turn], reference: Sequence[Turn]) -> int:
    """Places at which a text has another token than the reference's."""
    pairs = zip(turns, reference, strict=True)
    return sum(differing_tokens(*rows) for own, base in pairs for rows in zip(own.tokens, base.tokens, strict=True))


def disagreement(bundle: Path, texts: Sequence[list[int]]) -> tuple[float, float]:
    """How often `exit` chooses another token than `full` behind the same held-out text: the mean over ``texts``, and half of its
    95% interval."""
    answers = dict[str, list[Reading]]()
    for policy in ("full", "exit"):
        # An engine for several sequences evaluates exits where a batch of them gains, and else runs `full`.
        options = EngineOptions(policy=policy, max_batch=1, threads=ThreadOptions(shared=True))
        with Engine.load(bundle, options, device="cpu") as engine:
            answers[policy] = [read_text(engine, text, PROMPT_TOKENS) for text in texts]
    pairs = zip(answers["exit"], answers["full"], strict=True)
    shares = [np.mean(np.not_equal(own.answers, full.answers)) for own, full in pairs]
    return float(np.mean(shares)), float(1.96 * np.std(shares, ddof=1) / np.sqrt(len(shares)))


def violations(loop_ends: Sequence[int], windows: int) -> Outcome:
    """Certificates at `PERCENT` % from a quarter of the held-out documents, judged on the others."""
    with tempfile.TemporaryDirectory() as folder:
        train, held_out = exit_traces(MODEL, "library", loop_ends, _HEAD, windows, Path(folder))
    family = fit_family(train, [(depth, _HEAD, ROUTER) for depth in loop_ends])
    pool = pooled(held_out, family, "document")
    parts = partial(resplits, share=_SHARE, repeats=_REPEATS, seed=0)
    return judge(pool, ARMS["ltt"], parts(len(pool.tokens)), PERCENT / 100, CONFIDENCE)


def add_speeds(report: Report, rows: Sequence[Mapping[str, Any]], prompts: int) -> None:
    caption = (
        f"{prompts} held-out prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones. Ratios are to `full` on the same weights "
        "in neighbouring turns: median with its 95% interval, and of the total time. Loops of a token: after how many `exit` "
        "takes it; launched: loops that were run for it, rejected drafts included. Differ: tokens that are not `full`'s."
    )
    load = max(row["other_load"] for row in rows)
    notes = [f"Other processes took at most {load:.0%} of the CPU meanwhile."]
    report.table("Looped demo, fp32", HEADINGS, map(_cells, rows), caption, notes)
    by_place = {(row["arm"], row["batch"]): row for row in rows}
    report.add("looped_exact_speedup", by_place[EXACT, 1]["ratio_median"])
    report.add("looped_exact_total", by_place[EXACT, 1]["ratio_total"])
    report.add("looped_exact_b8", by_place[EXACT, 8]["ratio_median"])
    report.add("looped_loops_speedup", by_place[LOOPS, 1]["ratio_median"])
    report.add("looped_loops_b8", by_place[LOOPS, 8]["ratio_median"])
    report.add("looped_differs", sum(row["differing_tokens"] for row in rows if row["arm"] in (EXACT, LOOPS)))
    report.add(f"looped_{EXIT}_speedup", by_place[EXIT, 1]["ratio_median"])
    report.add(f"looped_{EXIT}_b8", by_place[EXIT, 8]["ratio_median"])
    report.add(f"looped_{EXIT}_loops", by_place[EXIT, 1]["loops"])


def _cells(row: Mapping[str, Any]) -> list[str]:
    full = row["arm"] == BASELINE
    kept = (f"{name.removeprefix('accepted_')} {share:.0%}" for name, share in row.items() if name.startswith("accepted_"))
    return [
        str(row["batch"]),
        row["title"],
        "1" if full else f"{row['ratio_median']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})",
        "1" if full else f"{row['ratio_total']:.2f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['loops']:.2f}" if row["arm"] in (BASELINE, EXIT) else "",  # drafts are final after all loops
        f"{row['launched']:.2f}",
        " ".join(kept),
        str(row["differing_tokens"]),
    ]


def add_certificate(report: Report, bundle: Path, documents: int, windows: int) -> None:
    """What `exit` does behind held-out text, and how often its certificate is violated."""
    texts = [prompt.ids for prompt in held_out_prompts(documents, PROMPT_TOKENS + READ_TOKENS, "library")]
    mean, interval = disagreement(bundle, texts)
    report.add(f"looped_{EXIT}_disagreement_pct", 100 * mean)
    share = f"{mean:.2%} ± {interval:.2%}"
    said = f"`exit` certified at {PERCENT}% chooses another token than `full` at {share} of {documents * READ_TOKENS:,} places "
    said += f"of {documents} held-out documents."
    if windows:
        model = read_manifest(bundle).model
        layers = model.num_layers // model.loops
        found = violations([layers * loop for loop in range(1, model.loops)], windows)
        report.add("looped_violations_pct", 100 * found.violations)
        said += f" Chosen anew on random quarters of the documents, certificates are violated in {found.violations:.1%} of "
        said += f"cases (at most 5% may be); {found.exit_share:.0%} of the tokens leave early."
    report.statement("Does the certificate hold?", said)


def main(
    prompts: Annotated[int, typer.Option(min=8, help="Held-out prompts of each batch size.")] = 64,
    windows: Annotated[int, typer.Option(min=0, help="Windows of 256 tokens for the certificates; 0: none.")] = 400,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_PROMPTS} prompts, no certificates.")] = False,
    bundles: Annotated[Path | None, typer.Option(help="Take bundle_1 and bundle_5 from this folder; do not calibrate.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure the looped demo on this machine's CPU."""
    if quick:
        prompts = QUICK_PROMPTS
        windows = 0
    report = Report("looped", prompts=prompts, new_tokens=NEW_TOKENS, windows=windows)
    made = {p: bundles / f"bundle_{p}" for p in (1, PERCENT)} if bundles is not None else calibrated_bundles(MODEL, cache)
    ids = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, "library")]
    report.rows += [row for batch in (1, 8) for row in run_batch(made, batch, ids, NEW_TOKENS)]
    add_speeds(report, report.rows, prompts)
    add_certificate(report, made[PERCENT], 12 if quick else 48, windows)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
