"""What a depth policy is: it decides how deep each token goes and returns tokens whose output is final."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.exits import Exit
from tide_runtime.errors import ParamsError
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
    def num_logits(self) -> int:
        """The number of its last tokens whose logits are read: of a prompt to continue 1 in the last chunk, else 0."""
        return min(self.tokens, max(0, self.sequence.num_cached_tokens + self.tokens - self.sequence.logits_from))


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
        first output token, after its last chunk. Advances ``num_cached_tokens`` and sets ``prefilled``.
        """

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        """How many of the sequence's first tokens may go into the prefix cache: their keys and values are the model's own."""


class EnginePolicy(DepthPolicy, Protocol):
    """A policy with what an engine needs to know before a request runs."""

    def check_params(self, params: GenerationParams) -> None:
        """Raise ParamsError where the policy cannot do what a request wants."""

    @property
    def can_resume(self) -> bool:
        """Whether a sequence's text stays the same when its tokens are prefilled again."""

    @property
    def runs_every_layer(self) -> bool:
        """Whether each token's logits are those of all layers, as a prefill gives them."""

    @property
    def uses_draft_head(self) -> bool:
        """Whether it runs the draft head, so that rows keep the cache that one may have."""

    @property
    def loops_as_rows(self) -> bool:
        """Whether it steps in a `LoopContext`."""


@dataclass(frozen=True)
class TextDrafts:
    """How a loop on the device drafts tokens that it copies from a text.

    Args:
        limit: most drafts of a pass.
        usual_rates: (least matched tokens of a class, usual share of such drafts that are right), rising.
        weight: drafts that a usual rate counts as.
        pass_ms: time of a pass, by sequences and tokens of each.
    """

    limit: int
    usual_rates: Sequence[tuple[int, float]]
    weight: float
    pass_ms: Callable[[int, int], float]


@dataclass(frozen=True)
class DevicePlan:
    """How a loop on the device decodes as a policy does.

    Args:
        host: runs the steps that the loop cannot, with the tokens that the loop would give: it evaluates exits for every token.
        exits: those that the loop evaluates for every token, shallow first, and their thresholds.
        can_start: whether the loop may take a sequence over: none of its tokens waits for layers.
        drafts: those that it verifies; None: it runs a token at a time.
    """

    host: EnginePolicy
    exits: Sequence[tuple[Exit, float]] = ()
    can_start: Callable[[TokenSequence], bool] = lambda sequence: True
    drafts: TextDrafts | None = None


class LoadedPolicy(EnginePolicy, Protocol):
    """A policy as `registry.make_policy` makes it, before it is known what drives it."""

    def device_plan(self) -> DevicePlan | str:
        """How a loop on the device runs this policy, or why none can."""


@dataclass(frozen=True)
class BackendFacts:
    """What a policy is made for.

    Args:
        concurrency: sequences that run at once.
        pass_costs: what passes through all layers take on this machine; None: not measured.
        same_bits: a token's logits do not depend on what shares its launch.
        rounds: the target rounds to few bits, so that without ``same_bits`` drafts would change many texts.
        adapted: requests may choose adapters, which exits and their certificate do not have.
        loop_costs: returns what launches of one loop take, as measured here, or None; None itself: the target does not run rows
            of loops, see `LoopContext`.
    """

    concurrency: int = 1
    pass_costs: CostTable | None = None
    same_bits: bool = True
    rounds: bool = False
    adapted: bool = False
    loop_costs: Callable[[], CostTable | None] | None = None


def refuse_depth_budget(policy: str, params: GenerationParams) -> None:
    """Raise ParamsError where a request has a depth budget: ``policy`` promises the model's own output."""
    if params.depth_budget is not None:
        raise ParamsError(
            f"depth_budget is set, and policy {policy} promises the model's own output, which takes every layer; "
            "leave it out, or load the engine with policy exit"
        )
