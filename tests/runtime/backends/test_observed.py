"""Observed backends report how long graphs ran, not how long it took to queue them."""

import time
from pathlib import Path
from typing import Any

from runtime.host_device import HostDevice
from tide_runtime.backends.observed import observed
from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle import Bundle

BUSY_S = 0.02


class BusyDevice(HostDevice):
    """A device whose work takes `BUSY_S`."""

    def synchronize(self) -> None:
        time.sleep(BUSY_S)
        super().synchronize()


class Seconds:
    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        self.of[graph] = seconds


def test_a_device_is_waited_for(bundle: Path) -> None:
    """Guards against profiles and host overheads in which the work of a GPU counts as the host's."""
    on_cpu: Any = ("CPUExecutionProvider", {})
    seconds = Seconds()
    backend = OnnxRuntimeCudaBackend.load(Bundle.open(bundle), "cuda", ThreadOptions(1), BusyDevice(), on_cpu)
    step = observed(backend, seconds).context(1).step(0, [2], [1])
    step.input_ids[:] = 5
    step.place([0])
    step.run("segment_0")
    assert seconds.of["segment_0"] >= BUSY_S
