"""Execution of a program as CUDA graphs, in one of two forms, which the types of the captured nodes decide.

*Conditional*: conditions become conditional nodes, and one launch runs the whole program. A conditional body may contain kernels,
copies, child graphs and further conditions. A condition handle belongs to the graph of its node, so that graph's builder creates
it before the kernels that set it are captured.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#conditional-graph-nodes

*Flat*: each stretch of the program without conditions becomes a graph of its own, in which every node type is allowed except host
functions. The host queues as many iterations of a loop without inner conditions as may be needed, without waiting in between;
it reads the flags of inner conditions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from tide_runtime.backends.device.control_flow import Execution, IfThen, Node, Run, Switch, While, bodies_of, conditions
from tide_runtime.backends.device.device import Device
from tide_runtime.device_loop.captured_nodes import node_types, why_not_in_a_body, why_not_repeatable
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.errors import TargetError, TideError

_REFUSED = "the decode step cannot be captured in a CUDA graph"
_BUGS = (AttributeError, ImportError, NameError, TypeError)  # errors of this file or of the package's version, not of a capture


class CapturingDevice(Device, Protocol):
    """The part of `CudaDevice` that captures graphs: ``gpu`` is a cuda.core Device, ``core_stream`` the Stream of ``stream``."""

    gpu: Any
    core_stream: Any

    def capturing(self) -> AbstractContextManager[None]:
        """Context manager of a capture; the caller holds the lock."""

    def instantiate(self, builder: Any, frees_memory: bool) -> Any:
        """The executable graph of ``builder``, uploaded. ``frees_memory``: each launch frees what the last one has not."""

    def is_invalid(self, builder: Any) -> bool:
        """Whether a call that captures do not allow has made the capture of ``builder`` invalid."""

    def discard(self, builder: Any) -> None:
        """End the capture of ``builder``, which gives no graph: the stream can be used again."""

    def copies_host_memory(self, node: Any) -> bool:
        """Whether ``node``, a captured memcpy, reads or writes host memory other than `pinned`."""


class GraphDriver:
    """Captures programs that have run once on the device's stream, as a capture must not load modules or allocate memory.

    ``no_conditions``: returns why no conditional nodes can be used on this machine, whatever a library captures, or None; called
    once the loop's kernels are loaded. A kernel that sets no conditions would leave a WHILE running forever.
    """

    name = "device-driven"

    def __init__(self, device: CapturingDevice, no_conditions: Callable[[], str | None] = lambda: None) -> None:
        self._device, self._no_conditions = device, no_conditions

    def compile(self, program: Sequence[Node]) -> Execution:
        """``program`` as one graph with conditional nodes, or flat, with the reason as ``refusal``, if it has conditions.

        Raises TargetError when it can be captured in neither form.
        """
        self._device.use()
        with self._captures() as captures:
            flat = _FlatProgram(self._device, captures)
            parts = flat.capture(program)
        if (reason := why_not_repeatable(flat.types)) is not None:
            raise TargetError(f"{_REFUSED}: {reason}")
        branches = any(True for _ in conditions(program))
        refusal = self._no_conditions() or why_not_in_a_body(flat.types) if branches else None
        if branches and refusal is None:
            try:
                return Execution(self._conditional(program), flat.types)
            except TargetError as error:
                refusal = str(error)
        with self._captures():
            return Execution(flat.instantiate(parts), flat.types, refusal)

    @contextmanager
    def _captures(self) -> Iterator[ExitStack]:
        """A stack that closes its builders when a later step fails. Errors of cuda.core and of the captured libraries, which each
        have their own classes, become TargetError."""
        try:
            with self._device.lock, self._device.capturing(), ExitStack() as captures:
                yield captures
                captures.pop_all()
        except _BUGS:
            raise
        except TideError as error:
            raise TargetError(f"{_REFUSED}: {error}") from error
        except Exception as error:
            raise TargetError(f"{_REFUSED}: {type(error).__name__}: {error}") from error

    def _conditional(self, program: Sequence[Node]) -> Callable[[int], None]:
        try:
            with self._captures() as captures:
                builder = _begin(self._device, self._device.gpu.create_graph_builder(), captures)
                self._emit(builder, program, captures)
                _end(self._device, builder)
                graph = self._device.instantiate(builder, frees_memory=False)
        finally:
            for condition in conditions(program):
                condition.handle = None  # so that the host can run the same program
        return lambda turns: _launch(self._device, graph)

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
            for opened, body in zip(_open_bodies(builder, node, handles[index]), bodies_of(node), strict=True):
                begun = _begin(self._device, opened, captures)
                self._emit(begun, body, captures)
                _end(self._device, begun)

    def _capture(self, builder: Any, node: Run, captures: ExitStack) -> None:
        if not node.fixed_stream:
            node.enqueue(int(builder.stream.handle))
            return
        child = _begin(self._device, self._device.core_stream.create_graph_builder(), captures)
        node.enqueue(self._device.stream)
        _end(self._device, child)
        builder.embed(child)


@dataclass
class _Stretch:
    """Consecutive runs, captured by ``builder``; ``launch`` launches them once they are instantiated."""

    builder: Any
    graph: Any = None


class _FlatProgram:
    """Captures the stretches of a program, counts their nodes by type in ``types``, and instantiates them."""

    def __init__(self, device: CapturingDevice, captures: ExitStack) -> None:
        self._device, self._captures = device, captures
        self._stretches: list[_Stretch] = []
        self.types: Counter[str] = Counter()

    def capture(self, program: Sequence[Node]) -> tuple[Node, ...]:
        """``program`` with one `Run` for each stretch."""
        nodes = list[Node]()
        for is_run, group in groupby(program, lambda node: isinstance(node, Run)):
            if is_run:
                nodes.append(self._stretch([node for node in group if isinstance(node, Run)]))
            else:
                nodes += [self._with_stretches(node) for node in group if not isinstance(node, Run)]
        return tuple(nodes)

    def _with_stretches(self, node: IfThen | Switch | While) -> Node:
        if isinstance(node, Switch):
            return replace(node, bodies=tuple(self.capture(body) for body in node.bodies))
        return replace(node, body=self.capture(node.body))

    def _stretch(self, runs: Sequence[Run]) -> Run:
        builder = _begin(self._device, self._device.core_stream.create_graph_builder(), self._captures)
        for run in runs:
            run.enqueue(self._device.stream)
        _end(self._device, builder)
        self.types += node_types(builder.graph_definition, self._device.copies_host_memory)
        stretch = _Stretch(builder)
        self._stretches.append(stretch)
        return Run(", ".join(run.name for run in runs), lambda _: _launch(self._device, stretch.graph), fixed_stream=True)

    def instantiate(self, parts: Sequence[Node]) -> Callable[[int], None]:
        for stretch in self._stretches:
            stretch.graph = self._device.instantiate(stretch.builder, frees_memory=True)
        return HostDriver(self._device, queues_turns=True).compile(parts).launch


def _open_bodies(builder: Any, node: IfThen | Switch | While, handle: Any) -> Sequence[Any]:
    """Builders of the bodies of a conditional node, which this adds to the graph of ``builder``."""
    if isinstance(node, Switch):
        return builder.switch(handle, len(node.bodies))
    return [builder.if_then(handle) if isinstance(node, IfThen) else builder.while_loop(handle)]


def _launch(device: CapturingDevice, graph: Any) -> None:
    with device.lock:
        graph.launch(device.core_stream)


def _begin(device: CapturingDevice, builder: Any, captures: ExitStack) -> Any:
    """Start capturing with ``builder``, which ``captures`` closes if a later step fails: an open capture would block its
    stream, which is the device's own for a `Run` with a fixed stream."""
    captures.callback(_close, device, builder)
    return builder.begin_building()


def _end(device: CapturingDevice, builder: Any) -> None:
    """End the capture of ``builder``. Libraries may ignore the error that made it invalid, or leave streams unjoined."""
    if device.is_invalid(builder):
        raise TargetError("a call that a capture does not allow has made it invalid")
    _or_discard(device, builder, builder.end_building)


def _close(device: CapturingDevice, builder: Any) -> None:
    with suppress(Exception):  # the error of the failed capture is already being raised
        if device.is_invalid(builder):
            device.discard(builder)
        else:
            _or_discard(device, builder, builder.close)


def _or_discard(device: CapturingDevice, builder: Any, end: Callable[[], object]) -> None:
    """Call ``end``, which ends a capture. Where that fails there is no graph, as with streams that are not joined."""
    try:
        end()
    except Exception:
        device.discard(builder)
        raise
