"""A pool whose models take no time and no memory: bytes are numbers, and engines note what becomes of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from tide_serve.models.pool import ModelPool, PooledModel


@dataclass(eq=False)
class StubEngine:
    """As much of an engine as the pool uses."""

    name: str
    healthy: bool = True
    closed: bool = False
    step_time: float = 0.0
    close_error: Exception | None = None
    chat_template: str | None = None
    tool_chat_template: str | None = None
    backend: Any = field(default_factory=lambda: SimpleNamespace(private_weights=""))

    def close(self, abort: bool = False) -> None:
        self.healthy, self.closed = False, True
        if self.close_error is not None:
            raise self.close_error

    def metrics(self) -> str:
        return "# TYPE tide_steps_total counter\ntide_steps_total 3\n# TYPE tide_running gauge\ntide_running 1\n"


@dataclass
class StubSource:
    """A bundle on a disk that a test may break.

    Args:
        error: raised instead of a load.
        may_load: a load waits for it.
        engines: made so far.
    """

    name: str
    bytes: int
    error: Exception | None = None
    max_queue: int = 100
    may_load: threading.Event = field(default_factory=threading.Event)
    engines: list[StubEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_load.set()
        self.options = SimpleNamespace(max_queue=self.max_queue)
        self.bundle = SimpleNamespace(manifest=SimpleNamespace(max_seq_len=64, tokenizer=None))

    def verified(self) -> StubSource:
        if self.error is not None:
            raise self.error
        return self

    def load(self, plan: object) -> StubEngine:
        assert self.may_load.wait(30)
        self.engines.append(StubEngine(self.name))
        return self.engines[-1]

    @property
    def loaded(self) -> int:
        """Bytes that its engines hold."""
        return self.bytes * sum(not engine.closed for engine in self.engines)


@dataclass(frozen=True)
class StubPool:
    """The pool, and its models by name."""

    pool: ModelPool
    sources: dict[str, StubSource]

    @classmethod
    def of(cls, memory: int, idle_unload: float | None = None, max_queue: int = 100, **sizes: int) -> StubPool:
        """A pool of models with these ``sizes``."""
        sources = {name: StubSource(name, size, max_queue=max_queue) for name, size in sizes.items()}
        models = [PooledModel(name, cast(Any, source), cast(Any, source)) for name, source in sources.items()]
        return cls(ModelPool(models, memory, idle_unload), sources)

    async def hold(self, name: str) -> StubEngine:
        """The engine, as a request gets it; the test releases it."""
        return cast(StubEngine, self.pool.take(name) or await self.pool.wait(name))

    def state(self, name: str) -> str:
        return str(self.pool.described(name)["state"])
