"""One loop for all callers: threads and event loops, failures of a sequence or of the backend, and the end of an engine."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from runtime.depth.test_lazy_depth import recomputed
from runtime.numpy_engine import POISON, POSITIONS, NumpyEngine, wanted
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.kv_caches import blocks_of
from tide_runtime.errors import EngineClosedError, NumericsError, QueueFullError
from tide_runtime.scheduling.handle import GenerationHandle

PROMPT, LONG = [1, 2, 3], 60
PROMPTS = ["def add(a, b):", "class", "x", "    def __init__(self, x, y):\n        self.x = x", "return a + b\n"]


@pytest.fixture
def engine() -> Iterator[NumpyEngine]:
    with NumpyEngine() as engine:
        yield engine


def text(engine: NumpyEngine, prompt: list[int], count: int = 8) -> list[int]:
    return recomputed(engine.model, wanted(prompt, count))[0]


def result(handle: GenerationHandle) -> list[int]:
    return list(handle.result(60).token_ids)


# --- Many callers


def test_threads_and_event_loops_get_their_texts() -> None:
    """Breaks: texts that are mixed up, lost or changed by company, little memory, chunks, shared prefixes or preemption."""
    with NumpyEngine(capacity=4, blocks=blocks_of(POSITIONS) + 1, chunk=7) as engine:

        def prompts(caller: int) -> list[list[int]]:
            random = np.random.default_rng(caller)
            shared = [5, 6] * 8
            return [shared * int(random.integers(2)) + random.integers(0, 9, random.integers(1, 30)).tolist() for _ in range(4)]

        def in_thread(caller: int) -> list[list[int]]:
            if caller % 2:
                return [result(engine.submit(prompt, 20)) for prompt in prompts(caller)]
            streams = [engine.submit(prompt, 20, priority=caller % 3) for prompt in prompts(caller)]
            return [[chunk.token_id for chunk in stream if chunk.token_id is not None] for stream in streams]

        def in_event_loop(caller: int) -> list[list[int]]:
            async def one(prompt: list[int]) -> list[int]:
                handle = engine.submit(prompt, 20)
                if len(prompt) % 2:
                    return list((await handle).token_ids)
                return [chunk.token_id async for chunk in handle if chunk.token_id is not None]

            async def all_of_them() -> list[list[int]]:
                return await asyncio.gather(*map(one, prompts(caller)))

            return asyncio.run(all_of_them())

        with ThreadPoolExecutor(6) as pool:
            calls = [pool.submit(in_event_loop if caller > 3 else in_thread, caller) for caller in range(6)]
            for caller, call in enumerate(calls):
                assert call.result(60) == [text(engine, prompt, 20) for prompt in prompts(caller)]
        assert engine.scheduler.preemptions > 0 and not engine.scheduler.has_work
        assert engine.scheduler.free_blocks + engine.scheduler.cache.blocks == engine.scheduler.options.blocks


def test_a_real_engine_serves_threads_and_event_loops(load: Callable[..., Engine]) -> None:
    """Breaks: the same with kernels, a tokenizer and streamed text."""
    params = GenerationParams(max_new_tokens=10, ignore_eos=True)
    with load(max_batch=3) as engine:
        alone = [engine.generate(prompt, params)[0].text for prompt in PROMPTS]

        async def one(prompt: str) -> str | None:
            return (await engine.submit(prompt, params)).text

        async def together() -> list[str | None]:
            return await asyncio.gather(*map(one, PROMPTS))

        def streamed(prompt: str) -> str:
            return "".join(chunk.text for chunk in engine.stream(prompt, params))

        with ThreadPoolExecutor(6) as pool:
            events, generated = pool.submit(asyncio.run, together()), pool.submit(engine.generate, PROMPTS, params)
            assert list(pool.map(streamed, PROMPTS, timeout=60)) == alone
            assert events.result(60) == [one.text for one in generated.result(60)] == alone
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0)


# --- Failures


def test_a_loaded_prefix_may_be_evicted_in_the_same_step() -> None:
    """Breaks: a prompt that takes a known prefix and then its memory; released blocks hold garbage."""
    with NumpyEngine(capacity=1, blocks=4, chunk=POSITIONS) as engine:
        prompt = [1, 2, 3, 4] * 4
        result(engine.submit([*prompt, 5], 2))
        assert (engine.scheduler.cache.blocks, engine.scheduler.free_blocks) == (2, 2)
        handle = engine.submit([*prompt, *[6, 7] * 20], 6)
        assert result(handle) == text(engine, [*prompt, *[6, 7] * 20], 6)
        assert handle.result(0).stats.prefix_tokens == 16


def test_nan_logits_end_one_sequence_alone(engine: NumpyEngine) -> None:
    """Breaks: other requests' texts, by one whose logits are NaN; or the next user of its row, by NaN left in the cache."""
    with engine.backend.paused():
        before, poisoned, after = (engine.submit(prompt, 20) for prompt in (PROMPT, [4, POISON, 4, 4], [2]))
    with pytest.raises(NumericsError, match="NaN"):
        poisoned.result(60)
    assert (result(before), result(after)) == (text(engine, PROMPT, 20), text(engine, [2], 20))
    rows = [engine.submit([n], 20) for n in range(4)]  # every row is used again
    assert [result(handle) for handle in rows] == [text(engine, [n], 20) for n in range(4)]
    assert engine.loop.healthy


def test_nan_does_not_spread_by_the_prefix_cache(engine: NumpyEngine) -> None:
    """Breaks: a text that shares its beginning with one that failed behind it."""
    prompt = [1, 2] * 16
    with pytest.raises(NumericsError):
        engine.submit([*prompt, POISON]).result(60)
    assert result(engine.submit([*prompt, 3])) == text(engine, [*prompt, 3])


def test_a_backend_that_raises_once_ends_the_requests_of_the_step(engine: NumpyEngine) -> None:
    """Breaks: a service that is down for good after one failed launch, or callers that wait for ever."""
    with engine.backend.paused():
        first = engine.submit(PROMPT)
        assert engine.backend.entered.wait(60)
        engine.backend.failures = 1
        next_step = engine.submit([2])
    with pytest.raises(RuntimeError, match="the backend broke"):
        first.result(60)
    assert result(next_step) == text(engine, [2])
    assert result(engine.submit(PROMPT)) == text(engine, PROMPT)
    assert engine.loop.healthy


def test_failures_in_a_row_end_the_engine(engine: NumpyEngine) -> None:
    """Breaks: a broken device behind an engine that says it is healthy. Two failures and a good step do not end it."""
    for failures in (2, 1):
        engine.backend.failures = failures
        for _ in range(failures):
            with pytest.raises(RuntimeError):
                result(engine.submit(PROMPT))
        assert result(engine.submit(PROMPT)) == text(engine, PROMPT)
    with engine.backend.paused():
        handles = [engine.submit(PROMPT)]
        assert engine.backend.entered.wait(60)
        engine.backend.failures = 3
        handles += [engine.submit(PROMPT, priority=-n) for n in range(9)]
    errors = [handle._result.exception(60) for handle in handles]
    assert [type(error) for error in errors] == [RuntimeError] * 9 + [EngineClosedError]
    assert not engine.loop.healthy
    with pytest.raises(EngineClosedError, match=r"the engine has failed \(the backend broke\); load it again"):
        engine.submit(PROMPT)


def test_a_device_that_cannot_even_free_a_row_leaves_no_caller_waiting(engine: NumpyEngine) -> None:
    """Breaks: callers that wait for ever, when a lost device raises in the clean-up too."""
    with engine.backend.paused():
        handles = [engine.submit(PROMPT)]
        assert engine.backend.entered.wait(60)
        handles += [engine.submit(PROMPT) for _ in range(7)]
        engine.backend.failures, engine.backend.breaks_rows = 1, True
    errors = [handle._result.exception(10) for handle in handles]
    assert {type(error) for error in errors} <= {RuntimeError, EngineClosedError}
    assert not engine.loop.healthy


def test_a_result_that_cannot_be_made_leaves_no_caller_waiting(engine: NumpyEngine) -> None:
    """Breaks: callers that wait for ever, when a tokenizer fails at the end of a text."""

    def fail(sequence: object) -> None:
        raise ValueError("no text")

    engine.loop._finish = fail  # type: ignore[assignment]
    with engine.backend.paused():
        handles = [engine.submit(PROMPT, count) for count in (3, 5, 9, 9, 9, 9)]
    errors = [handle._result.exception(10) for handle in handles]
    assert {type(error) for error in errors} == {ValueError} and engine.loop.healthy


def test_a_step_that_hangs_can_be_told_from_outside(engine: NumpyEngine) -> None:
    """Breaks: a server whose device hangs says that it is healthy for ever; or an idle one that it hangs."""
    with engine.backend.paused():
        handle = engine.submit(PROMPT)
        assert engine.backend.entered.wait(60)
        before = engine.loop.step_time
        time.sleep(0.01)
        assert engine.loop.step_time > before >= 0
    result(handle)
    engine.loop.stop(abort=False)
    assert engine.loop.step_time == 0


# --- Queue and time


def test_a_full_queue_refuses_and_takes_requests_again(load: Callable[..., Engine]) -> None:
    """Breaks: a service without back pressure; or a batch given to `generate` that the queue's limit cuts."""
    with NumpyEngine(capacity=1, max_queue=1) as engine:
        with engine.backend.paused():
            running = engine.submit(PROMPT)
            assert engine.backend.entered.wait(60)
            waiting = engine.submit(PROMPT)
            with pytest.raises(QueueFullError):
                engine.submit(PROMPT)
            waiting.cancel()
        waiting.result(60)
        assert result(running) == result(engine.submit(PROMPT)) == text(engine, PROMPT)
    with load(max_batch=1, max_queue=1) as real:
        assert len(real.generate(PROMPTS, GenerationParams(max_new_tokens=2))) == len(PROMPTS)


def test_the_wait_in_the_queue_is_measured() -> None:
    """Breaks: a trace shows a slow prompt where the request waited for others, or the wait of a preempted one twice."""
    with NumpyEngine(capacity=1) as engine:
        with engine.backend.paused():
            running, waiting = engine.submit(PROMPT), engine.submit(PROMPT)
            assert engine.backend.entered.wait(60)
            time.sleep(0.05)
        first, second = (handle.result(60).stats for handle in (running, waiting))
    assert first.queue_time < first.time_to_first_token - 0.05  # the step itself was paused
    assert 0.05 + first.decode_time < second.queue_time < second.time_to_first_token


def test_a_preempted_request_left_the_queue_once() -> None:
    """Breaks: the wait after a preemption counts as the wait before the first step."""
    with NumpyEngine(capacity=2, blocks=4, chunk=40) as engine:
        important, minor = engine.submit([1] * 20, 30, priority=1), engine.submit([2] * 20, 30)
        stats = minor.result(60).stats
        assert stats.preemptions and stats.queue_time < stats.time_to_first_token
        important.result(60)


def test_a_timeout_ends_with_what_there_is(load: Callable[..., Engine]) -> None:
    """Breaks: a request that runs past its time, in its row or in the queue, or ends with nothing or with an error."""
    with NumpyEngine(capacity=1) as engine:
        with engine.backend.paused(after=3):
            running, waiting = engine.submit(PROMPT, LONG, timeout=0.3), engine.submit(PROMPT, timeout=0.3)
            assert engine.backend.entered.wait(60)
            time.sleep(0.35)
        for handle in (running, waiting):
            assert handle.result(60).finish_reason == "deadline"
        stats = waiting.result(60).stats
        assert stats.queue_time == stats.time_to_first_token >= 0.3 and stats.decode_time == 0  # it never left the queue
        assert result(running) == text(engine, PROMPT, LONG)[: len(result(running))] and len(result(running)) >= 3
        assert result(waiting) == [] and [chunk.token_id for chunk in waiting] == [None]
        assert result(engine.submit(PROMPT, timeout=60.0)) == text(engine, PROMPT)
    with load() as real:
        assert real.submit("x", timeout=0.0).result(60).finish_reason == "deadline"


def test_a_cancelled_request_that_lost_its_row_ends_at_once() -> None:
    """Breaks: a client that went away while it was preempted, and whose text is computed again without a reader."""
    with NumpyEngine(capacity=2, blocks=4, chunk=40) as engine:
        with engine.backend.paused(after=2):
            important = engine.submit([1] * 31, 30, priority=1)
            minor = engine.submit([2] * 31, 30)
            assert engine.backend.entered.wait(60)
            minor.cancel()
            with engine.backend.paused(after=1):
                assert minor.result(60).finish_reason == "cancelled" and not important.done
        assert result(important) == text(engine, [1] * 31, 30)


def test_an_idle_engine_takes_no_processor_time(engine: NumpyEngine) -> None:
    """Breaks: a loop that polls."""
    result(engine.submit(PROMPT))
    began = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - began < 0.02


# --- The end


def test_close_finishes_what_is_in_progress(load: Callable[..., Engine]) -> None:
    """Breaks: answers that are cut by an orderly shutdown, and requests that are taken by a closed engine."""
    engine = NumpyEngine(capacity=1)
    handles = [engine.submit(PROMPT, 20) for _ in range(3)]
    engine.loop.stop(abort=False)
    assert [handle.done for handle in handles] == [True] * 3
    assert [result(handle) for handle in handles] == [text(engine, PROMPT, 20)] * 3
    real = load()
    handle = real.submit("x", GenerationParams(max_new_tokens=20, ignore_eos=True))
    real.close()
    assert handle.done and len(handle.result(0).token_ids) == 20
    real.close()
    for call in (lambda: real.submit("x"), lambda: real.generate("x"), lambda: real.stream("x"), lambda: real.score([1, 2])):
        with pytest.raises(EngineClosedError, match="the engine is closed; load it again"):
            call()
    assert not real.healthy


def test_close_can_cancel_what_is_in_progress() -> None:
    """Breaks: a shutdown that must be quick and waits for the longest text, or callers that are never told."""
    engine = NumpyEngine(capacity=1)
    with engine.backend.paused(after=3):
        running, waiting = engine.submit(PROMPT, LONG), engine.submit(PROMPT)
        assert engine.backend.entered.wait(60)
        stopping = threading.Thread(target=engine.loop.stop, kwargs={"abort": True})
        stopping.start()
        while engine.loop.healthy:
            time.sleep(0.001)
    stopping.join(60)
    assert [handle.result(0).finish_reason for handle in (running, waiting)] == ["cancelled"] * 2
    assert 3 <= len(result(running)) < LONG and result(waiting) == []
    with pytest.raises(EngineClosedError):
        engine.submit(PROMPT)


def test_a_dropped_engine_ends_its_thread(load: Callable[..., Engine]) -> None:
    """Breaks: memory and threads of engines that were never closed, also where requests were finished, left or cancelled."""
    engine, params = load(max_batch=1), GenerationParams(max_new_tokens=30, ignore_eos=True)
    kept = engine.submit("x", params)
    kept.result(60)
    for _ in engine.submit("x", params):
        break
    running, waiting = engine.submit("x", params), engine.submit("x", params)
    waiting.cancel()
    running.result(60)
    thread, gone = engine._loop._thread, weakref.ref(engine)
    assert thread is not None and thread.is_alive()
    del engine
    gc.collect()
    thread.join(10)
    assert gone() is None and not thread.is_alive()
    assert kept.result(0).finish_reason == "length"


def test_a_handle_keeps_its_engine_until_the_request_ends(load: Callable[..., Engine]) -> None:
    """Breaks: ``load().submit(prompt)``, cancelled because the caller keeps only the handle, and not the engine."""
    handle = load().submit("x", GenerationParams(max_new_tokens=30, ignore_eos=True))
    gc.collect()
    assert handle.result(60).finish_reason == "length"


def in_child(bundle: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run ``lines`` in a process of its own, which has an ``engine`` that has worked."""
    begin = [
        "import os, sys, time",
        "from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions",
        "from tide_runtime.errors import EngineClosedError",
        f"engine = Engine.load({str(bundle)!r}, EngineOptions(threads=ThreadOptions(1)))",
        "long = GenerationParams(max_new_tokens=60, ignore_eos=True)",
        "engine.generate('x', GenerationParams(max_new_tokens=2))",
    ]
    return subprocess.run([sys.executable, "-c", "\n".join([*begin, *lines])], capture_output=True, encoding="utf-8", timeout=60)


@pytest.mark.parametrize("line", ["pass", "iterator = iter(engine.submit('x', long)); next(iterator)"])
def test_a_process_exits_without_close(bundle: Path, line: str) -> None:
    """Breaks: scripts that hang at their end, idle or with a request in progress."""
    child = in_child(bundle, line, "print('end')")
    assert (child.returncode, child.stdout, child.stderr) == (0, "end\n", "")


def test_a_forked_process_is_refused(bundle: Path) -> None:
    """Breaks: a server that loads the engine and forks its workers, which would wait for a thread that they do not have."""
    child = in_child(
        bundle,
        "handle = engine.submit('x', long)",
        "child = os.fork()",
        "if child == 0:",
        "    handle.cancel()",
        "    try:",
        "        engine.generate('x')",
        "    except EngineClosedError as error:",
        "        print(engine.healthy, error, flush=True)",
        "    engine.close()",
        "    os._exit(0)",  # as multiprocessing does: ONNX Runtime's sessions wait for the threads that they do not have either
        "_, status = os.waitpid(child, 0)",
        "print(status, engine.healthy, handle.result(30).finish_reason)",
    )
    forked, parent = child.stdout.splitlines()
    assert forked == "False the engine was loaded before this process was forked; load it in this process", child.stderr
    assert parent == "0 True length"
