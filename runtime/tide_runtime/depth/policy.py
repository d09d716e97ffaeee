"""What a depth policy is: it decides how deep each token goes and returns tokens whose output is final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence


class DepthPolicy(Protocol):
    """What the scheduler drives. Sequences occupy the batch indices 0 … len(sequences) - 1, in order."""

    name: str

    def prefill(self, context: ExecutionContext, sequence: TokenSequence) -> int:
        """Run the sequence's prompt into its KV cache; returns the first output token."""

    def decode(self, context: ExecutionContext, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        """Advance every sequence and its ``num_cached_tokens``; returns each one's new final tokens, none while it waits for
        others."""


class LoadedPolicy(DepthPolicy, Protocol):
    """A policy as `registry.make_policy` makes it for an engine."""

    def check_params(self, params: GenerationParams) -> None:
        """Raise ParamsError where the policy cannot do what a request wants."""

    def why_on_host(self, pads_sequences: bool) -> str | None:
        """Why a loop on the device cannot run this policy; None: it can.

        Args:
            pads_sequences: the target's graphs take several tokens of several sequences at once.
        """

    def for_device_loop(self) -> list[tuple[Exit, float]]:
        """The exits, shallow first, that a device loop evaluates for every token, and their thresholds. From then on the policy
        evaluates them for every token too, so that steps driven from the host give the same tokens."""

    def can_loop(self, sequence: TokenSequence) -> bool:
        """Whether a device loop may take the sequence over: none of its tokens waits for layers."""

    def took_tokens(self, sequence: TokenSequence, depths: Sequence[int]) -> None:
        """A device loop generated one token at each of ``depths`` (layers run); all layers have caught up."""
