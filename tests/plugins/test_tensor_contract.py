"""Tensors that violate a kernel's contract are refused with their name, actual and expected property."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plugins.host_driver import on_host
from plugins.launch_case import EMPTY_KERNELS, router_tensors
from plugins.recording_driver import RecordingDriver
from tide_plugins.build.builder import Builder
from tide_plugins.conformance import CaseSpec, cases
from tide_plugins.launch import decode_loop_launch, exit_router_launch
from tide_plugins.launch.device_array import DeviceArray
from tide_plugins.launch.exit_router_launch import prepare_exit_router
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.params import ChooseTokenParams, ExitRouterParams, ExitScoreParams, LoopTurnParams, TakeTokensParams
from tide_runtime.errors import ParamsError

_OPTIONAL = {
    *("input_ids", "position_ids", "position_ids32", "write_index", "write_index32", "seqlens_k"),  # of a decode loop
    *("logits_index", "logits_index32", "last", "mlp_score", "eos"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    return KernelLibrary(RecordingDriver(), Builder(tmp_path_factory.mktemp("cubins"), EMPTY_KERNELS))


def _refused(library: KernelLibrary, **changed: Any) -> str:
    with pytest.raises(ParamsError) as caught:
        prepare_exit_router(library, epsilon=1e-6, stream=1, **(router_tensors() | changed))
    return str(caught.value)


def _changed(name: str, **fields: Any) -> dict[str, DeviceArray]:
    return {name: replace(router_tensors()[name], **fields)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": None}, "hidden is missing"),
        ({"hidden": [1.0]}, "hidden is a list; expected a DeviceArray(pointer, shape, dtype) of GPU memory"),
        (_changed("hidden", dtype="i32"), "hidden has dtype i32; expected one of f32, f16, bf16"),
        (_changed("down", dtype="f16"), "down has dtype f16; expected f32"),
        (_changed("score", dtype="f16"), "score has dtype f16; expected f32"),
        (_changed("hidden", shape=(4096,)), "hidden has shape [4096]; expected [rows, hidden_size]"),
        (
            _changed("down", shape=(128, 4095)),
            "down has shape [128, 4095]; expected [width, hidden_size] with hidden_size = 4096, as in hidden",
        ),
        (_changed("score", shape=(7,)), "score has shape [7]; expected [rows] with rows = 8, as in hidden"),
        (_changed("up_bias", shape=(2,)), "up_bias has shape [2]; expected a scalar"),
        (_changed("hidden", strides=(4096, 2)), "hidden has strides [4096, 2] for shape [8, 4096]; expected a contiguous"),
        (_changed("down", strides=(5000, 1)), "down has strides [5000, 1] for shape [128, 4096]; expected a contiguous tensor"),
        (_changed("score", device=1), "score is on GPU 1; expected GPU 0, where the kernel runs"),
        (_changed("up", pointer=0x1002), "up begins at address 0x1002; expected a multiple of its elements' 4 bytes"),
        (_changed("score", writable=False), "score is read-only; expected memory that the kernel may write to"),
        ({"hiden": router_tensors()["hidden"]}, "exit_router has no hiden; its tensors are hidden, down"),
    ],
)
def test_what_is_wrong_is_named(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    """Guards against out-of-bounds accesses and wrong types, which kernels cannot detect."""
    assert message in _refused(library, **change)


@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (8, {"up_bias": {"shape": ()}}),  # as torch.zeros(())
        (8, {"up_bias": {"shape": (1,)}}),
        (1, {"hidden": {"strides": (1, 1)}}),  # libraries give dimensions of size 1 any stride
    ],
)
def test_what_libraries_make_is_taken(library: KernelLibrary, rows: int, change: dict[str, Any]) -> None:
    """Guards against refusing tensors that are right in another form."""
    tensors = router_tensors(rows=rows)
    changed = {name: replace(tensors[name], **fields) for name, fields in change.items()}
    prepare_exit_router(library, epsilon=1e-6, stream=1, **(tensors | changed))


@pytest.mark.parametrize("spec", {spec.kernel: spec for spec in cases()}.values(), ids=lambda spec: spec.kernel)
def test_every_kernel_accepts_its_valid_tensors_and_misses_each_required_one(library: KernelLibrary, spec: CaseSpec) -> None:
    """Guards against contracts that lack a tensor, which would be a null pointer in the kernel."""
    case = spec.build()
    tensors = {name: on_host(tensor) for name, tensor in case.tensors.items()}
    case.prepare(library, stream=1, **tensors, **case.numbers)
    for name in set(tensors) - _OPTIONAL:
        with pytest.raises(ParamsError, match=rf"{spec.kernel}: .*{name}"):
            case.prepare(library, stream=1, **(tensors | {name: None}), **case.numbers)


def test_every_pointer_of_every_parameter_struct_can_be_given(library: KernelLibrary) -> None:
    """Guards against pointer fields that are never set."""
    scratch = {"workspace", "counters", "partial"}
    contracts = {
        ExitRouterParams: exit_router_launch.TENSORS,
        TakeTokensParams: decode_loop_launch.TAKE_TENSORS,
        LoopTurnParams: decode_loop_launch.TURN_TENSORS,
        ExitScoreParams: decode_loop_launch.SCORE_TENSORS,
        ChooseTokenParams: decode_loop_launch.CHOOSE_TENSORS,
    }
    for params, tensors in contracts.items():
        fields = [name for name, *_ in params._fields_]
        names = [tensor.name for tensor in tensors]
        first_number = max(fields.index(name) for name in {*names, *scratch & set(fields)}) + 1
        assert set(fields[:first_number]) == {*names, *scratch & set(fields)}
