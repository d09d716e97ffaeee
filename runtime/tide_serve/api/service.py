"""What all routes share: the server's models and options, and the model that a request names."""

from __future__ import annotations

import hashlib
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import monotonic, time
from weakref import WeakKeyDictionary

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from tide_runtime import Engine, Generation

from tide_serve.api.logprobs import TokenTexts
from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError
from tide_serve.models.registry import ModelRegistry
from tide_serve.observe.request_record import ServerState, current_record

_HELD = "tide.held_models"  # in the scope of a request


@dataclass(frozen=True)
class ServedModel:
    """The model that one request names. Its engine stays loaded until the request's answer has ended.

    Args:
        name: as the request gives it.
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
        """Of the server's time limit; 0 or less: it is over."""
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
        """The model ``name`` (None: the first one), held until the answer to ``request`` has ended (see `HoldModels`).

        Raises ApiError (404) for a model that is not served here, and what `ModelRegistry.hold` raises.
        """
        name = self.model_names[0] if name is None else name
        self.check_model(name)
        deadline = monotonic() + self.config.request_timeout
        held: AsyncExitStack = request.scope[_HELD]
        engine = await held.enter_async_context(self.models.hold(name))
        if engine not in self._of_engines:
            self._of_engines[engine] = TokenTexts(engine.tokenizer), _fingerprint(engine)
        if (record := current_record.get()) is not None:
            record.model = name
        return ServedModel(self, name, engine, *self._of_engines[engine], deadline, self.models.adapter(name))

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
        record.prompt_tokens += generation.stats.prompt_tokens
        record.output_tokens += generation.stats.new_tokens
        if self.config.log_text:
            record.output_texts.append(generation.text or "")
        self.observer.generated(record, generation)


class HoldModels:
    """A middleware: what a request holds (`Service.model`) is released when its answer has ended, a stream's included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as held:
            scope[_HELD] = held
            await self._app(scope, receive, send)


def _fingerprint(engine: Engine) -> str:
    parts = [engine.target, engine.policy.name, *(info.sha256 for _, info in sorted(engine.manifest.files.items()))]
    return f"tide_{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"
