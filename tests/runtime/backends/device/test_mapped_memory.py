"""Memory that is mapped into reserved addresses, held to the rules of the driver's documentation."""

from threading import RLock
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")

from runtime.backends.device.simulated_driver import FULL, GRANULE, SimulatedDriver
from tide_runtime.backends.device.cuda_device import CudaDevice
from tide_runtime.backends.device.deferred_frees import DeferredFrees
from tide_runtime.backends.device.mapped_memory import AddressRange, MappedMemory
from tide_runtime.errors import DeviceMemoryError, TargetError


def addresses(driver: SimulatedDriver, count_bytes: int) -> AddressRange:
    def check(call: str, result: tuple[Any, ...]) -> Any:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise (DeviceMemoryError if result[0] == FULL else TargetError)(f"{call}: {result[0].name}")
        return result[1] if len(result) > 1 else None

    return AddressRange(driver, check, 1, 7, count_bytes)


def test_memory_is_mapped_once_and_zeroed() -> None:
    """Guards against granules that are mapped twice, or zeroed again under the keys that they hold."""
    driver = SimulatedDriver()
    made = addresses(driver, 10 * GRANULE - 5)
    assert made.provided == GRANULE and driver.reserved == {made.pointer: 10 * GRANULE}
    made.provide([(3 * GRANULE + 1, 3 * GRANULE + 2)])
    made.provide([(GRANULE - 1, 5 * GRANULE + 1)])
    made.provide([(0, 6 * GRANULE)])
    places = [((address - made.pointer) // GRANULE, size // GRANULE) for address, size in driver.zeroed]
    assert places == [(0, 1), (3, 1), (1, 2), (4, 2)]
    assert made.provided == 6 * GRANULE and driver.free == 994 and not driver.handles
    made.provide([(9 * GRANULE, 10 * GRANULE - 5)])
    with pytest.raises(AssertionError):
        made.provide([(0, 10 * GRANULE + 1)])


def test_everything_is_given_back_when_the_stream_is_done() -> None:
    """Guards against memory that stays taken, and memory that is taken away under a running step."""
    driver, lock = SimulatedDriver(), RLock()
    frees = DeferredFrees(lock)
    memory = MappedMemory(addresses(driver, 8 * GRANULE), lock, frees)
    memory.provide([(2 * GRANULE, 4 * GRANULE)])
    assert memory.provided == 3 * GRANULE
    with lock, frees.deferred():
        with pytest.raises(AssertionError, match="zero the memory again"):
            memory.provide([(0, 5 * GRANULE)])
        del memory
        assert driver.mapped
    assert not driver.mapped and not driver.reserved and driver.free == 1000 and driver.contexts == ["main"]


@pytest.mark.parametrize("refuses", ["attribute", "cuMemAddressReserve", "cuMemMap"])
def test_a_driver_that_does_not_map_is_found_at_once(refuses: str) -> None:
    """Guards against an engine that fails at its first token where memory could have been allocated whole."""
    driver = SimulatedDriver(refuses=refuses)
    with pytest.raises(TargetError) as refused:
        addresses(driver, 8 * GRANULE)
    assert not isinstance(refused.value, DeviceMemoryError)
    assert not driver.reserved and not driver.handles and driver.free == 1000


def test_memory_that_is_short_is_reported_and_can_be_asked_for_again() -> None:
    """Guards against an engine that cannot go on after one request too many."""
    driver = SimulatedDriver(free=4)
    made = addresses(driver, 8 * GRANULE)
    made.provide([(4 * GRANULE, 5 * GRANULE)])
    with pytest.raises(DeviceMemoryError, match="cuMemCreate"):
        made.provide([(2 * GRANULE, 3 * GRANULE), (6 * GRANULE, 8 * GRANULE)])
    assert made.provided == 2 * GRANULE and driver.free == 2, "a part of what was asked for stays taken"
    made.provide([(6 * GRANULE, 8 * GRANULE)])
    driver.free += 4
    made.provide([(0, 8 * GRANULE)])
    assert made.provided == 8 * GRANULE and driver.free == 0


def gpu(driver: SimulatedDriver) -> Any:
    """A `CudaDevice` over ``driver``."""
    made: Any = object.__new__(CudaDevice)
    made._api, made.ordinal, made.stream, made.name, made.lock = driver, 1, 7, "H0", RLock()
    made._frees = DeferredFrees(made.lock)
    made.allocate = lambda count_bytes: SimpleNamespace(pointer=256 * count_bytes)
    return made


def test_a_gpu_that_does_not_map_allocates_at_once() -> None:
    """Guards against a machine on which nothing runs, or takes more memory than it did and says nothing."""
    with pytest.warns(RuntimeWarning, match=r"cuMemMap on GPU 1 failed: .*NOT_SUPPORTED: in words; 8 MiB for keys.* at once"):
        memory = gpu(SimulatedDriver(refuses="cuMemMap")).reserve(8 << 20)
    memory.provide([(0, 8 << 20)])
    assert memory.provided == 8 << 20 and memory.pointer == 256 * (8 << 20)


def test_a_full_gpu_is_an_error_of_memory() -> None:
    """Guards against a step that ends the engine where fewer requests would fit, and against a fallback that is as full."""
    with pytest.raises(DeviceMemoryError, match=r"GPU 1 \(H0\) has no memory left \(cuMemCreate\); run fewer sequences"):
        gpu(SimulatedDriver(free=0)).reserve(8 << 20)
    memory = gpu(SimulatedDriver(free=2)).reserve(8 << 20)
    assert isinstance(memory, MappedMemory) and memory.provided == GRANULE
    with pytest.raises(DeviceMemoryError):
        memory.provide([(0, 8 << 20)])
