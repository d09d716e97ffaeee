"""The arms of a load on SmolLM2: which weights each has, its process, and how it runs requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tide_bench.arms.process import ArmProcess
from tide_bench.load import LoadRun, Request, Served, Server, closed_loop, open_loop
from tide_bench.rounds import SETTLE_S

from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.serving.http_server import tide_serve
from benchmarks.serving.servers import GenaiEngine, LlamacppClient, TideServer

Kind = Literal["tide", "generate", "serve", "llamacpp", "genai-engine", "genai-batch"]
MODEL = GGUF_MODELS["smollm2"]
Q4_1, GENAI = "Q4_1 of the GGUF file", "int4 by genai's builder"
_FILE_OF = {"llamacpp": "llamacpp", "genai-engine": "genai-int4", "genai-batch": "genai-int4"}


@dataclass(frozen=True)
class LoadArm:
    """One way to serve ``clients`` at once.

    Args:
        label: of its results.
        weights: ``fp32`` or ``int4`` of TIDE; what the table says for the others.
        clients: requests at once. llama.cpp's server holds as many sequences.
        context: tokens of a sequence at most, for llama.cpp's caches.
        policy: of ``serve``.
    """

    kind: Kind
    label: str
    title: str
    weights: str
    clients: int
    context: int = 256
    policy: str = "full"

    @property
    def name(self) -> str:
        """As in results: ``tide_int4_8``."""
        return f"{self.label}_{self.clients}"

    @property
    def over_http(self) -> bool:
        """Whether its clients are threads of the benchmark's own process."""
        return self.kind in ("serve", "llamacpp")


def tide_arm(weights: str, clients: int) -> LoadArm:
    return LoadArm("tide", f"tide_{weights}", f"TIDE {weights}, submit", weights, clients)


def llamacpp_arm(clients: int, context: int = 256) -> LoadArm:
    return LoadArm("llamacpp", "llamacpp", "llama.cpp server", Q4_1, clients, context)


class LoadArms:
    """Processes of arms, started when first used, on the bundles and files in ``cache``. Close it to end them.

    TIDE's arms of the same weights share an engine of ``max_batch`` sequences. Raises ArmError when a process does not start.
    """

    def __init__(self, cache: Path, max_batch: int) -> None:
        self._cache, self._max_batch, self._stack = cache, max_batch, ExitStack()
        self._processes: dict[str, ArmProcess] = {}
        self._servers: dict[str, Any] = {}

    def __enter__(self) -> LoadArms:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def process(self, arm: LoadArm) -> ArmProcess:
        """The arm's process; llama.cpp has one for each number of clients, as its caches are sized when it is loaded."""
        key = f"tide {arm.weights}" if arm.kind in ("tide", "generate") else arm.kind
        if arm.kind in ("llamacpp", "genai-engine"):
            key = f"{key} {arm.clients} x {arm.context}"
        if key not in self._processes:
            self._processes[key] = self._start(arm)
        return self._processes[key]

    def server(self, arm: LoadArm) -> Any:
        """What clients in this process call, of an arm over HTTP; tide-serve is one process for each policy."""
        key = arm.policy if arm.kind == "serve" else f"{arm.name} {arm.context}"
        if key not in self._servers:
            if arm.kind == "serve":
                options = ("--policy", arm.policy, "--max-batch", self._max_batch)
                self._servers[key] = self._stack.enter_context(tide_serve(self._folder(arm), *options))
            else:
                self._servers[key] = LlamacppClient(self.process(arm).call("serve", arm.clients, arm.context))
        return self._servers[key]

    def start(self, arm: LoadArm) -> None:
        """Start the arm's process, untimed."""
        if arm.over_http:
            self.server(arm)
        else:
            self.process(arm)

    def closed(self, arm: LoadArm, requests: Sequence[Request]) -> LoadRun:
        """All of ``requests`` in a closed loop of the arm's clients."""
        self.start(arm)
        time.sleep(SETTLE_S)
        if arm.over_http:
            server: Server = self.server(arm)
            return closed_loop(server, requests, arm.clients)
        process = self.process(arm)
        if arm.kind == "tide":
            run: LoadRun = process.apply(closed_loop, requests, arm.clients)
        elif arm.kind == "generate":
            run = process.call("generate", requests)
        elif arm.kind == "genai-engine":
            run = process.call("closed_loop", requests, arm.clients)
        else:
            run = _one_batch(process, requests)
        return run

    def open(self, arm: LoadArm, requests: Sequence[Request]) -> LoadRun:
        """``requests`` at their times of arrival; for TIDE's engine, tide-serve and llama.cpp."""
        self.start(arm)
        time.sleep(SETTLE_S)
        if arm.over_http:
            return open_loop(self.server(arm), requests)
        run: LoadRun = self.process(arm).apply(open_loop, requests)
        return run

    def _folder(self, arm: LoadArm) -> Path:
        return folder_of(_FILE_OF.get(arm.kind, arm.weights), MODEL, self._cache / "smollm2")

    def _start(self, arm: LoadArm) -> ArmProcess:
        loads: dict[str, Callable[[Path], Any]] = {
            "tide": partial(TideServer, max_batch=self._max_batch),
            "generate": partial(TideServer, max_batch=self._max_batch),
            "genai-engine": partial(GenaiEngine, batch=arm.clients),
        }
        name = "genai" if arm.kind == "genai-batch" else arm.kind
        return self._stack.enter_context(closing(ArmProcess(name, self._folder(arm), load=loads.get(arm.kind))))


def _one_batch(process: ArmProcess, requests: Sequence[Request]) -> LoadRun:
    """All of ``requests``, of equal lengths, as one batch of genai's generator."""
    new_tokens = requests[0].new_tokens
    timing = process.generate([request.prompt for request in requests], new_tokens)
    seconds = timing.first_token_s + timing.decode_s
    served = [Served.at(0.0, (timing.first_token_s, seconds), new_tokens) for _ in requests]
    return LoadRun(seconds, served, 0.0)
