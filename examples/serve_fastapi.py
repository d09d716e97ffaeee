"""A TIDE engine behind HTTP: text as it is generated, and clients that hang up in the middle.

    pip install 'tide-llm[serve]'
    python examples/serve_fastapi.py engine/ --port 8000
    curl -N localhost:8000/generate -d '{"prompt": "class Stack:", "max_new_tokens": 40}' -H 'content-type: application/json'

POST /generate answers with JSON lines, one ``{"text": …, "token": …}`` per token; the last one has ``"done": {…}`` with the
whole text besides. GET /metrics gives totals for Prometheus, GET /health the model's name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field
from tide_runtime import Chunk, Engine, EngineOptions, GenerationHandle, GenerationParams, QueueFullError, TideError


class GenerateRequest(BaseModel):
    """``prompt``: text or token ids; the rest as in `GenerationParams`."""

    prompt: str | list[int]
    max_new_tokens: int = Field(default=64, ge=1)
    temperature: float = Field(default=0.0, ge=0.0)
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    ignore_eos: bool = False

    def params(self) -> GenerationParams:
        """Raises ParamsError for values out of range."""
        return GenerationParams(**self.model_dump(exclude={"prompt"}))


def make_app(engine: Engine) -> FastAPI:
    """The service. All requests join the engine's loop, which bounds how many run, how many wait, and their memory."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title=f"TIDE: {engine.manifest.model.name}", lifespan=lifespan)

    @app.exception_handler(TideError)
    async def refuse(request: Request, error: TideError) -> JSONResponse:
        busy = isinstance(error, QueueFullError)
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=429 if busy else 400)

    @app.post("/generate")
    async def generate(request: GenerateRequest) -> StreamingResponse:
        # A prompt or parameter that is wrong is refused here, before the answer has begun.
        handle = engine.submit(request.prompt, request.params())
        return StreamingResponse(_lines(handle), media_type="application/jsonl")

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(engine.metrics())

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"model": engine.manifest.model.name, "policy": engine.policy.name}

    return app


async def _lines(handle: GenerationHandle) -> AsyncIterator[str]:
    """JSON lines of the chunks. When the client hangs up, this is cancelled, and so is the generation."""
    async for chunk in handle:
        yield _line(chunk)


def _line(chunk: Chunk) -> str:
    line: dict[str, Any] = {"text": chunk.text, "token": chunk.token_id}
    if chunk.generation is not None:
        done, stats = chunk.generation, chunk.generation.stats
        line["done"] = {
            "text": done.text,
            "token_ids": list(done.token_ids),
            "finish_reason": done.finish_reason,
            "time_to_first_token_ms": 1e3 * stats.time_to_first_token,
            "layers_per_token": stats.layers_per_token,
        }
    return json.dumps(line, ensure_ascii=False) + "\n"


def main(
    bundle: Annotated[Path, typer.Argument(help="The bundle's directory, as `tide-export --out` wrote it.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    policy: Annotated[str, typer.Option(help="Depth policy: full, exact, exit or auto.")] = "auto",
    at_once: Annotated[int, typer.Option(help="Requests that run together; more wait.")] = 16,
) -> None:
    """Serve a bundle over HTTP."""
    import uvicorn

    engine = Engine.load(bundle, EngineOptions(policy=policy, max_batch=at_once))
    uvicorn.run(make_app(engine), host=host, port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
