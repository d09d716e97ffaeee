"""Two replicas of a tiny bundle on a Ray cluster of three nodes on this machine, behind one ingress."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.cluster.held_app import FOLDER
from serve.cluster.ray_cluster import Deployment, in_time, local_cluster
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

pytestmark = pytest.mark.slow
TESTS = Path(__file__).resolve().parents[2]
CODE = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])  # replicas run the code of this process
ENGINE = {"max_batch": 4, "kv_memory": 2**24}
PROMPTS = [[5 + i, 17, 40, 9] for i in range(6)]


@dataclass
class Running:
    """The application on the cluster.

    Args:
        folder: see `held_app`.
    """

    url: str
    bundle: Path
    folder: Path
    client: httpx.Client
    pool: ThreadPoolExecutor

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body)

    def post_later(self, path: str, **body: Any) -> Future[httpx.Response]:
        return self.pool.submit(self.post, path, **body)

    def held(self, name: str, besides: int = 0) -> int:
        """Wait until a replica is held at ``name`` and return its pid; ``besides``: a replica that was held there before."""
        return in_time(lambda: next((pid for pid in self._pids(name) if pid != besides), 0))

    def release(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def deploy(self, engine: dict[str, Any]) -> None:
        """Deploy both replicas with the engine's options ``engine``, or update them to these in place."""
        args = {"bundle": str(self.bundle), "replicas": 2, "engine": ENGINE}
        user_config = {"bundle": str(self.bundle), "engine": engine, "threads": 1}
        Deployment("serve.cluster.held_app:app", args, {"user_config": user_config}).finish(2)

    def replicas(self) -> dict[int, dict[str, Any]]:
        """By pid, what the replicas say of themselves that answer now."""
        answers = [self.post("/test/replica", prompt=f"prompt {number}").json() for number in range(16)]
        return {answer["pid"]: answer for answer in answers}

    def metrics(self) -> dict[str, float]:
        """Values by name and labels, as the ingress gives them to Prometheus."""
        lines = self.client.get(f"{self.url}/metrics").raise_for_status().text.splitlines()
        values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in values}

    def _pids(self, name: str) -> list[int]:
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{name}.at.*")]


@pytest.fixture(scope="module")
def running(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("held")
    with (
        local_cluster(2, {FOLDER: str(folder), "PYTHONPATH": CODE}) as address,
        httpx.Client(timeout=60) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        running = Running(f"http://{address}", bundle, folder, client, pool)
        running.deploy(ENGINE)
        in_time(lambda: client.get(f"{running.url}/ready").status_code == 200)
        yield running


def test_answers_equal_the_single_engine(running):
    """Breaks: an application gives other answers on a cluster than on a laptop."""
    params = GenerationParams(max_new_tokens=12)
    with Engine.load(running.bundle, EngineOptions(threads=ThreadOptions(1))) as engine:
        expected = [generation.text for generation in engine.generate(PROMPTS, params)]
    later = [running.post_later("/v1/completions", model="tiny-chat", prompt=p, max_tokens=12, temperature=0) for p in PROMPTS]
    assert [answer.result().json()["choices"][0]["text"] for answer in later] == expected


def test_client_that_leaves_ends_the_generation(running):
    """Breaks: a cluster computes for clients that are gone."""
    body = {"model": "tiny-chat", "prompt": PROMPTS[0], "max_tokens": 500, "stream": True, "ignore_eos": True}
    with running.client.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    in_time(lambda: any(count for name, count in running.metrics().items() if 'reason="cancelled"' in name))


def test_update_loses_no_request(running):
    """Breaks: a new bundle costs the requests that are in progress when it is deployed."""
    held = [running.post_later(f"/test/held/update{number}") for number in range(4)]
    for number in range(4):
        running.held(f"update{number}")
    before = set(running.replicas())
    running.deploy({**ENGINE, "max_batch": 2})
    after = running.replicas()
    assert {replica["engine"]["max_batch"] for replica in after.values()} == {2}
    assert set(after) == before, "the update has restarted replicas in place of loading the bundle in them"
    for number in range(4):
        running.release(f"update{number}")
    assert [answer.result().status_code for answer in held] == [200] * 4


def test_stream_of_a_lost_replica_ends_with_an_error(running):
    """Breaks: a client takes the beginning of a text for the whole of it."""
    with running.client.stream("POST", f"{running.url}/test/stream/cut") as answer:
        lines = answer.iter_lines()
        first = next(lines)
        os.kill(running.held("cut"), signal.SIGKILL)
        rest = [line for line in lines if line]
    assert first.startswith("data: ") and len(rest) == 1 and '"error"' in rest[0]


def test_request_of_a_lost_replica_is_answered_by_another(running):
    """Breaks: a machine that fails costs all requests that it has not answered yet."""
    in_time(lambda: len(running.replicas()) == 2)
    answer = running.post_later("/test/held/again")
    lost = running.held("again")
    os.kill(lost, signal.SIGKILL)
    other = running.held("again", besides=lost)
    running.release("again")
    assert (answer.result().status_code, answer.result().json()) == (200, {"pid": other})
