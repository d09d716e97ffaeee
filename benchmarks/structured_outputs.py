"""Structured outputs: are they valid, and what do the tokens that a grammar forces save? SmolLM2-135M-Instruct on the CPU.

    python -m benchmarks.structured_outputs                      # int4 and fp32, 200 schemas: 6 minutes
    python -m benchmarks.structured_outputs --schemas 50 --weights int4

Part 1: one output for each schema at temperature 1, eight at once, checked by the package jsonschema with formats. Outputs that
`max_new_tokens` cut are counted apart. Schemas that llguidance refuses are reported with its reason.

Part 2: the fixed forms, one at a time: policy `exact` with the drafts that the grammar forces, without them (drafts from text
stay), and `full`, in turn on the same weights. All three give the same tokens. Mask time is all that the grammar does, over
the decode time of the first.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean, median
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import typer
from jsonschema import Draft202012Validator
from rich.progress import Progress
from tide_bench.arms.base import with_limitation
from tide_bench.arms.tide import limitation
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import DepthOptions, Engine, EngineOptions, Generation, GenerationParams, Grammar, ThreadOptions
from tide_runtime.errors import GrammarError
from tide_runtime.text.grammar import GrammarState

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.structured.schemas import FIXED, Schema, schemas

AT_ONCE, ROUNDS, NEW_TOKENS = 8, 5, 256
WEIGHTS = ("int4", "fp32")
GRAMMAR_WORK = ("allowed", "take", "forced", "num_valid")


def prompt_of(engine: Engine, name: str, schema: Schema) -> list[int]:
    request = f"Make up an example of a {name.replace('_', ' ')} as JSON with this schema: {json_module.dumps(schema)}"
    return engine.chat_prompt([{"role": "user", "content": request}])


def load_engines(folder: Path, stack: ExitStack) -> dict[str, Engine]:
    """Engines on the same weights: with the grammar's drafts, without them, and `full`."""
    options = EngineOptions(policy="exact", threads=ThreadOptions(shared=True), max_batch=AT_ONCE, verify=False)
    first = stack.enter_context(Engine.load(folder, options))
    others = {
        "without": replace(options, depth=DepthOptions(draft="ngram"), max_batch=1),
        "full": replace(options, policy="full", max_batch=1),
    }
    return {"grammar": first, **{name: stack.enter_context(first.with_options(own)) for name, own in others.items()}}


def validity(engine: Engine, chosen: dict[str, Schema], seed: int, progress: Progress) -> list[dict[str, Any]]:
    """A row for each schema: refused, cut, valid or invalid."""
    bar, rows, names = progress.add_task("schemas", total=len(chosen)), [], list(chosen)
    for start in range(0, len(names), 4 * AT_ONCE):
        handles = {}
        for number, name in enumerate(names[start : start + 4 * AT_ONCE], start):
            params = GenerationParams(NEW_TOKENS, 1.0, grammar=Grammar.json_schema(chosen[name]), seed=seed + number)
            try:
                handles[name] = engine.submit(prompt_of(engine, "thing", chosen[name]), params, streamed=False)
            except GrammarError as error:
                rows.append({"schema": name, "outcome": "refused", "reason": str(error)})
        rows += [{"schema": name, **outcome(handle.result(), chosen[name])} for name, handle in handles.items()]
        progress.update(bar, completed=start + 4 * AT_ONCE)
    return rows


def outcome(generation: Generation, schema: Schema) -> dict[str, Any]:
    """What became of one output."""
    if generation.finish_reason == "length":
        return {"outcome": "cut", "tokens": generation.stats.new_tokens}
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    try:
        errors = [error.message for error in validator.iter_errors(json_module.loads(generation.text or ""))]
    except ValueError as error:
        errors = [str(error)]
    found = {"outcome": "invalid" if errors else "valid", "tokens": generation.stats.new_tokens}
    return found | ({"reason": errors[0], "text": generation.text} if errors else {})


@contextmanager
def timed_grammars() -> Iterator[list[float]]:
    """Seconds that grammars take, in a list that grows."""
    seconds: list[float] = []

    def timed(method: Any) -> Any:
        def call(*args: Any) -> Any:
            began = perf_counter()
            try:
                return method(*args)
            finally:
                seconds.append(perf_counter() - began)

        return call

    with ExitStack() as stack:
        for name in GRAMMAR_WORK:
            stack.enter_context(patch.object(GrammarState, name, timed(getattr(GrammarState, name))))
        yield seconds


def speeds(engines: dict[str, Engine], weights: str, progress: Progress) -> list[dict[str, Any]]:
    """A row for each fixed form: medians of decode time over rounds, in turn."""
    rows, title = [], with_limitation(weights, limitation(engines["grammar"]))
    bar = progress.add_task(f"fixed forms, {weights}", total=len(FIXED))
    for name, schema in FIXED.items():
        params = GenerationParams(NEW_TOKENS, grammar=Grammar.json_schema(schema), use_prefix_cache=False)
        times: dict[str, list[float]] = {arm: [] for arm in engines}
        tokens: dict[str, Sequence[int]] = {}
        spent = 0.0
        for number in range(ROUNDS):
            order = list(engines)
            for arm in order[number % len(order) :] + order[: number % len(order)]:
                generation = engines[arm].generate(prompt_of(engines[arm], name, schema), params)[0]
                times[arm].append(generation.stats.decode_time)
                tokens[arm] = generation.token_ids
                if arm == "grammar":
                    found = generation
        with timed_grammars() as seconds:
            masked = engines["grammar"].generate(prompt_of(engines["grammar"], name, schema), params)[0]
        spent = sum(seconds) / masked.stats.decode_time
        middle = {arm: median(own) for arm, own in times.items()}
        differing = sum(a != b for arm in tokens for a, b in zip(tokens[arm], tokens["full"], strict=False))
        differing += sum(abs(len(own) - len(tokens["full"])) for own in tokens.values())
        rows.append(
            {
                "form": name, "weights": weights, "title": title, "tokens": len(tokens["full"]), "drafted": found.stats.drafted,
                "over_without": middle["without"] / middle["grammar"], "over_full": middle["full"] / middle["grammar"],
                "mask_share": spent, "differing": differing,
            }
        )  # fmt: skip
        progress.advance(bar)
    return rows


def add_tables(report: Report, forms: Sequence[dict[str, Any]]) -> None:
    """The fixed forms, and what became of all outputs."""
    results, rows = report.results, []
    for row in forms:
        speeds = [f"{row[name]:.2f}x" for name in ("over_without", "over_full")]
        forced = row["drafted"].get("grammar", 0) / row["tokens"]
        rows.append([row["title"], row["form"], str(row["tokens"]), f"{forced:.0%}", *speeds, f"{row['mask_share']:.1%}"])
    report.table(
        "Forced tokens are free drafts",
        ["weights", "schema", "tokens", "drafted", "over `exact` without them", "over `full`", "mask"],
        rows,
        "SmolLM2-135M-Instruct, policy `exact`, fixed JSON schemas, greedy, one at a time. Drafted: share of the tokens that the "
        "schema forces. Mask: all that the grammar does, of the decode time. Tokens that differ between the arms: "
        f"{results['differing_tokens']:.0f}.",
    )
    report.statement(
        "Valid outputs",
        f"{report.settings['schemas']} JSON schemas at temperature 1: {results['valid_outputs']:.0f} outputs valid, "
        f"{results['invalid_outputs']:.0f} invalid, {results['cut_outputs']:.0f} cut by the token limit, "
        f"{results['refused_outputs']:.0f} schemas refused.",
    )


def main(
    count: Annotated[int, typer.Option("--schemas", min=len(FIXED) + 2, help="Schemas of part 1.")] = 200,
    weights: Annotated[str, typer.Option(help=f"Of the model, of {','.join(WEIGHTS)}; part 1 uses the first.")] = ",".join(
        WEIGHTS
    ),
    seed: Annotated[int, typer.Option(min=0, help="Of the random schemas and of sampling.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Check outputs against their schemas, and measure what forced tokens save."""
    chosen = chosen_names(weights, WEIGHTS, "weights")
    report = Report("structured_outputs", model="SmolLM2-135M-Instruct", schemas=count, weights=weights, seed=seed)
    outcomes: list[dict[str, Any]] = []
    forms: list[dict[str, Any]] = []
    with Progress(console=console()) as progress:
        for name in chosen:
            with ExitStack() as stack:
                engines = load_engines(folder_of(name, GGUF_MODELS["smollm2"], cache / "smollm2"), stack)
                if name == chosen[0]:
                    outcomes = validity(engines["grammar"], schemas(count, seed), seed, progress)
                forms += speeds(engines, name, progress)
    for row in outcomes:
        if row["outcome"] in ("invalid", "refused"):
            console().print(f"{row['schema']} {row['outcome']}: {row['reason']}", markup=False)
    for kind in ("valid", "invalid", "cut", "refused"):
        report.add(f"{kind}_outputs", sum(row["outcome"] == kind for row in outcomes))
    for name in chosen:
        own, suffix = [row for row in forms if row["weights"] == name], "" if name == chosen[0] else f"_{name}"
        report.add(f"forced_speedup{suffix}", geometric_mean(row["over_without"] for row in own))
        report.add(f"forced_over_full{suffix}", geometric_mean(row["over_full"] for row in own))
        report.add(f"mask_pct{suffix}", 100 * fmean(row["mask_share"] for row in own))
        report.add(f"mask_worst_pct{suffix}", 100 * max(row["mask_share"] for row in own))
    report.add("differing_tokens", sum(row["differing"] for row in forms))
    report.rows = [*outcomes, *forms]
    add_tables(report, forms)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
