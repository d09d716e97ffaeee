"""What a server needs of its models, and the registry of a server with one engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tide_runtime import Engine
from tide_runtime.errors import ParamsError


class ModelRegistry(ABC):
    """Engines by the names of their models. All methods but `close` are called in the event loop's thread.

    Args:
        names: of all models, those that are not loaded included; the first one is shown.
    """

    names: Sequence[str]

    @abstractmethod
    def hold(self, name: str) -> AbstractAsyncContextManager[Engine]:
        """The engine of one of ``names``, which stays loaded while the context is open."""

    def adapter(self, name: str) -> str | None:
        """The adapter that one of ``names`` stands for, of those that its engine has; None: the model itself."""
        return None

    @abstractmethod
    def described(self, name: str) -> dict[str, Any]:
        """What /v1/models says about one of ``names`` in addition to OpenAI's fields."""

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
        if both := sorted({*own} & {*engine.options.adapters}):
            raise ParamsError(f"{', '.join(both)} is the name of a model and of an adapter; give one of them another name")

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[Engine]:
        yield self.engine

    def adapter(self, name: str) -> str | None:
        return name if name in self.engine.options.adapters else None

    def described(self, name: str) -> dict[str, Any]:
        parent = {"parent": self.names[0]} if self.adapter(name) is not None else {}
        return {"max_model_len": self.engine.manifest.max_seq_len, **parent}

    def failure(self) -> str | None:
        return None if self.engine.healthy else "the engine has failed or is closed; its log says why"

    def obstacle(self) -> str | None:
        if not self.engine.healthy:
            return "the engine has failed or is closed"
        waiting, most = self.engine.stats().waiting, self.engine.options.max_queue
        return f"the queue is full: {waiting} requests wait" if waiting >= most else None

    def metrics(self) -> str:
        return self.engine.metrics()

    def close(self, abort: bool = False) -> None:
        self.engine.close(abort)
