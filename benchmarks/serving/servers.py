"""What serves a load: TIDE's engine and onnxruntime-genai's, each in a process of its own, and llama.cpp's server over HTTP.

TIDE's clients are threads of the engine's process, as a service's are. Those of llama.cpp are threads of the caller's process.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from tide_bench.arms.process import ArmError
from tide_bench.load import LoadRun, Request, Served, closed_loop
from tide_bench.report import cores

from benchmarks.serving.http_server import event_lines
from benchmarks.serving.python_share import StepTime, decode_step_time, watched_sessions


class TideServer:
    """An engine of policy `full`; every request has a cache salt of its own, so that none finds another's prefix."""

    def __init__(self, folder: Path, max_batch: int) -> None:
        from tide_bench.arms.tide import load_engine
        from tide_runtime import Engine, EngineOptions, ThreadOptions

        load_engine(folder).close()  # what a process loads first runs faster: see `tide_bench.arms.tide.load_second`
        gc.collect()
        options = EngineOptions(policy="full", max_batch=max_batch, threads=ThreadOptions(shared=True), verify=False)
        self.engine = Engine.load(folder, options, device="cpu")
        self._salts = count()

    def stream(self, request: Request) -> Iterator[None]:
        tokens = 0
        for _ in self.engine.submit(request.prompt, self._params(request.new_tokens, self._salt())):
            tokens += 1
            yield
        if tokens != request.new_tokens:
            raise ArmError(f"TIDE made {tokens} tokens, expected {request.new_tokens}")

    def generate(self, requests: Sequence[Request]) -> LoadRun:
        """All of ``requests``, which want the same number of new tokens, in one call of `Engine.generate`."""
        params = self._params(requests[0].new_tokens, self._salt())
        cpu, start = time.process_time(), perf_counter()
        done = self.engine.generate([request.prompt for request in requests], params)
        seconds = perf_counter() - start
        served = [Served.at(0.0, (one.stats.time_to_first_token, seconds), one.stats.new_tokens) for one in done]
        return LoadRun(seconds, served, time.process_time() - cpu)

    def first_tokens(self, prompts: Sequence[Sequence[int]], salt: str | None = None) -> float:
        """Seconds until all of ``prompts``, submitted together, have their first token; they end there."""
        params = self._params(1, salt or self._salt())
        start = perf_counter()
        handles = [self.engine.submit(list(prompt), params) for prompt in prompts]
        for handle in handles:
            handle.result()
        return perf_counter() - start

    def idle_cpu(self, seconds: float) -> float:
        """CPU seconds of this process over ``seconds`` without requests."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def step_time(self, requests: Sequence[Request]) -> StepTime:
        """A decode step of all of ``requests`` together, each streamed by a client of its own."""
        with watched_sessions() as runs:
            closed_loop(self, requests, len(requests))
        return decode_step_time(runs)

    def _salt(self) -> str:
        return f"request {next(self._salts)}"

    def _params(self, new_tokens: int, salt: str) -> Any:
        from tide_runtime import GenerationParams

        return GenerationParams(max_new_tokens=new_tokens, ignore_eos=True, cache_salt=salt)


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


class GenaiEngine:
    """`onnxruntime_genai.Engine` in its static batching: requests that wait are batched, and none joins a batch that runs.

    Its continuous batching needs a model with PagedAttention, which its builder makes for CUDA and WebGPU only (0.18). Static
    batches hold at most 4 requests, whatever ``max_batch_size`` says. Clients are simulated in the engine's own thread, so
    they cost next to nothing.
    """

    def __init__(self, folder: Path, batch: int) -> None:
        import onnxruntime_genai as og

        self._og = og
        config = og.Config(str(folder))
        session = {"intra_op_num_threads": cores()}
        decoder = {"decoder": {"session_options": session}}
        config.overlay(json.dumps({"model": decoder, "engine": {"static_batching": {"max_batch_size": batch}}}))
        self._engine = og.Engine(og.Model(config))
        self._events = self._engine.create_event_buffer(64)

    def closed_loop(self, requests: Sequence[Request], clients: int) -> LoadRun:
        """As `tide_bench.load.closed_loop`."""
        waiting, running, served = iter(requests), list[_GenaiTurn](), list[Served]()
        cpu, start = time.process_time(), perf_counter()
        while True:
            while len(running) < clients and (request := next(waiting, None)) is not None:
                running.append(self._begin(request, perf_counter() - start))
            if not running:
                return LoadRun(perf_counter() - start, served, time.process_time() - cpu)
            events = self._engine.run(self._events)
            now = perf_counter() - start
            for event in events:
                turn = next(turn for turn in running if turn.handle is event.request)
                if event.flags & self._og.EngineEventFlags.FAILED:
                    raise ArmError(f"onnxruntime-genai's engine failed: {event.error_code}")
                if event.flags & self._og.EngineEventFlags.TOKEN:
                    turn.times.append(now)
                if event.flags & self._og.EngineEventFlags.TURN_FINISHED:
                    running.remove(turn)
                    served.append(turn.served())

    def _begin(self, request: Request, now: float) -> _GenaiTurn:
        sizes = self._og.RequestOptions()
        sizes.set_max_session_tokens(len(request.prompt) + request.new_tokens)
        handle = self._engine.create_request(options=sizes)
        options = self._og.TurnOptions(handle)
        options.set_max_generated_tokens(request.new_tokens)
        options.set_min_generated_tokens(request.new_tokens)  # masks end-of-sequence
        options.set_do_sample(False)
        handle.begin_turn(np.array(request.prompt, np.int32), options)
        return _GenaiTurn(handle, request, now)


class _GenaiTurn:
    """A request that runs, and when its tokens came."""

    def __init__(self, handle: Any, request: Request, sent: float) -> None:
        self.handle, self.times = handle, list[float]()
        self._request, self._sent = request, sent

    def served(self) -> Served:
        self.handle.close()
        if len(self.times) != self._request.new_tokens:
            raise ArmError(f"onnxruntime-genai made {len(self.times)} tokens, expected {self._request.new_tokens}")
        return Served.at(self._sent, self.times, self._request.new_tokens)
