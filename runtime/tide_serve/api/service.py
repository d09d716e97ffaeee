"""What all routes share: the server's models and options, and the model that a request names."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic, time
from weakref import WeakKeyDictionary

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from tide_runtime import Engine, Generation

from tide_serve.api.logprobs import TokenTexts
from tide_serve.config import ServeConfig
from tide_serve.errors import RETRY_S, ApiError
from tide_serve.models.registry import ModelRegistry
from tide_serve.observe.request_record import ServerState, current_record

_SCOPE_KEY = "tide.held_models"  # key in a request's ASGI scope


@dataclass(frozen=True)
class ServedModel:
    """The model that one request names. Its engine stays loaded until the request's answer has ended.

    Args:
        name: as the request gives it, where a model of the server has that name.
        token_texts, fingerprint: of the engine; ``fingerprint`` is the answer's ``system_fingerprint``, which changes with the
            bundle, the target and the depth policy.
        deadline: `monotonic` seconds at which the server's time limit for the request is over.
        adapter: the engine's LoRA adapter that answers are written with; None: the model itself.
    """

    service: Service
    name: str
    engine: Engine
    token_texts: TokenTexts
    fingerprint: str
    deadline: float
    adapter: str | None = None

    @property
    def config(self) -> ServeConfig:
        return self.service.config

    @property
    def seconds_left(self) -> float:
        """Seconds left of the server's time limit; 0 or less: it is over."""
        return self.deadline - monotonic()


@dataclass
class Service(ServerState):
    """A server with models. ``started``: Unix time, the ``created`` of the models."""

    models: ModelRegistry
    started: int = field(default_factory=lambda: int(time()))
    _of_engines: WeakKeyDictionary[Engine, tuple[TokenTexts, str]] = field(default_factory=WeakKeyDictionary, init=False)

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(self.models.names)

    async def model(self, request: Request, name: str | None) -> ServedModel:
        """The model ``name``, held until the answer to ``request`` has ended (see `HoldModels`). An only one has any name.

        Raises ApiError (404) for a model that is not served here, and what `ModelRegistry.wait` and its future raise.
        """
        name = self._served_name(name)
        if (record := current_record.get()) is not None:
            record.model = name
        deadline = monotonic() + self.config.request_timeout
        engine = self.models.take(name) or await self._waited(request, name, deadline)
        held: ExitStack = request.scope[_SCOPE_KEY]
        held.callback(self.models.release, name)
        if engine not in self._of_engines:
            self._of_engines[engine] = TokenTexts(engine.tokenizer), _fingerprint(engine)
        return ServedModel(self, name, engine, *self._of_engines[engine], deadline, self.models.adapter(name))

    async def writer(self, request: Request, name: str | None) -> ServedModel:
        """`model`, which writes text. Raises ApiError (404) for an embedding model besides."""
        model = await self.model(request, name)
        if model.engine.manifest.embedding is not None:
            message = f"the model {model.name!r} embeds texts and writes none; send them to /v1/embeddings, or name another model"
            raise ApiError(404, message, "model", "no_text")
        return model

    async def _waited(self, request: Request, name: str, deadline: float) -> Engine:
        """An engine that is not loaded yet. Raises ApiError beyond ``deadline`` and where the client leaves."""
        waiting = self.models.wait(name)
        client = ClientWatch(request, waiting.cancel)
        try:
            async with asyncio.timeout(deadline - monotonic()):
                return await waiting
        except BaseException as error:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:  # at the same moment
                self.models.release(name)
            if isinstance(error, TimeoutError):
                raise out_of_time(self.config) from error
            if client.left:
                raise ApiError(499, "the client has left") from error  # so this answer is not sent
            raise
        finally:
            client.close()

    def _served_name(self, name: str | None) -> str:
        if name not in self.model_names and self.models.only:
            return self.model_names[0]
        if name is None:
            message = f"model is missing; give one of {', '.join(self.model_names)}"
            raise ApiError(400, message, "model", "missing_required_parameter")
        self.check_model(name)
        return name

    def check_model(self, name: str) -> None:
        """Raise ApiError (404) for a model that is not served here."""
        if name not in self.model_names:
            message = f"the model {name!r} is not served here, expected one of {', '.join(self.model_names)}"
            raise ApiError(404, message, "model", "model_not_found")

    def generated(self, generation: Generation) -> None:
        """Note a generation that has ended, for the log and the traces. Routes call it once for each of a request's."""
        record = current_record.get()
        if record is None:  # the application runs without `tide_serve.http.middlewares.guard`
            return
        stats = generation.stats
        record.prompt_tokens += stats.prompt_tokens
        record.cached_tokens += stats.prefix_tokens
        record.output_tokens += stats.new_tokens
        record.first_token_s = max(record.first_token_s, stats.time_to_first_token)
        record.tokens_per_second += stats.tokens_per_second
        if self.config.log_text:
            record.output_texts.append(generation.text or "")
        self.observer.generated(record, generation)


class ClientWatch:
    """Calls ``on_leave`` when the client hangs up, until it is closed.

    ``left``: whether it has.
    """

    def __init__(self, request: Request, on_leave: Callable[[], object]) -> None:
        self.left = False
        self._request, self._on_leave = request, on_leave
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._on_leave()


def out_of_time(config: ServeConfig) -> ApiError:
    """The error of a request that got nothing done within the server's time limit."""
    message = f"nothing was done within {config.request_timeout:g} s, as the server is busy; send the request again later"
    return ApiError(503, message, None, "timeout", RETRY_S)


class HoldModels:
    """A middleware: what a request holds (`Service.model`) is released when its answer has ended, a stream's included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            scope[_SCOPE_KEY] = held
            await self._app(scope, receive, send)


def _fingerprint(engine: Engine) -> str:
    parts = [engine.target, engine.policy.name, *(info.sha256 for _, info in sorted(engine.manifest.files.items()))]
    return f"tide_{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"
