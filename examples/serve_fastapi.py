"""An engine inside an application of your own: a route that uses it, and OpenAI's API with the chat page below ``/llm``.

    pip install '.[serve]'
    python examples/serve_fastapi.py engine/ --port 8000
    curl -N localhost:8000/explain --data 'def add(a, b): return a + b' -H 'content-type: text/plain'

``http://localhost:8000/llm/`` is the chat page, and OpenAI's clients take ``http://localhost:8000/llm/v1`` as their base URL.
For the API alone there is `tide-serve`, which also has what a server needs on a network: limits, draining, TLS, logs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from fastapi import Body, FastAPI
from fastapi.responses import StreamingResponse
from tide_runtime import Engine, EngineOptions, GenerationHandle, TideError
from tide_serve import make_app
from tide_serve.errors import answer_error


def make_service(engine: Engine) -> FastAPI:
    """The application. Both parts share the engine's loop, its batches and its prefix cache."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close(abort=True)

    app = FastAPI(title="My application", lifespan=lifespan)
    app.mount("/llm", make_app(engine))
    app.add_exception_handler(TideError, answer_error)

    @app.post("/explain")
    async def explain(code: Annotated[str, Body(media_type="text/plain", max_length=20_000)]) -> StreamingResponse:
        """What ``code`` does, in plain text as it is generated."""
        prompt = engine.chat_prompt([{"role": "user", "content": f"Explain in one sentence what this code does:\n\n{code}"}])
        # A prompt that is too long and a full queue are refused here, before the answer has begun.
        handle = engine.submit(prompt, engine.default_params(max_new_tokens=80), timeout=60)
        return StreamingResponse(_texts(handle), media_type="text/plain; charset=utf-8")

    return app


async def _texts(handle: GenerationHandle) -> AsyncIterator[str]:
    """The text in pieces. When the client disconnects, this is cancelled, and so is the generation."""
    async for chunk in handle:
        yield chunk.text


def main(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory, as `tide-export --out` wrote it.")],
    port: Annotated[int, typer.Option(help="Port of this machine's loopback address to listen on.")] = 8000,
    policy: Annotated[str, typer.Option(help="Depth policy: full, exact, exit or auto.")] = "auto",
) -> None:
    """Serve the application."""
    import uvicorn

    engine = Engine.load(bundle, EngineOptions(policy=policy))
    uvicorn.run(make_service(engine), port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
