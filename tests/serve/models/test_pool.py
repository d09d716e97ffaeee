"""Which models are loaded when, with stub engines."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve.models.stub_models import StubEngine, StubPool
from slow_cases import slow_but
from tide_runtime.errors import BundleError, QueueFullError
from tide_serve.errors import ApiError
from tide_serve.models.registry import LONGEST_STEP_S


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run ``test`` in an event loop of its own; one that hangs fails."""

    @wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    return run


async def eventually(holds: Callable[[], bool]) -> None:
    while not holds():  # `in_loop` ends it
        await asyncio.sleep(0.001)


async def settled() -> None:
    """Let the pool's task do what it can do now."""
    await asyncio.sleep(0.02)


@in_loop
async def test_models_are_loaded_once_and_kept() -> None:
    """Breaks: each request loads its model, or all are loaded at the start."""
    stub = StubPool.of(memory=10, a=5, b=5)
    assert stub.state("a") == "not loaded"
    first = await asyncio.gather(*(stub.hold("a") for _ in range(5)))
    assert len(set(map(id, first))) == 1 and stub.state("a") == "loaded" and stub.state("b") == "not loaded"
    assert await stub.hold("a") is first[0] and len(stub.sources["a"].engines) == 1


@in_loop
async def test_the_least_recently_used_model_makes_room() -> None:
    """Breaks: a model that is in use all day is unloaded for one that is rarely asked for."""
    stub = StubPool.of(memory=10, a=5, b=5, c=5)
    for name in "aba":
        await stub.hold(name)
        stub.pool.release(name)
    await stub.hold("c")
    assert [stub.state(name) for name in "abc"] == ["loaded", "not loaded", "loaded"]
    stub = StubPool.of(memory=10, a=5, b=5, c=5)
    for name in "ab":
        await stub.hold(name)
    for name in "ba":  # the answer that began first ends last
        stub.pool.release(name)
    await stub.hold("c")
    assert [stub.state(name) for name in "abc"] == ["loaded", "not loaded", "loaded"]


@in_loop
async def test_a_model_is_not_unloaded_in_the_middle_of_an_answer() -> None:
    """Breaks: a stream ends because somebody asked for another model; or a busy model keeps the others out for ever."""
    stub = StubPool.of(memory=5, a=5, b=5)
    answering = [await stub.hold("a") for _ in range(2)]
    other = asyncio.create_task(stub.hold("b"))
    await settled()
    later = asyncio.create_task(stub.hold("a"))  # must not overtake
    stub.pool.release("a")
    await settled()
    assert not answering[0].closed and not other.done() and not later.done() and stub.state("b") == "loading"
    stub.pool.release("a")
    assert (await other).name == "b" and answering[0].closed
    await settled()
    assert not later.done() and not (await other).closed
    stub.pool.release("b")
    assert (await later).name == "a" and (await other).closed


@in_loop
async def test_idle_models_leave_before_busy_ones() -> None:
    """Breaks: a request waits for a long answer of another model though an idle one could have made room."""
    stub = StubPool.of(memory=10, a=5, b=5, c=5)
    await stub.hold("a")
    await stub.hold("b")
    stub.pool.release("b")
    await stub.hold("c")
    assert [stub.state(name) for name in "abc"] == ["loaded", "not loaded", "loaded"]


@in_loop
async def test_a_failure_is_told_and_tried_again() -> None:
    """Breaks: one broken bundle hangs its requests or those of other models, or a repaired one needs a restart."""
    stub = StubPool.of(memory=10, a=5, b=5)
    stub.sources["a"].error = BundleError("weights.bin is missing")
    with pytest.raises(ApiError) as refused:
        await stub.hold("a")
    assert (refused.value.status, refused.value.code) == (503, "model_not_loaded") and "weights.bin" in str(refused.value)
    assert "weights.bin" in stub.pool.described("a")["error"]
    assert (await stub.hold("b")).name == "b"
    stub.sources["a"].error = ValueError("a secret")
    with pytest.raises(ApiError) as refused:
        await stub.hold("a")
    assert "secret" not in str(refused.value)
    stub.sources["a"].error = None
    assert (await stub.hold("a")).name == "a" and "error" not in stub.pool.described("a")


@in_loop
async def test_a_bundle_that_changes_while_its_load_waits_is_read_again() -> None:
    """Breaks: an engine has the weights of a new bundle and the manifest of the old one."""
    stub = StubPool.of(memory=5, a=5, b=5)
    answering = await stub.hold("a")
    other = asyncio.create_task(stub.hold("b"))
    await settled()
    stub.sources["b"].error = BundleError("weights.bin was changed")
    stub.pool.release("a")
    with pytest.raises(ApiError, match="was changed"):
        await other
    assert await stub.hold("a") is answering


@in_loop
async def test_an_engine_that_has_failed_is_loaded_again() -> None:
    """Breaks: a fault of one model's backend lasts until the server is restarted."""
    stub = StubPool.of(memory=5, a=5)
    failed = await stub.hold("a")
    failed.healthy = False
    again = asyncio.create_task(stub.hold("a"))
    await settled()
    assert not again.done()
    stub.pool.release("a")
    assert await again is not failed and failed.closed


@in_loop
async def test_idle_models_are_unloaded() -> None:
    """Breaks: memory stays taken all night, a long answer's model is unloaded, or one that cannot be closed is the last."""
    stub = StubPool.of(memory=10, idle_unload=0.05, a=5, b=5)
    await stub.hold("a")
    (await stub.hold("b")).close_error = RuntimeError("the device is lost")
    stub.pool.release("b")
    await eventually(lambda: stub.state("b") == "not loaded")
    await asyncio.sleep(0.1)
    assert stub.state("a") == "loaded" and stub.sources["b"].engines[0].closed
    assert not (await stub.hold("b")).closed


@in_loop
async def test_an_engine_that_hangs_fails_the_health_check() -> None:
    """Breaks: a server whose device hangs is never restarted, and each of its requests waits until its time is over."""
    stub = StubPool.of(memory=10, a=5, b=5)
    engine = await stub.hold("a")
    engine.step_time = LONGEST_STEP_S - 1
    assert stub.pool.failure() is None and stub.pool.obstacle() is None
    engine.step_time = LONGEST_STEP_S + 1
    reason = f"a: a step has not ended in {LONGEST_STEP_S} s: the engine hangs"
    assert (stub.pool.failure(), stub.pool.obstacle()) == (reason, reason)


@in_loop
async def test_too_many_waiting_requests_are_refused() -> None:
    """Breaks: requests for a model that waits for room pile up without end, or those whose clients have left keep others out."""
    stub = StubPool.of(memory=5, max_queue=2, a=5, b=5)
    await stub.hold("a")
    left, _ = stub.pool.wait("b"), stub.pool.wait("b")
    with pytest.raises(QueueFullError, match="b to be loaded"):
        stub.pool.wait("b")
    left.cancel()
    stub.pool.wait("b")


@in_loop
async def test_closing_ends_everything() -> None:
    """Breaks: a server that ends leaves requests waiting, or an engine that was being loaded."""
    stub = StubPool.of(memory=10, a=5, b=5)
    first = await stub.hold("a")
    stub.sources["b"].may_load.clear()
    waiting = [asyncio.create_task(stub.hold("b")) for _ in range(2)]
    await settled()
    await asyncio.to_thread(stub.pool.close, True)
    for request in waiting:
        with pytest.raises(ApiError, match="stopping"):
            await request
    stub.sources["b"].may_load.set()
    await eventually(lambda: len(stub.sources["b"].engines) == 1 and stub.sources["b"].engines[0].closed)
    assert first.closed and stub.pool.obstacle() is not None
    with pytest.raises(ApiError, match="stopping"):
        await stub.pool.wait("a")


@in_loop
async def test_counts_outlive_an_engine_and_states_do_not() -> None:
    """Breaks: totals of a model fall to zero when it is loaded again, or its queue is shown though it is not loaded."""
    stub = StubPool.of(memory=5, a=5, b=5)
    for name in "aba":
        await stub.hold(name)
        stub.pool.release(name)
    stub.sources["b"].error = BundleError("weights.bin is missing")
    with pytest.raises(ApiError):
        await stub.hold("b")
    values = {
        (sample.name, sample.labels["model"]): sample.value
        for family in text_string_to_metric_families(stub.pool.metrics())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert values["tide_steps_total", "a"] == 6 and values["tide_steps_total", "b"] == 3
    assert values["tide_running", "a"] == 1 and ("tide_running", "b") not in values
    assert values["tide_model_loads_total", "a"] == 2 and values["tide_model_load_failures_total", "b"] == 1
    assert (values["tide_model_bytes", "a"], values["tide_model_bytes", "b"]) == (5, 0)
    assert 0 < values["tide_model_load_seconds_total", "a"] < 10


@pytest.mark.parametrize("seed", slow_but(range(3), 0))
def test_any_traffic(seed: int) -> None:
    """Breaks: more is loaded than the memory holds, an engine is closed under a request, or a request never gets its turn."""
    random, stub = Random(seed), StubPool.of(memory=10, idle_unload=0.01, a=3, b=4, c=5, d=10)

    async def request(name: str) -> None:
        await asyncio.sleep(random.random() / 20)
        future = stub.pool.wait(name) if (engine := stub.pool.take(name)) is None else None
        if future is not None:
            if random.random() < 0.2:
                await asyncio.wait([future], timeout=random.random() / 100)
                if future.cancel():
                    return
            engine = await future
        assert isinstance(engine, StubEngine) and engine.name == name
        for _ in range(random.randrange(4)):
            assert not engine.closed
            assert sum(source.loaded for source in stub.sources.values()) <= 10
            await asyncio.sleep(random.random() / 200)
        assert not engine.closed
        stub.pool.release(name)

    async def traffic() -> None:
        await asyncio.gather(*(request(random.choice("abcd")) for _ in range(150)))
        await eventually(lambda: not any(source.loaded for source in stub.sources.values()))

    in_loop(traffic)()
