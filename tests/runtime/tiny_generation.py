"""Generating with a depth policy over the NumPy backend, every cache entry and waiting state checked on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from runtime.numpy_backend import NumpyBackend, NumpyContext
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.frontier import LazySequence
from tide_runtime.depth.policy import DepthPolicy, PromptChunk
from tide_runtime.depth.tuning import DepthTuning
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sampler import Sampler
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

TOLERANCE = 1e-9  # float64, sums in another order


@dataclass(frozen=True)
class Request:
    """``seat``: the row's number in its batch."""

    prompt: tuple[int, ...]
    params: GenerationParams
    seat: int


def make_row(request: Request, manifest: Manifest) -> TokenSequence:
    """A sequence as `Engine` makes it."""
    slots, prompt = manifest.max_seq_len, request.prompt
    tokens = np.zeros(min(len(prompt) + request.params.max_new_tokens, slots + 1), np.int64)
    tokens[: len(prompt)] = prompt
    return TokenSequence(
        tokens=tokens,
        num_tokens=len(prompt),
        prompt_tokens=len(prompt),
        params=request.params,
        eos=frozenset(request.params.eos_token_ids or ()),
        sampler=Sampler(request.params, manifest.model.vocab_size),
    )


FAR_DRAFTS = DepthTuning(first_exit_drafts=64, padding_penalty=0.0)
"""Exits draft up to the limit from a text's first cycle on, and a sequence may get ahead of others."""

Policy = TypeVar("Policy", bound=DepthPolicy)


def exits_pay(policy: Policy, cost: float = 0.5) -> Policy:
    """``policy``, to which every evaluation of exits seems to gain, so that no cooldown begins."""
    for owner, price in priced(policy):
        setattr(owner, price, lambda *_: cost)
    return policy


def priced(policy: DepthPolicy) -> list[tuple[Any, str]]:
    """What prices evaluations of exits, and the name of the method."""
    owners = ((policy, "token_cost"), (getattr(policy, "speculator", None), "cycle_cost"))
    return [(owner, price) for owner, price in owners if hasattr(owner, price)]


class Audited:
    """A policy whose rows are checked after each step and, for policies that skip layers, after each advance."""

    def __init__(self, policy: DepthPolicy, manifest: Manifest, model: TinyTransformer) -> None:
        self.policy, self.model, self.name = policy, model, policy.name
        self.edges = [0, *manifest.checkpoints, manifest.model.num_layers]
        executor = getattr(policy, "executor", None)
        if executor is not None:
            advance = executor.advance

            def audited(context: NumpyContext, states: Sequence[LazySequence], *arguments: object) -> object:
                logits = advance(context, states, *arguments)
                self._check(context, [state.sequence for state in states])
                return logits

            executor.advance = audited

    @property
    def lookahead(self) -> int:
        return self.policy.lookahead

    def reusable_tokens(self, row: TokenSequence) -> int:
        return self.policy.reusable_tokens(row)

    def step(self, context: NumpyContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]) -> list[list[int]]:
        rows = [row.batch_index for row in decoding]
        assert rows == sorted(rows)
        tokens = self.policy.step(context, decoding, prompts)
        self._check(context, [*decoding, *(chunk.sequence for chunk in prompts)])
        return tokens

    def _check(self, context: NumpyContext, rows: Sequence[TokenSequence]) -> None:
        for row in rows:
            state = row.policy_state  # full steps leave the frontier behind, and so does a preemption
            skips = isinstance(state, LazySequence) and row.prefilled and state.frontier.done[0] >= row.num_cached_tokens
            skips &= getattr(state, "refills", row.history.refills) == row.history.refills
            done = state.frontier.done if skips else [row.num_cached_tokens] * (len(self.edges) - 1)
            assert done == sorted(done, reverse=True) and (done[-1] >= row.prompt_tokens or not row.prefilled)
            text = self.model.states_of(row.tokens[: max(done[0], row.num_tokens)])
            for segment, count in enumerate(done):
                layers = slice(self.edges[segment], self.edges[segment + 1])
                _same(context.keys[layers, row.batch_index, :count], text.keys[layers, :count])
                _same(context.values[layers, row.batch_index, :count], text.values[layers, :count])
                if skips and segment > 0:
                    waiting = slice(count, done[segment - 1])
                    states = state.frontier.states[segment][: state.frontier.waiting(segment)]
                    _same(states, text.hidden[self.edges[segment]][waiting])


def generate(
    policy: DepthPolicy, backend: NumpyBackend, requests: Sequence[Request], capacity: int, chunk: int | None = None
) -> list[TokenSequence]:
    """The finished rows of ``requests``, in their order. ``chunk``: prompt tokens of a step, shared with decodes; None: prompts
    run before decodes."""
    rows = [make_row(request, backend.manifest) for request in requests]
    audited: Any = Audited(policy, backend.manifest, backend.model)
    context: Any = backend.context(capacity)
    for _ in run(audited, context, rows, chunk=chunk or 256, prompts_first=chunk is None):
        pass
    assert all(row.finish_reason is not None for row in rows)
    return rows


def output(row: TokenSequence) -> tuple[list[int], str | None]:
    """A row's new tokens and why it ended."""
    return row.new_tokens.tolist(), row.finish_reason


def _same(found: NDArray[Any], wanted: NDArray[np.float64]) -> None:
    assert found.shape == wanted.shape
    assert found.size == 0 or np.abs(found - wanted).max() < TOLERANCE  # many times faster than assert_allclose
