"""Prompts made to mislead the depth policies, found by search over token sequences, and what bounds the damage.

    python -m benchmarks.adversarial_depth                         # 10 minutes
    python -m benchmarks.adversarial_depth --generations 40        # a longer search

Three searches, each by mutation of the best prompts so far (random tokens replaced, copied, or repeated), on counts and not on
clocks, so that a seed finds the same prompts everywhere where costs are the same:

- *slow*: SmolLM2-135M under the default policy, the prompt whose drafts cost most for what they give, by the engine's own costs;
- *deep*: the demo model under `exit`, certified at 5%, the prompt after which exits are evaluated and no token stops early;
- *shallow*: the same, the prompt after which the fewest layers are run for a token. There `exit` is run again with each of its
  bounds: `min_depth`, `max_exit_streak`, a request's `depth_budget` does not bound from below and is left out.

Then the worst prompts are timed against `full` in turn, and `exit`'s tokens are compared with the model's after the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tide_bench.report import Report
from tide_bench.teacher_forcing import read_text
from tide_runtime import Engine, EngineOptions, Generation, GenerationParams, ThreadOptions
from tide_runtime.bundle import Bundle
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.options import DepthOptions

from benchmarks.decode_cpu import CACHE
from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.models.gguf_files import GGUF_MODELS
from benchmarks.quantised_decode import folder_of

POPULATION, KEPT = 16, 4  # prompts of a generation, and those that the next one is made from
PROMPT_TOKENS, NEW_TOKENS = 48, 64
ROUNDS = 7  # of timing
PERCENT = 5  # certified disagreement of the demo bundle under `exit`

console = Console(width=max(110, Console().width))
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
    for _ in track(range(generations), description=what, console=console, transient=True):
        params = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, use_prefix_cache=False)
        results = engine.generate([prompt.tolist() for prompt in prompts], params)
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
    """Time of a request's passes over that of `full` for the same tokens, by the engine's costs of passes."""
    costs = CostModel.of(engine.manifest, engine.backend.pass_costs)
    single = costs.full(1, 1, 1)

    def fitness(result: Generation) -> float:
        stats = result.stats
        drafted, passes = sum(stats.drafted.values()), max(1, stats.deep_passes)
        mean = 1 + drafted / passes
        return passes * costs.full(1, round(mean), round(mean)) / (single * (stats.new_tokens - 1))

    return fitness


def timed_ratio(full: Engine, other: Engine, prompt: Sequence[int]) -> float:
    """Decode time of `full` over the other engine's: the median over rounds, in turn, without prefix cache and pool."""
    params = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, use_prefix_cache=False)
    ratios = []
    for _ in range(ROUNDS):
        seconds = [engine.generate([list(prompt)], params)[0].stats.decode_time for engine in (full, other)]
        ratios.append(seconds[0] / seconds[1])
    return median(ratios)


def disagreement(full: Engine, other: Engine, prompt: Sequence[int]) -> float:
    """Share of tokens that differ from `full`'s after the text that `full` writes."""
    params = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, use_prefix_cache=False)
    text = [*prompt, *full.generate([list(prompt)], params)[0].token_ids]
    answers = [read_text(engine, text, len(prompt)).answers for engine in (full, other)]
    return float(np.mean(np.not_equal(*answers)))


def slow_prompt(report: Report, cache: Path, weights: str, generations: int, seed: int, table: Table) -> None:
    bundle = Bundle.open(folder_of(weights, GGUF_MODELS["smollm2"], cache / "smollm2"), verify=False)
    threads = ThreadOptions(shared=True)
    with ExitStack() as stack:
        full = stack.enter_context(Engine(bundle, EngineOptions(policy="full", max_batch=1, threads=threads)))
        auto = stack.enter_context(Engine(bundle, EngineOptions(max_batch=1, threads=threads), backend=full.backend))
        worst = search(auto, draft_cost(auto), generations, seed, f"slow, {weights}")
        ratio = timed_ratio(full, auto, worst.prompt)
        (result,) = auto.generate([worst.prompt], GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    stats = result.stats
    drafted, accepted = sum(stats.drafted.values()), sum(stats.accepted.values())
    table.add_row(
        f"SmolLM2-135M {weights}", "slow", "exact (default)", f"{stats.layers_per_token:.1f}", f"{ratio:.2f}", "",
        f"{accepted} of {drafted} drafts accepted; modelled cost {worst.fitness:.3f}",
    )  # fmt: skip
    report.rows.append({"search": "slow", "weights": weights, "prompt": worst.prompt, "cost": worst.fitness, "speedup": ratio})
    report.add(f"exact_worst_found_{weights}", ratio)


def exit_prompts(report: Report, cache: Path, generations: int, seed: int, table: Table) -> None:
    bundle = Bundle.open(calibrated_bundles("layerskip", cache)[PERCENT], verify=False)
    threads, layers = ThreadOptions(shared=True), bundle.manifest.model.num_layers
    calibration = bundle.manifest.calibration
    assert calibration is not None
    bounds = {
        "exit": DepthOptions(),
        f"exit, min_depth {layers // 2}": DepthOptions(min_depth=layers // 2),
        "exit, max_exit_streak 2": DepthOptions(max_exit_streak=2),
    }
    least = max(info.checkpoint for info in calibration.exits if info.exit_threshold is not None)
    bounds = {name: options for name, options in bounds.items() if options.min_depth <= least}
    with ExitStack() as stack:
        full = stack.enter_context(Engine(bundle, EngineOptions(policy="full", max_batch=1, threads=threads)))
        engines = {
            name: stack.enter_context(
                Engine(bundle, EngineOptions(policy="exit", depth=options, max_batch=1, threads=threads), backend=full.backend)
            )
            for name, options in bounds.items()
        }
        plain = engines["exit"]

        def depth(result: Generation) -> float:
            depths = result.stats.depth_of_each(layers)
            return sum(depths) / len(depths)

        found = {
            "deep": search(plain, depth, generations, seed, "deep"),
            "shallow": search(plain, lambda result: -depth(result), generations, seed, "shallow"),
        }
        for name, worst in found.items():
            for title, engine in engines.items() if name == "shallow" else [("exit", plain)]:
                ratio, differs = timed_ratio(full, engine, worst.prompt), disagreement(full, engine, worst.prompt)
                (result,) = engine.generate([worst.prompt], GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
                table.add_row("demo layerskip", name, title, f"{depth(result):.1f}", f"{ratio:.2f}", f"{differs:.1%}", "")
                row = {"search": name, "policy": title, "prompt": worst.prompt, "depth": depth(result), "speedup": ratio}
                report.rows.append(row | {"disagreement": differs})
            report.add(f"exit_{name}_speedup", report.rows[-1]["speedup"])
        report.add("exit_shallow_disagreement_pct", 100 * max(r["disagreement"] for r in report.rows if r["search"] == "shallow"))


def main(
    generations: Annotated[int, typer.Option(min=1, help=f"Of a search; each tries {POPULATION} prompts.")] = 12,
    weights: Annotated[str, typer.Option(help="Of SmolLM2-135M-Instruct.")] = "fp32,int4",
    seed: Annotated[int, typer.Option(min=0, help="Of the searches.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Search for prompts that mislead `exact` and `exit`."""
    report = Report("adversarial_depth", generations=generations, weights=weights, seed=seed)
    table = Table(
        "model", "search", "policy", "layers/token", "speedup over full", "other tokens", "", title="Worst prompts found"
    )
    for name in weights.split(","):
        slow_prompt(report, cache, name, generations, seed, table)
    exit_prompts(report, cache, generations, seed, table)
    console.print(table)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
