"""Several tiny models behind one server, in memory for fewer."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from edited_bundle import sign
from fastapi import FastAPI
from serve.http.processes import ROOT, end_of
from serve.live import listening
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_serve import ServeConfig, make_app
from tide_serve.api.service import Service
from tide_serve.http.middlewares import guard
from tide_serve.models.named import make_pool
from tide_serve.models.pool import ModelPool

NAMES = ("first", "second", "third")
OPTIONS = EngineOptions(max_batch=4, threads=ThreadOptions(1), kv_memory=2**21)
PROMPT = "def add"


@pytest.fixture(scope="module")
def bundles(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three models of the same shapes that write different texts: the weights in another order."""
    folder = tmp_path_factory.mktemp("engines")
    for number, name in enumerate(NAMES):
        copy = Path(shutil.copytree(bundle, folder / name))
        [weights] = {target["weights"] for target in json.loads((copy / "manifest.json").read_text())["targets"].values()}
        values = np.fromfile(copy / weights, np.float32)
        np.roll(values, 640 * number).tofile(copy / weights)
        sign(copy, weights)
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def texts(bundles: dict[str, Path]) -> dict[str, str]:
    """What each model writes alone."""
    found = {}
    for name, directory in bundles.items():
        with Engine.load(directory, OPTIONS) as engine:
            [generation] = engine.generate(PROMPT, GenerationParams(max_new_tokens=12, ignore_eos=True))
            found[name] = generation.text or ""
    assert len(set(found.values())) == len(NAMES)
    return found


@pytest.fixture(scope="module")
def size(bundles: dict[str, Path]) -> int:
    """Bytes of one of the models, which are equal."""
    return int(make_pool({"first": str(bundles["first"])}, OPTIONS, 2**30).described("first")["bytes"])


@dataclass(frozen=True)
class Several:
    http: httpx.Client
    pool: ModelPool
    app: FastAPI

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
        return self.http.post("/v1/completions", json=body)

    def states(self) -> dict[str, str]:
        return {model["id"]: model["state"] for model in self.http.get("/v1/models").json()["data"]}

    def wait_for(self, model: str, state: str) -> None:
        end = time.monotonic() + 20
        while self.states()[model] != state:
            assert time.monotonic() < end, self.states()
            time.sleep(0.005)


@contextmanager
def several(
    bundles: dict[str, Path], memory: int, config: ServeConfig | None = None, idle_unload: float | None = None
) -> Iterator[Several]:
    pool = make_pool({name: str(path) for name, path in bundles.items()}, OPTIONS, memory, idle_unload)
    app = make_app(pool, config or ServeConfig())
    service: Service = app.state.service
    with listening(guard(app, service)) as url, httpx.Client(base_url=url, timeout=60) as http:  # type: ignore[arg-type]
        yield Several(http, pool, app)


def test_swaps_under_load(bundles: dict[str, Path], texts: dict[str, str], size: int) -> None:
    """Breaks: a swap fails a request, or answers it with another model's text."""
    with several(bundles, 2 * size + size // 2) as server, ThreadPoolExecutor(8) as pool:
        assert set(server.states().values()) == {"not loaded"}
        asked = [NAMES[number * number % 3 if number % 2 else number % 3] for number in range(36)]
        answers = list(pool.map(server.ask, asked))
        assert [answer.status_code for answer in answers] == [200] * 36
        assert [(a.json()["model"], a.json()["choices"][0]["text"]) for a in answers] == [(name, texts[name]) for name in asked]
        assert sorted(server.states().values()) == ["loaded", "loaded", "not loaded"]
        metrics = server.http.get("/metrics").text
        assert all(f'tide_requests_total{{model="{name}",reason="length"}}' in metrics for name in NAMES)
        fingerprints = {server.ask(name).json()["system_fingerprint"] for name in NAMES}
        assert len(fingerprints) == 3


def test_a_stream_keeps_its_model(bundles: dict[str, Path], size: int) -> None:
    """Breaks: a stream is cut off as another model needs the room."""
    with several(bundles, size) as server, ThreadPoolExecutor(1) as pool:
        body = {"model": "first", "prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            engine = server.pool.take("first")
            assert engine is not None
            step = engine.policy.step

            def slow_step(*arguments: Any) -> Any:
                time.sleep(0.005)
                return step(*arguments)

            engine.policy.step = slow_step  # type: ignore[assignment, method-assign]
            server.pool.release("first")
            other = pool.submit(server.ask, "second")
            server.wait_for("second", "loading")
            assert server.states()["first"] == "loaded"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]
        assert other.result().status_code == 200
        assert server.states() == {"first": "not loaded", "second": "loaded", "third": "not loaded"}


def test_a_broken_bundle_answers_with_its_reason(bundles: dict[str, Path], texts: dict[str, str], tmp_path: Path) -> None:
    """Breaks: one damaged file stops the server or its other models, or a repaired bundle is not seen."""
    broken = Path(shutil.copytree(bundles["second"], tmp_path / "second"))
    graph = next((broken / "onnx").rglob("*.onnx"))
    whole = graph.read_bytes()
    graph.write_bytes(whole[:-5])
    with several({**bundles, "second": broken}, 2**30) as server:
        for path in ("completions", "chat/completions", "responses"):
            body = {"model": "second", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
            needed = {"completions": ("prompt",), "chat/completions": ("messages",), "responses": ("input",)}[path]
            answer = server.http.post(f"/v1/{path}", json={name: body[name] for name in ("model", *needed)})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
            assert graph.name in answer.json()["error"]["message"] and answer.json()["error"]["param"] == "model"
        assert graph.name in server.http.get("/v1/models/second").json()["error"]
        assert server.ask("first").json()["choices"][0]["text"] == texts["first"]
        assert server.http.get("/health").status_code == 200
        graph.write_bytes(whole)
        assert server.ask("second").json()["choices"][0]["text"] == texts["second"]


def test_unknown_names_and_unload(bundles: dict[str, Path]) -> None:
    """Breaks: a mistyped name loads something, or memory stays taken when nobody asks."""
    with several(bundles, 2**30, idle_unload=0.2) as server:
        assert server.ask("fourth").status_code == 404
        assert server.http.post("/tokenize", json={"model": "second", "prompt": "a"}).json()["count"] == 1
        assert server.states() == {"first": "not loaded", "second": "loaded", "third": "not loaded"}
        server.wait_for("second", "not loaded")


def test_an_ending_server_answers_all(bundles: dict[str, Path], size: int) -> None:
    """Breaks: requests that wait for a model, or stream from one, hang as the server ends."""
    with ThreadPoolExecutor(6) as pool:
        with several(bundles, size) as server:
            busy = pool.submit(server.ask, "first", max_tokens=400)
            server.wait_for("first", "loaded")
            assert server.pool.take("first") is not None  # an answer that does not end
            waiting = [pool.submit(server.ask, name) for name in ("second", "third", "second")]
            server.wait_for("second", "loading")
            server.pool.close(abort=True)
            answers = [answer.result(20) for answer in (busy, *waiting)]
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert all(answer.status_code == 503 for answer in answers[1:])


@pytest.mark.slow
def test_the_command_serves_a_folder_and_ends_cleanly(bundles: dict[str, Path]) -> None:
    """Breaks: `tide-serve engines/` does not start; or SIGTERM cuts off an answer, or hangs, with several models."""
    folder = bundles["first"].parent
    command = [sys.executable, "-m", "tide_serve.cli", str(folder), "--port", "0", "--threads", "1", "--memory", "1GiB"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        serves, curl, _ = (process.stdout.readline() for _ in range(3))
        url = re.search(r"http://127\.0\.0\.1:\d+", serves)
        assert (
            url is not None
            and serves.endswith(" serves first, second, third, loaded at first use within 1.0 GiB\n")
            and '"model": "first"' in curl
        )
        with httpx.Client(base_url=url[0], timeout=60) as http:
            body = {"model": "second", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
            assert http.post("/v1/completions", json={**body, "model": "first", "stream": False}).status_code == 200
            with http.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        code, log = end_of(process)
    finally:
        process.kill()
        process.communicate()
    assert code == 0 and [line["model"] for line in log if "model" in line] == ["first", "second"]
