"""A GPU that executes CUDA graphs in Python: streams that run or record, conditional bodies, and the rules for them.

The builder has the part of cuda.core's interface that the runtime uses; test_cuda_core_api.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from runtime.host_device import HostDevice

Work = Callable[[], None]
_MOST_TURNS = 10_000  # of one loop: one that never ends would hang the tests


@dataclass
class SimulatedStream:
    gpu: SimulatedGpu
    handle: int

    def create_graph_builder(self) -> SimulatedBuilder:
        return SimulatedBuilder(self.gpu, self)


@dataclass(eq=False)
class SimulatedCondition:
    handle: int
    builder: SimulatedBuilder
    default_value: int | None


class SimulatedGpu(HostDevice):
    """``conditions``: handle → value. ``graph_launches``: how many graphs were launched from the host."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.gpu, self.core_stream = self, SimulatedStream(self, self.stream)
        self.conditions: dict[int, int] = {}
        self.recording: dict[int, SimulatedBuilder] = {}  # by the handle of the stream
        self.graph_launches = 0
        self._next = 1000

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def new_handle(self) -> int:
        self._next += 1
        return self._next

    def create_graph_builder(self) -> SimulatedBuilder:
        return SimulatedBuilder(self, SimulatedStream(self, self.new_handle()))

    def submit(self, stream: int, work: Work) -> None:
        """What a kernel's launch does: run now, or be recorded."""
        if stream in self.recording:
            self.recording[stream].work.append(work)
        else:
            assert stream == self.stream, "a kernel was launched on a stream that records nothing"
            work()

    def set_condition(self, handle: int, value: int) -> None:
        """cudaGraphSetConditional."""
        assert handle in self.conditions, "a kernel set a condition of a graph that is not running"
        self.conditions[handle] = value

    def allocate(self, count_bytes: int) -> Any:
        assert not self.recording, "memory was allocated while a graph was captured"
        return super().allocate(count_bytes)

    def copy(self, target: int, source: int, count_bytes: int) -> None:
        self.submit(self.stream, lambda: HostDevice.copy(self, target, source, count_bytes))

    def synchronize(self) -> None:
        assert not self.recording, "the host waited while a graph was captured"
        super().synchronize()


@dataclass(eq=False)
class SimulatedBuilder:
    gpu: SimulatedGpu
    stream: SimulatedStream
    work: list[Work] = field(default_factory=list)
    state: str = "new"
    inside: SimulatedBuilder | None = None
    defaults: dict[int, int | None] = field(default_factory=dict)

    def begin_building(self) -> SimulatedBuilder:
        assert self.state == "new" and self.stream.handle not in self.gpu.recording
        self.state, self.gpu.recording[self.stream.handle] = "building", self
        return self

    def close(self) -> None:
        """Ends a capture that has begun."""
        if self.state == "building":
            self.end_building()

    def end_building(self) -> SimulatedBuilder:
        assert self.state == "building"
        self.state = "built"
        del self.gpu.recording[self.stream.handle]
        return self

    def create_condition(self, default_value: int | None = None) -> SimulatedCondition:
        assert self.state == "building"
        condition = SimulatedCondition(self.gpu.new_handle(), self, default_value)
        self.defaults[condition.handle] = default_value
        return condition

    def if_then(self, condition: SimulatedCondition) -> SimulatedBuilder:
        body = self._body(condition)

        def work() -> None:
            if self.gpu.conditions[condition.handle]:
                body.execute()

        self.work.append(work)
        return body

    def while_loop(self, condition: SimulatedCondition) -> SimulatedBuilder:
        body = self._body(condition)

        def work() -> None:
            turns = 0
            while self.gpu.conditions[condition.handle]:
                turns += 1
                assert turns < _MOST_TURNS, "a loop does not end"
                body.execute()

        self.work.append(work)
        return body

    def embed(self, child: SimulatedBuilder) -> None:
        assert self.state == "building" and child.state == "built" and child.inside is None
        self.work.append(child.execute)

    def complete(self) -> SimulatedGraph:
        assert self.state == "built" and self.inside is None
        return SimulatedGraph(self)

    def execute(self) -> None:
        for work in self.work:
            work()

    def _body(self, condition: SimulatedCondition) -> SimulatedBuilder:
        assert self.state == "building"
        assert condition.builder is self, "a condition is used in another graph than the one it was made for"
        return SimulatedBuilder(self.gpu, SimulatedStream(self.gpu, self.gpu.new_handle()), inside=self, defaults=self.defaults)


@dataclass(eq=False)
class SimulatedGraph:
    builder: SimulatedBuilder

    def upload(self, stream: SimulatedStream) -> None:
        assert stream is self.builder.gpu.core_stream

    def launch(self, stream: SimulatedStream) -> None:
        """Conditions of the graph start at their defaults; those made inside a body must be set before they are asked."""
        gpu = self.builder.gpu
        assert stream is gpu.core_stream and not gpu.recording
        gpu.graph_launches += 1
        gpu.conditions = {handle: value for handle, value in self.builder.defaults.items() if value is not None}
        self.builder.execute()
        gpu.conditions = {}
