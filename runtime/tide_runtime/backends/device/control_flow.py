"""Device work with control flow as data: a program that the host runs node by node, or that is captured in one CUDA graph.

    while running:            While(running, …)
        segment_0             Run
        router                Run: a kernel that sets `deeper`
        if deeper:            IfThen(deeper, …)
            segment_1         Run
        take_tokens           Run: a kernel that sets `running`

Both ways run the same kernels over the same memory in the same order, so both produce the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Enqueue = Callable[[int], None]  # queues work on the stream of the given handle
Launch = Callable[[int], None]  # runs a program; its argument: iterations after which a `While` has nothing left to do


@dataclass
class Condition:
    """Result of a kernel that a `While`, `IfThen` or `Switch` branches on.

    Args:
        flag: device address of an int32 that the kernel sets and the host reads.
        default: value when a program starts.
        handle: CUDA graph condition that the kernel also sets, while a graph is captured.
    """

    flag: int
    default: int
    handle: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Run:
    """A leaf of the program: ``enqueue`` is called by the host for every run, or once while captured.

    ``fixed_stream``: it queues on the device's own stream regardless of its argument, so its capture is a child graph.
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
class Switch:
    """The body whose number is ``condition`` runs, or none where there are fewer."""

    condition: Condition
    bodies: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class While:
    """``body`` runs while ``condition``, evaluated before every iteration, is not 0.

    Iterations after that are harmless: a driver that cannot evaluate the condition without waiting may run too many.
    """

    condition: Condition
    body: tuple[Node, ...]


Node = Run | IfThen | Switch | While


@dataclass(frozen=True)
class Execution:
    """A program that a driver has made ready to run.

    Args:
        launch: runs it.
        node_types: captured nodes by type; empty: nothing was captured.
        refusal: why its conditions are not conditional nodes of a CUDA graph, or None.
    """

    launch: Launch
    node_types: Mapping[str, int] = field(default_factory=dict)
    refusal: str | None = None


Compile = Callable[[Sequence[Node]], Execution]


def conditions(program: Sequence[Node]) -> Iterator[Condition]:
    """All conditions of ``program``, including nested ones."""
    for node in program:
        if not isinstance(node, Run):
            yield node.condition
            for body in bodies_of(node):
                yield from conditions(body)


def bodies_of(node: IfThen | Switch | While) -> tuple[tuple[Node, ...], ...]:
    return node.bodies if isinstance(node, Switch) else (node.body,)
