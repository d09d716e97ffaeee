"""Launches as the driver receives them: entry point, grid, parameters, stream; with a recording driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plugins.launch_case import (
    EMPTY_KERNELS,
    router_tensors,
    select_tensors,
    translate_tensors,
    verify_tensors,
)
from plugins.recording_driver import RecordingDriver
from tide_plugins.build.builder import Builder
from tide_plugins.build.cubin_cache import CubinCache
from tide_plugins.kernels import KERNELS
from tide_plugins.launch.draft_verify import prepare_draft_verify
from tide_plugins.launch.exit_router import prepare_exit_router
from tide_plugins.launch.exit_select import prepare_exit_select
from tide_plugins.launch.exit_translate import prepare_exit_translate
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.plans import plan_exit_router, plan_exit_translate
from tide_runtime.errors import ParamsError, TargetError

_STREAM = 0xABC0


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(CubinCache(tmp_path_factory.mktemp("cubins")), EMPTY_KERNELS)


@pytest.fixture
def driver() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def library(driver: RecordingDriver, builder: Builder) -> KernelLibrary:
    return KernelLibrary(driver, builder)


def _router(library: KernelLibrary, tensors: dict[str, Any], **more: Any) -> Any:
    return prepare_exit_router(library, threshold=0.75, epsilon=1e-6, stream=_STREAM, **(tensors | more))


def test_a_router_launch_carries_every_address_and_number(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against pointers in wrong fields."""
    tensors = router_tensors(rows=8, hidden_size=4096, width=128)
    _router(library, tensors).enqueue(_STREAM)
    [launch] = driver.launches
    plan = plan_exit_router(8, 4096, 128, 2, driver.sm_count)
    assert (launch.entry, launch.plan, launch.stream) == ("tide_exit_router_f16", plan.launch, _STREAM)
    sent = launch.params
    assert {name: getattr(sent, name) for name in tensors} == {name: array.pointer for name, array in tensors.items()}
    assert (sent.rows, sent.hidden_size, sent.width, sent.row_stride, sent.chunk) == (8, 4096, 128, 4096, plan.chunk)
    assert (sent.threshold, sent.down_sum, sent.row_count, sent.sets_condition) == (0.75, 0, 0, 0)
    assert sent.epsilon == pytest.approx(1e-6)


def test_scratch_memory_is_large_enough_and_apart(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against counters that overlap the workspace, so that no block detects that it is the last."""
    prepared = _router(library, router_tensors())
    plan = plan_exit_router(8, 4096, 128, 2, driver.sm_count).launch
    [memory] = driver.memory
    assert prepared.params.counters == memory.pointer
    assert prepared.params.workspace % 256 == 0 and prepared.params.workspace >= memory.pointer + 4 * plan.counters
    assert prepared.params.workspace + plan.workspace_bytes <= memory.pointer + memory.count_bytes


def test_many_rows_take_the_tiled_form_and_ask_for_its_shared_memory(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against launches above 48 KiB of shared memory without the opt-in."""
    plan = plan_exit_router(4096, 4096, 192, 2, driver.sm_count)
    assert plan.launch.shared_bytes > 48 * 1024
    _router(library, router_tensors(rows=4096, width=192)).enqueue(_STREAM)
    assert driver.launches[0].entry == "tide_exit_router_tiled_f16"
    assert driver.shared == {"tide_exit_router_tiled_f16": plan.launch.shared_bytes}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_element_type_chooses_the_entry_point(library: KernelLibrary, driver: RecordingDriver, dtype: str) -> None:
    _router(library, router_tensors(dtype=dtype)).enqueue(_STREAM)
    assert driver.launches[0].entry == f"tide_exit_router_{dtype}"


def test_enqueueing_again_costs_one_launch_and_no_memory(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against allocations in a decode step, which cannot be captured in a CUDA graph."""
    prepared = _router(library, router_tensors())
    for _ in range(3):
        prepared.enqueue(_STREAM)
    assert (len(driver.launches), len(driver.memory), len(driver.loaded)) == (3, 1, 1)


def test_no_rows_is_a_launch_that_writes_zero_counts(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against stale counts when every row has finished."""
    _router(library, router_tensors(rows=0)).enqueue(_STREAM)
    assert driver.launches[0].params.rows == 0 and min(driver.launches[0].plan.grid) >= 1


def test_a_graph_condition_is_passed_on(library: KernelLibrary) -> None:
    """Guards against truncated 64-bit handles."""
    params = _router(library, router_tensors(), graph_condition=2**63 + 5).params
    assert (params.graph_condition, params.sets_condition) == (2**63 + 5, 1)


def test_a_graph_condition_on_volta_is_refused(builder: Builder) -> None:
    """Guards against ignored graph conditions, which Volta's images do not support."""
    volta = KernelLibrary(RecordingDriver(compute=70, sm_count=80), builder)
    with pytest.raises(TargetError, match=r"sm_70 set no CUDA graph condition"):
        _router(volta, router_tensors(), graph_condition=1)


def test_a_gpu_newer_than_every_cubin_gets_ptx(builder: Builder) -> None:
    driver = RecordingDriver(compute=140)
    _router(KernelLibrary(driver, builder), router_tensors()).enqueue(_STREAM)
    assert driver.loaded == [(True, "tide_exit_router_f16")]


@pytest.mark.parametrize("width", [0, 257])
def test_a_router_width_the_kernel_does_not_have_is_refused(library: KernelLibrary, width: int) -> None:
    with pytest.raises(ParamsError, match=rf"exit_router: down has {width} rows; expected 1 to 256"):
        _router(library, router_tensors(width=width))


def test_select_reads_strides_from_the_tensors(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against assuming contiguous rows for views into larger buffers."""
    tensors = select_tensors()
    tensors["hidden"] = replace(tensors["hidden"], shape=(8, 4000), strides=(4096, 1))
    for name in ("exit_states", "continue_hidden", "head_input"):
        tensors[name] = replace(tensors[name], shape=(tensors[name].shape[0], 4000), strides=(4001, 1))
    prepare_exit_select(library, stream=_STREAM, **tensors).enqueue(_STREAM)
    sent = driver.launches[0].params
    assert (sent.hidden_stride, sent.exit_stride, sent.continue_stride, sent.head_stride) == (4096, 4001, 4001, 4001)
    assert (sent.rows, sent.hidden_size, driver.launches[0].plan.grid[0]) == (8, 4000, 8)


def test_select_in_place_keeps_a_column_in_one_block(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against blocks that overwrite rows before other blocks have read them."""
    tensors = select_tensors()
    tensors |= {"continue_hidden": tensors["hidden"], "exit_states": tensors["hidden"]}
    prepare_exit_select(library, stream=_STREAM, **tensors).enqueue(_STREAM)
    assert driver.launches[0].plan.grid[0] == 1


@pytest.mark.parametrize(
    ("name", "like", "shift", "expected"),
    [
        ("continue_hidden", "hidden", 4096 * 2, "continue_hidden overlaps hidden"),
        ("head_input", "hidden", 0, "head_input overlaps hidden"),
        ("head_input", "continue_hidden", 4096, "head_input overlaps continue_hidden"),
        ("continue_origin", "origin", 0, "continue_origin overlaps origin"),
    ],
)
def test_select_refuses_outputs_that_overlap(library: KernelLibrary, name: str, like: str, shift: int, expected: str) -> None:
    """Guards against races by overlapping outputs."""
    tensors = select_tensors()
    tensors[name] = replace(tensors[name], pointer=tensors[like].pointer + shift)
    with pytest.raises(ParamsError, match=expected):
        prepare_exit_select(library, stream=_STREAM, **tensors)


def test_select_with_nothing_to_write_is_refused(library: KernelLibrary) -> None:
    tensors = select_tensors() | {"continue_hidden": None, "head_input": None}
    with pytest.raises(ParamsError, match="no continue_hidden and no head_input"):
        prepare_exit_select(library, stream=_STREAM, **tensors)


def test_translate_is_two_launches_with_the_same_parameters(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against different `code` buffers of the two launches."""
    prepare_exit_translate(library, epsilon=1e-5, stream=_STREAM, **translate_tensors()).enqueue(_STREAM)
    down, up = driver.launches
    plan = plan_exit_translate(8, 4096, 64, 2, driver.sm_count)
    assert (down.entry, up.entry) == ("tide_exit_translate_down_f16", "tide_exit_translate_up_f16")
    assert (down.plan, up.plan) == (plan.down, plan.up)
    assert bytes(down.params) == bytes(up.params)
    [memory] = driver.memory
    assert memory.pointer <= down.params.code and down.params.code + 4 * 8 * 64 <= memory.pointer + memory.count_bytes


def test_translate_takes_its_rows_from_the_list(library: KernelLibrary, driver: RecordingDriver) -> None:
    """Guards against reads past the end of the row list."""
    tensors = translate_tensors(rows=8)
    tensors["row_list"] = replace(router_tensors(rows=3)["exit_rows"])
    tensors["out"] = replace(tensors["out"], shape=(3, 4096))
    prepare_exit_translate(library, epsilon=1e-5, stream=_STREAM, **tensors).enqueue(_STREAM)
    assert driver.launches[0].params.rows == 3
    with pytest.raises(ParamsError, match="out has 3 rows; expected room for 8"):
        prepare_exit_translate(library, epsilon=1e-5, stream=_STREAM, **(tensors | {"row_list": None}))


def test_translate_in_place_needs_every_row_in_its_place(library: KernelLibrary, driver: RecordingDriver) -> None:
    tensors = translate_tensors()
    in_place = tensors | {"out": tensors["hidden"]}
    prepare_exit_translate(library, epsilon=1e-5, stream=_STREAM, **in_place).enqueue(_STREAM)
    assert driver.launches[0].params.out == tensors["hidden"].pointer
    packed = in_place | {"row_list": router_tensors()["exit_rows"]}
    with pytest.raises(ParamsError, match="out overlaps hidden"):
        prepare_exit_translate(library, epsilon=1e-5, stream=_STREAM, **packed)


@pytest.mark.parametrize(("vocab", "threads"), [(0, 32), (32000, 1024)])
def test_verify_is_greedy_or_sampling(library: KernelLibrary, driver: RecordingDriver, vocab: int, threads: int) -> None:
    prepare_draft_verify(library, stream=_STREAM, **verify_tensors(vocab=vocab)).enqueue(_STREAM)
    [launch] = driver.launches
    assert (launch.plan.grid, launch.plan.block[0], launch.params.vocab) == ((4, 1, 1), threads, vocab)
    assert (launch.params.probabilities == 0) == (vocab == 0)
    assert (launch.params.rows, launch.params.width) == (4, 5)


def test_verify_refuses_a_mixture(library: KernelLibrary) -> None:
    """Guards against silently ignoring greedy tokens or probabilities when both are given."""
    both = verify_tensors() | verify_tensors(vocab=100)
    with pytest.raises(ParamsError, match="deep_tokens belong to greedy"):
        prepare_draft_verify(library, stream=_STREAM, **both)
    with pytest.raises(ParamsError, match="sampling needs seed"):
        prepare_draft_verify(library, stream=_STREAM, **(verify_tensors(vocab=100) | {"seed": None}))
    with pytest.raises(ParamsError, match=r"expected deep_tokens \(greedy\), or probabilities and seed"):
        prepare_draft_verify(library, stream=_STREAM, **(verify_tensors() | {"deep_tokens": None}))


def test_more_rows_than_a_grid_holds_are_refused(library: KernelLibrary) -> None:
    """Guards against 'invalid argument' from the driver."""
    with pytest.raises(ParamsError, match="pass fewer rows at once"):
        prepare_exit_translate(library, epsilon=1e-5, stream=_STREAM, **translate_tensors(rows=600_000, hidden_size=64, rank=8))


def test_every_entry_point_can_be_loaded(library: KernelLibrary) -> None:
    """Guards against entry-point names that the cubins lack."""
    plan = plan_exit_router(1, 64, 8, 4, 1).launch
    for kernel in KERNELS:
        for form in kernel.forms:
            dtype = kernel.dtypes[-1]
            assert library.entry(kernel.name, form, dtype, plan) == f"tide_{form}_{dtype}"
