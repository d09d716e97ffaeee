"""Driving a program from the host: it waits for one pinned flag at each condition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tide_runtime.cuda.device import Device
from tide_runtime.cuda.program import Condition, IfThen, Node, Run


class HostDriver:
    """For every device, and for what is captured later: a first run makes libraries load and allocate what they need."""

    name = "host-driven"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flag = device.pinned(np.dtype(np.int32).itemsize).view(np.int32)

    def compile(self, program: Sequence[Node]) -> Callable[[], None]:
        """What runs ``program`` once."""
        return lambda: self._run(program)

    def _run(self, program: Sequence[Node]) -> None:
        for node in program:
            if isinstance(node, Run):
                node.enqueue(self._device.stream)
            elif isinstance(node, IfThen):
                if self._read(node.condition):
                    self._run(node.body)
            else:
                proceed = node.condition.default
                while proceed:
                    self._run(node.body)
                    proceed = self._read(node.condition)

    def _read(self, condition: Condition) -> int:
        self._device.download(self._flag, condition.flag)
        self._device.synchronize()
        return int(self._flag[0])
