"""Decode loop on the device: a launch generates several tokens per sequence without the host.

    while a sequence is running and turns are left:
        segments up to the first exit                               all sequences, one token each
        exit_join · the exit's graph · exit_candidates
        if a sequence may exit:
            head · exit_score · choose_token
        exit_gate
        if a sequence does not exit (or a window is full, or it is the last turn):
            exit_inputs · segments up to the next exit              all sequences, all pending tokens: [B, 1, 2, 4 or 8]
            exit_join · …
            if a sequence does not exit …:
                exit_inputs · the other segments                    all sequences, all pending tokens
                choose_token · exit_merge
        take_tokens · turn

One iteration, called a turn, generates a token of every running sequence. Without exits it consists of all segments,
choose_token, take_tokens and turn. Where all sequences are greedy, choose_token is left out, because the graphs give the argmax.
Finished sequences are masked until the launch ends; the batch changes between launches only. A token that exits early stays
pending: the layers it skipped run when a later token needs their keys and values, in the last turn, or when the host has to
choose its successor, so that no tokens are pending between launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tide_runtime.backends.device.arena import Arena, DeviceBuffers
from tide_runtime.backends.device.control_flow import IfThen, Launch, Node, Run, Switch, While
from tide_runtime.backends.device.device_step import DeviceContext, DeviceStep
from tide_runtime.backends.step_arrays import PADDED_TOKENS, StepShape
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import HEAD
from tide_runtime.device_loop.loop_kernels import (
    ExitCandidates,
    ExitGate,
    ExitInputs,
    ExitScore,
    ExitWindow,
    LoopKernels,
)
from tide_runtime.device_loop.loop_state import LoopState
from tide_runtime.device_loop.padded_steps import PaddedSteps, choice_of, next_inputs, runs_of
from tide_runtime.device_loop.token_ring import NO_TOKEN, exit_and_token
from tide_runtime.sequence import TokenSequence

_TURN_INPUTS = ("input_ids", "position_ids", "write_index", "seqlens_k")
_DEEPER_INPUTS = ("position_ids", "write_index", "seqlens_k", "logits_index")


@dataclass(frozen=True)
class LoopExit:
    """An exit before a segment, which tokens take when the router's score reaches ``threshold``."""

    early_exit: Exit
    threshold: float

    @property
    def boundary(self) -> int:
        return self.early_exit.boundary

    @property
    def depth(self) -> int:
        return self.early_exit.info.checkpoint

    @property
    def graphs(self) -> list[str]:
        """The graph of the exit's router and translator, if it has one."""
        return [] if self.early_exit.graph is None else [self.early_exit.graph]


class DecodeLoop:
    """Decode loop over batch indices 0 … ``batch_size`` - 1 of ``context``, for the slots that its caches have when it is made.

    Args:
        turns: most tokens per sequence and launch.
        exits: shallow first.
        window: most pending tokens of a sequence, over all exits; one of `PADDED_TOKENS`.
        samples: sequences need not be greedy.

    The first launch runs every graph of the loop, so that a capture after it meets no lazy initialization.
    """

    def __init__(
        self,
        context: DeviceContext,
        batch_size: int,
        kernels: LoopKernels,
        turns: int,
        exits: Sequence[LoopExit] = (),
        window: int = 1,
        samples: bool = False,
    ) -> None:
        self.context = context
        self.batch_size = batch_size
        self._exits = exits
        self._window = window
        self._samples = samples
        self.state = LoopState(context.backend.device, batch_size, turns, len(exits))
        self._ones = [1] * batch_size
        self._is_warm = False
        self._step = DeviceStep(context, StepShape.of(0, self._ones, self._ones), captured=True)
        self._segments = [segment.name for segment in context.backend.manifest.segments]
        sizes = {f"{e.boundary}": batch_size * window * self._step.hidden[e.boundary - 1].row_bytes for e in exits}
        self._windows = Arena(context.backend.device, sizes)  # states pending at each exit
        self._behind: list[tuple[PaddedSteps, list[str]]] = []  # steps behind each exit, and the segments that they run
        self.program: tuple[Node, ...] = (While(self.state.proceed, self._body(kernels)),)

    def launch(self, run: Launch, sequences: Sequence[TokenSequence], eos: Iterable[int]) -> list[list[int]]:
        """Launch the program for ``sequences``, at the first batch indices, which end at ids of ``eos``.

        Returns the new tokens of each.
        """
        idle = [0] * (self.batch_size - len(sequences))
        num_cached_tokens = [*(sequence.num_cached_tokens for sequence in sequences), *idle]
        self.context.backend.device.use()
        if not self._is_warm:
            self._warm_up(num_cached_tokens)
        self._step.begin(self._ones, self._ones, 0)
        self._step.input_ids[:] = [*(sequence.last_token for sequence in sequences), *idle]
        self._step.place(num_cached_tokens)
        self._step.assume_full_caches()
        self._step.send()
        most = max(len(sequence.tokens) - sequence.num_cached_tokens - 1 for sequence in sequences)  # the last is not cached
        turns = self.state.launch(run, sequences, eos, min(self.state.turns, most))
        self._count(len(turns), *self.state.ring.take_counts())
        self._is_warm = True
        return [self._take(sequence, [turn[row] for turn in turns]) for row, sequence in enumerate(sequences)]

    def _take(self, sequence: TokenSequence, values: Iterable[int]) -> list[int]:
        """The tokens in a sequence's ``values`` of the ring, whose depths are noted."""
        generated = [exit_and_token(value) for value in values if value != NO_TOKEN]
        if self._exits:
            depths = [self.context.backend.manifest.model.num_layers, *(loop_exit.depth for loop_exit in self._exits)]
            sequence.depth.token_depths += [depths[number] for number, _ in generated]
        return [token for _, token in generated]

    def _body(self, kernels: LoopKernels) -> tuple[Node, ...]:
        state, step = self.state, self._step
        chosen = state.pointers["chosen"] if self._exits else step.address("token")
        take = Run("take_tokens", kernels.take_tokens(state, chosen))
        turn = Run("turn", kernels.turn(state, next_inputs(step, _TURN_INPUTS), self.context.caches.slots))
        if not self._exits:
            return (*runs_of(step, self._segments), *self._choice(kernels, step, self._segments[-1]), take, turn)
        first = self._exits[0].boundary
        shallow = runs_of(step, self._segments[:first])
        join = self._join(kernels, 1, step)
        return (*shallow, join, *self._from_exit(kernels, 1), take, turn)

    def _from_exit(self, kernels: LoopKernels, number: int) -> tuple[Node, ...]:
        """Evaluation of exit ``number``, at which the newest states are pending, and the layers after it."""
        loop_exit = self._exits[number - 1]
        more = number < len(self._exits)
        segments = self._segments[loop_exit.boundary : self._exits[number].boundary if more else len(self._segments)]
        sizes = PADDED_TOKENS[: PADDED_TOKENS.index(self._window) + 1]
        # Buffers of their own, as an exit reads what the step before it has put out.
        behind = PaddedSteps(self.context, self.batch_size, sizes, _DEEPER_INPUTS, DeviceBuffers(self.context.backend.device))
        self._behind.append((behind, segments))
        widest = behind.widest
        states = self._step.hidden[loop_exit.boundary - 1]
        gate = ExitGate(
            number=number,
            score=self._step.address("score"),
            threshold=loop_exit.threshold,
            exit_token=self._step.address("token"),
            width=self._window,
        )
        inputs = ExitInputs(
            number=number,
            window=self._windows.pointers[f"{loop_exit.boundary}"],
            width=self._window,
            row_bytes=states.row_bytes,
            states=widest.hidden[loop_exit.boundary - 1].pointer,
            inputs=behind.inputs,
            slots=self.context.caches.slots,
        )
        bodies = tuple(
            (*runs_of(step, segments), *([self._join(kernels, number + 1, step)] if more else [])) for step in behind.steps
        )
        if more:
            rest = self._from_exit(kernels, number + 1)
        else:
            merge = Run("exit_merge", kernels.exit_merge(self.state, widest.address("token")))
            rest = (*self._choice(kernels, widest, self._segments[-1]), merge)
        write = Run("exit_inputs", kernels.exit_inputs(self.state, inputs))
        return (
            *self._evaluation(kernels, number, loop_exit),
            Run("exit_gate", kernels.exit_gate(self.state, gate)),
            IfThen(self.state.deeper[number - 1], (write, Switch(self.state.choices[number - 1], bodies), *rest)),
        )

    def _join(self, kernels: LoopKernels, number: int, before: DeviceStep) -> Run:
        """``before``: the step whose segments output the states that arrive at exit ``number``."""
        boundary = self._exits[number - 1].boundary
        states = before.hidden[boundary - 1]
        newest = self._step.hidden[boundary - 1]
        window = ExitWindow(
            number=number,
            states=states.pointer,
            arriving=before.shape.seq,
            row_bytes=states.row_bytes,
            window=self._windows.pointers[f"{boundary}"],
            width=self._window,
            last=None if before is self._step else newest.pointer,
        )
        return Run("exit_join", kernels.exit_join(self.state, window))

    def _evaluation(self, kernels: LoopKernels, number: int, loop_exit: LoopExit) -> list[Node]:
        """The exit's router and, if a sequence may exit, its head on the hidden states at its checkpoint.

        The head reads the whole vocabulary's weights: on a model of 1B parameters a fifth of a step's time.
        """
        info = loop_exit.early_exit.info
        step = self._step
        candidates = ExitCandidates(
            number=number,
            score=step.address("score"),
            threshold=loop_exit.threshold if info.decides_before_head else info.mlp_threshold or 0.0,
            has_mlp=info.has_mlp,
        )
        return [
            *runs_of(step, loop_exit.graphs),
            Run("exit_candidates", kernels.exit_candidates(self.state, candidates)),
            IfThen(self.state.heads[number - 1], tuple(self._head(kernels, loop_exit))),
        ]

    def _head(self, kernels: LoopKernels, loop_exit: LoopExit) -> list[Run]:
        info = loop_exit.early_exit.info
        step = self._step
        device = self.context.backend.device
        nodes = runs_of(step, [HEAD])
        if info.head == "identity":  # the head reads the last hidden array
            source, target = step.hidden[loop_exit.boundary - 1], step.hidden[-1]
            size = self.batch_size * source.row_bytes
            nodes.insert(0, Run("to_head", lambda _: device.copy(target.pointer, source.pointer, size), fixed_stream=True))
        if not info.decides_before_head:
            logits = step.tensors(HEAD, ["logits"])["logits"]
            score = ExitScore(
                logits=logits.pointer,
                element=logits.element,
                vocab=logits.shape[-1],
                token=step.address("token"),
                score=step.address("score"),
            )
            nodes.append(Run("exit_score", kernels.exit_score(self.state, score)))
        return [*nodes, *self._choice(kernels, step, HEAD)]

    def _choice(self, kernels: LoopKernels, step: DeviceStep, graph: str) -> list[Run]:
        return [choice_of(kernels, self.state, step, graph)] if self._samples else []

    def _warm_up(self, num_cached_tokens: Sequence[int]) -> None:
        """Run what the first launch may leave out. The keys and values that this writes lie behind those of each sequence, where
        the launch writes its own."""
        for behind, segments in self._behind:
            behind.warm_up(segments, num_cached_tokens)
        for name in [graph for loop_exit in self._exits for graph in (*loop_exit.graphs, HEAD)]:
            self._step.enqueue(name)

    def _count(self, turns: int, deep: Sequence[int], heads: Sequence[int]) -> None:
        """Count the loop's launches from the device's counters: turns that ran the layers after each exit, and its head."""
        edges = [0, *(loop_exit.boundary for loop_exit in self._exits), len(self._segments)]
        times = [turns, *deep]
        for number, count in enumerate(times):
            evaluated = self._exits[number].graphs if number < len(self._exits) else []
            for graph in [*self._segments[edges[number] : edges[number + 1]], *evaluated]:
                self.context.count(graph, count)
        if heads:
            self.context.count(HEAD, sum(heads))
