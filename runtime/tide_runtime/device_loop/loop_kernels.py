"""Interface of a decode loop's kernels; `plugins/` implements them in CUDA, tests in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tide_runtime.backends.device.control_flow import Enqueue
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.device_loop.loop_state import LoopState
from tide_runtime.device_loop.text_state import TextState


@dataclass(frozen=True)
class NextInputs:
    """Inputs of the next graphs: device address and element type by input name."""

    pointers: dict[str, int]
    types: dict[str, ElementType]


@dataclass(frozen=True)
class ExitCandidates:
    """Arguments of `LoopKernels.exit_candidates`.

    Args:
        number: the exit's number, 1 for the first.
        score: [B] float32; on input the MLP router's score if the exit ``has_mlp``.
        threshold: least score of the MLP with which a sequence may exit.
    """

    number: int
    score: int
    threshold: float
    has_mlp: bool


@dataclass(frozen=True)
class ExitScore:
    """Arguments of `LoopKernels.exit_score`.

    Args:
        logits: [B, ``vocab``] of type ``element``, output of the exit's head.
        token: [B] int64, argmax of the logits; -1 where they are not finite.
        score: [B] float32; on input what `LoopKernels.exit_candidates` wrote, on output the token's probability, or -1 for
            sequences that are no candidates or have no token.
    """

    logits: int
    element: ElementType
    vocab: int
    token: int
    score: int


@dataclass(frozen=True)
class ChooseToken:
    """Arguments of `LoopKernels.choose_token`.

    Args:
        logits: [B · ``tokens``, ``vocab``] of type ``element``; those of a sequence's tokens stand one after the other.
        chosen: [B · ``tokens``] int64, the tokens that follow; -1 where the logits are not finite, or the host has to decide.
    """

    logits: int
    element: ElementType
    vocab: int
    chosen: int
    tokens: int = 1


@dataclass(frozen=True)
class ExitWindow:
    """Arguments of `LoopKernels.exit_join`: hidden states that arrive at an exit, and those pending there.

    Args:
        number: the exit's number, 1 for the first.
        states: [B, ``arriving``, H] outputs of the layers before the exit.
        row_bytes: bytes of one hidden state.
        window: [B, W, H] pending states, W = ``width``.
        last: [B, H] destination of each sequence's newest state; None: not needed.
    """

    number: int
    states: int
    arriving: int
    row_bytes: int
    window: int
    width: int
    last: int | None


@dataclass(frozen=True)
class ExitGate:
    """Arguments of `LoopKernels.exit_gate`: inputs of an exit's decision.

    Args:
        number: the exit's number, 1 for the first.
        score: [B] float32, the router's score.
        exit_token: [B] int64, the exit head's token.
        width: most pending tokens of a sequence, over all exits.
    """

    number: int
    score: int
    threshold: float
    exit_token: int
    width: int


@dataclass(frozen=True)
class ExitInputs:
    """Arguments of `LoopKernels.exit_inputs`: what is pending at an exit, and the inputs of the layers after it.

    Args:
        number: the exit's number, 1 for the first.
        window: [B, W, H] pending states, W = ``width``, a power of two.
        row_bytes: bytes of one hidden state.
        states: room for [B, W, H], the states that these layers read.
        inputs: write_index [B], position_ids with room for [B, W], …, logits_index [B].
        slots: slots of the KV caches.
    """

    number: int
    window: int
    width: int
    row_bytes: int
    states: int
    inputs: NextInputs
    slots: int


class LoopKernels(Protocol):
    """Each method returns a function that queues one kernel; a condition's handle is read at that time."""

    @property
    def conditions_refused(self) -> str | None:
        """Reason why these kernels cannot set CUDA graph conditions, or None."""

    def take_tokens(self, state: LoopState, chosen: int) -> Enqueue:
        """Append ``chosen`` [B] int64 to the running sequences, and finish those at an eos id or their limit."""

    def turn(self, state: LoopState, inputs: NextInputs, slots: int) -> Enqueue:
        """Write the turn's tokens to the ring and the next turn's inputs, and set ``proceed`` if a sequence is running and turns
        are left.

        The positions of finished sequences are clamped to the last slot; their caches are not read again.
        """

    def exit_candidates(self, state: LoopState, candidates: ExitCandidates) -> Enqueue:
        """Decide whether the exit's head runs: the exit's ``heads`` is set if a running sequence has not exited before and, with
        an MLP, its score reaches the threshold. Sets ``score`` of the others to -1, without an MLP that of candidates to 1."""

    def exit_score(self, state: LoopState, early_exit: ExitScore) -> Enqueue:
        """Write the maximum probability of the exit's head to ``score``."""

    def choose_token(self, state: LoopState, choice: ChooseToken) -> Enqueue:
        """Choose tokens of the running sequences as `Sampler.sample` does, or leave them to the host where rounding decides."""

    def exit_join(self, state: LoopState, window: ExitWindow) -> Enqueue:
        """Append arriving states to an exit's pending ones: at the first exit the newest of each running sequence, at the others
        those that were pending at the previous exit."""

    def exit_gate(self, state: LoopState, gate: ExitGate) -> Enqueue:
        """Decide which sequences exit, and whether the layers after the exit run.

        Adds the arrived tokens to ``waiting`` and sets ``exits`` and ``chosen`` of sequences that exit here. Sets the exit's
        ``deeper`` if a sequence has not exited, a window is full, or this is the last turn.
        """

    def exit_inputs(self, state: LoopState, inputs: ExitInputs) -> Enqueue:
        """Write the inputs of the layers after the exit for S tokens of each sequence, the smallest power of two that holds what
        is pending in each running one, and the exit's ``choice``, log2 S: states [B, S, H], positions [B, S], whatever their
        room."""

    def text_drafts(self, state: LoopState, texts: TextState, inputs: NextInputs, slots: int) -> Enqueue:
        """Guess how each running sequence's text goes on, from where its longest end occurred before, and choose how many tokens
        S of each sequence the next pass takes: a power of two, for the most expected tokens per time. Writes the pass's
        ``inputs``, token ids and positions [B, S], whatever their room, and ``texts.choice``, log2 S.

        The positions of finished sequences are clamped to the last slots; their caches are not read again.
        """

    def text_accept(self, state: LoopState, texts: TextState, chosen: int) -> Enqueue:
        """Append the drafts that are the model's tokens ``chosen`` [B, S] int64, and one more of these, to the running
        sequences; where a token is negative, the sequence needs the host. Writes the turn's ring values, and sets ``proceed``
        if a sequence is running, every running one has 16 slots below its bound, none needs the host, and turns are left."""

    def exit_merge(self, state: LoopState, deep_token: int) -> Enqueue:
        """Set ``chosen`` of sequences that did not exit to the full model's token [B], and clear the pending tokens."""
