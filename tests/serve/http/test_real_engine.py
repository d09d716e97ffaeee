"""The checks around real routes and a real engine."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
