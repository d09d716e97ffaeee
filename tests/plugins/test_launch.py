"""Launches as the driver receives them: entry point, grid, parameters, stream; with a recording driver."""

from __future__ import annotations

from typing import Any

import pytest
from plugins.launch_case import EMPTY_KERNELS, router_tensors, turn_tensors
from plugins.recording_driver import RecordingDriver
from tide_plugins.build.builder import Builder
from tide_plugins.kernels import KERNELS
from tide_plugins.launch.decode_loop_launch import prepare_loop_turn
from tide_plugins.launch.exit_router_launch import float_bits, prepare_exit_router
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.plans import plan_exit_router, plan_loop_block
from tide_runtime.errors import ParamsError, TargetError

_STREAM = 0xABC0


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("cubins"), EMPTY_KERNELS)


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def library(driver: RecordingDriver, builder: Builder) -> KernelLibrary:
    return KernelLibrary(driver, builder)


def _router(library: KernelLibrary, tensors: dict[str, Any], **more: Any) -> Any:
    return prepare_exit_router(library, epsilon=1e-6, stream=_STREAM, **(tensors | more))


def test_a_router_is_two_launches_that_carry_every_address_and_number(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against pointers in wrong places, and against a second launch that reads another layout."""
    tensors = router_tensors(rows=8, hidden_size=4096, width=128)
    _router(library, tensors).enqueue(_STREAM)
    project, score = driver.launches
    plan = plan_exit_router(8, 4096, 128)
    assert (project.entry, project.plan, project.stream) == ("tide_exit_router_project_f16", plan.project, _STREAM)
    assert (score.entry, score.plan, score.stream) == ("tide_exit_router_score_f16", plan.score, _STREAM)
    sent = score.params
    assert {name: getattr(sent, name) for name in tensors} == {name: array.pointer for name, array in tensors.items()}
    assert (sent.rows, sent.hidden_size, sent.width, sent.chunk) == (8, 4096, 128, plan.chunk)
    assert sent.epsilon == float_bits(1e-6) and bytes(project.params) == bytes(sent)
    [memory] = driver.memory
    assert sent.partial == memory.pointer and memory.count_bytes >= 4 * plan.partial
    assert project.arguments == ("hidden", "down", "rows", "hidden_size", "width", "chunk", "partial")
    assert score.arguments[:5] == ("hidden", "partial", "down_bias", "up", "up_bias") and score.arguments[-1] == "score"


def test_enqueueing_again_costs_two_launches_and_no_memory(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against allocations in a decode step, which cannot be captured in a CUDA graph."""
    prepared = _router(library, router_tensors())
    for _ in range(3):
        prepared.enqueue(_STREAM)
    assert (len(driver.launches), len(driver.memory), len(driver.loaded)) == (6, 1, 2)


def test_a_graph_condition_is_passed_on(library: KernelLibrary) -> None:
    """Guards against truncated 64-bit handles."""
    params = prepare_loop_turn(library, stream=_STREAM, slots=8, **turn_tensors()).with_condition(2**63 + 5).params
    assert (params.graph_condition, params.sets_condition) == (2**63 + 5, 1)


def test_a_graph_condition_on_volta_is_refused(builder: Builder) -> None:
    """Guards against ignored graph conditions, which Volta's images do not support."""
    volta = KernelLibrary(RecordingDriver(compute=70), builder)
    launch = prepare_loop_turn(volta, stream=_STREAM, slots=8, **turn_tensors())
    with pytest.raises(TargetError, match=r"sm_70 set no CUDA graph condition"):
        launch.with_condition(1)


def test_a_gpu_newer_than_every_cubin_gets_ptx(builder: Builder) -> None:
    driver = RecordingDriver(compute=140)
    _router(KernelLibrary(driver, builder), router_tensors()).enqueue(_STREAM)
    assert driver.loaded == [(True, "tide_exit_router_project_f16"), (True, "tide_exit_router_score_f16")]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"width": 0}, "exit_router: down has 0 rows; expected 1 to 256"),
        ({"width": 257}, "exit_router: down has 257 rows; expected 1 to 256"),
        ({"rows": 600_000, "hidden_size": 64, "width": 8}, "pass fewer rows at once"),  # more than a grid holds
    ],
)
def test_sizes_that_the_kernel_does_not_have_are_refused(library: KernelLibrary, sizes: dict[str, int], words: str) -> None:
    """Guards against 'invalid argument' from the driver."""
    with pytest.raises(ParamsError, match=words):
        _router(library, router_tensors(**sizes))


def test_every_entry_point_can_be_loaded(library: KernelLibrary) -> None:
    """Guards against entry-point names that the cubins lack."""
    for kernel in KERNELS:
        for form in kernel.forms:
            dtype = kernel.dtypes[-1]
            assert library.entry(kernel.name, form, dtype, plan_loop_block()) == f"tide_{form}_{dtype}"
