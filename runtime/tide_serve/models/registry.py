"""What a server needs of its models, and the registry of a server with one engine."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from asyncio import Future
from collections.abc import Sequence
from typing import Any

from tide_runtime import Engine
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.errors import ParamsError, PromptError
from tide_runtime.text.chat_template import analysed

from tide_serve.request.tools import described_calls

_log = logging.getLogger("tide_serve")
LONGEST_STEP_S = 600  # seconds after which a step counts as hung; it computes a part of a prompt at most


class ModelRegistry(ABC):
    """Engines by the names of their models. All methods but `close` are called in the event loop's thread.

    Args:
        names: of all models, those that are not loaded included; the first one is shown.
        only: all names are of one model.
    """

    names: Sequence[str]
    only: bool

    @abstractmethod
    def take(self, name: str) -> Engine | None:
        """The engine of one of ``names``, which stays loaded until `release`; None: it has to be waited for."""

    def wait(self, name: str) -> Future[Engine]:
        """What gives the engine as `take` does, once it is loaded. Raises QueueFullError where too many requests wait already.

        Its result has to be released even where the request that waited for it has ended.
        """
        raise NotImplementedError(f"the engine of {name} is always loaded")

    @abstractmethod
    def release(self, name: str) -> None:
        """An answer has ended: the engine that it has taken may be unloaded."""

    def adapter(self, name: str) -> str | None:
        """The adapter that one of ``names`` stands for, of those that its engine has; None: the model itself."""
        return None

    @abstractmethod
    def described(self, name: str) -> dict[str, Any]:
        """What /v1/models says about one of ``names`` in addition to OpenAI's fields."""

    @abstractmethod
    def summary(self) -> str:
        """What the server says when it starts."""

    @abstractmethod
    def chats(self, name: str) -> bool:
        """Whether one of ``names`` has a chat template, as far as is known."""

    @abstractmethod
    def failure(self) -> str | None:
        """Why only a restart helps; None: nothing is wrong."""

    @abstractmethod
    def obstacle(self) -> str | None:
        """Why new requests would be refused now; None: they are accepted."""

    @abstractmethod
    def metrics(self) -> str:
        """Metrics of the engines in the Prometheus text format."""

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """Close all engines, as `Engine.close` does. Later requests are refused."""


class OneEngine(ModelRegistry):
    """A registry of one engine that its caller has loaded, under any ``names``; each of its adapters is a model of its own name.

    Raises ParamsError where an adapter has a model's name.
    """

    def __init__(self, engine: Engine, names: Sequence[str] = ()) -> None:
        self.engine = engine
        own = names or (engine.manifest.model.name,)
        self.names = (*own, *engine.options.adapters)
        self.only = not engine.options.adapters
        if both := sorted({*own} & {*engine.options.adapters}):
            raise ParamsError(f"{', '.join(both)} is the name of a model and of an adapter; give one of them another name")
        log_notes(own[0], engine)

    def take(self, name: str) -> Engine:
        return self.engine

    def release(self, name: str) -> None:
        """The engine stays loaded."""

    def adapter(self, name: str) -> str | None:
        return name if name in self.engine.options.adapters else None

    def described(self, name: str) -> dict[str, Any]:
        parent = {"parent": self.names[0]} if self.adapter(name) is not None else {}
        return {**described(self.engine.manifest), **parent, **described_calls(self.engine)}

    def summary(self) -> str:
        return f"{self.names[0]}, policy {self.engine.policy.name}, target {self.engine.target}"

    def chats(self, name: str) -> bool:
        return has_chat_template(self.engine.manifest)

    def failure(self) -> str | None:
        return hanging(self.engine) if self.engine.healthy else "the engine has failed or is closed; its log says why"

    def obstacle(self) -> str | None:
        if not self.engine.healthy:
            return "the engine has failed or is closed"
        if (reason := hanging(self.engine)) is not None:
            return reason
        waiting = self.engine.stats().waiting
        most = self.engine.options.max_queue
        return f"the queue is full: {waiting} requests wait" if waiting >= most else None

    def metrics(self) -> str:
        return self.engine.metrics()

    def close(self, abort: bool = False) -> None:
        self.engine.close(abort)


def log_notes(name: str, engine: Engine) -> None:
    """Say what of a model's calls its template left open, and which chats it does not take as they are, once it is loaded."""
    if note := described_calls(engine).get("tool_calls_note"):
        _log.info("tool calls of %s: %s", name, note)
    for template in {engine.chat_template, engine.tool_chat_template} - {None, ""}:
        try:
            if notes := analysed(template or "").turns.notes:
                _log.info("the chat template of %s does not take every chat: %s", name, "; ".join(notes))
        except PromptError as error:
            _log.warning("model %s cannot chat: %s", name, error)


def hanging(engine: Engine) -> str | None:
    """Why ``engine`` will not go on by itself; None: it will."""
    return f"a step has not ended in {LONGEST_STEP_S} s: the engine hangs" if engine.step_time > LONGEST_STEP_S else None


def described(manifest: Manifest) -> dict[str, Any]:
    """What /v1/models says of a bundle: its context in tokens, whether it has a chat template, and whether it has early exits."""
    exits = manifest.calibration is not None and bool(manifest.calibration.exits)
    return {"max_model_len": manifest.max_seq_len, "chat": has_chat_template(manifest), "exits": exits}


def has_chat_template(manifest: Manifest) -> bool:
    tokenizer = manifest.tokenizer if manifest.embedding is None else None
    return tokenizer is not None and tokenizer.chat_template is not None
