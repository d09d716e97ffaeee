"""The kernels of a decode loop, by what they do; `plugins/` has them in CUDA, tests have them in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.backends.device.program import Enqueue
from tide_runtime.device_loop.loop_state import LoopState


@dataclass(frozen=True)
class NextInputs:
    """Where the next turn's graphs read: device addresses by input name, and the element type of each."""

    pointers: dict[str, int]
    types: dict[str, ElementType]


@dataclass(frozen=True)
class ExitScore:
    """How sure an exit's head is, where its MLP lets it say so.

    Args:
        logits: [B, ``vocab``] of type ``element``, the head's. ``token``: [B] int64, their argmax, -1 where they are no numbers.
        score: [B] float32, the MLP's where the exit ``has_mlp``; replaced by the token's probability, or by -1 where the MLP says
            less than ``mlp_threshold`` or there is no token.
    """

    logits: int
    element: ElementType
    vocab: int
    token: int
    score: int
    has_mlp: bool
    mlp_threshold: float


@dataclass(frozen=True)
class ExitWindow:
    """The states that wait at an exit, and those that come to it.

    Args:
        number: of the exit, 1 for the first.
        states: [B, ``arriving``, H] outputs of the layers in front of it. ``row_bytes``: of one state.
        window: [B, W, H] the states that wait, W = ``width``.
        last: [B, H] where the newest state of each row is wanted, None: nowhere.
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
    """What an exit decides with, and what the layers behind it read.

    Args:
        number: of the exit, 1 for the first.
        score: [B] float32, the router's.
        exit_token: [B] int64, the exit head's.
        behind: inputs of the layers behind: write_index, position_ids [B, W], …, logits_index [B], W = ``width``.
        width: most tokens of a row that wait at all exits together.
        slots: of a cache's row.
    """

    number: int
    score: int
    threshold: float
    exit_token: int
    behind: NextInputs
    width: int
    slots: int


class LoopKernels(Protocol):
    """Each returns what queues one kernel; a condition's handle is read when it is queued."""

    @property
    def conditions_refused(self) -> str | None:
        """Why these kernels cannot set conditions of CUDA graphs; None: they can."""

    def take_tokens(self, state: LoopState, chosen: int) -> Enqueue:
        """Take ``chosen`` [B] int64 as output of the rows that run; ends rows at an eos id or their limit."""

    def turn(self, state: LoopState, inputs: NextInputs, slots: int) -> Enqueue:
        """Write the ring, make the next turn's inputs, and set ``proceed``: some row runs and turns are left.

        A row that has ended writes to its cache's last slot at most; nobody reads its caches again.
        """

    def exit_score(self, state: LoopState, exit: ExitScore) -> Enqueue:
        """Max-probability of the exit's head into ``score``."""

    def exit_join(self, state: LoopState, window: ExitWindow) -> Enqueue:
        """Copy the states that come to an exit behind those that wait there: at the first exit one of each row that runs, at
        the others what waited at the exit before."""

    def exit_gate(self, state: LoopState, gate: ExitGate) -> Enqueue:
        """``waiting``: what has come waits here now. ``exits``, ``chosen``: rows whose score clears the threshold, unless they
        left before. Set the exit's ``deeper`` where a row has not left, as much waits as a window holds, or this is the last
        turn; lay out the inputs of the layers behind."""

    def exit_merge(self, state: LoopState, deep_token: int) -> Enqueue:
        """Every layer has run: ``chosen`` of rows that did not leave is the model's own token [B], and nothing waits now."""
