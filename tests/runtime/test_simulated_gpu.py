"""The simulated GPU refuses what a real one refuses: a loop that passes here must not fail at its first capture there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from runtime.simulated_gpu import RULES, CudaError, ProcessDied, SimulatedBuilder, SimulatedGpu


def body(gpu: SimulatedGpu) -> SimulatedBuilder:
    """The body of a conditional node, capturing."""
    builder = gpu.create_graph_builder().begin_building()
    return builder.if_then(builder.create_condition(default_value=1)).begin_building()


def captured(gpu: SimulatedGpu, queue: Callable[[int], object], mode: str = "relaxed") -> SimulatedBuilder:
    """A graph of what ``queue`` queues on the device's stream."""
    builder = gpu.core_stream.create_graph_builder().begin_building(mode)
    queue(gpu.stream)
    return builder.end_building()


def allocated_and_freed(gpu: SimulatedGpu) -> SimulatedBuilder:
    return captured(gpu, lambda stream: gpu.free_async(stream, gpu.malloc_async(stream)))


def refused(rule: str) -> pytest.RaisesExc[CudaError]:
    return pytest.raises(CudaError, match=f"^{rule}: ")


@pytest.mark.parametrize("rule", [rule for rule, (name, _) in RULES.items() if name is not None])
def test_rules_are_those_of_the_driver(rule: str) -> None:
    """Guards against a simulated GPU that is strict about rules that CUDA does not have, or has dropped."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
    name, words = RULES[rule]
    documented = " ".join(str(getattr(driver, str(name)).__doc__).split())
    assert words in documented


@pytest.mark.parametrize("queue", ["malloc_async", "launch_host_function"])
def test_bodies_take_neither_memory_nor_host_nodes(queue: str) -> None:
    """Guards against loops over cuBLAS and ONNX Runtime in conditional bodies."""
    gpu = SimulatedGpu()
    inner = body(gpu)
    work = [] if queue == "malloc_async" else [lambda: None]
    with refused("body nodes"):
        getattr(gpu, queue)(inner.stream.handle, *work)


def test_child_graphs_with_memory_nodes_are_refused() -> None:
    """Guards against embedding what ONNX Runtime has captured."""
    gpu = SimulatedGpu()
    parent = gpu.create_graph_builder().begin_building()
    with refused("child with memory"):
        parent.embed(allocated_and_freed(gpu))


def test_host_functions_in_child_graphs_of_bodies_are_refused() -> None:
    """Guards against the same node one level deeper."""
    gpu = SimulatedGpu()
    child = captured(gpu, lambda stream: gpu.launch_host_function(stream, lambda: None))
    with refused("body nodes"):
        body(gpu).embed(child)


def test_child_graphs_are_cloned_when_embedded() -> None:
    """Guards against a child graph that is changed after the loop has embedded it."""
    gpu, ran = SimulatedGpu(), list[str]()
    child = captured(gpu, lambda stream: gpu.submit(stream, lambda: ran.append("first")))
    parent = gpu.create_graph_builder().begin_building()
    parent.embed(child)
    child.definition.recorded.append(captured(gpu, lambda s: gpu.submit(s, lambda: ran.append("late"))).definition.recorded[0])
    parent.end_building().complete().launch(gpu.core_stream)
    assert ran == ["first"]


@pytest.mark.parametrize("mode", ["relaxed", "thread_local", "global"])
def test_synchronization_invalidates_a_capture(mode: str) -> None:
    """Guards against a library that waits for its stream in every run."""
    gpu = SimulatedGpu()
    builder = gpu.core_stream.create_graph_builder().begin_building(mode)
    with refused("synchronization"):
        gpu.synchronize()
    with refused("invalidation"):
        gpu.submit(gpu.stream, lambda: None)
    assert gpu.is_invalid(builder)


@pytest.mark.parametrize("end", ["close", "end_building"])
def test_a_builder_of_an_invalid_capture_must_not_be_touched(end: str) -> None:
    """Guards against a refused capture that takes the server along: with cuda-core up to 1.2 the graph is destroyed twice."""
    gpu = SimulatedGpu()
    builder = gpu.core_stream.create_graph_builder().begin_building()
    with refused("synchronization"):
        gpu.synchronize()
    with pytest.raises(ProcessDied):
        getattr(builder, end)()
    gpu.discard(builder)
    assert not gpu.recording


@pytest.mark.parametrize("mode", ["relaxed", "thread_local", "global"])
def test_unsafe_calls_invalidate_strict_captures(mode: str) -> None:
    """Guards against a capture mode in which a library's cudaMalloc fails."""
    gpu = SimulatedGpu()
    gpu.core_stream.create_graph_builder().begin_building(mode)
    if mode == "relaxed":
        gpu.malloc()
        return
    with refused("unsafe calls"):
        gpu.malloc()


def test_a_condition_belongs_to_its_graph_or_one_inside_it() -> None:
    """Guards against a handle of another graph, which a kernel could not set."""
    gpu = SimulatedGpu()
    outer = gpu.create_graph_builder().begin_building()
    condition, other = outer.create_condition(default_value=1), gpu.create_graph_builder().begin_building()
    with refused("handle of this graph"):
        other.if_then(condition)
    inner = outer.if_then(outer.create_condition(default_value=1)).begin_building()
    inner.if_then(condition)


def test_a_condition_without_a_node_is_not_instantiated() -> None:
    """Guards against handles that are made and forgotten."""
    gpu = SimulatedGpu()
    builder = gpu.create_graph_builder().begin_building()
    builder.create_condition(default_value=1)
    with refused("handle with a node"):
        builder.end_building().complete()


def test_memory_nodes_allow_one_instantiation() -> None:
    gpu = SimulatedGpu()
    builder = allocated_and_freed(gpu)
    builder.complete()
    with refused("one instantiation"):
        builder.complete()


@pytest.mark.parametrize("frees_memory", [False, True])
def test_a_graph_with_unfreed_memory_is_not_launched_again(frees_memory: bool) -> None:
    """Guards against graphs that fail at their second launch, the second token."""
    gpu = SimulatedGpu()
    graph = gpu.instantiate(captured(gpu, gpu.malloc_async), frees_memory)
    graph.launch(gpu.core_stream)
    if frees_memory:
        graph.launch(gpu.core_stream)
        return
    with refused("memory is freed"):
        graph.launch(gpu.core_stream)


def test_a_free_that_belongs_to_no_launch_fails_at_the_second() -> None:
    """Guards against frees of the runtime's own buffers that a capture records (`DeferredFrees`)."""
    gpu = SimulatedGpu()
    buffer = gpu.malloc_async(gpu.stream)
    graph = captured(gpu, lambda stream: gpu.free_async(stream, buffer)).complete()
    graph.launch(gpu.core_stream)
    with pytest.raises(CudaError, match="freed twice"):
        graph.launch(gpu.core_stream)


def test_graphs_are_not_launched_into_a_capture() -> None:
    """Guards against a library that launches graphs of its own."""
    gpu = SimulatedGpu()
    graph = captured(gpu, lambda stream: gpu.submit(stream, lambda: None)).complete()
    gpu.core_stream.create_graph_builder().begin_building()
    with refused("launch while capturing"):
        graph.launch(gpu.core_stream)


def test_host_functions_run_at_every_launch() -> None:
    """Guards against graphs that release a run's buffers once per token."""
    gpu, ran = SimulatedGpu(), list[int]()
    graph = captured(gpu, lambda stream: gpu.launch_host_function(stream, lambda: ran.append(1))).complete()
    graph.launch(gpu.core_stream)
    graph.launch(gpu.core_stream)
    assert len(ran) == 2


def test_copies_read_their_addresses_at_every_launch() -> None:
    """Guards against graphs that read what a library has since put into its memory."""
    gpu, memory, read = SimulatedGpu(), ["first"], list[str]()
    graph = captured(gpu, lambda stream: gpu.copy_from_host_async(stream, lambda: read.append(memory[0]))).complete()
    graph.launch(gpu.core_stream)
    memory[0] = "second"
    graph.launch(gpu.core_stream)
    assert read == ["first", "second"]


def test_a_fork_that_does_not_join_leaves_no_graph() -> None:
    """Guards against a library with streams of its own: the capture ends, and its builder must not be closed."""
    gpu = SimulatedGpu()
    builder = gpu.core_stream.create_graph_builder().begin_building()
    gpu.fork(gpu.stream)
    with refused("unjoined"):
        builder.end_building()
    with pytest.raises(ProcessDied):
        builder.close()
    gpu.discard(builder)
    assert not gpu.recording


def test_every_rule_has_a_test() -> None:
    """Guards against a rule in the table that nothing enforces."""
    source = Path(__file__).read_text()
    tested = set(re.findall(r'refused\("([a-z ]+)"\)', source))
    by_behaviour = {
        "child is cloned",
        "handle before its node",
        "host functions repeat",
        "copies repeat",
        "invalid graph",
    }  # no error
    assert tested | by_behaviour == set(RULES)
