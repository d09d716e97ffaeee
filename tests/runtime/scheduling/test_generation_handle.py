"""A handle gives the same request to threads and to event loops, and cancels what is not wanted any more."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
from runtime.depth.test_lazy_depth import recomputed
from runtime.numpy_engine import POISON, NumpyEngine, wanted
from tide_runtime.errors import NumericsError
from tide_runtime.outputs import Chunk, Generation
from tide_runtime.scheduling.handle import GenerationHandle

PROMPT, LONG = [1, 2, 3], 60


@pytest.fixture
def engine() -> Iterator[NumpyEngine]:
    with NumpyEngine(capacity=1) as engine:
        yield engine


def text(engine: NumpyEngine, count: int = 8) -> list[int]:
    return recomputed(engine.model, wanted(PROMPT, count))[0]


def iterated(handle: GenerationHandle) -> Generation:
    return [chunk.generation for chunk in handle][-1]  # type: ignore[return-value]


def iterated_async(handle: GenerationHandle) -> Generation:
    async def last() -> Generation | None:
        return [chunk.generation async for chunk in handle][-1]

    return asyncio.run(last())  # type: ignore[return-value]


def awaited(handle: GenerationHandle) -> Generation:
    async def whole() -> Generation:
        return await handle

    return asyncio.run(whole())


WAYS: list[Callable[[GenerationHandle], Generation]] = [iterated, iterated_async, awaited, GenerationHandle.result]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("late", [False, True])
def test_every_way_gives_the_whole_result(engine: NumpyEngine, way: Callable[[GenerationHandle], Generation], late: bool) -> None:
    """Breaks: a result that is lost when the request ends before anybody asks for it."""
    handle = engine.submit(PROMPT)
    if late:
        handle.result(60)
    generation = way(handle)
    assert (list(generation.token_ids), generation.finish_reason, handle.done) == (text(engine), "length", True)


def test_chunks_are_the_tokens_in_their_order(engine: NumpyEngine) -> None:
    """Breaks: a token that is delivered twice, late or not at all, in either kind of loop."""

    async def chunks() -> list[int | None]:
        with engine.backend.paused():
            handle = engine.submit(PROMPT)
            iterator = aiter(handle)
            first = asyncio.ensure_future(anext(iterator))
            await asyncio.sleep(0)
        return [(await first).token_id, *[chunk.token_id async for chunk in iterator]]

    assert asyncio.run(chunks()) == [chunk.token_id for chunk in engine.submit(PROMPT)] == text(engine)


def test_a_receiver_gets_every_chunk_early_and_late(engine: NumpyEngine) -> None:
    """Breaks: a server that loses the tokens from before it listened, or those after."""
    handle = engine.submit(PROMPT)
    iterator = iter(handle)
    received: list[Chunk | BaseException] = [next(iterator)]
    handle.listen(received.append)
    handle.result(60)
    assert [chunk.token_id for chunk in received if isinstance(chunk, Chunk)] == text(engine)
    assert isinstance(received[-1], Chunk) and received[-1].generation is not None


def test_a_receiver_gets_the_error(engine: NumpyEngine) -> None:
    """Breaks: a server that waits for ever for a request that has failed."""
    handle = engine.submit([*PROMPT, POISON])
    received: list[Chunk | BaseException] = []
    with pytest.raises(NumericsError):
        handle.result(60)
    handle.listen(received.append)
    assert isinstance(received[-1], NumericsError)


def test_a_handle_without_chunks_gives_the_last_one(engine: NumpyEngine) -> None:
    """Breaks: a consumer that waits for chunks which are not delivered."""
    [chunk] = list(engine.submit(PROMPT, streamed=False))
    assert chunk.generation is not None and list(chunk.generation.token_ids) == text(engine)


def test_result_waits_no_longer_than_asked(engine: NumpyEngine) -> None:
    """Breaks: a caller with a time limit of its own that is kept, or whose request is lost when the limit has passed."""
    with engine.backend.paused():
        handle = engine.submit(PROMPT)
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        assert not handle.done
    assert list(handle.result(60).token_ids) == text(engine)


def test_cancel_in_the_queue_ends_with_the_step_in_progress(engine: NumpyEngine) -> None:
    """Breaks: a cancelled request that holds its place, or waits for one to be told that it is cancelled."""
    with engine.backend.paused():
        running = engine.submit(PROMPT)
        assert engine.backend.entered.wait(60)
        waiting = engine.submit(PROMPT)
        waiting.cancel()
    generation = waiting.result(60)
    assert (generation.token_ids, generation.finish_reason) == ((), "cancelled")
    assert [chunk.token_id for chunk in waiting] == [None]
    assert engine.scheduler.waiting == 0
    assert list(running.result(60).token_ids) == text(engine)
    running.cancel()  # too late, and harmless
    assert running.result(0).finish_reason == "length"


def test_cancel_while_running_keeps_what_there_is(engine: NumpyEngine) -> None:
    """Breaks: a client's half answer that is thrown away, or an engine that goes on without a reader."""
    with engine.backend.paused(after=4):
        handle = engine.submit(PROMPT, LONG)
        iterator = iter(handle)
        for _ in range(3):
            next(iterator)
        handle.cancel()
    generation = handle.result(60)
    assert generation.finish_reason == "cancelled"
    found = list(generation.token_ids)
    assert 3 <= len(found) < LONG and found == text(engine, LONG)[: len(found)]
    assert [chunk.token_id for chunk in iterator] == [*found[3:], None]


def ends(handle: GenerationHandle) -> str:
    return handle.result(60).finish_reason


def test_leaving_a_loop_early_cancels(engine: NumpyEngine) -> None:
    """Breaks: a client that went away and whose text is generated to its end."""
    with engine.backend.paused(after=2):
        handle = engine.submit(PROMPT, LONG)
        for _ in handle:
            break
    assert ends(handle) == "cancelled"


def test_leaving_an_asynchronous_loop_early_cancels(engine: NumpyEngine) -> None:
    """Breaks: the same for a server's coroutine; the iterator is closed by the event loop."""

    async def leave() -> GenerationHandle:
        handle = engine.submit(PROMPT, LONG)
        async for _ in handle:
            break
        await asyncio.sleep(0.01)
        return handle

    with engine.backend.paused(after=2):
        handle = asyncio.run(leave())
    assert ends(handle) == "cancelled"


@pytest.mark.parametrize("iterates", [False, True])
def test_cancelling_the_task_cancels_the_request(engine: NumpyEngine, iterates: bool) -> None:
    """Breaks: a web framework that cancels the task of a client which has gone, while its text is generated to its end."""

    async def cancelled() -> GenerationHandle:
        with engine.backend.paused():
            handle = engine.submit(PROMPT, LONG)

            async def consume() -> None:
                if iterates:
                    async for _ in handle:
                        pass
                else:
                    await handle

            task = asyncio.create_task(consume())
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return handle

    assert ends(asyncio.run(cancelled())) == "cancelled"
    assert list(engine.submit(PROMPT).result(60).token_ids) == text(engine)  # the loop has survived it


def test_two_tasks_await_one_request_and_one_is_cancelled(engine: NumpyEngine) -> None:
    """Breaks: the other task's wait, which must end with what there is and not with CancelledError."""

    async def both() -> Generation:
        with engine.backend.paused():
            handle = engine.submit(PROMPT, LONG)

            async def consume() -> Generation:
                return await handle

            tasks = [asyncio.create_task(consume()) for _ in range(2)]
            await asyncio.sleep(0.01)
            tasks[0].cancel()
            await asyncio.sleep(0)
        return await tasks[1]

    assert asyncio.run(both()).finish_reason == "cancelled"


@pytest.mark.parametrize("way", WAYS)
def test_errors_come_out_of_every_way(engine: NumpyEngine, way: Callable[[GenerationHandle], Generation]) -> None:
    """Breaks: a failed request that looks like an empty or an endless text."""
    handle = engine.submit([1, POISON])
    with pytest.raises(NumericsError, match="NaN"):
        way(handle)
    assert handle.done


def test_an_event_loop_that_is_gone_does_not_harm_the_engine(engine: NumpyEngine) -> None:
    """Breaks: the engine's thread, by a chunk for an event loop that is closed."""

    async def leave() -> tuple[GenerationHandle, object]:
        handle = engine.submit(PROMPT, LONG)
        iterator = aiter(handle)
        await anext(iterator)
        return handle, iterator

    loop = asyncio.new_event_loop()
    with engine.backend.paused(after=2):
        handle, iterator = loop.run_until_complete(leave())
        loop.close()
    assert ends(handle) == "length"
    assert list(engine.submit(PROMPT).result(60).token_ids) == text(engine)
    del iterator
