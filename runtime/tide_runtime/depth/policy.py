"""What a depth policy is: it decides how deep each token goes and returns tokens whose output is final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence


class PromptChunk(NamedTuple):
    """The next ``tokens`` tokens of a sequence that are not cached yet, up to its ``prefill_end``."""

    sequence: TokenSequence
    tokens: int

    @property
    def is_last(self) -> bool:
        return self.sequence.num_cached_tokens + self.tokens >= self.sequence.prefill_end

    @property
    def wanted(self) -> int:
        """The number of its last tokens whose logits the policy reads: 1 in a prompt's last chunk, else 0."""
        return int(self.is_last and self.sequence.num_tokens == self.sequence.prompt_tokens)


class DepthPolicy(Protocol):
    """What the engine loop drives. A sequence keeps its row (``batch_index``) from one step to the next."""

    name: str

    @property
    def lookahead(self) -> int:
        """Most tokens that a step puts into the cache of a sequence that decodes."""

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        """Advance the ``decoding`` sequences, whose rows rise, and run the ``prompts``, in shared launches where that pays.

        Returns the new final tokens of each decoding sequence, none while it waits for others, then those of each prompt: the
        first token behind its last chunk. Advances ``num_cached_tokens`` and sets ``prefilled``.
        """

    def settled(self, sequence: TokenSequence) -> int:
        """How many tokens of the sequence have keys and values in its row that are the model's own, in every layer."""


class EnginePolicy(DepthPolicy, Protocol):
    """A policy with what an engine asks before a request runs."""

    def check_params(self, params: GenerationParams) -> None:
        """Raise ParamsError where the policy cannot do what a request wants."""

    @property
    def can_resume(self) -> bool:
        """Whether a sequence's text stays the same when its tokens are prefilled again."""


class LoadedPolicy(EnginePolicy, Protocol):
    """A policy as `registry.make_policy` makes it, before it is known what drives it."""

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
