"""Whether memory that a GPU maps by need behaves as `Device.reserve` says, and what it costs.

    python -m benchmarks.gpu.growing_memory [--json FILE]

Exit code 1 when a check fails, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tide_runtime.backends.device.device import Device, ReservedMemory
from tide_runtime.errors import TargetError

_BLOCK = 1 << 20  # bytes of a block that is written, half a granule
_BLOCKS = 64
_ROW, _CACHES = 8 << 20, 64  # bytes of a row of 4,096 slots in a cache of an 8B model, and the number of its caches


def findings(device: Device, block: int = _BLOCK, row: int = _ROW) -> dict[str, Any]:
    """Name → what was found; the values of checks are True or False, and all True where memory behaves as it should.

    Args:
        block: bytes of a block that the checks write, half a granule.
        row: bytes of each cache of a row, whose costs are measured.

    Raises TargetError when a call fails.
    """
    device.use()
    began = perf_counter()
    memory = device.reserve(_BLOCKS * block)
    reserve_ms = 1e3 * (perf_counter() - began)
    by_need = memory.provided < _BLOCKS * block
    return {"maps_by_need": by_need, "reserve_ms": round(reserve_ms, 3), **_checks(device, memory, block), **_costs(device, row)}


def _checks(device: Device, memory: ReservedMemory, block: int) -> dict[str, bool]:
    """Blocks 0 and 5 hold numbers while memory is mapped beside and between them; copies cross the borders of mappings."""
    places = [memory.pointer + number * block for number in range(_BLOCKS)]
    numbers = np.random.default_rng(0).integers(0, 256, block, np.uint8)
    memory.provide([(0, block)])
    zeroed = not _read(device, places[0], block).any()
    device.upload_copy(places[0], numbers)
    memory.provide([(5 * block, 6 * block)])
    device.copy(places[5], places[0], block)
    memory.provide([(0, _BLOCKS * block)])
    kept = all(np.array_equal(_read(device, places[number], block), numbers) for number in (0, 5))
    device.copy_strided(places[16], places[0], 4 * block, block, 3)
    strided = [_read(device, places[number], block) for number in (16, 20, 24)]
    device.copy(places[3] + block // 2, places[0], block)
    across = np.array_equal(_read(device, places[3] + block // 2, block), numbers)
    device.zero(places[0], block)
    return {
        "new_memory_is_zero": zeroed,
        "growth_keeps_contents": kept,
        "strided_copies_are_right": np.array_equal(strided[0], numbers) and not (strided[1].any() or strided[2].any()),
        "copies_cross_mappings": across,
        "zeroing_works": not _read(device, places[0], block).any(),
    }


def _costs(device: Device, row: int) -> dict[str, float]:
    """Milliseconds to map, zero and give back one row of ``row`` bytes in each of 64 caches."""
    memory = device.reserve(2 * row * _CACHES)
    device.synchronize()
    began = perf_counter()
    for number in range(_CACHES):
        memory.provide([(2 * number * row, (2 * number + 1) * row)])
    mapped = perf_counter()
    device.synchronize()
    zeroed = perf_counter()
    del memory
    ended = perf_counter()
    spans = {"mapped": mapped - began, "zeroed": zeroed - mapped, "given_back": ended - zeroed}
    return {f"row_{what}_ms": round(1e3 * seconds, 3) for what, seconds in spans.items()}


def _read(device: Device, pointer: int, count_bytes: int) -> NDArray[np.uint8]:
    held = device.pinned(count_bytes)
    device.download(held, pointer)
    device.synchronize()
    return held


def seen_by_torch(device: Device) -> bool | None:
    """Whether torch reads mapped memory by its address, as target ``torch`` does; None: torch is missing, or sees no GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    memory = device.reserve(4 * _BLOCK)
    memory.provide([(0, 4 * _BLOCK)])
    device.upload_copy(memory.pointer, np.arange(_BLOCK, dtype=np.int32))
    device.synchronize()
    described = {"data": (memory.pointer, False), "shape": (_BLOCK,), "typestr": "<i4", "strides": None, "version": 3}
    described_by = type("Described", (), {"__cuda_array_interface__": described})()
    tensor = torch.as_tensor(described_by, device=f"cuda:{device.ordinal}")
    return bool((tensor == torch.arange(_BLOCK, dtype=torch.int32, device=tensor.device)).all())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    try:
        from tide_runtime.backends.device.cuda_device import CudaDevice

        device = CudaDevice()
    except TargetError as error:
        print(f"NOT RUN: {error}", file=sys.stderr)
        return 2
    found = {"gpu": device.name, **findings(device), "seen_by_torch": seen_by_torch(device)}
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=1))
    for name, value in found.items():
        print(f"RESULT growing_memory_{name}={value}")
    return int(False in [value for value in found.values() if isinstance(value, bool)])


if __name__ == "__main__":
    sys.exit(main())
