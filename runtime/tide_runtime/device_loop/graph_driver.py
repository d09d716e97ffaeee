"""Driving a program by a CUDA graph: conditions become conditional nodes, and one launch runs it to its end.

A conditional body may hold kernels, copies, child graphs and further conditions. A handle belongs to the graph that holds its
node, so it is made in that graph's builder, before the kernels that set it are captured.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#conditional-graph-nodes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Protocol

from tide_runtime.backends.device.program import IfThen, Node, Run, conditions
from tide_runtime.errors import TargetError


class CapturingDevice(Protocol):
    """The part of `CudaDevice` that makes graphs: ``gpu``, a cuda.core Device, and ``core_stream``, its Stream ``stream``."""

    gpu: Any
    core_stream: Any
    stream: int
    lock: AbstractContextManager[Any]

    def capturing(self) -> AbstractContextManager[None]:
        """Around a capture, by whoever has the lock."""


class GraphDriver:
    """For what has run once on the device's stream: nothing may be loaded or allocated while it is captured."""

    name = "device-driven"

    def __init__(self, device: CapturingDevice) -> None:
        self._device = device

    def compile(self, program: Sequence[Node]) -> Callable[[], None]:
        """What launches ``program`` as one graph. Raises TargetError when the driver, or a library, cannot capture it."""
        try:
            with self._device.lock, self._device.capturing(), ExitStack() as begun:
                builder = _begin(self._device.gpu.create_graph_builder(), begun)
                self._emit(builder, program, begun)
                builder.end_building()
                graph = builder.complete()
                graph.upload(self._device.core_stream)
                begun.pop_all()
        except Exception as error:  # cuda.core's and each library's own
            raise TargetError(f"the decode step cannot be captured in a CUDA graph: {type(error).__name__}: {error}") from error
        finally:
            for condition in conditions(program):
                condition.handle = None  # the host may drive the same program

        def launch() -> None:
            with self._device.lock:
                graph.launch(self._device.core_stream)

        return launch

    def _emit(self, builder: Any, program: Sequence[Node], begun: ExitStack) -> None:
        made = {}
        for place, node in enumerate(program):
            if not isinstance(node, Run):
                made[place] = builder.create_condition(default_value=node.condition.default)
                node.condition.handle = int(made[place].handle)
        for place, node in enumerate(program):
            if isinstance(node, Run):
                self._capture(builder, node, begun)
                continue
            body = _begin(builder.if_then(made[place]) if isinstance(node, IfThen) else builder.while_loop(made[place]), begun)
            self._emit(body, node.body, begun)
            body.end_building()

    def _capture(self, builder: Any, node: Run, begun: ExitStack) -> None:
        if not node.fixed_stream:
            node.enqueue(int(builder.stream.handle))
            return
        piece = _begin(self._device.core_stream.create_graph_builder(), begun)
        node.enqueue(self._device.stream)
        piece.end_building()
        builder.embed(piece)


def _begin(builder: Any, begun: ExitStack) -> Any:
    """``builder``, capturing. Should the rest fail, ``begun`` closes it: nothing else ends a capture, and until then its stream,
    the device's own for a `Run` that is fixed to it, can do nothing else."""
    begun.callback(_close, builder)
    return builder.begin_building()


def _close(builder: Any) -> None:
    with suppress(Exception):  # what a capture that failed says of itself is known by then
        builder.close()
