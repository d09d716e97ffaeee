"""Every case of the CUDA kernels on a GPU: right results, and the same bits in every repetition. The GPU kit runs this."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tide_plugins.conformance import CaseSpec, cases
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.device_array import DeviceArray
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.stream_handle import LEGACY_DEFAULT_STREAM as STREAM
from tide_runtime.targets.gpu_probe import present_gpu

pytestmark = pytest.mark.skipif(present_gpu(0) is None, reason="there is no GPU")
REPEATS = 3
NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "uint64": "u64", "uint8": "u8"}
Array = NDArray[Any]


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    return KernelLibrary(CudaDriver(0))


def owner(array: Array) -> Array:
    """The array that owns the memory: views of one buffer stay views of one buffer on the GPU."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def place(array: Array) -> int:
    """Bytes from the beginning of its owner to the array."""
    return int(array.__array_interface__["data"][0] - owner(array).__array_interface__["data"][0])


@pytest.mark.parametrize("spec", list(cases()), ids=lambda spec: f"{spec.kernel} {spec.name}")
def test_results_are_right_and_repeat(spec: CaseSpec, library: KernelLibrary) -> None:
    """Guards against what the host's compiler does not show: races, other rounding, launches that the driver refuses."""
    import torch

    case = spec.build()
    owners = {id(owner(array)): owner(array) for array in case.tensors.values()}
    stored = {key: np.frombuffer(array.tobytes() or b"\0", np.uint8).copy() for key, array in owners.items()}
    buffers = {key: torch.from_numpy(content).cuda() for key, content in stored.items()}
    arrays = {
        name: DeviceArray(
            buffers[id(owner(array))].data_ptr() + place(array),
            array.shape,
            NAMES[str(array.dtype)],
            0,
            tuple(stride // array.itemsize for stride in array.strides),
        )
        for name, array in case.tensors.items()
    }
    launch = case.prepare(library, stream=STREAM, **arrays, **case.numbers)
    found = list[dict[str, Array]]()
    for _ in range(REPEATS):
        for key, content in stored.items():
            buffers[key].copy_(torch.from_numpy(content))
        torch.cuda.synchronize()
        launch.enqueue(STREAM)
        torch.cuda.synchronize()
        back = {key: buffer.cpu().numpy() for key, buffer in buffers.items()}
        views = {name: (array, back[id(owner(array))]) for name, array in case.tensors.items()}
        found.append({n: np.ndarray(a.shape, a.dtype, b, place(a), a.strides) for n, (a, b) in views.items()})
    case.check(found[0])
    for later in found[1:]:
        assert all(array.tobytes() == found[0][name].tobytes() for name, array in later.items())
