"""The FastAPI example under load: 500 requests of 16 clients over loopback, every fifth one hanging up in the middle.

    python -m benchmarks.serve_fastapi engine/

Every answer is compared, token by token, with the same prompt's answer on an idle engine. Memory is the server's
resident set, after a warm-up of 10% of the requests and at the end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from tide_bench.prompts import read_prompts, windows
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.arms.serve_clients import ClientRequest, send_all, serving, wrong_answers

HANG_UP_EVERY = 5
TEXTS = 16  # with all lengths 144 different requests, each of which is run alone once
PROMPT_TOKENS, NEW_TOKENS = (16, 48, 96), (8, 24, 40)


def client_requests(prompts: list[list[int]], count: int) -> list[ClientRequest]:
    """Prompts and outputs of several lengths; every fifth client hangs up after a third of its tokens."""
    lengths = [(PROMPT_TOKENS[i % 3], NEW_TOKENS[i // 3 % 3]) for i in range(count)]
    return [
        ClientRequest(windows(prompts[i % TEXTS :] + prompts, tokens, 1)[0], new, new // 3 if i % HANG_UP_EVERY == 4 else None)
        for i, (tokens, new) in enumerate(lengths)
    ]


def alone(bundle: Path, policy: str, requests: list[ClientRequest]) -> list[list[int]]:
    """The answer to each prompt on an idle engine; `exit` depends on no other sequence, so this holds for every policy."""
    with Engine.load(bundle, EngineOptions(policy=policy, threads=ThreadOptions(shared=True), verify=False)) as engine:
        texts: dict[tuple[int, ...], list[int]] = {}
        for request in requests:
            key = (*request.prompt, -request.new_tokens)
            if key not in texts:
                params = GenerationParams(max_new_tokens=request.new_tokens, ignore_eos=True)
                texts[key] = list(engine.generate(request.prompt, params)[0].token_ids)
    return [texts[(*request.prompt, -request.new_tokens)] for request in requests]


def main(
    bundle: Annotated[Path, typer.Argument(help="A bundle with a tokenizer.")],
    requests: Annotated[int, typer.Option(min=20, help="Requests in all.")] = 500,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 16,
    policy: Annotated[str, typer.Option(help="Depth policy of the server.")] = "exact",
    at_once: Annotated[int, typer.Option(min=1, help="Generations that the server runs together.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Load the example service and compare every answer."""
    with Engine.load(bundle, EngineOptions(verify=False)) as engine:
        prompts = read_prompts(None, engine.tokenizer)
    planned = client_requests(prompts, requests)
    expected = alone(bundle, policy, planned)
    report = Report("serve_fastapi", requests=requests, clients=clients, policy=policy, at_once=at_once)
    early = requests // 10
    with serving(bundle, policy, at_once) as (url, server):
        answers = send_all(url, planned[:early], clients)
        before, start = server.memory_info().rss, time.perf_counter()
        answers += send_all(url, planned[early:], clients)
        seconds, after = time.perf_counter() - start, server.memory_info().rss
    wrong = wrong_answers(planned, answers, expected)
    first = [1e3 * answer.first_token_s for answer in answers[early:]]
    report.add("requests", len(answers))
    report.add("hung_up", sum(request.hang_up_after is not None for request in planned))
    report.add("wrong_answers", len(wrong))
    report.add("tokens_per_s", sum(len(answer.tokens) for answer in answers[early:]) / seconds)
    report.add("first_token_ms_p50", float(np.percentile(first, 50)))
    report.add("first_token_ms_p95", float(np.percentile(first, 95)))
    report.add("memory_before_mib", before / 2**20)
    report.add("memory_growth_mib", (after - before) / 2**20)
    if wrong:
        print(f"answers that differ from their single run: {wrong[:20]}")
    report.finish(json)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
