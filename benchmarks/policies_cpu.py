"""Depth policies on the CPU, fp32: how much faster than the *unsplit* ONNX graph, and how much of that the theory promises.

    python -m benchmarks.policies_cpu                          # 24 prompts x 64 tokens
    python -m benchmarks.policies_cpu --prompts 100 --new-tokens 128
    python -m benchmarks.policies_cpu --models layerskip --batch 1 --arms full,exact_both --temperature 0

Every ratio has the unsplit graph, driven by the same loop, as its baseline: all of TIDE's arms run in one process, each beside
the baseline on the same prompts, in alternating slices of 4 tokens a sequence (see `turns`; a whole turn of one after a whole
turn of the other scatters several times as much on a shared machine). Where in memory a graph and its caches lie makes it a
percent or two faster or slower for as long as it is loaded. So the baseline is the session of the unsplit graph that the
policies' own engine loaded, with caches of its own (loaded apart, it was 0.5% to 1.5% faster than ``full``, which runs the same
graph; ``exit`` at 5% has a bundle and an engine of its own); as a bundle of its own the unsplit graph is an arm. And everything
is loaded several times (``--loads``), each time for a part of the prompts. HF's arms have processes of their own, 4 groups of
prompts, and whole turns of the baseline before and after theirs. Prompts are windows of 64 tokens from files that neither the
models nor the calibration have seen (see `held_out`; ``--data demo`` takes the demo's own files instead, which the calibration
learned from); sampling and random weights get fewer of them, batches the same ones in other batches. Batch 1 runs every arm and
every temperature, batches run ``--batch-arms``, greedily. ``random`` has random weights and a calibration that is wrong about
them: the worst that can happen. The first run calibrates both demo models, which takes some minutes more. 100 prompts of 128
tokens take 85 minutes; ``--resume`` goes on where a run was interrupted, after the models that its file has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from tide_bench.arms.process import ArmError
from tide_bench.other_load import OtherLoad
from tide_bench.report import Report
from tide_runtime import EngineOptions, GenerationParams

from benchmarks.arms.engine_arm import EngineArm
from benchmarks.arms.hf_arms import HFArm
from benchmarks.arms.policy_arms import ArmSet, demo_arms, random_arms
from benchmarks.arms.policy_list import HF_TITLES, TITLES
from benchmarks.arms.turns import Group, Turn, take_turns
from benchmarks.held_out import SOURCES, held_out_prompts
from benchmarks.models.calibrated_bundles import PERCENTS, calibrated_bundles
from benchmarks.tables.arm_figures import repetition, speed_figures, text_figures, theory_figures
from benchmarks.tables.policy_table import BASELINE, CAPTION, add_policy_results, print_policy_table

CACHE = Path(__file__).resolve().parents[1] / "build" / "bench-cache"
BATCH_ARMS = ("full", "exact_ngram", "exact_router", "exact_both", "exit1")  # what a user would choose from
MODELS = ("layerskip", "stock", "random")
PROMPT_TOKENS = 64
SAMPLED_SHARE, RANDOM_SHARE = 4, 4  # one prompt in so many for sampling and for random weights
LEAST_GROUPS = 6  # the bootstrap over fewer is meaningless
LEAST_TOKENS = 3072  # in all turns of an arm that takes a share: a quarter of a second for one is noise
QUEUE = 6  # prompts per slot that a batch works off in one turn: a slot whose sequence is finished takes the next one
RANDOM_QUEUE = 2  # of random weights, which only show that nothing gets slow
SAMPLE = 6  # prompts on which baselines are fitted

console = Console(width=max(190, Console().width))  # piped output would wrap the table at 80


@dataclass(frozen=True)
class Plan:
    """What to run: ``prompts`` [N][S], the same for every model, batch size and arm."""

    models: Sequence[str]
    batches: Sequence[int]
    arms: Sequence[str]
    batch_arms: Sequence[str]
    temperatures: Sequence[float]
    prompts: Group
    new_tokens: int
    loads: int

    def cases(self) -> list[tuple[float, int]]:
        """Temperatures and batch sizes to run: greedily every one, otherwise the smallest."""
        return [(t, batch) for t in self.temperatures for batch in self.batches if not t or batch == min(self.batches)]

    def groups(self, model: str, batch: int, temperature: float) -> list[Group]:
        """The prompts by turns, a rest that is too few for another turn left out; again in other company until it is enough."""
        share = (SAMPLED_SHARE if temperature else 1) * (RANDOM_SHARE if model == "random" else 1)
        queue = RANDOM_QUEUE if model == "random" else QUEUE
        size = batch if batch == 1 else min(queue * batch, len(self.prompts))
        order = list(self.prompts[: max(len(self.prompts) // share, size)])
        groups: list[Group] = []
        shuffle = Random(batch).shuffle
        while len(groups) < LEAST_GROUPS or (share > 1 and sum(map(len, groups)) * self.new_tokens < LEAST_TOKENS):
            groups += [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
            shuffle(order)
        return groups


@dataclass
class Taken:
    """The turns that were taken of some groups of prompts at one batch size and temperature, in the groups' order."""

    groups: Sequence[Group]
    base: list[Turn] = field(default_factory=list)
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    other_load: float = 0.0  # the largest share of the CPU that others took

    def take(self, arms: ArmSet, names: Sequence[str], params: GenerationParams, batch: int, end: int) -> None:
        """Let ``arms`` take their turns at the next groups, up to the ``end``-th."""
        names = [name for name in names if name in arms.arms and (params.greedy or isinstance(arms.arms[name], EngineArm))]
        done = len(self.base)
        first = list(chain.from_iterable(self.groups[done:]))[: max(QUEUE, len(self.groups[done]))]
        _warm_up(arms, names, first, params, batch)
        running = {name: arms.arms[name] for name in names if name in arms.arms}
        load = OtherLoad(arm.process.pid for arm in running.values() if isinstance(arm, HFArm))
        base, turns = take_turns(arms.baseline, running, self.groups[done:end], params, batch, done)
        self.other_load = max(self.other_load, load.share())
        self.base += base
        for name, own in turns.items():
            self.turns.setdefault(name, []).extend(own)

    def rows(self, arms: ArmSet, greedy: bool) -> list[dict[str, Any]]:
        """A row for each arm, the baseline first."""
        full, rows = self.turns.get("full", self.base), []
        for name, own in {BASELINE: self.base, **self.turns}.items():
            row = {"arm": name, **speed_figures(own), "ngram_hits": repetition(self.groups, own)}
            arm = arms.baseline if name == BASELINE else arms.arms.get(name)
            if isinstance(arm, EngineArm) and arms.costs is not None:
                row |= theory_figures(own, arm.engine.layers, self.base, arms.baseline.engine.layers, arms.costs)
            rows.append(row | text_figures(own, full) if greedy else row)
        return rows


def _warm_up(arms: ArmSet, names: Sequence[str], prompts: Group, params: GenerationParams, batch: int) -> None:
    """Bind every shape, as in a service after some requests; an arm that fails here is left out from now on.

    HF binds none: a prompt for each sequence of the batch is enough.
    """
    arms.baseline.turn(prompts, params, batch)
    for name in names:
        try:
            arms.arms[name].turn(prompts if isinstance(arms.arms[name], EngineArm) else prompts[:batch], params, batch)
        except ArmError as error:
            arms.drop(name, f"batch {batch}: {error}")


def run_model(report: Report, plan: Plan, model: str, bundles: Path | None, cache: Path) -> None:
    """All batch sizes and temperatures of one model."""
    cases = {(t, batch): Taken(plan.groups(model, batch, t)) for t, batch in plan.cases()}
    failures: dict[str, str] = {}
    for number in range(plan.loads):
        wanted = [name for name in plan.arms if name not in failures and (number == 0 or name not in HF_TITLES)]
        with _phase(f"{model}: bundles and arms, load {number + 1} of {plan.loads}"):
            arms = _arms(plan, model, wanted, bundles, cache)
        for (temperature, batch), taken in cases.items():
            params = GenerationParams(max_new_tokens=plan.new_tokens, temperature=temperature, ignore_eos=True)
            end = round(len(taken.groups) * (number + 1) / plan.loads)
            names = plan.arms if batch == 1 else plan.batch_arms
            title = f"{model}: batch {batch}, temperature {temperature:g}, {end} of {len(taken.groups)} groups"
            if end > len(taken.base):
                with _phase(title):
                    taken.take(arms, names, params, batch, end)
        failures |= arms.failures
        arms.close()
    for (temperature, batch), taken in cases.items():
        place, rows = {"model": model, "batch": batch, "temperature": temperature}, taken.rows(arms, temperature == 0)
        report.rows += [{**place, "other_load": taken.other_load, **row} for row in rows]
        print_policy_table(console, place, rows, taken.other_load)
    console.print(CAPTION, style="dim")
    for name, reason in failures.items():
        console.print(f"{model}, {TITLES[name]} could not run: {reason}", style="yellow", markup=False)
        report.rows.append({"model": model, "arm": name, "note": reason})


def _arms(plan: Plan, model: str, wanted: Sequence[str], bundles: Path | None, cache: Path) -> ArmSet:
    calibrated = "layerskip" if model == "random" else model
    made = {p: bundles / f"{calibrated}_{p}" for p in PERCENTS} if bundles else calibrated_bundles(calibrated, cache)
    if model == "random":
        return random_arms(made[1], wanted, cache)
    sample = [[prompt] for prompt in plan.prompts[:SAMPLE]]
    return demo_arms(model, made, wanted, sample, plan.new_tokens, cache)


@contextmanager
def _phase(title: str) -> Iterator[None]:
    start = perf_counter()
    with console.status(title):
        yield
    console.print(f"{title}: {perf_counter() - start:.1f} s", style="dim", markup=False)


def _split(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"{what} {', '.join(unknown) or 'missing'}; choose from: {', '.join(known)}")
    return names


def _numbers(text: str, kind: type[int] | type[float], what: str, least: float, most: float) -> list[Any]:
    """Rising: the engine's caches of a smaller batch are made before those of a larger one, which would serve it too."""
    try:
        numbers = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not least <= numbers[0] <= numbers[-1] <= most:
        raise typer.BadParameter(f"{what} is {text!r}; give numbers from {least:g} to {most:g}, separated by commas")
    return numbers


def main(
    models: Annotated[str, typer.Option(help=f"Models, of {','.join(MODELS)}.")] = ",".join(MODELS),
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,8",
    arms: Annotated[str, typer.Option(help=f"Arms, of {','.join(TITLES)}.")] = ",".join(TITLES),
    batch_arms: Annotated[str, typer.Option(help="Those of them that also run in batches.")] = ",".join(BATCH_ARMS),
    temperature: Annotated[str, typer.Option(help="Temperatures; 0 is greedy, others take fewer prompts.")] = "0,0.8",
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts of 64 tokens.")] = 24,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens a sequence.")] = 64,
    loads: Annotated[
        int, typer.Option(min=1, help="How often everything is loaded anew, each time for a part of the prompts.")
    ] = 4,
    data: Annotated[str, typer.Option(help=f"Where the prompts come from, of {','.join(SOURCES)}.")] = "library",
    bundles: Annotated[Path | None, typer.Option(help="Take MODEL_1 and MODEL_5 from this folder; do not calibrate.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles and graphs are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file, after every model.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the models that the file has.")] = False,
) -> None:
    """Compare depth policies on this machine's CPU."""
    wanted = _split(arms, list(TITLES), "arm")
    plan = Plan(
        models=_split(models, MODELS, "model"),
        batches=_numbers(batch, int, "batch", 1, EngineOptions().max_batch),
        arms=wanted,
        batch_arms=[name for name in _split(batch_arms, list(TITLES), "arm") if name in wanted],
        temperatures=_numbers(temperature, float, "temperature", 0, 2),
        prompts=[prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, _split(data, SOURCES, "data")[0])],
        new_tokens=new_tokens,
        loads=loads,
    )
    kept = ("models", "batches", "arms", "batch_arms", "temperatures", "new_tokens", "loads")
    settings = {name: getattr(plan, name) for name in kept}
    report = Report("policies_cpu", prompts=prompts, data=data, **settings)
    if resume:
        if json is None:
            raise typer.BadParameter("--resume goes on with a file; name it with --json")
        try:
            report.take_up(json)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; leave out --resume") from error
    done = {row["model"] for row in report.rows}
    for model in (model for model in plan.models if model not in done):
        run_model(report, plan, model, bundles, cache)
        if json is not None:
            report.write(json)  # should the next model be interrupted
    add_policy_results(report)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
