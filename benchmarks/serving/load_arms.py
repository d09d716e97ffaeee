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
from tide_bench.load import Request
from tide_bench.rounds import SETTLE_S

from benchmarks.models.gguf_files import GGUF_MODELS
from benchmarks.quantised_decode import folder_of
from benchmarks.serving.clients import LoadRun, Served, closed_loop, open_loop
from benchmarks.serving.servers import GenaiEngine, LlamacppClient, TideServer

Kind = Literal["tide", "generate", "llamacpp", "genai-engine", "genai-batch"]
MODEL = GGUF_MODELS["smollm2"]
_FILE_OF = {"llamacpp": "llamacpp", "genai-engine": "genai-int4", "genai-batch": "genai-int4"}


@dataclass(frozen=True)
class LoadArm:
    """One way to serve ``clients`` at once.

    Args:
        weights: ``fp32`` or ``int4`` of TIDE; what the table says for the others.
        clients: requests at once. TIDE's and llama.cpp's server hold as many sequences.
        context: tokens of a sequence at most, for llama.cpp's caches.
    """

    kind: Kind
    title: str
    weights: str
    clients: int
    context: int = 256

    @property
    def name(self) -> str:
        """As in results: ``tide_int4_8``."""
        weights = f"_{self.weights}" if self.kind in ("tide", "generate") else ""
        return f"{self.kind.replace('-', '_')}{weights}_{self.clients}"


class LoadArms:
    """Processes of arms, started when first used, on the bundles and files in ``cache``. Close it to end them.

    TIDE's arms of the same weights share an engine of ``max_batch`` sequences. Raises ArmError when a process does not start.
    """

    def __init__(self, cache: Path, max_batch: int) -> None:
        self._cache, self._max_batch, self._stack = cache, max_batch, ExitStack()
        self._processes: dict[str, ArmProcess] = {}
        self._addresses: dict[str, str] = {}

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
            if arm.kind == "llamacpp":
                self._addresses[arm.name] = self._processes[key].call("serve", arm.clients, arm.context)
        return self._processes[key]

    def closed(self, arm: LoadArm, requests: Sequence[Request]) -> LoadRun:
        """All of ``requests`` in a closed loop of the arm's clients."""
        process = self.process(arm)
        time.sleep(SETTLE_S)
        if arm.kind == "llamacpp":
            return closed_loop(LlamacppClient(self._addresses[arm.name]), requests, arm.clients)
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
        """``requests`` at their times of arrival; for TIDE and llama.cpp."""
        process = self.process(arm)
        time.sleep(SETTLE_S)
        if arm.kind == "llamacpp":
            return open_loop(LlamacppClient(self._addresses[arm.name]), requests)
        run: LoadRun = process.apply(open_loop, requests)
        return run

    def _start(self, arm: LoadArm) -> ArmProcess:
        folder = folder_of(_FILE_OF.get(arm.kind, arm.weights), MODEL, self._cache / "smollm2")
        loads: dict[str, Callable[[Path], Any]] = {
            "tide": partial(TideServer, max_batch=self._max_batch),
            "generate": partial(TideServer, max_batch=self._max_batch),
            "genai-engine": partial(GenaiEngine, batch=arm.clients),
        }
        name = "genai" if arm.kind == "genai-batch" else arm.kind
        return self._stack.enter_context(closing(ArmProcess(name, folder, load=loads.get(arm.kind))))


def _one_batch(process: ArmProcess, requests: Sequence[Request]) -> LoadRun:
    """All of ``requests``, of equal lengths, as one batch of genai's generator."""
    new_tokens = requests[0].new_tokens
    timing = process.generate([request.prompt for request in requests], new_tokens)
    seconds = timing.first_token_s + timing.decode_s
    served = [Served.at(0.0, (timing.first_token_s, seconds), new_tokens) for _ in requests]
    return LoadRun(seconds, served, 0.0)
