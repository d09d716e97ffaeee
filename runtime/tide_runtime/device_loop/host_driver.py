"""Execution of a program by the host, which reads a pinned flag at each condition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.device.control_flow import Condition, Execution, IfThen, Node, Run, Switch, conditions
from tide_runtime.backends.device.device import Device


class HostDriver:
    """Works on every device. Also runs a program once before its capture, so that libraries load and allocate what they need.

    ``queues_turns``: run a loop without inner conditions for the given number of iterations instead of reading its flag after
    each. That pays where an iteration is queued in less time than the device takes for it, as one graph is.
    """

    name = "host-driven"

    def __init__(self, device: Device, queues_turns: bool = False) -> None:
        self._device, self._queues_turns = device, queues_turns

    def compile(self, program: Sequence[Node]) -> Execution:
        """Each execution has its own flag, as several threads may run programs."""
        flag = self._device.pinned(np.dtype(np.int32).itemsize).view(np.int32)
        return Execution(lambda turns: self._run(program, flag, turns))

    def _run(self, program: Sequence[Node], flag: NDArray[np.int32], turns: int) -> None:
        for node in program:
            if isinstance(node, Run):
                with self._device.lock:
                    node.enqueue(self._device.stream)
            elif isinstance(node, IfThen):
                if self._read(node.condition, flag):
                    self._run(node.body, flag, turns)
            elif isinstance(node, Switch):
                for body in node.bodies[self._read(node.condition, flag) :][:1]:
                    self._run(body, flag, turns)
            elif self._queues_turns and not any(conditions(node.body)):
                for _ in range(turns):
                    self._run(node.body, flag, turns)
            else:
                proceed = node.condition.default
                while proceed:
                    self._run(node.body, flag, turns)
                    proceed = self._read(node.condition, flag)

    def _read(self, condition: Condition, flag: NDArray[np.int32]) -> int:
        self._device.download(flag, condition.flag)
        self._device.synchronize()
        return int(flag[0])
