"""Lazy depth against a transformer that recomputes everything, on random bundles, batches, stops and cache limits.

Every run is audited (`tiny_generation.Audited`): after each advance and each step, all cache entries that count as done and
all states that wait are those of the tokens, recomputed.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime.random_bundles import Case, cases
from runtime.simulated_exit import SimulatedExit
from runtime.tiny_generation import Request, generate, output, priced
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.depth.registry import make_policy
from tide_runtime.depth.tuning import DepthTuning
from tide_runtime.sampler import Sampler

examples = partial(settings, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def recomputed(model: TinyTransformer, request: Request) -> tuple[list[int], str]:
    """Tokens and end of plain decoding, the whole text computed anew for each token."""
    tokens, params = list(request.prompt), request.params
    sampler = Sampler(params, model.vocab)
    while True:
        tokens.append(sampler.sample(model.full_logits(np.array(tokens))[-1].astype(np.float32), np.array(tokens)))
        new = tokens[len(request.prompt) :]
        if new[-1] in (params.eos_token_ids or ()):
            return new, "eos"
        if len(new) >= params.max_new_tokens:
            return new, "length"
        if len(tokens) > model.positions:
            return new, "cache_full"


def tuned(case: Case, policy: str) -> Any:
    """The case's policy with its tuning, and its prices multiplied by the case's factor."""
    tuning = DepthTuning(exit_room=case.room, cooldown=case.rest)
    made: Any = make_policy(policy, case.manifest, replace(case.options, tuning=tuning))
    for owner, price in priced(made):
        setattr(owner, price, _times(case.price, getattr(owner, price)))
    return made


def _times(factor: float, cost: Callable[..., float]) -> Callable[..., float]:
    return lambda *arguments: factor * cost(*arguments)


def outputs(case: Case, policy: str) -> list[object]:
    return [output(row) for row in generate(tuned(case, policy), case.backend(), case.requests, case.capacity, case.chunk)]


@examples(max_examples=30)
@given(cases(sampling=True))
def test_full_is_the_recomputed_model(case: Case) -> None:
    """Breaks: the reference of everything else, and with it rows that join, leave and move between slots."""
    assert outputs(case, "full") == [recomputed(case.model, request) for request in case.requests]


@examples(max_examples=100)
@given(cases(sampling=True))
def test_exact_is_full_token_for_token(case: Case) -> None:
    """Breaks: the promise of `exact`, whatever the drafters say, the neighbours do, and where the text or the cache ends."""
    assert outputs(case, "exact") == [recomputed(case.model, request) for request in case.requests]


@examples(max_examples=60)
@given(cases(sampling=True), st.randoms(use_true_random=False))
def test_exit_says_what_its_exits_say(case: Case, random: object) -> None:
    """Breaks: a token not taken from the first exit that is sure of it, computed over exact keys and values; or one whose
    depth depends on its neighbours (an involuntary exit), on the order of the batch, or on rows that wait for company."""
    policy = tuned(case, "exit")
    shuffled = list(case.requests)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for requests, capacity in ((case.requests, case.capacity), (shuffled, case.capacity + 1)):
        rows = generate(tuned(case, "exit"), case.backend(), requests, capacity, case.chunk)
        for request, row in zip(requests, rows, strict=True):
            wanted = SimulatedExit(policy, case.manifest, case.model, request)
            assert output(row) == (wanted.run(), wanted.reason)
            assert row.depth.token_depths == wanted.depths
