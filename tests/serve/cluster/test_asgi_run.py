"""Requests that an application answers in the process of a replica."""

import asyncio
from contextlib import aclosing

import pytest
from tide_serve.cluster.replica import answer_messages

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}
START = {"type": "http.response.start", "status": 200, "headers": []}


def _part(body: bytes, more_body: bool = True) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


def _all(app, body: bytes = b"") -> list[dict]:
    async def collect() -> list[dict]:
        return [message async for message in answer_messages(app, SCOPE, body)]

    return asyncio.run(collect())


def test_ready_parts_are_joined():
    """Breaks: an answer of many small parts costs a message between processes for each of them."""

    async def app(scope, receive, send):
        body = (await receive())["body"]
        await send(START)
        await send(_part(body))
        await send(_part(b"b"))
        await asyncio.sleep(0.01)
        await send(_part(b"c"))
        await send(_part(b"", more_body=False))

    assert _all(app, b"a") == [START, _part(b"ab"), _part(b"c", more_body=False)]


def test_part_is_passed_on_at_once():
    """Breaks: a stream's tokens arrive together at its end."""
    reached = asyncio.Event()

    async def app(scope, receive, send):
        await send(_part(b"a"))
        await reached.wait()

    async def first() -> dict:
        async with aclosing(answer_messages(app, SCOPE, b"")) as messages:
            message = await asyncio.wait_for(anext(messages), 5)
            reached.set()
            return message

    assert asyncio.run(first()) == _part(b"a")


def test_error_of_the_application_is_raised():
    """Breaks: a failure in a replica ends an answer as if it were complete."""

    async def app(scope, receive, send):
        await send(START)
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        _all(app)


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_leaving_cancels_the_application(how):
    """Breaks: the engine goes on generating for a client that has left."""
    ended = []

    async def watch(receive):
        ended.append((await receive())["type"])

    async def app(scope, receive, send):
        await receive()
        watcher = asyncio.ensure_future(watch(receive))
        try:
            await send(START)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(how)
            await watcher  # which routes start, and which has to hear of it even where no answer has begun
            raise

    async def leave() -> set[str]:
        async with aclosing(answer_messages(app, SCOPE, b"")) as messages:
            await anext(messages)
            if how == "cancelled":
                task = asyncio.ensure_future(anext(messages))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
        return set(ended)  # here, as the end of the loop cancels everything

    assert asyncio.run(leave()) == {how, "http.disconnect"}
