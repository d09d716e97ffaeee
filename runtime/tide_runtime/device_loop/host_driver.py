"""Execution of a program by the host, which reads a pinned flag at each condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.program import Condition, IfThen, Node, Run


class HostDriver:
    """Works on every device. Also runs a program once before its capture, so that libraries load and allocate what they need."""

    name = "host-driven"

    def __init__(self, device: Device) -> None:
        self._device = device

    def compile(self, program: Sequence[Node]) -> Callable[[], None]:
        """A function that runs ``program`` once. Each has its own flag, as several threads may run programs."""
        flag = self._device.pinned(np.dtype(np.int32).itemsize).view(np.int32)
        return lambda: self._run(program, flag)

    def _run(self, program: Sequence[Node], flag: NDArray[np.int32]) -> None:
        for node in program:
            if isinstance(node, Run):
                with self._device.lock:
                    node.enqueue(self._device.stream)
            elif isinstance(node, IfThen):
                if self._read(node.condition, flag):
                    self._run(node.body, flag)
            else:
                proceed = node.condition.default
                while proceed:
                    self._run(node.body, flag)
                    proceed = self._read(node.condition, flag)

    def _read(self, condition: Condition, flag: NDArray[np.int32]) -> int:
        self._device.download(flag, condition.flag)
        self._device.synchronize()
        return int(flag[0])
