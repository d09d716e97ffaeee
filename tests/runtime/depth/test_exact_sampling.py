"""`exact` at a temperature generates `full`'s text for each seed, and over seeds draws from the model's own distribution.

Thousands of seeded texts of a few tokens are counted and held against probabilities computed from scratch (chi-square).
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tide_runtime.depth.exact as exact
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.tiny_generation import FAR_DRAFTS, Request, exits_pay, make_row
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.backends.base import Logits
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth.exact import ExactDepth, verify
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.speculation.record import Draft
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sampler import Sampler
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

VOCAB, TOKENS, TEXTS, ROWS = 4, 4, 1000, 100
MODEL = TinyTransformer(seed=1, strengths=(0.5, 1.5, 1.5), vocab=VOCAB, positions=32)  # deep layers that change the draft's mind
MODEL.weights["head"] *= 0.4  # all tokens are likely enough to be counted
EXITS = [ExitInfo(1, "linear", "max_probability", 0.4), ExitInfo(2, "identity", "max_probability", 0.0)]
PLAIN = (1, 3)
# After 0, 0 every token has been seen, so that there is a copied draft whatever the first token is.
REPEATING = (0, 0, 1, 3, 0, 0, 2, 2, 0, 0, 3, 1, 0, 0, 0, 1, 0, 0)
SAMPLING: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.9}


def chi_square(prompt: tuple[int, ...], draft: Any, **changes: Any) -> tuple[float, float, Counter[str]]:
    """The statistic of the texts `exact` says, its 99.9% quantile when they follow the model, and what was drafted."""
    params = GenerationParams(**{**SAMPLING, **changes})
    manifest = tiny_manifest(MODEL, (1, 2), EXITS)
    policy = ExactDepth(manifest, DepthOptions(draft=draft, draft_limit=2, tuning=FAR_DRAFTS))
    policy.speculator.costs.full = lambda rows, tokens, seq: 1.0  # else so large a batch would leave copying alone
    rows = [make_row(Request(prompt, replace(params, seed=seed), seed), manifest) for seed in range(TEXTS)]
    list(run(exits_pay(policy), NumpyBackend(manifest, MODEL).context(ROWS), rows))
    counted = Counter(tuple(row.new_tokens.tolist()) for row in rows)
    expected = {text: TEXTS * _probability(prompt, text, params) for text in itertools.product(range(VOCAB), repeat=TOKENS)}
    assert sum(expected.values()) == pytest.approx(TEXTS)
    common = [text for text, count in expected.items() if count >= 5]
    pairs = [(counted[text], expected[text]) for text in common]
    rest = TEXTS - sum(count for _, count in pairs)
    if rest >= 5:
        pairs.append((TEXTS - sum(count for count, _ in pairs), rest))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in pairs)
    return statistic, _quantile(len(pairs) - 1), sum((row.depth.drafted for row in rows), Counter())


def _probability(prompt: tuple[int, ...], text: tuple[int, ...], params: GenerationParams) -> float:
    probability, sampler = 1.0, Sampler(params, VOCAB)
    for place, token in enumerate(text):
        before = np.array([*prompt, *text[:place]])
        probability *= sampler.distribution(MODEL.full_logits(before)[-1].astype(np.float32), before)[token]
    return float(probability)


def _quantile(freedom: int) -> float:
    """The 99.9% quantile of chi-square, by Wilson and Hilferty's approximation."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3)


@pytest.mark.parametrize(
    ("prompt", "draft", "changes"),
    [
        (PLAIN, "router", {"top_p": 0.8, "repetition_penalty": 1.5}),
        (REPEATING, "all", {"temperature": 1.7, "top_k": 3}),
    ],
)
def test_exact_draws_from_the_models_distribution(prompt: tuple[int, ...], draft: str, changes: dict[str, Any]) -> None:
    """Breaks: sampled text of another quality than the model's, too subtle to see in any one text."""
    statistic, limit, drafted = chi_square(prompt, draft, **changes)
    assert statistic < limit
    assert drafted.total() > TEXTS  # it was the drafters' words that were verified


def _with_other_noise(sequence: TokenSequence, drafts: Sequence[Draft], verified: Logits) -> tuple[list[int], int]:
    with patch.object(sequence, "sampler", Sampler(replace(sequence.params, seed=999), VOCAB)):
        return verify(sequence, drafts, verified)


def test_exits_draft_with_the_noise_of_the_verification() -> None:
    """Breaks: drafts of exits are drawn on their own, and are accepted as rarely as two independent draws agree."""

    def accepted() -> float:
        manifest = tiny_manifest(MODEL, (1, 2), EXITS)
        policy = ExactDepth(manifest, DepthOptions(draft="router", draft_limit=2, tuning=FAR_DRAFTS))
        params = GenerationParams(max_new_tokens=12, temperature=0.9)
        rows = [make_row(Request(PLAIN, replace(params, seed=seed), seed), manifest) for seed in range(200)]
        list(run(exits_pay(policy), NumpyBackend(manifest, MODEL).context(ROWS), rows))
        return sum(row.depth.accepted["router"] for row in rows) / sum(row.depth.drafted["router"] for row in rows)

    with_same = accepted()
    with patch.object(exact, "verify", _with_other_noise):
        assert with_same > accepted() + 0.1
