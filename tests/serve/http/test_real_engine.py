"""The checks around real routes and a real engine."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.http.processes import ROOT, end_of
from starlette.types import ASGIApp
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_serve import ServeConfig, make_app
from tide_serve.http.middlewares import guard

KEY = "sk-0123456789abcdef"


def test_server_starts_says_how_to_use_it_and_ends_cleanly(bundle: Path) -> None:
    """Breaks: `tide-serve engine/`, the first thing that a user types."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "TIDE_API_KEYS": KEY, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tide_serve.cli", str(bundle), "--port", "0", "--threads", "1", "--model-name", "tiny"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        serves, curl, page = (process.stdout.readline() for _ in range(3))
        url = re.search(r"http://127\.0\.0\.1:\d+", serves)
        assert url is not None and "policy" in serves and page.strip() == f"or open {url[0]}/ in a browser"
        path, body = re.search(r"curl http://[^/]+(\S+) .*-d '(.*)'", curl).groups()  # type: ignore[union-attr]
        request = {**json.loads(body), "max_tokens": 3}
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url[0], timeout=60) as client:
            assert client.get("/ready").status_code == 200
            assert client.post(path, json=request).status_code == 401
            assert client.get("/", headers={"Host": "rebound.example.org"}).status_code == 421
            answer = client.post(path, json=request, headers=headers)
            assert answer.status_code == 200 and answer.json()["model"] == "tiny"
        process.send_signal(signal.SIGTERM)
        code, log = end_of(process)
    finally:
        process.kill()
        process.communicate()
    assert code == 0
    [refused, misdirected, good] = log
    assert (refused["status"], misdirected["status"], good["output_tokens"]) == (401, 421, 3)
    assert KEY not in json.dumps(log) and "Hello" not in json.dumps(log)


@pytest.fixture(scope="module")
def app(bundle: Path) -> Iterator[ASGIApp]:
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1))) as engine:
        app = make_app(engine, ServeConfig(model_names=("tiny",)))
        yield guard(app, app.state.service)


def nested(levels: int) -> Any:
    """A JSON schema of so many ``levels``."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


PATHS = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 1},
}
HOSTILE: dict[str, dict[str, Any] | bytes] = {
    "100,000 stop strings": {"stop": [str(number) for number in range(100_000)]},
    "a stop string of 100,000 characters": {"stop": "x" * 100_000},
    "lists in lists": b"[" * 1_000_000,
    "objects in objects": b'{"a":' * 300_000,
    "a field that is nested": b'{"model": "tiny", "prompt": ' + b"[" * 500 + b"1" + b"]" * 500 + b"}",
    "invalid UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "half of a surrogate pair": b'{"model": "tiny", "prompt": "\\ud800"}',
    "a number of 100,000 digits": b'{"model": "tiny", "max_tokens": ' + b"9" * 100_000 + b"}",
    "no JSON": b"prompt=a",
    "a body that ends early": b'{"model": "tiny"',
    "nothing": b" ",
    "a nested schema": {"response_format": schema_format(nested(300))},
    "a large schema": {"response_format": schema_format({"enum": ["x" * 100_000]})},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", HOSTILE)
def test_hostile_body_is_400_and_the_server_goes_on(app: ASGIApp, path: str, body: str) -> None:
    """Breaks: one request raises RecursionError or MemoryError in the server, or makes everybody else wait."""
    hostile = HOSTILE[body]
    content = hostile if isinstance(hostile, bytes) else json.dumps({**PATHS[path], **hostile}).encode()

    async def send() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tiny") as client:
            refused = await client.post(path, content=content, headers={"Content-Type": "application/json"})
            return refused, await client.post(path, json=PATHS[path])

    refused, good = asyncio.run(send())
    assert refused.status_code == 400, refused.text[:300]
    assert refused.json()["error"]["type"] == "invalid_request_error" and len(refused.text) < 1000
    assert good.status_code == 200, good.text
