"""Forms in which programs are captured: the types of the captured nodes decide, and a form that is refused is named."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from runtime.device_loop.test_decode_loop import EXITS, TURNS, Driven, expected, requests
from runtime.simulated_gpu import CudaError, SimulatedBuilder, SimulatedGpu, SimulatedGraph
from runtime.tiny_generation import Request, make_row
from tide_runtime.backends.device.control_flow import Condition, Run, While
from tide_runtime.device_loop.driver_choice import DriverChoice
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.errors import TargetError
from tide_runtime.generation_params import GenerationParams

MEMORY = "captured nodes of type mem_alloc, mem_free are not allowed in conditional bodies"
COPIES = "it holds 3 copies of a library's host memory"
HOST = "it holds 3 host functions, which a library queued for one run only"


def long_request(tokens: int) -> list[Request]:
    return [replace(requests()[0], params=GenerationParams(max_new_tokens=tokens))]


@pytest.mark.parametrize("fixed", [False, True], ids=["own-stream", "fixed-stream"])
@pytest.mark.parametrize("name", ["none", "both", "three"])
@pytest.mark.filterwarnings("ignore:captured nodes of type")
def test_memory_nodes_are_captured_flat_and_generate_the_same_tokens(name: str, fixed: bool) -> None:
    """Guards against loops over ONNX Runtime that are refused: its matrix products allocate workspaces in the capture."""
    exits = EXITS[name]
    for wanted in (requests(), requests(eos=(4,)), requests(budgets=(99, 5, 99, 99, 9))):
        driven = Driven(exits, fixed=fixed, queued_beside="memory")
        assert driven.tokens(wanted) == expected(wanted, exits)
    assert driven.gpu.graph_launches > 0


def test_full_decoding_does_not_wait_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a host that waits for every token: all turns of a launch are queued at once."""
    driven, waits = Driven(fixed=True, queued_beside="memory"), list[int]()
    launch = SimulatedGraph.launch

    def watched(graph: SimulatedGraph, stream: Any) -> None:
        waits.append(driven.gpu.waits)
        launch(graph, stream)

    monkeypatch.setattr(SimulatedGraph, "launch", watched)
    driven.rows(long_request(1 + 4 * TURNS), 1)  # the first token is the prompt's, the first launch the host's
    assert [count for _, count in sorted(Counter(waits).items())] == [TURNS] * 3
    assert str(DriverChoice(driven.policy, loop=driven.policy)) == f"device-driven, 16 launches of one token at once: {MEMORY}"
    assert driven.drivers.refused is None


def test_no_more_turns_are_queued_than_tokens_are_wanted() -> None:
    """Guards against short answers that take the time of a whole launch: the limit is known, unlike an EOS token."""
    driven = Driven(fixed=True, queued_beside="memory")
    [row] = driven.rows(long_request(1 + TURNS + 2), 1)
    assert row.finish_reason == "length" and driven.gpu.graph_launches == 2


def test_allowed_nodes_are_captured_in_conditional_bodies() -> None:
    """Guards against a launch of every token where one launch of the whole loop is possible, as over TensorRT's engines, or with
    CUBLAS_WORKSPACE_CONFIG=:0:0."""
    for fixed in (False, True):
        driven = Driven(EXITS["two"], fixed=fixed)
        driven.rows(requests(budgets=(21,) * 5), 1)
        execution = driven.drivers.execution
        assert execution is not None and execution.refusal is None and not set(execution.node_types) - {"kernel", "memcpy"}
        assert str(DriverChoice(driven.policy, loop=driven.policy)) == "device-driven, 16 tokens a launch"


def test_refused_nodes_under_exits_are_announced() -> None:
    """Guards against a host that reads a flag at every exit without saying so."""
    driven = Driven(EXITS["two"], fixed=True, queued_beside="memory")
    with pytest.warns(RuntimeWarning, match=f"{MEMORY}; decoding is driven from the host"):
        driven.rows(requests(), 3)
    assert str(DriverChoice(driven.policy, loop=driven.policy)) == f"host-driven: {MEMORY}" and driven.gpu.graph_launches


def test_conditional_nodes_that_a_machine_lacks_leave_the_flat_form() -> None:
    """Guards against host-driven single launches on drivers before CUDA 12.4 and GPUs before Turing."""
    driven = Driven()
    driven.drivers.compile = GraphDriver(driven.gpu, lambda: "no graph conditions").compile
    wanted = requests()
    assert driven.tokens(wanted) == expected(wanted, ()) and driven.gpu.graph_launches
    assert str(DriverChoice(driven.policy, loop=driven.policy)).endswith("at once: no graph conditions")


@pytest.mark.parametrize(
    ("beside", "reason"),
    [("host", HOST), ("copy", COPIES), ("wait", "CudaError: synchronization"), ("fork", "CudaError: unjoined")],
)
def test_what_no_graph_may_hold_is_driven_by_the_host(beside: str, reason: str) -> None:
    """Guards against a process that ends in a second release of ONNX Runtime's buffers (onnxruntime pull request 32081), wrong
    tokens from a node on the processor whose input is copied from memory of another run, and a stream that stays unusable."""
    driven, wanted = Driven(fixed=True, queued_beside=beside), requests()
    with pytest.warns(RuntimeWarning, match=f"cannot be captured in a CUDA graph: {reason}"):
        assert driven.tokens(wanted) == expected(wanted, ())
    assert driven.gpu.graph_launches == 0 and not driven.gpu.recording
    assert str(DriverChoice(driven.policy, loop=driven.policy)).startswith("host-driven: the decode step cannot be captured")


@pytest.mark.parametrize("body", [False, True], ids=["flat", "in-a-body"])
def test_a_capture_that_a_library_made_invalid_without_an_error_is_refused(body: bool) -> None:
    """Guards against a process that dies of ending such a capture (cuda-python issue 2834); the stream must be usable again."""
    gpu, calls = SimulatedGpu(), list[int]()

    def waits_and_ignores_the_error(stream: int) -> None:
        calls.append(stream)
        if len(calls) > body:  # the flat capture comes first
            with suppress(CudaError):
                gpu.synchronize_stream(stream)

    compile = GraphDriver(gpu).compile
    program = [Run("waits", waits_and_ignores_the_error, fixed_stream=True)]
    if body:
        execution = compile([While(Condition(0, 1), tuple(program))])
        assert execution.refusal is not None and "has made it invalid" in execution.refusal
    else:
        with pytest.raises(TargetError, match="in a CUDA graph: a call that a capture does not allow has made it invalid"):
            compile(program)
    assert not gpu.recording and not gpu.is_capturing


@pytest.mark.parametrize("fails", [False, True], ids=["at-its-end", "before"])
def test_a_capture_that_leaves_no_graph_is_never_closed(fails: bool) -> None:
    """Guards against a process that dies later, when the builder is collected: cuda-core destroys the graph a second time."""
    gpu = SimulatedGpu()

    def forks(stream: int) -> None:
        gpu.fork(stream)
        if fails:
            raise RuntimeError("not supported")

    with pytest.raises(TargetError, match="RuntimeError: not supported" if fails else "unjoined"):
        GraphDriver(gpu).compile([Run("forks", forks, fixed_stream=True)])
    assert [builder.state for builder in gpu.without_graph] == ["discarded"] and not gpu.recording


def test_a_missing_method_is_an_error_and_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a release of cuda-core with other names that looks like a GPU without graphs."""
    monkeypatch.delattr(SimulatedBuilder, "while_loop")
    driven = Driven()
    with pytest.raises(AttributeError, match="while_loop"):
        driven.rows(requests(), 3)
    assert not driven.gpu.recording


def test_counters_stay_on_the_device() -> None:
    """Guards against kernels that read pinned memory over PCIe in every turn: the host copies the counters after a launch."""
    driven = Driven(EXITS["two"])
    driven_loop = driven.policy._loop(driven.backend.context(1), [make_row(requests()[0], driven.manifest)])
    assert driven_loop is not None
    ring = driven_loop.loop.state.ring
    _, counters = ring.pointers
    assert any(memory.pointer <= counters < memory.end for memory in driven.gpu._memory)
    assert counters != ring.counts.ctypes.data
