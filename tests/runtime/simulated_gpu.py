"""A GPU that executes CUDA graphs in Python: streams that run or record, and the rules that the driver enforces.

The builder has the part of cuda.core's interface that the runtime uses; test_cuda_core_api.py holds the two together.
`RULES` names the source of every rule; test_simulated_gpu.py breaks each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from runtime.host_device import HostDevice

Work = Callable[[], None]
_MAX_TURNS = 10_000  # of one loop: one that never ends would hang the tests
_IN_BODIES = {"KERNEL", "EMPTY", "GRAPH", "MEMSET", "MEMCPY", "CONDITIONAL"}
_MEMORY = {"MEM_ALLOC", "MEM_FREE"}

# Rule → where it stands: a function of the driver API's documentation, or another source.
RULES = {
    "body nodes": "CUDA_CONDITIONAL_NODE_PARAMS: kernels, empty nodes, child graphs, memsets, memcopies and conditionals alone",
    "child with memory": "cuGraphAddChildGraphNode: no allocation nodes, free nodes or conditional nodes",
    "child is cloned": "cuGraphAddChildGraphNode",
    "handle before its node": "CUDA_CONDITIONAL_NODE_PARAMS",
    "handle of this graph": "cuGraphConditionalHandleCreate: a conditional node in this graph or one of its children",
    "handle with a node": "cuGraphConditionalHandleCreate: otherwise instantiation may fail",
    "one instantiation": "cuGraphAddMemAllocNode: of a graph with allocations one may exist at a time",
    "memory is freed": "cuGraphLaunch: unless instantiated with CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH",
    "unsafe calls": "cuThreadExchangeStreamCaptureMode: unless the capture began with CU_STREAM_CAPTURE_MODE_RELAXED",
    "synchronization": "CUDA programming guide, CUDA Graphs, Prohibited and Unhandled Operations",
    "invalidation": "CUDA programming guide, CUDA Graphs, Invalidation: errors until the capture is ended, which gives no graph",
    "invalid graph": "cuda-python issue 2834: closing an invalid capture's builder destroys its graph again",
    "launch while capturing": "onnxruntime pull request 32081: cudaErrorStreamCaptureUnsupported",
    "unjoined": "CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED: ending the capture gives no graph",
    "copies repeat": "cuGraphMemcpyNodeGetParams: a memcpy node has addresses of its own",
    "host functions repeat": "onnxruntime, CudaStream::CleanUpOnRunEnd: every launch replays it, and releases again",
}


class CudaError(Exception):
    """Stands for cuda.core's CUDAError, which is not among its public names."""


class ProcessDied(BaseException):
    """Stands for a fault in the driver, which no ``except`` catches."""


def _broken(rule: str) -> CudaError:
    return CudaError(f"{rule}: {RULES[rule]}")


@dataclass(frozen=True, eq=False)
class SimulatedNode:
    kind: str
    work: Work
    child_graph: SimulatedDefinition | None = None
    of_host_memory: bool = False

    @property
    def type(self) -> Any:
        return SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{self.kind}")


@dataclass(eq=False)
class SimulatedDefinition:
    """A graph's nodes, in the order of their only stream."""

    recorded: list[SimulatedNode] = field(default_factory=list)

    def nodes(self) -> set[SimulatedNode]:
        return set(self.recorded)

    def kinds(self) -> set[str]:
        """Types of all nodes, with those of child graphs."""
        children = (node.child_graph.kinds() for node in self.recorded if node.child_graph is not None)
        return {node.kind for node in self.recorded}.union(*children)

    def cloned(self) -> SimulatedDefinition:
        return SimulatedDefinition([_cloned(node) for node in self.recorded])

    def execute(self) -> None:
        for node in self.recorded:
            node.work()


def _cloned(node: SimulatedNode) -> SimulatedNode:
    if node.child_graph is None:
        return node
    child = node.child_graph.cloned()
    return SimulatedNode(node.kind, child.execute, child)


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
    has_node: bool = False


class SimulatedGpu(HostDevice):
    """``conditions``: handle → value. ``graph_launches``: how many graphs were launched from the host."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.gpu, self.core_stream = self, SimulatedStream(self, self.stream)
        self.conditions: dict[int, int] = {}
        self.recording: dict[int, SimulatedBuilder] = {}  # by the handle of the stream
        self.live: set[int] = set()  # stream-ordered allocations that are not freed
        self.graph_launches = 0
        self.without_graph: list[SimulatedBuilder] = []  # builders that must be discarded, or they take the process along
        self._next = 1000

    def capturing(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def is_capturing(self) -> bool:  # type: ignore[override]
        return bool(self.recording)

    def new_handle(self) -> int:
        self._next += 1
        return self._next

    def create_graph_builder(self) -> SimulatedBuilder:
        return SimulatedBuilder(self, SimulatedStream(self, self.new_handle()))

    def instantiate(self, builder: SimulatedBuilder, frees_memory: bool) -> SimulatedGraph:
        graph = builder.complete(SimpleNamespace(auto_free_on_launch=frees_memory))
        graph.upload(self.core_stream)
        return graph

    def is_invalid(self, builder: SimulatedBuilder) -> bool:
        return builder.state == "building" and builder.invalid is not None

    def discard(self, builder: SimulatedBuilder) -> None:
        assert self.is_invalid(builder) or builder.graph_is_gone
        builder.state = "discarded"
        self.recording.pop(builder.stream.handle, None)

    def copies_host_memory(self, node: SimulatedNode) -> bool:
        return node.of_host_memory

    def submit(self, stream: int, work: Work, kind: str = "KERNEL", of_host_memory: bool = False) -> None:
        """What a kernel's launch does: run now, or be recorded."""
        if stream in self.recording:
            self.recording[stream].record(SimulatedNode(kind, work, of_host_memory=of_host_memory))
        else:
            assert stream == self.stream, "a kernel was launched on a stream that records nothing"
            work()

    def malloc_async(self, stream: int) -> int:
        """cudaMallocAsync: an address, which a capture fixes for all launches of the graph."""
        address = self.new_handle()
        self.submit(stream, lambda: self.live.add(address), "MEM_ALLOC")
        return address

    def free_async(self, stream: int, address: int) -> None:
        """cudaFreeAsync."""

        def free() -> None:
            if address not in self.live:
                raise CudaError("an allocation is freed twice")
            self.live.remove(address)

        self.submit(stream, free, "MEM_FREE")

    def copy_from_host_async(self, stream: int, work: Work) -> None:
        """cudaMemcpyAsync from memory that the runtime has not pinned."""
        self.submit(stream, work, "MEMCPY", of_host_memory=True)

    def fork(self, stream: int) -> None:
        """An event of ``stream`` that another stream waits for, which never joins again."""
        if stream in self.recording:
            self.recording[stream].forked = True

    def launch_host_function(self, stream: int, work: Work) -> None:
        """cudaLaunchHostFunc."""
        self.submit(stream, work, "HOST")

    def malloc(self) -> None:
        """cudaMalloc, a potentially unsafe call; as cudaMemcpy."""
        for builder in self.recording.values():
            if builder.mode != "relaxed":
                builder.invalidate("unsafe calls")

    def synchronize_stream(self, stream: int) -> None:
        """cudaStreamSynchronize."""
        if stream in self.recording:
            self.recording[stream].invalidate("synchronization")

    def set_condition(self, handle: int, value: int) -> None:
        """cudaGraphSetConditional."""
        assert handle in self.conditions, "a kernel set a condition of a graph that is not running"
        self.conditions[handle] = value

    def allocate(self, count_bytes: int) -> Any:
        assert not self.recording, "memory was allocated while a graph was captured"
        return super().allocate(count_bytes)

    def zero(self, pointer: int, count_bytes: int) -> None:
        self.submit(self.stream, lambda: HostDevice.zero(self, pointer, count_bytes), "MEMSET")

    def upload(self, pointer: int, source: Any) -> None:
        self._copied(lambda: HostDevice.upload(self, pointer, source))

    def download(self, target: Any, pointer: int) -> None:
        self._copied(lambda: HostDevice.download(self, target, pointer))

    def copy(self, target: int, source: int, count_bytes: int) -> None:
        self._copied(lambda: HostDevice.copy(self, target, source, count_bytes))

    def synchronize(self) -> None:
        self.synchronize_stream(self.stream)
        super().synchronize()

    def _copied(self, copy: Work) -> None:
        self.submit(self.stream, copy, "MEMCPY")


@dataclass(eq=False)
class SimulatedBuilder:
    gpu: SimulatedGpu
    stream: SimulatedStream
    state: str = "new"
    inside: SimulatedBuilder | None = None
    conditions: list[SimulatedCondition] = field(default_factory=list)  # of the whole graph, with its bodies
    definition: SimulatedDefinition = field(default_factory=SimulatedDefinition)
    mode: str = "relaxed"
    invalid: CudaError | None = None
    forked: bool = False
    graph_is_gone: bool = False  # the driver has destroyed it, and closing the builder would destroy it again
    instances: list[SimulatedGraph] = field(default_factory=list)

    @property
    def graph_definition(self) -> SimulatedDefinition:
        assert self.state == "built", "the definition of a primary builder is available after end_building"
        return self.definition

    def begin_building(self, mode: str | None = "relaxed") -> SimulatedBuilder:
        assert self.state == "new" and self.stream.handle not in self.gpu.recording
        self.state, self.mode, self.gpu.recording[self.stream.handle] = "building", mode or "relaxed", self
        return self

    def close(self) -> None:
        """Ends a capture that has begun, and frees the graph of one that has ended."""
        if self.state == "discarded":
            return
        if self.invalid is not None or self.graph_is_gone:
            raise ProcessDied(RULES["invalid graph"])
        if self.state == "building":
            self._end_capture()
        self.state = "closed"

    def end_building(self) -> SimulatedBuilder:
        assert self.state == "building"
        if self.invalid is not None:
            raise ProcessDied(RULES["invalid graph"])
        self._end_capture()
        self.state = "built"
        return self

    def _end_capture(self) -> None:
        del self.gpu.recording[self.stream.handle]
        if self.forked:
            self.graph_is_gone = True
            self.gpu.without_graph.append(self)
            raise _broken("unjoined")

    def create_condition(self, default_value: int | None = None) -> SimulatedCondition:
        assert self.state == "building"
        condition = SimulatedCondition(self.gpu.new_handle(), self, default_value)
        self.conditions.append(condition)
        return condition

    def if_then(self, condition: SimulatedCondition) -> SimulatedBuilder:
        body = self._body(condition)

        def work() -> None:
            if self.gpu.conditions[condition.handle]:
                body.definition.execute()

        self.record(SimulatedNode("CONDITIONAL", work))
        return body

    def switch(self, condition: SimulatedCondition, count: int) -> tuple[SimulatedBuilder, ...]:
        bodies = tuple(self._body(condition) for _ in range(count))

        def work() -> None:
            if self.gpu.conditions[condition.handle] < count:
                bodies[self.gpu.conditions[condition.handle]].definition.execute()

        self.record(SimulatedNode("CONDITIONAL", work))
        return bodies

    def while_loop(self, condition: SimulatedCondition) -> SimulatedBuilder:
        body = self._body(condition)

        def work() -> None:
            turns = 0
            while self.gpu.conditions[condition.handle]:
                turns += 1
                assert turns < _MAX_TURNS, "a loop does not end"
                body.definition.execute()

        self.record(SimulatedNode("CONDITIONAL", work))
        return body

    def embed(self, child: SimulatedBuilder) -> None:
        assert self.state == "building" and child.state == "built" and child.inside is None
        if child.definition.kinds() & {*_MEMORY, "CONDITIONAL"}:
            self.invalidate("child with memory")
        if self.inside is not None and child.definition.kinds() - _IN_BODIES:
            self.invalidate("body nodes")
        clone = child.definition.cloned()
        self.record(SimulatedNode("GRAPH", clone.execute, clone))

    def complete(self, options: Any = None) -> SimulatedGraph:
        assert self.state == "built" and self.inside is None
        if not all(condition.has_node for condition in self.conditions):
            raise _broken("handle with a node")
        if self.instances and self.definition.kinds() & _MEMORY:
            raise _broken("one instantiation")
        self.instances.append(SimulatedGraph(self, bool(options and options.auto_free_on_launch)))
        return self.instances[-1]

    def record(self, node: SimulatedNode) -> None:
        if self.invalid is not None:
            raise _broken("invalidation") from self.invalid
        if self.inside is not None and node.kind not in _IN_BODIES:
            self.invalidate("body nodes")
        self.definition.recorded.append(node)

    def invalidate(self, rule: str) -> None:
        """What an invalid operation does: it fails, and so does everything up to the end of the capture."""
        self.invalid = _broken(rule)
        raise self.invalid

    def _body(self, condition: SimulatedCondition) -> SimulatedBuilder:
        assert self.state == "building"
        if condition.builder not in self._with_parents():
            raise _broken("handle of this graph")
        condition.has_node = True
        stream = SimulatedStream(self.gpu, self.gpu.new_handle())
        return SimulatedBuilder(self.gpu, stream, inside=self, conditions=self.conditions)

    def _with_parents(self) -> Iterator[SimulatedBuilder]:
        builder: SimulatedBuilder | None = self
        while builder is not None:
            yield builder
            builder = builder.inside


@dataclass(eq=False)
class SimulatedGraph:
    builder: SimulatedBuilder
    auto_free: bool = False

    def upload(self, stream: SimulatedStream) -> None:
        assert stream is self.builder.gpu.core_stream

    def launch(self, stream: SimulatedStream) -> None:
        """Conditions of the graph start at their defaults; those made inside a body must be set before they are asked."""
        gpu = self.builder.gpu
        assert stream is gpu.core_stream
        if gpu.recording:
            raise _broken("launch while capturing")
        gpu.graph_launches += 1
        outside = set(gpu.live) - self._unfreed
        if self._unfreed & gpu.live and not self.auto_free:
            raise _broken("memory is freed")
        gpu.live -= self._unfreed
        gpu.conditions = {c.handle: c.default_value for c in self.builder.conditions if c.default_value is not None}
        self.builder.definition.execute()
        gpu.conditions, self._unfreed = {}, gpu.live - outside

    def __post_init__(self) -> None:
        self._unfreed: set[int] = set()  # allocations of the last launch
