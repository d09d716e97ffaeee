"""The simulated GPU refuses what a real one refuses: a loop that passes here must not fail at its first capture there."""

from collections.abc import Callable
from typing import Any

import pytest
from runtime.simulated_gpu import RULES, CudaError, ProcessDied, SimulatedBuilder, SimulatedGpu


def begun(gpu: SimulatedGpu, mode: str = "relaxed") -> SimulatedBuilder:
    """A capture of the device's stream."""
    return gpu.core_stream.create_graph_builder().begin_building(mode)


def other(gpu: SimulatedGpu) -> SimulatedBuilder:
    """A capture of another stream."""
    return gpu.create_graph_builder().begin_building()


def body(gpu: SimulatedGpu) -> SimulatedBuilder:
    """The body of a conditional node, capturing."""
    builder = other(gpu)
    return builder.if_then(builder.create_condition(default_value=1)).begin_building()


def captured(gpu: SimulatedGpu, queue: Callable[[int], object]) -> SimulatedBuilder:
    """A graph of what ``queue`` queues on the device's stream."""
    builder = begun(gpu)
    queue(gpu.stream)
    return builder.end_building()


def allocated_and_freed(gpu: SimulatedGpu) -> SimulatedBuilder:
    return captured(gpu, lambda stream: gpu.free_async(stream, gpu.malloc_async(stream)))


def launched_twice(graph: Any, gpu: SimulatedGpu) -> None:
    graph.launch(gpu.core_stream)
    graph.launch(gpu.core_stream)


def launched_in_capture(gpu: SimulatedGpu) -> None:
    graph = captured(gpu, lambda stream: gpu.submit(stream, lambda: None)).complete()
    begun(gpu)
    graph.launch(gpu.core_stream)


def after_synchronization(gpu: SimulatedGpu) -> None:
    begun(gpu)
    with pytest.raises(CudaError):
        gpu.synchronize()
    gpu.submit(gpu.stream, lambda: None)


def instantiated_twice(gpu: SimulatedGpu) -> None:
    builder = allocated_and_freed(gpu)
    builder.complete()
    builder.complete()


def unused_handle(gpu: SimulatedGpu) -> None:
    builder = other(gpu)
    builder.create_condition(default_value=1)
    builder.end_building().complete()


def forked(gpu: SimulatedGpu) -> None:
    builder = begun(gpu)
    gpu.fork(gpu.stream)
    builder.end_building()


REFUSED: list[tuple[str, Callable[[SimulatedGpu], object]]] = [
    ("body nodes", lambda gpu: gpu.malloc_async(body(gpu).stream.handle)),
    ("body nodes", lambda gpu: gpu.launch_host_function(body(gpu).stream.handle, lambda: None)),
    ("body nodes", lambda gpu: body(gpu).embed(captured(gpu, lambda s: gpu.launch_host_function(s, lambda: None)))),
    ("child with memory", lambda gpu: other(gpu).embed(allocated_and_freed(gpu))),
    *(("synchronization", lambda gpu, mode=mode: (begun(gpu, mode), gpu.synchronize())) for mode in ("relaxed", "global")),
    ("invalidation", after_synchronization),
    *(("unsafe calls", lambda gpu, mode=mode: (begun(gpu, mode), gpu.malloc())) for mode in ("thread_local", "global")),
    ("handle of this graph", lambda gpu: other(gpu).if_then(other(gpu).create_condition(default_value=1))),
    ("handle with a node", unused_handle),
    ("one instantiation", instantiated_twice),
    ("memory is freed", lambda gpu: launched_twice(gpu.instantiate(captured(gpu, gpu.malloc_async), False), gpu)),
    ("launch while capturing", launched_in_capture),
    ("unjoined", forked),
]
# Rules that are seen in what graphs do, not by an error.
BY_BEHAVIOUR = {
    "child is cloned",
    "handle before its node",
    "host functions repeat",
    "copies repeat",
    "invalid graph",
}  # no error


@pytest.mark.parametrize(("rule", "breach"), REFUSED)
def test_a_breach_is_refused(rule: str, breach: Callable[[SimulatedGpu], object]) -> None:
    """Guards against loops and libraries that work in the simulation alone."""
    with pytest.raises(CudaError, match=f"^{rule}: "):
        breach(SimulatedGpu())
    assert {rule for rule, _ in REFUSED} | BY_BEHAVIOUR == set(RULES)


@pytest.mark.parametrize("breach", [SimulatedGpu.synchronize, lambda gpu: gpu.fork(gpu.stream)])
def test_a_builder_without_a_graph_must_not_be_touched(breach: Callable[[SimulatedGpu], object]) -> None:
    """Guards against a refused capture that takes the server along: with cuda-core up to 1.2 the graph is destroyed twice."""
    gpu = SimulatedGpu()
    builder = begun(gpu)
    with pytest.raises(CudaError):
        breach(gpu)
        builder.end_building()
    with pytest.raises(ProcessDied):
        builder.close()
    gpu.discard(builder)
    assert not gpu.recording


def test_what_a_graph_does_at_every_launch() -> None:
    """Guards against children that change after they are embedded, buffers released once per token, stale addresses, and frees
    of the runtime's own buffers that a capture records (`DeferredFrees`)."""
    gpu, ran, memory = SimulatedGpu(), list[str](), ["first"]

    def queue(stream: int) -> None:
        gpu.launch_host_function(stream, lambda: ran.append("host"))
        gpu.copy_from_host_async(stream, lambda: ran.append(memory[0]))

    graph = captured(gpu, queue).complete()
    graph.launch(gpu.core_stream)
    memory[0] = "second"
    graph.launch(gpu.core_stream)
    assert ran == ["host", "first", "host", "second"]
    child, parent = captured(gpu, lambda stream: gpu.submit(stream, lambda: ran.append("child"))), other(gpu)
    parent.embed(child)
    child.definition.recorded.append(captured(gpu, lambda s: gpu.submit(s, lambda: ran.append("late"))).definition.recorded[0])
    parent.end_building().complete().launch(gpu.core_stream)
    assert ran[4:] == ["child"]
    buffer = gpu.malloc_async(gpu.stream)
    with pytest.raises(CudaError, match="freed twice"):
        launched_twice(captured(gpu, lambda stream: gpu.free_async(stream, buffer)).complete(), gpu)
