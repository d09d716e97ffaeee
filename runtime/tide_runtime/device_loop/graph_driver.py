"""Execution of a program as a CUDA graph: conditions become conditional nodes, and one launch runs the whole program.

A conditional body may contain kernels, copies, child graphs and further conditions. A condition handle belongs to the graph of
its node, so that graph's builder creates it before the kernels that set it are captured.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#conditional-graph-nodes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Protocol

from tide_runtime.backends.device.program import IfThen, Node, Run, conditions
from tide_runtime.errors import TargetError


class CapturingDevice(Protocol):
    """The part of `CudaDevice` that captures graphs: ``gpu`` is a cuda.core Device, ``core_stream`` the Stream of ``stream``."""

    gpu: Any
    core_stream: Any
    stream: int
    lock: AbstractContextManager[Any]

    def capturing(self) -> AbstractContextManager[None]:
        """Context manager of a capture; the caller holds the lock."""


class GraphDriver:
    """Captures programs that have run once on the device's stream, as a capture must not load modules or allocate memory."""

    name = "device-driven"

    def __init__(self, device: CapturingDevice) -> None:
        self._device = device

    def compile(self, program: Sequence[Node]) -> Callable[[], None]:
        """A function that launches ``program`` as one graph. Raises TargetError when it cannot be captured."""
        try:
            with self._device.lock, self._device.capturing(), ExitStack() as captures:
                builder = _begin(self._device.gpu.create_graph_builder(), captures)
                self._emit(builder, program, captures)
                builder.end_building()
                graph = builder.complete()
                graph.upload(self._device.core_stream)
                captures.pop_all()
        except Exception as error:  # cuda.core and each library raise their own classes
            raise TargetError(f"the decode step cannot be captured in a CUDA graph: {type(error).__name__}: {error}") from error
        finally:
            for condition in conditions(program):
                condition.handle = None  # so that the host can run the same program

        def launch() -> None:
            with self._device.lock:
                graph.launch(self._device.core_stream)

        return launch

    def _emit(self, builder: Any, program: Sequence[Node], captures: ExitStack) -> None:
        handles = {}
        for index, node in enumerate(program):
            if not isinstance(node, Run):
                handles[index] = builder.create_condition(default_value=node.condition.default)
                node.condition.handle = int(handles[index].handle)
        for index, node in enumerate(program):
            if isinstance(node, Run):
                self._capture(builder, node, captures)
                continue
            open_body = builder.if_then if isinstance(node, IfThen) else builder.while_loop
            body = _begin(open_body(handles[index]), captures)
            self._emit(body, node.body, captures)
            body.end_building()

    def _capture(self, builder: Any, node: Run, captures: ExitStack) -> None:
        if not node.fixed_stream:
            node.enqueue(int(builder.stream.handle))
            return
        child = _begin(self._device.core_stream.create_graph_builder(), captures)
        node.enqueue(self._device.stream)
        child.end_building()
        builder.embed(child)


def _begin(builder: Any, captures: ExitStack) -> Any:
    """Start capturing with ``builder``, which ``captures`` closes if a later step fails: an open capture would block its
    stream, which is the device's own for a `Run` with a fixed stream."""
    captures.callback(_close, builder)
    return builder.begin_building()


def _close(builder: Any) -> None:
    with suppress(Exception):  # the error of the failed capture is already being raised
        builder.close()
