"""Prompts made to mislead the depth policies, found by search over token sequences, and what bounds the damage.

    python -m benchmarks.adversarial_depth                         # 4 minutes
    python -m benchmarks.adversarial_depth --generations 40        # a longer search

Three searches, each by mutation of the best prompts so far (random tokens replaced, copied, or repeated), on counts and not on
clocks, so that a seed finds the same prompts everywhere where costs are the same:

- *slow*: SmolLM2-135M under the default policy, the prompt whose drafts cost most for what they give, by a table of costs that
  is the same on every machine;
- *deep*: the demo model under `exit`, certified at 5%, the prompt after which exits are evaluated and no token stops early;
- *shallow*: the same, the prompt after which the fewest layers are run for a token.

Then the worst prompts are timed against `full` in turn, and `exit`'s tokens are compared with the model's after the same text: as
it is, and with each of its bounds, `min_depth` and `max_exit_streak` on the shallow prompt, `depth_budget` on the deep one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.progress import track
from tide_bench.arms.base import with_limitation
from tide_bench.arms.tide import limitation, read_text
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import DepthOptions, Engine, EngineOptions, Generation, GenerationParams, ThreadOptions
from tide_runtime.bundle.exits import bundle_exits
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth_tuning import DepthTuning

from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE

POPULATION, KEPT = 16, 4  # prompts of a generation, and those that the next one is made from
PROMPT_TOKENS, NEW_TOKENS = 48, 64
ROUNDS = 7  # of timing
PARAMS = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, use_prefix_cache=False)
OPTIONS = EngineOptions(policy="full", max_batch=1, threads=ThreadOptions(shared=True), verify=False)
PERCENT = 5  # certified disagreement of the demo bundle under `exit`

Fitness = Callable[[Generation], float]


@dataclass(frozen=True)
class Worst:
    """The prompt that a search ended with, and its fitness."""

    prompt: list[int]
    fitness: float


def search(engine: Engine, fitness: Fitness, generations: int, seed: int, what: str) -> Worst:
    """The prompt of the greatest fitness that mutation finds; the best prompts of each generation survive."""
    random = np.random.default_rng(seed)
    vocab = engine.manifest.model.vocab_size
    prompts = [random.integers(0, vocab, PROMPT_TOKENS) for _ in range(POPULATION)]
    best: list[tuple[float, NDArray[np.int64]]] = []
    for _ in track(range(generations), description=what, console=console(), transient=True):
        results = engine.generate([prompt.tolist() for prompt in prompts], PARAMS)
        scored = [*best, *((fitness(result), prompt) for result, prompt in zip(results, prompts, strict=True))]
        best = sorted(scored, key=lambda pair: -pair[0])[:KEPT]
        prompts = [mutated(best[int(random.integers(len(best)))][1], random, vocab) for _ in range(POPULATION)]
    return Worst(best[0][1].tolist(), best[0][0])


def mutated(prompt: NDArray[np.int64], random: np.random.Generator, vocab: int) -> NDArray[np.int64]:
    """A copy with one change: a few other tokens, a part copied elsewhere, or a part repeated up to the end."""
    new, length = prompt.copy(), int(random.integers(1, 9))
    begin = int(random.integers(0, len(new) - length))
    kind = random.integers(3)
    if kind == 0:
        new[begin : begin + length] = random.integers(0, vocab, length)
    elif kind == 1:
        source = int(random.integers(0, len(new) - length))
        new[begin : begin + length] = prompt[source : source + length]
    else:
        new[begin:] = np.resize(prompt[begin : begin + length], len(new) - begin)
    return new


def draft_cost(engine: Engine) -> Fitness:
    """Time of a request's passes over that of `full` for the same tokens, by the runtime's guess of what passes cost: the same
    on every machine."""
    costs = CostModel.of(engine.manifest)
    single = costs.full(1, 1, 1)

    def fitness(result: Generation) -> float:
        stats = result.stats
        drafted, passes = sum(stats.drafted.values()), max(1, stats.deep_passes)
        mean = 1 + drafted / passes
        return passes * costs.full(1, round(mean), round(mean)) / (single * (stats.new_tokens - 1))

    return fitness


def timed_ratio(full: Engine, other: Engine, prompt: Sequence[int], depth_budget: float | None = None) -> float:
    """Decode time of `full` over the other engine's: the median over rounds, in turn, without prefix cache and pool."""
    ratios = []
    for _ in range(ROUNDS):
        seconds = [written(full, prompt).stats.decode_time, written(other, prompt, depth_budget).stats.decode_time]
        ratios.append(seconds[0] / seconds[1])
    return median(ratios)


def written(engine: Engine, prompt: Sequence[int], depth_budget: float | None = None) -> Generation:
    return engine.generate([list(prompt)], replace(PARAMS, depth_budget=depth_budget))[0]


def disagreement(full: Engine, other: Engine, prompt: Sequence[int]) -> float:
    """Share of tokens that differ from `full`'s after the text that `full` writes."""
    text = [*prompt, *written(full, prompt).token_ids]
    answers, model = read_text(other, text, len(prompt)).answers, read_text(full, text, len(prompt)).answers
    return float(np.mean(np.not_equal(answers, model)))


def slow_prompt(report: Report, cache: Path, weights: str, generations: int, seed: int) -> list[list[str]]:
    """The table's row of the default policy."""
    folder, repeatable = folder_of(weights, GGUF_MODELS["smollm2"], cache / "smollm2"), DepthTuning(clock_rate=0.0)
    with ExitStack() as stack:
        full = stack.enter_context(Engine.load(folder, OPTIONS))
        auto, searched = (
            stack.enter_context(full.with_options(replace(OPTIONS, policy="auto", depth=depth)))
            for depth in (DepthOptions(), DepthOptions(tuning=repeatable))
        )
        title = with_limitation("default", limitation(auto))
        worst = search(searched, draft_cost(searched), generations, seed, f"slow, {weights}")
        ratio = timed_ratio(full, auto, worst.prompt)
        stats = written(auto, worst.prompt).stats
    drafted, accepted = sum(stats.drafted.values()), sum(stats.accepted.values())
    row = {"search": "slow", "weights": weights, "policy": title, "prompt": worst.prompt, "cost": worst.fitness, "speedup": ratio}
    report.rows.append(row)
    report.add(f"exact_worst_found_{weights}", ratio)
    shown = [f"SmolLM2-135M {weights}", "slow", title, f"{stats.layers_per_token:.1f}", f"{ratio:.2f}", "0"]
    return [[*shown, f"{accepted} of {drafted} accepted"]]


@dataclass(frozen=True)
class ExitCase:
    """Policy `exit` with a bound, on the prompt that ``search`` found. ``budget``: of a request, as a share of the layers."""

    search: str
    title: str
    options: DepthOptions = field(default_factory=DepthOptions)
    budget: float | None = None


def exit_cases(deepest: int) -> list[ExitCase]:
    """``deepest``: layers before the deepest exit, the most that `min_depth` may be."""
    return [
        ExitCase("deep", "exit"),
        ExitCase("deep", "exit, depth_budget 0.8 L", budget=0.8),
        ExitCase("shallow", "exit"),
        ExitCase("shallow", f"exit, min_depth {deepest}", DepthOptions(min_depth=deepest)),
        ExitCase("shallow", "exit, max_exit_streak 2", DepthOptions(max_exit_streak=2)),
    ]


def exit_prompts(report: Report, cache: Path, generations: int, seed: int) -> list[list[str]]:
    """The table's rows of policy `exit`."""
    rows: list[list[str]] = []
    with ExitStack() as stack:
        full = stack.enter_context(Engine.load(calibrated_bundles("layerskip", cache)[PERCENT], OPTIONS))
        layers, deepest = full.depth, bundle_exits(full.manifest)[-1].info.checkpoint

        def depth(result: Generation) -> float:
            return float(np.mean(result.stats.depth_of_each(layers)))

        def load(options: DepthOptions) -> Engine:
            return stack.enter_context(full.with_options(replace(OPTIONS, policy="exit", depth=options)))

        plain = load(DepthOptions())
        found = {
            "deep": search(plain, depth, generations, seed, "deep"),
            "shallow": search(plain, lambda result: -depth(result), generations, seed, "shallow"),
        }
        for case in exit_cases(deepest):
            prompt, engine = found[case.search].prompt, load(case.options)
            budget = None if case.budget is None else case.budget * layers
            ratio, differs = timed_ratio(full, engine, prompt, budget), disagreement(full, engine, prompt)
            mean = depth(written(engine, prompt, budget))
            shown = "" if budget is not None else f"{differs:.1%}"  # a text is read without a budget
            rows.append(["demo layerskip", case.search, case.title, f"{mean:.1f}", f"{ratio:.2f}", shown, ""])
            row = {"search": case.search, "policy": case.title, "prompt": prompt, "depth": mean, "speedup": ratio}
            report.rows.append(row if budget is not None else row | {"disagreement": differs})
    plain_rows = {row["search"]: row for row in report.rows if row.get("policy") == "exit"}
    report.add("exit_deep_speedup", plain_rows["deep"]["speedup"])
    report.add("exit_shallow_layers", plain_rows["shallow"]["depth"])
    report.add("exit_shallow_disagreement_pct", 100 * plain_rows["shallow"]["disagreement"])
    return rows


def main(
    generations: Annotated[int, typer.Option(min=1, help=f"Of a search; each tries {POPULATION} prompts.")] = 12,
    weights: Annotated[str, typer.Option(help="Of SmolLM2-135M-Instruct.")] = "fp32,int4",
    seed: Annotated[int, typer.Option(min=0, help="Of the searches.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Search for prompts that mislead `exact` and `exit`."""
    report = Report("adversarial_depth", generations=generations, weights=weights, seed=seed)
    rows = [row for name in weights.split(",") for row in slow_prompt(report, cache, name, generations, seed)]
    rows += exit_prompts(report, cache, generations, seed)
    report.table(
        "Prompts made to mislead",
        ["model", "search", "policy", "layers", "speedup over `full`", "other tokens", "drafts"],
        rows,
        f"the worst that {generations} generations of a search over token sequences found. Deep: no token should stop early; "
        "shallow: all should; slow: drafts should cost most for what they give. Other tokens: share that differs from the "
        "model's after the same text.",
    )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
