"""Certified exit thresholds on synthetic text with known rates: coverage of the guarantee, counts, and refusals with reasons."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from benchmarks.exits.resplits import EXITS, synthetic_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tide_calibrate.certificate.certificate import certify, meaning
from tide_calibrate.certificate.risk import ExitRule, PolicyCounts, fit_family, policy_counts
from tide_calibrate.certificate.thresholds import (
    certified_member,
    choose_thresholds,
    disagreement,
    document_counts,
    naive_member,
)
from tide_calibrate.traces.trace import ExitTrace, SplitTrace
from tide_runtime.errors import CalibrationError, DataError, ParamsError

DELTA, DRAWS = 0.05, 300
ALLOWED = DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / DRAWS)


def trace_of(scores: list[list[float]], agrees: list[list[bool]], documents: int = 1, layers: int = 12) -> SplitTrace:
    """A trace of exits after 3, 6, … layers with these scores and agreements; tokens are spread evenly over the documents."""
    n = len(scores[0])
    document = (np.arange(n) * documents // n).astype(np.int32)
    zeros = np.zeros(n, np.float32)
    exits = {
        (3 * i + 3, "identity"): ExitTrace(
            3 * i + 3, "identity", np.array(agrees[i], bool), zeros, {"mlp": np.array(scores[i], np.float32)}
        )
        for i in range(len(scores))
    }
    return SplitTrace(document, document, zeros, exits, layers)


def exits_of(trace: SplitTrace) -> list[tuple[int, str, str]]:
    return [(checkpoint, head, next(iter(traced.scores))) for (checkpoint, head), traced in trace.exits.items()]


@pytest.fixture(scope="module")
def family():
    return fit_family(synthetic_trace(80, scatter=0.5, seed=1), EXITS, members=96)


@pytest.fixture(scope="module")
def population(family):
    return document_counts(synthetic_trace(400, scatter=0.5, seed=2), family)


def violations(pool: PolicyCounts, documents: int, epsilon: float, choose: Callable[[PolicyCounts], int], unit: str) -> float:
    """Share of `DRAWS` calibrations whose choice has a rate above ``epsilon`` on the whole ``pool``.

    Each calibration draws ``documents`` of the pool with replacement, so the rate on the pool is the true one.
    """
    random, population = np.random.default_rng(3), len(pool.tokens)
    true_rates = disagreement(pool, unit)
    members = [choose(pool.select(random.integers(0, population, documents))) for _ in range(DRAWS)]
    return float(np.mean(true_rates[members] > epsilon))


@pytest.mark.parametrize("documents", [5, 25])
@pytest.mark.parametrize("epsilon", [0.01, 0.05])
def test_certified_thresholds_exceed_epsilon_with_probability_at_most_delta(population, documents: int, epsilon: float) -> None:
    """Coverage of the guarantee: in 300 draws of calibration documents, the rate may exceed ε in a share δ of them."""
    chosen: list[int] = []

    def choose(counts: PolicyCounts) -> int:
        chosen.append(certified_member(counts, epsilon, 1 - DELTA))
        return chosen[-1]

    assert violations(population, documents, epsilon, choose, "document") <= ALLOWED
    assert min(chosen) > 0 and population.exit_share()[chosen].mean() > 0.2  # the guarantee must not hold by refusing all exits


def test_what_has_no_guarantee_exceeds_epsilon_far_more_often(population) -> None:
    """Shows that the coverage test can fail, and why unit="document" is the default: its tokens are not independent."""
    for epsilon in (0.01, 0.05):
        assert violations(population, 8, epsilon, partial(naive_member, max_disagreement=epsilon), "document") > 5 * DELTA
    by_token = partial(certified_member, max_disagreement=0.05, confidence=1 - DELTA, unit="token")
    assert violations(population, 8, 0.05, by_token, "token") > 2 * DELTA
    family = fit_family(synthetic_trace(80, scatter=0.0, seed=1), EXITS, members=96)
    independent = document_counts(synthetic_trace(400, scatter=0.0, seed=2), family)
    assert violations(independent, 8, 0.05, by_token, "token") <= ALLOWED  # where tokens are independent, it holds


@given(st.integers(0, 10_000), st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_a_family_is_ordered_from_safe_to_bold(seed: int, tokens: int) -> None:
    """Fixed-sequence testing needs non-increasing thresholds, and the stored float32 values must be the tested ones."""
    random = np.random.default_rng(seed)
    scores = [random.choice([0.1, 0.5, 0.5, 0.9, np.nan], tokens), random.random(tokens)]
    trace = trace_of(scores, [random.random(tokens) < 0.9, random.random(tokens) < 0.7])
    thresholds = fit_family(trace, exits_of(trace), members=20).thresholds
    assert np.all(thresholds[1:] <= thresholds[:-1]) and np.all(np.isinf(thresholds[0]))
    np.testing.assert_array_equal(thresholds, thresholds.astype(np.float32))
    assert set(thresholds[np.isfinite(thresholds)]) <= {float(np.float32(s)) for column in scores for s in column}


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=30, deadline=None)
def test_counts_match_the_policy_token_by_token(seed: int, referenced: bool) -> None:
    """The counts must match the runtime's behaviour: a score equal to the threshold exits, NaN and infinities never do. Against
    a reference, a token that runs every layer is a loss where the last layer differs."""
    random = np.random.default_rng(seed)
    values = np.array([0.2, 0.4, 0.4, 0.8, np.nan, np.inf, -np.inf], np.float32)
    scores, agrees, full_agrees = random.choice(values, (3, 50)), random.random((3, 50)) < 0.5, random.random(50) < 0.5
    trace = trace_of(list(scores), list(agrees), documents=4)
    trace = replace(trace, full_agrees=full_agrees if referenced else None)
    thresholds = -np.sort(-random.choice([0.2, 0.3, 0.4, 0.8, np.inf], (6, 3)).astype(np.float32), axis=0).astype(np.float64)
    counts = policy_counts(trace, [ExitRule(*e) for e in exits_of(trace)], thresholds, trace.document)
    losses, full_losses, saved, exits = np.zeros((4, 4, 6))
    for token, member in np.ndindex(50, 6):
        stops = [k for k in range(3) if np.isfinite(scores[k, token]) and scores[k, token] >= thresholds[member, k]]
        where = trace.document[token], member
        if stops:
            exits[where] += 1
            losses[where] += not agrees[stops[0], token]
            saved[where] += 12 - 3 * (stops[0] + 1)
        elif referenced:
            losses[where] += not full_agrees[token]
            full_losses[where] += not full_agrees[token]
    for name, expected in {"losses": losses, "full_losses": full_losses, "exits": exits, "layers_saved": saved}.items():
        np.testing.assert_array_equal(getattr(counts, name), expected)


def test_equal_scores_exit_together() -> None:
    """Tied scores stop all or none of their tokens, so a part of a tie must not be certified."""
    agrees = [i % 10 != 0 for i in range(2000)]
    trace = trace_of([[0.7] * 2000], [agrees], documents=20)
    family = fit_family(trace, exits_of(trace))
    assert set(family.thresholds.ravel().tolist()) == {math.inf, float(np.float32(0.7))}
    assert choose_thresholds(trace, family, 0.01).thresholds is None
    assert choose_thresholds(trace, family, 0.2).thresholds == (float(np.float32(0.7)),)


def test_a_tails_layers_and_both_thresholds_of_a_gated_head_count() -> None:
    """tail:2 after 3 of 12 layers runs 5; and no token stops where the MLP in front of the head is below its threshold."""
    trace = trace_of([[0.9, 0.1, 0.9]], [[True] * 3])
    trace.exits[3, "identity"].scores["max_probability"] = np.array([0.8, 0.8, 0.2], np.float32)
    rule = ExitRule(3, "identity", "mlp+max_probability", mlp_threshold=0.5)
    np.testing.assert_array_equal(rule.scores(trace), np.array([0.8, np.nan, 0.2], np.float32))
    tailed = replace(trace, exits={(3, "tail:2"): replace(trace.exits[3, "identity"], head="tail:2")})
    counts = policy_counts(tailed, [ExitRule(3, "tail:2", "mlp")], np.array([[0.5]]), trace.document)
    assert counts.layers_saved.item() == 2 * (12 - 5)


def test_scores_and_agreement_of_the_threshold_split_decide(family) -> None:
    """A router that outputs NaN must cost speed, not correctness; exits that agreed on the train split only are refused."""
    trace = synthetic_trace(20, 0.5, seed=4)
    broken = {k: replace(e, scores={"max_probability": np.full_like(e.nll, np.nan)}) for k, e in trace.exits.items()}
    choice = choose_thresholds(replace(trace, exits=broken), family, 0.05)
    assert choice.thresholds is None and choice.exit_share == 0 and "no token" in choice.reason
    assert fit_family(replace(trace, exits=broken), EXITS).thresholds.min() == math.inf
    wrong = {k: replace(e, agrees=np.zeros_like(e.agrees)) for k, e in trace.exits.items()}
    assert choose_thresholds(replace(trace, exits=wrong), family, 0.01).thresholds is None


@pytest.mark.parametrize("unit", ["document", "token"])
def test_too_little_text_is_refused_with_the_amount_needed(unit) -> None:
    """298 tokens without a loss cannot certify 1% at 95% confidence; the message must name more text as the remedy, and no
    certificate be written. With enough text but too strict an ε, it must not suggest more text."""
    n = 200 if unit == "token" else 5000
    trace = trace_of([[0.99] * n], [[True] * n])
    choice = choose_thresholds(trace, fit_family(trace, exits_of(trace)), 0.01, unit=unit)
    assert choice.thresholds is None and "too little text" in choice.reason and "299" in choice.reason
    assert f"about {math.ceil(n * 299 / choice.effective_tokens)} tokens" in choice.reason
    with pytest.raises(CalibrationError, match="too little text"):
        certify(choice, "ab", "2026-11-21")
    trace = trace_of([[0.9] * 40_000], [[i % 20 != 0 for i in range(40_000)]], documents=40)
    choice = choose_thresholds(trace, fit_family(trace, exits_of(trace)), 0.01, unit=unit)
    assert choice.thresholds is None and "wrong too often" in choice.reason and "too little" not in choice.reason


@pytest.mark.parametrize("chance", [0.0, 1 / 2048, 0.2])
def test_layers_that_never_agree_are_refused(chance: float) -> None:
    """An ε of 1% allows an exit that takes 1% of the tokens and is always wrong; the certificate must refuse it."""
    random = np.random.default_rng(0)
    train, test = (
        trace_of(list(random.random((2, 20_000))), list(random.random((2, 20_000)) < chance), documents=40) for _ in range(2)
    )
    choice = choose_thresholds(test, fit_family(train, exits_of(train)), 0.01)
    assert choice.thresholds is None and "never agree" in choice.reason and "full" in choice.reason


def test_the_choice_is_reproducible_and_monotone_in_epsilon_and_confidence() -> None:
    """The exit share must grow with ε and shrink with the confidence."""
    trace, family = synthetic_trace(30, 0.5, seed=6), fit_family(synthetic_trace(80, 0.5, seed=1), EXITS)
    strict, loose = (choose_thresholds(trace, family, epsilon) for epsilon in (0.01, 0.05))
    assert strict == choose_thresholds(trace, fit_family(synthetic_trace(80, 0.5, seed=1), EXITS), 0.01)
    assert strict.thresholds and loose.thresholds
    assert loose.exit_share > strict.exit_share > choose_thresholds(trace, family, 0.01, 0.999).exit_share
    counts = document_counts(trace, family)
    assert counts.exit_share()[naive_member(counts, 0.01)] > strict.exit_share
    assert strict.measured < 0.01 and strict.documents == 30 and strict.effective_tokens < strict.tokens
    certificate = certify(strict, data_sha256="ab" * 32, date="2026-11-21")  # ships in the bundle, and must be understandable
    assert (certificate.max_disagreement, certificate.confidence, certificate.unit) == (0.01, 0.95, "document")
    assert (certificate.tokens, certificate.documents, certificate.measured) == (strict.tokens, 30, strict.measured)
    text = meaning(certificate)
    assert "95% confidence" in text and "1.00%" in text and "30 documents" in text and "says nothing about" in text


def test_measured_rate_is_that_of_an_average_document(family) -> None:
    """One long document must not dominate: three documents with rates 0, 0 and 1 have a mean rate of 1/3 at any lengths."""
    trace = trace_of([[0.9] * 100], [[True] * 10 + [False] * 90])
    trace = replace(trace, document=np.array([3] * 5 + [7] * 5 + [9] * 90, np.int32))  # indices with gaps, as in a split
    counts = document_counts(trace, fit_family(trace_of([[0.9] * 50], [[True] * 50]), exits_of(trace)))
    assert counts.tokens.tolist() == [5, 5, 90]
    assert disagreement(counts)[-1] == pytest.approx(1 / 3) and disagreement(counts, "token")[-1] == 0.9


def test_invalid_options_and_exits_are_refused(family) -> None:
    """Unknown routers and out-of-range ε or confidence must raise an error instead of giving a certificate."""
    trace = synthetic_trace(5, 0.5, seed=7)
    for wrong in ({"max_disagreement": 0.0}, {"confidence": 1.0}, {"confidence": 0.05}, {"unit": "sentence"}):
        with pytest.raises(ParamsError):
            choose_thresholds(trace, family, **wrong)
    with pytest.raises(CalibrationError, match="router entropy"):
        fit_family(trace, [(6, "identity", "entropy")])
    with pytest.raises(CalibrationError, match="no trace of the head"):
        fit_family(trace, [(7, "identity", "max_probability")])
    for exits in ([], [EXITS[0], EXITS[0]]):
        with pytest.raises(CalibrationError, match="at most one per checkpoint"):
            fit_family(trace, exits)
    with pytest.raises(DataError, match="no text"):
        choose_thresholds(trace_of([[]], [[]]), family)
