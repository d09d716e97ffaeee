"""The kernels of a decode loop, by what they do; `plugins/` has them in CUDA, tests have them in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tide_runtime.backends.element_types import ElementType
from tide_runtime.cuda.loop_state import LoopState
from tide_runtime.cuda.program import Enqueue


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
class ExitGate:
    """What an exit decides with, and what the layers behind it read.

    Args:
        hidden: [B, H] the states at the exit. ``row_bytes``: of one.
        window: [B, W, H] the states that wait in front of the deeper layers, W = ``width``.
        score: [B] float32, the router's.
        exit_token: [B] int64, the exit head's.
        deep_token: [B] int64, the model's own, of each row's last waiting token.
        deep: inputs of the deeper layers: write_index, position_ids [B, W], …, logits_index [B].
        slots: of a cache's row.
    """

    hidden: int
    row_bytes: int
    window: int
    width: int
    score: int
    threshold: float
    exit_token: int
    deep_token: int
    deep: NextInputs
    slots: int


class LoopKernels(Protocol):
    """Each returns what queues one kernel; a condition's handle is read when it is queued."""

    def take_tokens(self, state: LoopState, chosen: int) -> Enqueue:
        """Take ``chosen`` [B] int64 as output of the rows that run; ends rows at an eos id or their limit."""

    def turn(self, state: LoopState, inputs: NextInputs, slots: int) -> Enqueue:
        """Write the ring, make the next turn's inputs, and set ``proceed``: some row runs and turns are left.

        A row that has ended writes to its cache's last slot at most; nobody reads its caches again.
        """

    def exit_score(self, state: LoopState, exit: ExitScore) -> Enqueue:
        """Max-probability of the exit's head into ``score``."""

    def exit_gate(self, state: LoopState, gate: ExitGate) -> Enqueue:
        """Let a running row's state join those that wait; ``exits``: rows whose score clears the threshold. Set ``deeper``
        where a row does not leave, a window is full, or this is the last turn; lay out the deeper layers' inputs."""

    def exit_merge(self, state: LoopState, gate: ExitGate) -> Enqueue:
        """``chosen``: the exit's token where the row left, else the model's own. Where the layers ran, nothing waits now."""
