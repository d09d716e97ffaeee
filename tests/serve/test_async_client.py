"""OpenAI's asynchronous client, with many requests at once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import openai
from serve.live import Served
from tide_runtime import GenerationParams

Result = TypeVar("Result")
TURNS = [[{"role": "user", "content": f"add {number}"}] for number in range(12)]


def run(served: Served, work: Callable[[openai.AsyncOpenAI], Awaitable[Result]]) -> Result:
    async def with_client() -> Result:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await work(client)

    return asyncio.run(with_client())


def expected(served: Served) -> list[str | None]:
    prompts = [served.engine.chat_prompt(turns) for turns in TURNS]
    return [generation.text for generation in served.engine.generate(prompts, GenerationParams(max_new_tokens=16))]


def test_answers_do_not_mix(served: Served, model: str) -> None:
    """Breaks: under load a client gets another's answer."""

    async def ask(client: openai.AsyncOpenAI) -> list[Any]:
        fields: dict[str, Any] = {"model": model, "max_tokens": 16}
        return await asyncio.gather(*(client.chat.completions.create(messages=turns, **fields) for turns in TURNS))

    assert [made.choices[0].message.content for made in run(served, ask)] == expected(served)


def test_streams_do_not_mix(served: Served, model: str) -> None:
    """Breaks: under load a client gets another's tokens, or loses its own."""

    async def stream(client: openai.AsyncOpenAI, turns: Any) -> str:
        chunks = await client.chat.completions.create(model=model, messages=turns, max_tokens=16, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask(client: openai.AsyncOpenAI) -> list[str]:
        return await asyncio.gather(*(stream(client, turns) for turns in TURNS))

    assert run(served, ask) == expected(served)


def test_errors_are_the_clients_own(served: Served, model: str) -> None:
    """Breaks: a program that catches BadRequestError and reads its param."""

    async def ask(client: openai.AsyncOpenAI) -> openai.BadRequestError | None:
        try:
            await client.completions.create(model=model, prompt="Hi", suffix="x")
        except openai.BadRequestError as error:
            return error
        return None

    error = run(served, ask)
    assert error is not None and (error.param, error.code) == ("suffix", "unsupported_parameter")


def test_leaving_a_stream_ends_the_generation(served: Served, model: str) -> None:
    """Breaks: the engine works on for clients that have closed their stream."""

    async def leave(client: openai.AsyncOpenAI) -> None:
        fields: dict[str, Any] = {"max_tokens": 400, "n": 2, "extra_body": {"ignore_eos": True}}
        async with await client.completions.create(model=model, prompt="def", stream=True, **fields) as chunks:
            async for _ in chunks:
                return

    before = served.engine.stats().step_tokens
    run(served, leave)
    served.wait_idle()
    assert served.engine.stats().step_tokens - before < 700
