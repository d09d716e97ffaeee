"""Clients that mean harm, in a process of their own: what each does to a server until it is told to stop.

Each attack sends at a steady rate, so that what is measured is the harm of a request and not the attacker's number of cores.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from asyncio import StreamReader, StreamWriter
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

_CONNECTIONS = 1000
_MIB = 2**20
_START_S, _ANSWER_S = 30, 60
_SHORT = {"model": "tide", "prompt": [5, 6, 7, 8] * 4, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}


@dataclass
class Target:
    """A server under attack.

    Args:
        rate: attacks per second.
        answers: status → how often; 0: the connection ended without an answer.
    """

    host: str
    port: int
    rate: float
    answers: Counter[int]

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[StreamReader, StreamWriter]]:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=4096)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send(self, body: bytes, chunked: bool = False) -> None:
        """One request, whose status is noted."""
        size = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + size + b"\r\n\r\n"
        async with self.connection() as (reader, writer):
            writer.write(head + (b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n" if chunked else body))
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self.answers[int((await reader.readline() or b"- 0").split()[1])] += 1
            except (ConnectionError, TimeoutError):
                self.answers[0] += 1

    async def steadily(self, attack: Callable[[], Awaitable[None]]) -> None:
        """Start an attack at each tick, whether or not the earlier ones have ended, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(_quietly(attack()))
                await asyncio.sleep(1 / self.rate)


async def _quietly(attack: Awaitable[None]) -> None:
    with suppress(OSError):  # the server has closed the connection, as it should
        await attack


def body(**fields: Any) -> bytes:
    return json.dumps(_SHORT | fields).encode()


def _nested_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# Bodies that are sent in turn; every other one of the large ones without its size in the headers.
BODIES: dict[str, Callable[[], list[bytes]]] = {
    "large_bodies": lambda: [body(prompt="x" * 10 * _MIB)],
    "stop_lists": lambda: [body(stop=[f"{number:05}" for number in range(100_000)]), body(stop="x" * 100_000)],
    "nested_schemas": lambda: [body(response_format=_nested_schema(300)), b"[" * 1_000_000],
    "invalid_utf8": lambda: [body(prompt="x" * _MIB + "END").replace(b"END", b"\xff\xfe")],
}
REFUSALS = {"large_bodies": 413, "stop_lists": 400, "nested_schemas": 400, "invalid_utf8": 400}


async def bodies(name: str, target: Target) -> None:
    """The bodies of that name."""
    sent = BODIES[name]()
    turn = count()

    async def attack() -> None:
        number = next(turn)
        await target.send(sent[number % len(sent)], chunked=name == "large_bodies" and number % 2 == 1)

    await target.steadily(attack)


async def slow_headers(target: Target) -> None:
    """Slowloris: headers of which a byte comes every second."""

    async def attack() -> None:
        async with target.connection() as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nX: ")
            while not reader.at_eof():
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(1)

    await target.steadily(attack)


async def idle_connections(target: Target) -> None:
    """1,000 connections that send nothing, or half a request; each is opened again when the server closes it."""

    async def hold(number: int) -> None:
        while True:
            async with target.connection() as (reader, writer):
                if number % 2:
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
                await reader.read()
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as tasks:
        for number in range(_CONNECTIONS):
            tasks.create_task(_forever(hold, number))


async def _forever(hold: Callable[[int], Awaitable[None]], number: int) -> None:
    while True:
        await _quietly(hold(number))


async def streams(read: bool, target: Target) -> None:
    """Streams whose client does not read; or the same streams, read at once: what the generations cost by themselves."""
    held = list[StreamWriter]()  # an unread answer stays unread

    async def attack() -> None:
        reader, writer = await asyncio.open_connection(target.host, target.port, limit=1)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        content = body()
        writer.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        if read:
            target.answers[int((await reader.read(4096)).split()[1])] += 1
            while b"[DONE]" not in await reader.read(65536):
                pass
            writer.close()
        else:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            held.append(writer)

    await target.steadily(attack)


Attack = Callable[[Target], Awaitable[None]]

ATTACKS: dict[str, Attack] = {
    "slow_readers": partial(streams, False),
    "slow_headers": slow_headers,
    **{name: partial(bodies, name) for name in BODIES},
    "idle_connections": idle_connections,
}
CONTROLS: dict[str, Attack] = {"slow_readers": partial(streams, True)}  # compared with, where that is not silence


@contextmanager
def attacking(attack: Attack, host: str, port: int, rate: float) -> Iterator[Counter[int]]:
    """Run ``attack`` in a process of its own; the statuses of its answers are there after the block."""
    answers: Counter[int] = Counter()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_attack, args=(attack, host, port, rate, there))
    process.start()
    try:
        if not here.poll(_START_S):
            raise RuntimeError("the attackers' process did not start")
        here.recv()
        yield answers
        here.send(None)
        found, failure = here.recv()
        if failure is not None:
            raise RuntimeError(f"the attackers failed: {failure}")
        answers.update(found)
    finally:
        process.join(_START_S)
        process.kill()


def _attack(attack: Attack, host: str, port: int, rate: float, told: Connection) -> None:
    answers: Counter[int] = Counter()

    async def until_told() -> str | None:
        task = asyncio.ensure_future(attack(Target(host, port, rate, answers)))
        told.send(None)
        await asyncio.to_thread(told.recv)
        task.cancel()
        await asyncio.wait([task])
        return None if task.cancelled() else repr(task.exception())

    told.send((answers, asyncio.run(until_told())))
