"""Import of tensors and streams from other libraries."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from tide_plugins.launch.device_array import DeviceArray, device_array
from tide_plugins.launch.stream_handle import stream_handle
from tide_runtime.errors import ParamsError

_CUDA, _INT, _FLOAT, _BFLOAT = 2, 0, 2, 4  # DLDeviceType and DLDataTypeCode, dlpack.h


class _DLTensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h (version 0), with the DLTensor's fields in place."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class FakeGpuTensor:
    """Exports DLPack like a framework's GPU tensor, with an address that is never read."""

    def __init__(self, code: int, bits: int, shape: tuple[int, ...], strides: tuple[int, ...], device: int = 0) -> None:
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(strides))(*strides)
        self._tensor = _DLTensor(
            0x7F00_0000_0000, _CUDA, device, len(shape), code, bits, 1, self._shape, self._strides, 512, None, None
        )
        self.device, self.streams = device, []  # type: ignore[var-annotated]

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_newer: Any) -> Any:
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._tensor), b"dltensor", None)


@pytest.mark.parametrize(
    ("code", "bits", "name"), [(_FLOAT, 32, "f32"), (_FLOAT, 16, "f16"), (_BFLOAT, 16, "bf16"), (_INT, 32, "i32")]
)
def test_dlpack_gives_address_shape_strides_and_device(code: int, bits: int, name: str) -> None:
    """Guards against ignored byte offsets of views from PyTorch, JAX or CuPy, and kernels that read before writes are done."""
    tensor = FakeGpuTensor(code, bits, (3, 64), (128, 1), device=1)
    array = device_array(tensor, stream=77)
    assert (array.pointer, array.shape, array.strides) == (0x7F00_0000_0200, (3, 64), (128, 1))
    assert (array.dtype, array.device) == (name, 1)
    assert array.owner is not None  # keeps the memory alive
    assert tensor.streams == [77]  # the owner lets the stream wait for its pending writes


class Unwilling(FakeGpuTensor):
    def __dlpack__(self, **_any: Any) -> Any:
        raise BufferError("requires gradient")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((2, 3), np.float32), r"of shape \(2, 3\) lies in host memory; move it to the GPU"),
        (torch.zeros(2, 3), r"of shape \(2, 3\) lies in host memory; move it to the GPU"),
        ([1.0, 2.0], r"list has neither __dlpack__ nor .*DeviceArray\(pointer, shape, dtype\)"),
        (Unwilling(_FLOAT, 32, (4,), (1,)), "Unwilling cannot be shared with a kernel: requires gradient"),
        (FakeGpuTensor(_FLOAT, 64, (4,), (1,)), "has dtype float64; kernels take float32, float16"),
    ],
    ids=["array", "torch", "list", "unwilling", "dtype"],
)
def test_what_no_kernel_takes_is_refused(value: Any, words: str) -> None:
    """Guards against illegal addresses on the GPU, and errors that do not say what to do, as for parameters with a gradient."""
    with pytest.raises(ParamsError, match=words):
        device_array(value, stream=1)


def test_raw_pointers_pass_through() -> None:
    array = DeviceArray(0x1000, (2, 8), "bf16", strides=(16, 1))
    assert device_array(array, stream=1) is array


class _Stream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0xBEEF


@pytest.mark.parametrize(("stream", "handle"), [(0xBEEF, 0xBEEF), (_Stream(), 0xBEEF), (0, 1)])
def test_streams_of_any_library(stream: Any, handle: int) -> None:
    """Guards against passing stream 0 to DLPack, which refuses it as ambiguous, instead of CU_STREAM_LEGACY."""
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [None, "0", -1, True, object()])
def test_what_is_not_a_stream_is_refused(stream: Any) -> None:
    """Guards against None, which libraries interpret differently."""
    with pytest.raises(ParamsError, match="expected a cudaStream_t"):
        stream_handle(stream)
