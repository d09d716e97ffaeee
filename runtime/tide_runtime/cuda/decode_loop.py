"""Decoding several tokens a launch: the segments, and kernels that take the tokens and lay out the next turn, in a loop.

    while some row runs and turns are left:
        segments up to the exit                                     all rows, one token each
        the exit's graph and head · exit_score · exit_gate          only where rows may leave early
        if a row goes on (or a window is full, or the last turn):
            the other segments                                      all rows, all that waits: [B, W]
        exit_merge · take_tokens · turn

Rows that have ended are masked until the launch is over; then rows join and leave. Layers that a token skipped are run for it
when the next token needs them, and for all of them in a launch's last turn: between launches nothing waits on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tide_runtime.backends.device_step import DeviceBuffers, DeviceSlots, DeviceStep
from tide_runtime.backends.element_types import ELEMENT_TYPES
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.cuda.loop_kernels import ExitGate, ExitScore, LoopKernels, NextInputs
from tide_runtime.cuda.loop_state import LoopState
from tide_runtime.cuda.program import IfThen, Node, Run, While
from tide_runtime.exits import Exit
from tide_runtime.manifest import HEAD

_NEXT = ("input_ids", "position_ids", "write_index", "seqlens_k")
_DEEP = ("position_ids", "write_index", "seqlens_k", "logits_index")


@dataclass(frozen=True)
class LoopExit:
    """Where rows may leave: at ``exit``, in front of a segment, from ``threshold`` on.

    ``window``: most tokens that wait in front of the deeper layers.
    """

    exit: Exit
    threshold: float
    window: int

    @property
    def boundary(self) -> int:
        return self.exit.boundary

    @property
    def depth(self) -> int:
        return self.exit.info.checkpoint

    @property
    def graphs(self) -> list[str]:
        """Those that are run to ask it."""
        return [HEAD] if self.exit.graph is None else [self.exit.graph, HEAD]


class DecodeLoop:
    """Slots 0 … ``rows`` - 1 of ``slots``, ``turns`` tokens a launch. ``is_warm``: each of its graphs has run."""

    def __init__(self, slots: DeviceSlots, rows: int, kernels: LoopKernels, turns: int, exit: LoopExit | None = None) -> None:
        self.slots, self.rows, self._exit, self.is_warm = slots, rows, exit, False
        self.state = LoopState(slots.backend.device, rows, turns)
        self._ones = [1] * rows
        self._step = DeviceStep(slots, StepShape.of(0, self._ones, self._ones), captured=True)
        self._segments = [segment.name for segment in slots.backend.manifest.segments]
        self.program: tuple[Node, ...] = (While(self.state.proceed, self._body(kernels)),)

    def launch(
        self, run: Callable[[], None], lengths: Sequence[int], tokens: Sequence[int], limits: Sequence[int], eos: Iterable[int]
    ) -> list[list[int]]:
        """Run the program by ``run``, for the first ``len(lengths)`` rows. Returns the turns as `TokenRing.take` does."""
        idle = [0] * (self.rows - len(lengths))
        self.slots.backend.device.use()
        self._step.begin(self._ones, self._ones)
        self._step.input_ids[:] = [*tokens, *idle]
        self._step.place([*lengths, *idle])
        self._step.widen()
        self._step.send()
        self.state.send(lengths, tokens, limits, eos)
        run()
        self.slots.backend.device.synchronize()
        turns = self.state.ring.take()
        self._count(len(turns), self.state.ring.take_deep())
        return turns

    def _body(self, kernels: LoopKernels) -> tuple[Node, ...]:
        state, slots = self.state, self.slots.caches.limit
        turn = Run("turn", kernels.turn(state, _inputs(self._step, _NEXT), slots))
        if self._exit is None:
            take = Run("take_tokens", kernels.take_tokens(state, self._step.address("token")))
            return (*self._graphs(self._step, self._segments), take, turn)
        take = Run("take_tokens", kernels.take_tokens(state, state.pointers["chosen"]))
        return (*self._with_exit(kernels, self._exit), take, turn)

    def _with_exit(self, kernels: LoopKernels, exit: LoopExit) -> tuple[Node, ...]:
        wide = [exit.window] * self.rows
        # Its buffers hold what waits from turn to turn, so they are not those of the other steps.
        deep = DeviceStep(self.slots, StepShape.of(0, wide, self._ones), DeviceBuffers(self.slots.backend.device), captured=True)
        states = self._step.hidden[exit.boundary - 1]
        gate = ExitGate(
            hidden=states.pointer,
            row_bytes=states.row_bytes,
            window=deep.hidden[exit.boundary - 1].pointer,
            width=exit.window,
            score=self._step.address("score"),
            threshold=exit.threshold,
            exit_token=self._step.address("token"),
            deep_token=deep.address("token"),
            deep=_inputs(deep, _DEEP),
            slots=self.slots.caches.limit,
        )
        deep.begin(wide, self._ones)
        deep.place([0] * self.rows)
        deep.widen()
        deep.send()  # what stays the same from turn to turn
        return (
            *self._graphs(self._step, self._segments[: exit.boundary]),
            *self._asking(kernels, exit),
            Run("exit_gate", kernels.exit_gate(self.state, gate)),
            IfThen(self.state.deeper, tuple(self._graphs(deep, self._segments[exit.boundary :]))),
            Run("exit_merge", kernels.exit_merge(self.state, gate)),
        )

    def _asking(self, kernels: LoopKernels, exit: LoopExit) -> list[Run]:
        """The exit's router and head, on the states in front of its segment."""
        info, step, device = exit.exit.info, self._step, self.slots.backend.device
        nodes = self._graphs(step, exit.graphs)
        if info.head == "identity":  # the head reads behind the last segment
            source, target = step.hidden[exit.boundary - 1], step.hidden[-1]
            size = self.rows * source.row_bytes
            nodes.insert(0, Run("to_head", lambda _: device.copy(target.pointer, source.pointer, size), fixed_stream=True))
        if info.router != "mlp":
            logits = step.tensors(HEAD, False, ["logits"])["logits"]
            score = ExitScore(
                logits=logits.pointer,
                element=logits.element,
                vocab=logits.shape[-1],
                token=step.address("token"),
                score=step.address("score"),
                has_mlp=info.asks_mlp,
                mlp_threshold=info.mlp_threshold or 0.0,
            )
            nodes.append(Run("exit_score", kernels.exit_score(self.state, score)))
        return nodes

    def _count(self, turns: int, deep: int) -> None:
        """Launches of the loop, as the device counted its turns."""
        every = self._segments if self._exit is None else [*self._segments[: self._exit.boundary], *self._exit.graphs]
        for graph in every:
            self.slots.count(graph, turns)
        if self._exit is not None:
            for graph in self._segments[self._exit.boundary :]:
                self.slots.count(graph, deep)
        self.is_warm |= turns > 0 and (self._exit is None or deep > 0)

    def _graphs(self, step: DeviceStep, names: Sequence[str]) -> list[Run]:
        fixed = self.slots.backend.fixed_stream
        return [Run(name, lambda stream, name=name: step.enqueue(name, stream), fixed) for name in names]  # type: ignore[misc]


def _inputs(step: DeviceStep, names: Sequence[str]) -> NextInputs:
    types = {name: ELEMENT_TYPES[step.block.host[name].dtype.name] for name in names}
    return NextInputs({name: step.block.pointers[name] for name in names}, types)
