"""The arms of a load on SmolLM2: tide-serve, the bare engine and llama.cpp's server, and how each runs requests.

Clients of the servers are threads of the caller's process; those of the bare engine are threads of the engine's.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.arms.tide import load_engine
from tide_bench.rounds import SETTLE_S
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.models.gguf_files import folder_of
from benchmarks.serving.http_server import event_lines, tide_serve
from benchmarks.serving.load import LoadRun, Request, Server, closed_loop, open_loop

Q4_1 = "Q4_1 of the GGUF file"


@dataclass(frozen=True)
class LoadArm:
    """One way to serve ``clients`` at once.

    Args:
        kind: tide-serve, the bare engine in a process of its own, or llama.cpp's server.
        label: of its results.
        weights: of TIDE; what the table says for llama.cpp.
        clients: requests at once. llama.cpp's server holds as many sequences.
        context: tokens of a sequence at most, for llama.cpp's caches.
        policy: of ``serve``.
    """

    kind: Literal["serve", "engine", "llamacpp"]
    label: str
    title: str
    weights: str
    clients: int
    context: int = 256
    policy: str = "full"

    @property
    def name(self) -> str:
        """The arm's name in results, such as ``serve_auto_8``."""
        return f"{self.label}_{self.clients}"

    @property
    def over_http(self) -> bool:
        return self.kind != "engine"


def llamacpp_arm(clients: int, context: int = 256) -> LoadArm:
    return LoadArm("llamacpp", "llamacpp", "llama.cpp server", Q4_1, clients, context)


class LoadArms:
    """Processes of arms, started when first used, on the bundles and files in ``cache``. Close it to end them.

    Bare engines hold ``max_batch`` sequences. Raises ArmError when a process does not start.
    """

    def __init__(self, cache: Path, max_batch: int) -> None:
        self._cache = cache
        self._max_batch = max_batch
        self._stack = ExitStack()
        self._servers: dict[str, Any] = {}

    def __enter__(self) -> LoadArms:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def server(self, arm: LoadArm) -> Any:
        """What clients call; tide-serve is one process for each policy, llama.cpp's server one for each number of clients, as its
        caches are sized when it is loaded. Of a bare engine: its process."""
        key = f"{arm.name} {arm.context}" if arm.kind == "llamacpp" else f"{arm.kind} {arm.policy} {arm.weights}"
        if key not in self._servers:
            self._servers[key] = self._started(arm)
        return self._servers[key]

    def _started(self, arm: LoadArm) -> Any:
        folder = folder_of("llamacpp" if arm.kind == "llamacpp" else arm.weights, self._cache)
        if arm.kind == "serve":
            return self._stack.enter_context(tide_serve(folder, "--policy", arm.policy, "--max-batch", self._max_batch))
        load = partial(BareEngine, max_batch=self._max_batch) if arm.kind == "engine" else None
        process = self._stack.enter_context(closing(ArmProcess(arm.kind, folder, load=load)))
        return process if arm.kind == "engine" else LlamacppClient(process.call("serve", arm.clients, arm.context))

    def closed(self, arm: LoadArm, requests: Sequence[Request]) -> LoadRun:
        """All of ``requests`` in a closed loop of the arm's clients."""
        server = self.server(arm)
        time.sleep(SETTLE_S)
        if arm.over_http:
            return closed_loop(server, requests, arm.clients)
        run: LoadRun = server.apply(closed_loop, requests, arm.clients)
        return run

    def open(self, arm: LoadArm, requests: Sequence[Request]) -> LoadRun:
        """``requests`` at their times of arrival, over HTTP."""
        server: Server = self.server(arm)
        time.sleep(SETTLE_S)
        return open_loop(server, requests)


class BareEngine:
    """An engine of policy `full`; every request has a cache salt of its own, so that none finds another's prefix."""

    def __init__(self, folder: Path, max_batch: int) -> None:
        load_engine(folder).close()  # what a process loads first runs faster: see `tide_bench.arms.tide.load_second`
        gc.collect()
        options = EngineOptions(policy="full", max_batch=max_batch, threads=ThreadOptions(shared=True), verify=False)
        self.engine = Engine.load(folder, options, device="cpu")
        self._salts = count()

    def stream(self, request: Request) -> Iterator[None]:
        salt = f"request {next(self._salts)}"
        tokens = 0
        params = GenerationParams(max_new_tokens=request.new_tokens, ignore_eos=True, cache_salt=salt)
        for _ in self.engine.submit(request.prompt, params):
            tokens += 1
            yield
        if tokens != request.new_tokens:
            raise ArmError(f"TIDE made {tokens} tokens, expected {request.new_tokens}")


class LlamacppClient:
    """The native HTTP interface of llama.cpp's server at ``address``, streamed: greedy, end-of-sequence never sampled."""

    def __init__(self, address: str) -> None:
        self._netloc = urlsplit(address).netloc

    def stream(self, request: Request) -> Iterator[None]:
        """An item for each event: a token, or two where the first one ends in the middle of a character."""
        body = {"prompt": request.prompt, "n_predict": request.new_tokens, "temperature": 0, "samplers": ["temperature"]}
        body |= {"ignore_eos": True, "cache_prompt": False, "stream": True}
        predicted = None
        for line in event_lines(self._netloc, "/completion", body, "llama.cpp's server"):
            if b'"stop":true' in line:
                predicted = json.loads(line)["tokens_predicted"]
            else:
                yield
        if predicted != request.new_tokens:
            raise ArmError(f"llama.cpp made {predicted} tokens, expected {request.new_tokens}")
