"""The FastAPI example, over loopback, by several clients at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.arms.serve_clients import ClientRequest, send, send_all, serving, wrong_answers

CLIENTS = 6


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[tuple[str, psutil.Process]]:
    with serving(bundle, at_once=3) as running:
        yield running


def _requests(count: int) -> list[ClientRequest]:
    """Prompts and outputs of all lengths; every fourth client hangs up."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 30, (count, 2)).tolist()
    prompts = [random.integers(3, 200, tokens).tolist() for tokens, _ in lengths]
    return [
        ClientRequest(prompt, new + 2, (new + 2) // 2 if i % 4 == 3 else None)
        for i, (prompt, (_, new)) in enumerate(zip(prompts, lengths, strict=True))
    ]


def test_no_answer_is_lost_or_mixed_up(server: tuple[str, psutil.Process], bundle: Path) -> None:
    """A client would read another one's text, or miss a token, when many send requests at once and some hang up."""
    requests = _requests(40)
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1))) as engine:
        params = [GenerationParams(max_new_tokens=request.new_tokens, ignore_eos=True) for request in requests]
        alone = [engine.generate(request.prompt, p)[0].token_ids for request, p in zip(requests, params, strict=True)]
    assert wrong_answers(requests, send_all(server[0], requests, CLIENTS), alone) == []


def test_a_client_that_hangs_up_gives_its_place_back(server: tuple[str, psutil.Process]) -> None:
    """After a few such clients the service would not answer any more."""
    with httpx.Client(timeout=60) as client:
        for _ in range(8):  # more than run at once
            assert not send(client, server[0], ClientRequest([5, 6, 7], 50, hang_up_after=1)).finished
        assert send(client, server[0], ClientRequest([5, 6, 7], 4)).finished


def test_caches_do_not_pile_up(server: tuple[str, psutil.Process]) -> None:
    """The service would grow with every request until it is killed."""
    send_all(server[0], _requests(20), CLIENTS)
    before = server[1].memory_info().rss
    send_all(server[0], _requests(40), CLIENTS)
    assert server[1].memory_info().rss - before < 16 * 2**20


def test_a_wrong_request_is_refused_before_the_answer_begins(server: tuple[str, psutil.Process]) -> None:
    """A client would get status 200 and an empty stream."""
    done = httpx.post(f"{server[0]}/generate", json={"prompt": ""})
    assert done.status_code == 400 and "the prompt is empty" in done.json()["error"]
    assert httpx.post(f"{server[0]}/generate", json={"prompt": "a", "top_p": 2}).status_code == 400
    assert httpx.post(f"{server[0]}/generate", json={"prompt": "a", "max_new_tokens": 0}).status_code == 422


def test_metrics_and_health(server: tuple[str, psutil.Process]) -> None:
    """Monitoring would see nothing."""
    assert httpx.get(f"{server[0]}/health").json()["policy"] == "exact"
    assert "tide_" in httpx.get(f"{server[0]}/metrics").text


def test_text_streams_in_pieces(server: tuple[str, psutil.Process]) -> None:
    """The whole text would arrive at once, at the end."""
    lines = []
    body = {"prompt": "def add(", "max_new_tokens": 12, "ignore_eos": True}
    with httpx.stream("POST", f"{server[0]}/generate", json=body) as response:
        for line in response.iter_lines():
            lines.append(line)
    assert len(lines) == 12 and '"done"' in lines[-1] and '"done"' not in lines[0]
