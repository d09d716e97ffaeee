"""What no kernel can be faster than on this GPU: moving its bytes, and being launched at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

from benchmarks.gpu.cuda_timing import Work, gpu_time
from benchmarks.gpu.router_problem import RouterProblem
from benchmarks.gpu.small_kernel import compile_cubin

_COPY_BYTES = 2**30
NOTHING = b'extern "C" __global__ void nothing() {}'


@dataclass(frozen=True)
class Floors:
    """``bandwidth``: bytes per µs of a large copy, counting both directions. ``launch_us``: an empty kernel, timed alike."""

    bandwidth: float
    launch_us: float

    def bytes_us(self, problem: RouterProblem) -> float:
        return problem.bytes / self.bandwidth

    def binding_us(self, problem: RouterProblem) -> float:
        """The larger one."""
        return max(self.bytes_us(problem), self.launch_us)


def measure_floors() -> Floors:
    """On the current GPU."""
    source = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return Floors(2 * _COPY_BYTES / gpu_time(copy, repeats=20), gpu_time(_launch_nothing()))


def _launch_nothing() -> Work:
    code = ObjectCode.from_cubin(compile_cubin(NOTHING, f"sm_{Device().arch}"))
    kernel, once = code.get_kernel("nothing"), LaunchConfig(grid=1, block=32)
    return lambda: launch(Stream.from_handle(torch.cuda.current_stream().cuda_stream), once, kernel)
