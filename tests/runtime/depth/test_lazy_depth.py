"""Lazy depth against a transformer that recomputes everything, on random bundles, batches, stops and cache limits.

Every run is audited (`tiny_generation.Audited`): after each advance and each step, all cache entries that count as done and
all states that wait are those of the tokens, recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import tide_runtime.depth.exact as exact_module
import tide_runtime.depth.exit as exit_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime.random_bundles import Case, cases
from runtime.simulated_exit import simulation
from runtime.tiny_generation import Request, generate, output
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.registry import make_policy
from tide_runtime.drafting.backoff import Trial
from tide_runtime.sampler import Sampler

NEVER = 2.0  # above every score
examples = partial(settings, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def recomputed(model: TinyTransformer, request: Request) -> tuple[list[int], str]:
    """Tokens and end of plain decoding, the whole text computed anew for each token."""
    tokens, params = list(request.prompt), request.params
    sampler = Sampler(params, model.vocab, request.seat)
    while True:
        tokens.append(sampler.sample(model.full_logits(np.array(tokens))[-1].astype(np.float32), np.array(tokens)))
        new = tokens[len(request.prompt) :]
        if new[-1] in (params.eos_token_ids or ()):
            return new, "eos"
        if len(new) >= params.max_new_tokens:
            return new, "length"
        if len(tokens) > model.positions:
            return new, "cache_full"


@contextmanager
def tuned(case: Case) -> Iterator[None]:
    """The case's figures in place of the policies' own."""
    with (
        patch.object(exit_module, "_ROOM", case.room),
        patch.object(exact_module, "Trial", partial(Trial, next_rest=case.rest)),
        patch.object(ExitDepth, "_cost", _times(case.price, ExitDepth._cost)),
        patch.object(ExactDepth, "_cycle_cost", _times(case.price, ExactDepth._cycle_cost)),
    ):
        yield


def _times(factor: float, cost: Callable[..., float]) -> Callable[..., float]:
    return lambda *arguments: factor * cost(*arguments)


def outputs(case: Case, policy: str) -> list[object]:
    with tuned(case):
        made = make_policy(policy, case.manifest, case.chunk, case.options)
        return [output(row) for row in generate(made, case.backend(), case.requests, case.capacity, case.rest)]


@examples(max_examples=30)
@given(cases(sampling=True))
def test_full_is_the_recomputed_model(case: Case) -> None:
    """Breaks: the reference of everything else, and with it rows that join, leave and move between slots."""
    assert outputs(case, "full") == [recomputed(case.model, request) for request in case.requests]


@examples(max_examples=180)
@given(cases(sampling=False))
def test_exact_is_full_token_for_token(case: Case) -> None:
    """Breaks: the promise of `exact`, whatever the drafters say, the neighbours do, and where the text or the cache ends."""
    assert outputs(case, "exact") == [recomputed(case.model, request) for request in case.requests]


@examples(max_examples=100)
@given(cases(sampling=True), st.randoms(use_true_random=False))
def test_exit_says_what_its_exits_say(case: Case, random: object) -> None:
    """Breaks: a token not taken from the first exit that is sure of it, computed over exact keys and values; or one whose
    depth depends on its neighbours (an involuntary exit), on the order of the batch, or on rows that wait for company. With
    ``kv propagate``, and of prompts that stop early: over keys and values that were not projected from the state each token
    stopped with."""
    policy, simulated = ExitDepth(case.manifest, case.chunk, case.options), simulation(case.options)
    shuffled = list(case.requests)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    with tuned(case):
        for requests, capacity in ((case.requests, case.capacity), (shuffled, case.capacity + 1)):
            fresh = ExitDepth(case.manifest, case.chunk, case.options)
            for request, row in zip(requests, generate(fresh, case.backend(), requests, capacity, case.rest), strict=True):
                wanted = simulated(policy, case.manifest, case.model, request, case.room, case.rest)
                assert output(row) == (wanted.run(), wanted.reason)
                assert row.depth.token_depths == wanted.depths


@examples(max_examples=30)
@given(cases(sampling=True))
def test_exit_that_never_exits_is_full(case: Case) -> None:
    """Breaks: a threshold nothing clears still changes the text."""
    policy = ExitDepth(case.manifest, case.chunk, replace(case.options, prefill_exit=False))
    policy.stops = [exit_module._Stop(stop.exit, NEVER) for stop in policy.stops]
    requests = [replace(r, params=replace(r.params, depth_budget=None)) for r in case.requests]  # a budget exits unsure
    rows = generate(policy, case.backend(), requests, case.capacity, case.rest)
    assert [output(row) for row in rows] == [recomputed(case.model, request) for request in requests]
    assert all(set(row.depth.token_depths) <= {case.manifest.model.num_layers} for row in rows)
