"""Whether a text depends on anything but its request: chats of SmolLM2-135M, greedy and sampled, in every way of making them.

    python -m benchmarks.same_text                                # all forms of weights
    python -m benchmarks.same_text --weights int4 --chats 12      # a few minutes

The reference is policy `full`, one caller, nothing cached. Against it: prompts from the prefix cache, 2, 8 and 32 callers, policy
`auto` (drafts), after preemption with prompts in chunks, and over HTTP with 8 callers. On processors where launches of one token
are padded, the price of that is printed. `benchmarks.certainty` asks servers, llama.cpp's too.
"""

from __future__ import annotations

import json as json_lines
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

import typer
from rich.progress import Progress
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.same_text.ways import REFERENCE, Ask, Outcome, Way, outcomes
from benchmarks.serving.http_server import tide_serve
from benchmarks.tasks.task_set import load_tasks

WEIGHTS = ("w8a8", "source", "int4", "int8", "fp32")
CROWDS = (2, 8, 32)
HTTP_CALLERS = 8
TEMPERATURE, TOP_P = 0.7, 0.95
MESSAGE_CHARACTERS = 120
COLUMNS = ("weights", "way", "ran", "texts", "differ", "drafted", "accepted", "prefix_tokens", "preemptions")


def ways(crowds: Sequence[int]) -> list[Way]:
    """The reference first. The first crowd of a policy finds an empty prefix cache, which it fills for the later ones."""
    cached = [Way(policy, callers, cached=True) for policy in ("full", "auto") for callers in (*crowds, 1)]
    return [REFERENCE, *cached, Way("auto", max(crowds), scarce=True)]


def chats(count: int) -> list[str]:
    """The beginnings of the tasks' first messages, of every kind in turn: prompts are most of the time."""
    kinds = [[task.turns[0][:MESSAGE_CHARACTERS] for task in kind.tasks] for kind in load_tasks()]
    mixed = [message for messages in zip_longest(*kinds) for message in messages if message is not None]
    if count > len(mixed):
        raise typer.BadParameter(f"there are {len(mixed)} chats; ask for fewer")
    return mixed[:count]


def asks(prompts: Sequence[list[int]], params: GenerationParams) -> list[Ask]:
    """Every prompt greedily, then every prompt sampled with a seed of its own."""
    sampled = [replace(params, temperature=TEMPERATURE, top_p=TOP_P, seed=number) for number in range(len(prompts))]
    return [*(Ask(prompt, params) for prompt in prompts), *map(Ask, prompts, sampled)]


def post(address: str, path: str, body: dict[str, Any]) -> Any:
    request = Request(f"{address}{path}", json_lines.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        return json_lines.load(answer)


def in_crowd(call: Callable[[Any], Any], items: Sequence[Any], callers: int) -> list[Any]:
    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(call, items))


def http_texts(bundle: Path, messages: Sequence[str], new_tokens: int) -> list[str]:
    """The chats from `tide-serve` with its defaults."""
    greedy = [{"temperature": 0} for _ in messages]
    sampled = [{"temperature": TEMPERATURE, "seed": i, "top_p": TOP_P} for i in range(len(messages))]

    def ask(one: tuple[str, dict[str, Any]]) -> str:
        body = {"model": "tide", "messages": [{"role": "user", "content": one[0]}], "max_tokens": new_tokens, **one[1]}
        return str(post(f"http://{server.address}", "/v1/chat/completions", body)["choices"][0]["message"]["content"])

    with tide_serve(bundle) as server:
        return in_crowd(ask, [*zip(messages, greedy, strict=True), *zip(messages, sampled, strict=True)], HTTP_CALLERS)


def row(weights: str, way: str, texts: int, differ: int, outcome: Outcome | None = None) -> dict[str, Any]:
    ran = {"ran": outcome.ran, **outcome.figures} if outcome is not None else {}
    return {"weights": weights, "way": way, "texts": texts, "differ": differ, **ran}


def measure(weights: str, count: int, new_tokens: int, report: Report, advance: Callable[[], None]) -> None:
    """Add the rows of one form of the weights."""
    bundle = folder_of(weights, CACHE)
    options = EngineOptions(target="cpu", threads=ThreadOptions(shared=True), verify=False)
    with Engine.load(bundle, options) as engine:
        messages = chats(count)
        prompts = [engine.chat_prompt([{"role": "user", "content": message}]) for message in messages]
        requests = asks(prompts, GenerationParams(max_new_tokens=new_tokens))
        done: list[Outcome] = []
        for outcome in outcomes(engine, requests, ways(CROWDS)):
            done.append(outcome)
            advance()
        reference = done[0]
        report.rows += [row(weights, one.way.name, len(one.texts), one.differs(reference.texts), one) for one in done]
        assert engine.tokenizer is not None
        eos = set(engine.manifest.generation.eos_token_ids)
        alone = [engine.tokenizer.decode([t for t in text.tokens if t not in eos]) for text in reference.texts]
        report.settings[f"row_padding_{weights}"] = str(engine.row_padding)
        if engine.bits_limitation is not None:
            report.settings[f"limitation_{weights}"] = engine.bits_limitation
    served = http_texts(bundle, messages, new_tokens)
    different = sum(own != other for own, other in zip(served, alone, strict=True))
    report.rows.append(row(weights, f"HTTP, {HTTP_CALLERS} callers", len(served), different))
    advance()


def main(
    weights: Annotated[str, typer.Option(help=f"Some of {', '.join(WEIGHTS)}.")] = ",".join(WEIGHTS),
    chats_: Annotated[int, typer.Option("--chats", min=1, help="Chats; each is made greedily and sampled.")] = 48,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a reply at most.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Make the same texts in many ways and count those that differ."""
    chosen = chosen_names(weights, WEIGHTS, "weights")
    report = Report("same_text", weights=weights, chats=chats_, new_tokens=new_tokens)
    with Progress(console=console()) as progress:
        bar = progress.add_task("texts", total=len(chosen) * (len(ways(CROWDS)) + 1))
        for name in chosen:
            progress.update(bar, description=name)
            measure(name, chats_, new_tokens, report, lambda: progress.advance(bar))
        report.add("same_text_differs", sum(one["differ"] for one in report.rows))
    shown = [[str(one.get(column, "")) for column in COLUMNS] for one in report.rows]
    report.table("Texts that are not those of a single caller under full", [c.replace("_", " ") for c in COLUMNS], shown)
    for name, value in report.settings.items():
        if name.startswith(("row_padding", "limitation")):
            console().print(f"{name}: {value}", highlight=False)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
