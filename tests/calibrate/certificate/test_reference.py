"""Certificates against another model than the full one: rounded weights and early exits under one bound."""

import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.exits.resplits import EXITS, synthetic_trace
from tide_calibrate.capture.reference import ReferenceTokens
from tide_calibrate.certificate.certificate import certify, certify_exits, meaning
from tide_calibrate.certificate.risk import fit_family
from tide_calibrate.certificate.thresholds import certified_member, choose_thresholds, disagreement, document_counts, naive_member
from tide_calibrate.traces.trace import ExitTrace, SplitTrace
from tide_runtime.bundle.calibration import ExitInfo

DELTA, DRAWS, LAYERS = 0.05, 300, 12
ORIGINAL = ReferenceTokens("the fp32 original tiny", "ef" * 32, np.zeros(0, np.int64), np.zeros((0, 1), np.int32))


def agreeing_trace(wrong: float, documents: int = 120, tokens: int = 200, seed: int = 0) -> SplitTrace:
    """Exits whose token is always the last layer's, which differs from the reference at this share of the tokens."""
    random = np.random.default_rng(seed)
    document = np.repeat(np.arange(documents, dtype=np.int32), tokens)
    full_agrees, scores = random.random(len(document)) >= wrong, random.random(len(document)).astype(np.float32)
    zeros = np.zeros(len(document), np.float32)
    exits = {(3, "identity"): ExitTrace(3, "identity", full_agrees, zeros, {"max_probability": scores})}
    return SplitTrace(document, document, zeros, exits, LAYERS, full_agrees=full_agrees)


def scattered_trace(documents: int, seed: int) -> SplitTrace:
    """Exits that often differ, of a model whose last layer differs at about 2% of tokens; both more in some documents."""
    trace, random = synthetic_trace(documents, 0.5, seed), np.random.default_rng(seed)
    level = random.normal(0, 0.5, documents)[trace.document]
    return replace(trace, full_agrees=random.random(len(level)) < 1 / (1 + np.exp(-4 - level)))


def exits_of(trace: SplitTrace) -> list[tuple[int, str, str]]:
    return [(checkpoint, head, "max_probability") for checkpoint, head in trace.exits]


def test_rounded_weights_count_although_exits_agree_with_the_last_layer() -> None:
    """A certificate for the original would promise 3% where the rounded weights alone change 5% of the tokens."""
    train, trace = agreeing_trace(0.0, seed=1), agreeing_trace(0.05)
    family = fit_family(train, exits_of(train))
    refused, given = (choose_thresholds(trace, family, epsilon) for epsilon in (0.03, 0.1))
    assert refused.thresholds is None
    assert f"the quantised model alone disagrees with the reference at {refused.full_disagreement:.2%} of" in refused.reason
    assert "above --max-disagreement 3.00%: take more bits or allow more" in refused.reason
    assert given.thresholds is not None and given.exit_share == pytest.approx(1, abs=0.01)
    assert given.full_disagreement == pytest.approx(0.05, abs=0.005) == given.measured
    # The same tokens without a reference: certified, as the exits are the model's own.
    own = replace(trace, full_agrees=None, exits=train.exits)
    assert choose_thresholds(own, family, 0.03).thresholds is not None


def test_a_bound_above_the_measured_rate_asks_for_documents_too() -> None:
    """A user with few documents would only be told to take more bits, although more documents narrow the bound."""
    trace = agreeing_trace(0.05, documents=4, tokens=100)
    choice = choose_thresholds(trace, fit_family(trace, exits_of(trace)), 0.08)
    assert choice.thresholds is None and "give more documents" in choice.reason and "upper bound" in choice.reason
    assert naive_member(document_counts(trace, fit_family(trace, exits_of(trace))), 0.01) == 0  # no member is below ε


@pytest.mark.parametrize(("epsilon", "documents"), [(0.025, 25), (0.05, 8), (0.05, 25)])
def test_joint_certificates_exceed_epsilon_with_probability_at_most_delta(epsilon: float, documents: int) -> None:
    """Coverage: over draws of calibration documents, the rate of a certified policy may exceed ε in a share δ of them."""
    train = synthetic_trace(80, 0.5, seed=1)
    pool = document_counts(scattered_trace(400, seed=2), fit_family(train, EXITS, members=96))
    rates, random = disagreement(pool), np.random.default_rng(3)
    draws = [pool.select(random.integers(0, len(pool.tokens), documents)) for _ in range(DRAWS)]
    members = np.array([certified_member(counts, epsilon, 1 - DELTA) for counts in draws])
    above = rates > epsilon
    assert np.mean((members > 0) & above[members]) <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / DRAWS)
    if documents == 25 and epsilon == 0.05:
        assert np.mean(members > 0) > 0.9  # the guarantee must not hold by refusing everything
        naive = np.array([naive_member(counts, epsilon) for counts in draws])
        assert np.mean((naive > 0) & above[naive]) > 5 * DELTA  # and the test above can fail


def test_the_rate_need_not_grow_along_the_family() -> None:
    """Exits that repair what rounding broke make the rate fall; the test must begin at the full depth and go on from it."""
    trace = agreeing_trace(0.04)
    right = {key: replace(traced, agrees=np.ones_like(traced.agrees)) for key, traced in trace.exits.items()}
    repaired = replace(trace, exits=right)
    family = fit_family(repaired, exits_of(trace))
    rates = disagreement(document_counts(repaired, family))
    assert rates[-1] < rates[0]
    assert choose_thresholds(repaired, family, 0.05).measured == rates[-1]
    assert choose_thresholds(repaired, family, 0.03).thresholds is None  # full depth fails, so nothing after it is tested


def test_the_certificate_names_its_reference() -> None:
    """A bundle's reader must see what the rate is counted against, and how much of it comes from rounding."""
    train, trace = agreeing_trace(0.0, seed=1), agreeing_trace(0.05)
    infos = [ExitInfo(3, "identity", "max_probability", exact_threshold=0.5)]
    certified = certify_exits(infos, train, trace, 0.1, 0.95, "ab" * 32, "2026-11-25", ORIGINAL)
    assert certified.certificate is not None and certified.exits[0].exit_threshold is not None
    assert (certified.certificate.reference, certified.certificate.reference_sha256) == (ORIGINAL.name, ORIGINAL.sha256)
    assert "differs from the fp32 original tiny at no more than 10.00%" in meaning(certified.certificate)
    assert f"{certified.certificate.full_disagreement:.2%} without exits" in meaning(certified.certificate)
    refused = certify_exits(infos, train, trace, 0.03, 0.95, "ab" * 32, "2026-11-25", ORIGINAL)
    assert refused.certificate is None and refused.exits[0].exit_threshold is None and "quantised model alone" in refused.refusal
    own = replace(trace, full_agrees=None, exits=train.exits)
    plain = certify(choose_thresholds(own, fit_family(train, exits_of(train)), 0.03), "ab" * 32, "2026-11-25")
    assert (plain.reference, plain.full_disagreement) == ("", 0) and "differs from the full model at" in meaning(plain)
