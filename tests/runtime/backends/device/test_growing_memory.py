"""Memory that a device maps by need behaves as `Device.reserve` says: on a GPU where there is one, else over host memory."""

import numpy as np
import pytest
from numpy.typing import NDArray
from runtime.host_device import HostDevice, HostReserved
from tide_runtime.backends.device.cuda_device import CudaDevice
from tide_runtime.backends.device.device import Device
from tide_runtime.targets.gpu_probe import present_gpu

BLOCKS = 64


def read(device: Device, pointer: int, count_bytes: int) -> NDArray[np.uint8]:
    held = device.pinned(count_bytes)
    device.download(held, pointer)
    device.synchronize()
    return held


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        (HostDevice, HostReserved.granule // 2),
        pytest.param(CudaDevice, 1 << 20, marks=pytest.mark.skipif(present_gpu(0) is None, reason="there is no GPU")),
    ],
)
def test_contents_stay_while_memory_is_mapped_beside_and_between_them(kind: type[Device], block: int) -> None:
    """Keys and values of running requests would be lost when another request comes; copies would end at a mapping's border."""
    device = kind()
    device.use()
    memory = device.reserve(BLOCKS * block)
    assert memory.provided < BLOCKS * block
    places = [memory.pointer + number * block for number in range(BLOCKS)]
    numbers = np.random.default_rng(0).integers(0, 256, block, np.uint8)
    memory.provide([(0, block)])
    assert not read(device, places[0], block).any()
    device.upload_copy(places[0], numbers)
    memory.provide([(5 * block, 6 * block)])
    device.copy(places[5], places[0], block)
    memory.provide([(0, BLOCKS * block)])
    assert all(np.array_equal(read(device, places[number], block), numbers) for number in (0, 5))
    device.copy_strided(places[16], places[0], 4 * block, block, 3)
    assert np.array_equal(read(device, places[16], block), numbers)
    assert not (read(device, places[20], block).any() or read(device, places[24], block).any())
    device.copy(places[3] + block // 2, places[0], block)
    assert np.array_equal(read(device, places[3] + block // 2, block), numbers)
    device.zero(places[0], block)
    assert not read(device, places[0], block).any()
