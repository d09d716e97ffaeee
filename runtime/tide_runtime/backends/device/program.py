"""Device work with conditions in it, as data: one program that the host drives step by step or a CUDA graph drives alone.

    while running:            While(running, …)
        segment_0             Run
        router                Run: a kernel that sets `deeper`
        if deeper:            IfThen(deeper, …)
            segment_1         Run
        take_tokens           Run: a kernel that sets `running`

Both drivers run the same kernels over the same memory in the same order, so both give the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Enqueue = Callable[[int], None]  # puts work on a stream, given as its handle


@dataclass
class Condition:
    """What a kernel decides and a `While` or `IfThen` asks.

    Args:
        flag: device address of an int32 that the kernel sets, for the host.
        default: its value when a program starts.
        handle: of the CUDA graph condition that the kernel is to set as well, while a graph is being made.
    """

    flag: int
    default: int
    handle: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Run:
    """``enqueue`` is called for every run by the host, and once to be captured.

    ``fixed_stream``: it queues on the device's own stream, whichever it is given; captured, it becomes a graph of its own.
    """

    name: str
    enqueue: Enqueue
    fixed_stream: bool = False


@dataclass(frozen=True)
class IfThen:
    """``body`` runs when ``condition`` is not 0."""

    condition: Condition
    body: tuple[Node, ...]


@dataclass(frozen=True)
class While:
    """``body`` runs as long as ``condition`` is not 0; it is asked before every turn."""

    condition: Condition
    body: tuple[Node, ...]


Node = Run | IfThen | While


def conditions(program: Sequence[Node]) -> Iterator[Condition]:
    """All that ``program`` asks, inner ones too."""
    for node in program:
        if not isinstance(node, Run):
            yield node.condition
            yield from conditions(node.body)
