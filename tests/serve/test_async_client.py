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


def test_streams_do_not_mix(served: Served, model: str) -> None:
    """Breaks: under load a client gets another's tokens, or loses its own."""

    async def stream(client: openai.AsyncOpenAI, turns: Any) -> str:
        chunks = await client.chat.completions.create(model=model, messages=turns, max_tokens=16, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask(client: openai.AsyncOpenAI) -> list[str]:
        return await asyncio.gather(*(stream(client, turns) for turns in TURNS))

    assert run(served, ask) == expected(served)
