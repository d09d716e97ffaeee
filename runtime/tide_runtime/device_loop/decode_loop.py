"""Decoding several tokens a launch: the segments, and kernels that take the tokens and lay out the next turn, in a loop.

    while some row runs and turns are left:
        segments up to the first exit                               all rows, one token each
        exit_join · the exit's graph and head · exit_score · exit_gate
        if a row goes on (or a window is full, or the last turn):
            segments up to the next exit                            all rows, all that waits: [B, W]
            exit_join · the exit's graph and head · exit_score · exit_gate
            if a row goes on …:
                the other segments                                  all rows, all that waits
                exit_merge
        take_tokens · turn

Without exits, all segments, take_tokens and turn. Rows that have ended are masked until the launch is over; then rows join and
leave. Layers that a token skipped are run for it when a later token needs them, and for all of them in a launch's last turn:
between launches nothing waits on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tide_runtime.backends.device.device_step import DeviceBuffers, DeviceContext, DeviceStep
from tide_runtime.backends.device.element_types import ELEMENT_TYPES
from tide_runtime.backends.device.program import IfThen, Node, Run, While
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import HEAD
from tide_runtime.device_loop.loop_kernels import ExitGate, ExitScore, ExitWindow, LoopKernels, NextInputs
from tide_runtime.device_loop.loop_state import LoopState

_NEXT = ("input_ids", "position_ids", "write_index", "seqlens_k")
_BEHIND = ("position_ids", "write_index", "seqlens_k", "logits_index")


@dataclass(frozen=True)
class LoopExit:
    """Where rows may leave: at ``exit``, in front of a segment, from ``threshold`` on."""

    exit: Exit
    threshold: float

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
    """ExecutionContext 0 … ``rows`` - 1 of ``slots``, ``turns`` tokens a launch.

    ``exits``: shallow first. ``window``: most tokens of a row that wait at all of them together.
    """

    def __init__(
        self,
        context: DeviceContext,
        rows: int,
        kernels: LoopKernels,
        turns: int,
        exits: Sequence[LoopExit] = (),
        window: int = 1,
    ) -> None:
        self.context, self.batch_size, self._exits, self._window = context, rows, exits, window
        self.state = LoopState(context.backend.device, rows, turns, len(exits))
        self._ones = [1] * rows
        self._ran = [False] * (1 + len(exits))  # the turn, and the layers behind each exit
        self._step = DeviceStep(context, StepShape.of(0, self._ones, self._ones), captured=True)
        self._segments = [segment.name for segment in context.backend.manifest.segments]
        self.program: tuple[Node, ...] = (While(self.state.proceed, self._body(kernels)),)

    @property
    def is_warm(self) -> bool:
        """Whether each of its graphs has run."""
        return all(self._ran)

    def launch(
        self, run: Callable[[], None], lengths: Sequence[int], tokens: Sequence[int], limits: Sequence[int], eos: Iterable[int]
    ) -> list[list[int]]:
        """Run the program by ``run``, for the first ``len(lengths)`` rows. Returns the turns as `TokenRing.take` does."""
        idle = [0] * (self.batch_size - len(lengths))
        self.context.backend.device.use()
        self._step.begin(self._ones, self._ones)
        self._step.input_ids[:] = [*tokens, *idle]
        self._step.place([*lengths, *idle])
        self._step.assume_full_caches()
        self._step.send()
        self.state.send(lengths, tokens, limits, eos)
        run()
        self.context.backend.device.synchronize()
        turns = self.state.ring.take()
        self._count(len(turns), self.state.ring.take_deep())
        return turns

    def _body(self, kernels: LoopKernels) -> tuple[Node, ...]:
        state, step = self.state, self._step
        chosen = state.pointers["chosen"] if self._exits else step.address("token")
        take = Run("take_tokens", kernels.take_tokens(state, chosen))
        turn = Run("turn", kernels.turn(state, _inputs(step, _NEXT), self.context.caches.limit))
        if not self._exits:
            return (*self._graphs(step, self._segments), take, turn)
        first = self._exits[0].boundary
        return (*self._graphs(step, self._segments[:first]), *self._from_exit(kernels, 1, step, 1), take, turn)

    def _from_exit(self, kernels: LoopKernels, number: int, before: DeviceStep, arriving: int) -> tuple[Node, ...]:
        """Asking exit ``number``, to which ``before`` brings up to ``arriving`` tokens of a row, and what lies behind it."""
        exit, more = self._exits[number - 1], number < len(self._exits)
        following = self._exits[number].boundary if more else len(self._segments)
        behind = self._step_behind()
        states, asked = before.hidden[exit.boundary - 1], self._step.hidden[exit.boundary - 1]
        window = ExitWindow(
            number=number,
            states=states.pointer,
            arriving=arriving,
            row_bytes=states.row_bytes,
            window=behind.hidden[exit.boundary - 1].pointer,
            width=self._window,
            last=None if before is self._step else asked.pointer,
        )
        gate = ExitGate(
            number=number,
            score=self._step.address("score"),
            threshold=exit.threshold,
            exit_token=self._step.address("token"),
            behind=_inputs(behind, _BEHIND),
            width=self._window,
            slots=self.context.caches.limit,
        )
        deeper = self._graphs(behind, self._segments[exit.boundary : following])
        if more:
            rest = self._from_exit(kernels, number + 1, behind, self._window)
        else:
            rest = (Run("exit_merge", kernels.exit_merge(self.state, behind.address("token"))),)
        return (
            Run("exit_join", kernels.exit_join(self.state, window)),
            *self._asking(kernels, exit),
            Run("exit_gate", kernels.exit_gate(self.state, gate)),
            IfThen(self.state.deeper[number - 1], (*deeper, *rest)),
        )

    def _step_behind(self) -> DeviceStep:
        """All that waits at an exit. Its buffers hold that from turn to turn, so they are not those of the other steps."""
        wide = [self._window] * self.batch_size
        step = DeviceStep(
            self.context, StepShape.of(0, wide, self._ones), DeviceBuffers(self.context.backend.device), captured=True
        )
        step.begin(wide, self._ones)
        step.place([0] * self.batch_size)
        step.assume_full_caches()
        step.send()  # what stays the same from turn to turn
        return step

    def _asking(self, kernels: LoopKernels, exit: LoopExit) -> list[Run]:
        """The exit's router and head, on the states in front of its segment."""
        info, step, device = exit.exit.info, self._step, self.context.backend.device
        nodes = self._graphs(step, exit.graphs)
        if info.head == "identity":  # the head reads behind the last segment
            source, target = step.hidden[exit.boundary - 1], step.hidden[-1]
            size = self.batch_size * source.row_bytes
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

    def _count(self, turns: int, deep: Sequence[int]) -> None:
        """Launches of the loop, as the device counted its turns. ``deep``: those that ran what lies behind each exit."""
        edges = [0, *(exit.boundary for exit in self._exits), len(self._segments)]
        times = [turns, *deep]
        for number, count in enumerate(times):
            asked = self._exits[number].graphs if number < len(self._exits) else []
            for graph in [*self._segments[edges[number] : edges[number + 1]], *asked]:
                self.context.count(graph, count)
        self._ran = [before or count > 0 for before, count in zip(self._ran, times, strict=True)]

    def _graphs(self, step: DeviceStep, names: Sequence[str]) -> list[Run]:
        fixed = self.context.backend.fixed_stream
        return [Run(name, lambda stream, name=name: step.enqueue(name, stream), fixed) for name in names]  # type: ignore[misc]


def _inputs(step: DeviceStep, names: Sequence[str]) -> NextInputs:
    types = {name: ELEMENT_TYPES[step.block.host[name].dtype.name] for name in names}
    return NextInputs({name: step.block.pointers[name] for name in names}, types)
