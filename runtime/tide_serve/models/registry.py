"""What a server needs of its models, and the registry of a server with one engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tide_runtime import Engine


class ModelRegistry(ABC):
    """Engines by the names of their models. All methods but `close` are called in the event loop's thread.

    Args:
        names: of all models, those that are not loaded included; the first one is shown.
    """

    names: Sequence[str]

    @abstractmethod
    def hold(self, name: str) -> AbstractAsyncContextManager[Engine]:
        """The engine of one of ``names``, which stays loaded while the context is open."""

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
    """A registry of one engine that its caller has loaded, under any ``names``."""

    def __init__(self, engine: Engine, names: Sequence[str] = ()) -> None:
        self.engine = engine
        self.names = names or (engine.manifest.model.name,)

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[Engine]:
        yield self.engine

    def described(self, name: str) -> dict[str, Any]:
        return {"max_model_len": self.engine.manifest.max_seq_len}

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
