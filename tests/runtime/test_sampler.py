"""Sampling must choose as transformers would, reproducibly, from the distribution the caller asked for."""

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tide_runtime import sampling_filters
from tide_runtime.errors import BundleError, NumericsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.gumbel_noise import GumbelNoise, gumbel
from tide_runtime.sampler import Sampler
from tide_runtime.text.grammar import Grammar
from transformers.generation import logits_process as hf

NOTHING = np.array([], dtype=np.int64)
TEXT = np.zeros(20_000, dtype=np.int64)  # TEXT[:n] stands before a token at position n


def reference(logits, seen, params):
    """[V] probabilities by transformers' processors, in the order `generate` builds them."""
    steps = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(params.temperature)])
    if params.repetition_penalty != 1:
        steps.insert(0, hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.top_k:
        steps.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(hf.MinPLogitsWarper(params.min_p))
    ids = torch.from_numpy(seen.astype(np.int64))[None]
    return torch.softmax(steps(ids, torch.from_numpy(logits.copy())[None])[0].double(), -1).numpy()


def assert_like_transformers(logits, seen, params):
    ours = Sampler(params, logits.size).distribution(logits, seen)
    theirs = reference(logits, seen, params)
    assert ours.dtype == np.float64 and ours.sum() == pytest.approx(1, abs=1e-12)
    if params.top_p < 1 and np.unique(logits).size < logits.size:
        ours, theirs = np.sort(ours), np.sort(theirs)  # which of tied tokens top-p drops is up to torch.sort
    np.testing.assert_array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-12)


@st.composite
def requests(draw):
    """Logits and ids seen, and parameters; half of the logits on a coarse grid, so that many are tied."""
    size = draw(st.integers(1, 60))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = random.normal(0, 3, size).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)
    seen = random.integers(0, size, draw(st.integers(1, 20)))
    params = GenerationParams(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 1.9])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, 40, 100])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.53, 0.11, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0413, 0.3137, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.1, 0.8, 2.0])),
    )
    return logits, seen, params


# Derandomised: transformers' sums are float32, so a mass within rounding of top_p could go either way by chance.
@settings(max_examples=200, deadline=None, derandomize=True)
@given(requests())
def test_distribution_is_transformers(request_):
    """Breaks: text sampled from a bundle differs in quality from the model's own generate()."""
    assert_like_transformers(*request_)


@pytest.mark.parametrize("k", [1, 3, 40, 90, 200, 5000])
@pytest.mark.parametrize("coarse", [False, True])
def test_top_k_of_a_large_vocabulary_is_that_of_all_sorted(k, coarse):
    """Breaks: the bound from columns' maxima drops a token that is among the k likeliest, or tied with the last."""
    logits = np.random.default_rng(k).normal(0, 3, 3_001).astype(np.float32)
    logits = np.round(logits) if coarse else logits
    kept = Sampler(GenerationParams(temperature=1.0, top_k=k), 3_001).distribution(logits, NOTHING) > 0
    np.testing.assert_array_equal(kept, logits >= np.sort(logits)[max(0, 3_001 - k)])


def test_top_p_drops_lower_ids_of_tied_tokens():
    """Breaks: the same seed gives other text on another machine, where the sort orders equal tokens differently."""
    logits = np.zeros(40, np.float32)
    kept = Sampler(GenerationParams(temperature=1.0, top_p=0.5), 40).distribution(logits, NOTHING) > 0
    assert kept.tolist() == [False] * 20 + [True] * 20


def test_masked_logits_are_never_drawn():
    """Breaks: a token the model forbids (-inf) appears in the output."""
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    params = GenerationParams(temperature=1.5, top_k=3, top_p=0.99, min_p=0.01, seed=0)
    sampler = Sampler(params, 4)
    assert {sampler.sample(logits, TEXT[:position]) for position in range(200)} == {1, 3}
    assert_like_transformers(logits, np.array([0]), params)


def test_tiny_temperature_is_nearly_greedy():
    """Breaks: dividing by a tiny temperature overflows to NaN."""
    for temperature in (1e-3, 1e-30, 5e-324):
        sampler = Sampler(GenerationParams(temperature=temperature, seed=0), 3)
        assert sampler.sample(np.array([1, 5, 2], np.float32), NOTHING) == 1


@settings(max_examples=100, deadline=None)
@given(requests(), st.sampled_from([1.0, 1.3, 0.5]))
def test_greedy_is_transformers(request_, penalty):
    """Breaks: greedy output differs from the model's own greedy output."""
    logits, seen, _ = request_
    sampler = Sampler(GenerationParams(repetition_penalty=penalty), logits.size)
    scores = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(seen)[None], torch.from_numpy(logits)[None])
    expected = int(scores.argmax())
    assert sampler.sample(logits, seen) == expected
    one_hot = sampler.distribution(logits, seen)
    assert one_hot[expected] == 1 and one_hot.sum() == 1


def test_callers_logits_are_left_alone():
    """Breaks: log-probabilities reported after sampling come from penalised logits."""
    logits = np.array([1, 2, -1], np.float32)
    logits.flags.writeable = False
    params = GenerationParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1, repetition_penalty=1.5)
    Sampler(params, 3).sample(logits, np.array([0, 2]))


FILTERS = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.95, "repetition_penalty": 1.4}]


def chi_square(tokens, probabilities):
    """The statistic of counted ``tokens``, and its 99.9% quantile when they follow ``probabilities`` (Wilson and Hilferty)."""
    counted, expected = np.bincount(tokens, minlength=probabilities.size), len(tokens) * probabilities
    assert counted[expected == 0].sum() == 0
    counted, expected = counted[expected > 0], expected[expected > 0]
    freedom = expected.size - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((counted - expected) ** 2 / expected).sum()), limit


@pytest.mark.parametrize("changes", FILTERS)
def test_positions_of_a_sequence_follow_the_distribution(changes):
    """Breaks: the tokens of one text do not follow the model's probabilities, for example as positions share noise."""
    logits = np.linspace(-2, 1, 8).astype(np.float32)
    sampler = Sampler(GenerationParams(temperature=0.8, seed=1, **changes), 8)
    drawn = [sampler.sample(logits, TEXT[:position]) for position in range(1, 6_000)]
    statistic, limit = chi_square(drawn, sampler.distribution(logits, TEXT[:1]))
    assert statistic < limit


@pytest.mark.parametrize("changes", FILTERS[::2])
def test_seeds_follow_the_distribution(changes):
    """Breaks: several samples of one prompt do not follow the model's probabilities, for example as seeds share noise."""
    logits = np.linspace(-2, 1, 8).astype(np.float32)
    samplers = [Sampler(GenerationParams(temperature=0.8, seed=seed, **changes), 8) for seed in range(3000)]
    drawn = [sampler.sample(logits, TEXT[:3]) for sampler in samplers]
    statistic, limit = chi_square(drawn, samplers[0].distribution(logits, TEXT[:3]))
    assert statistic < limit


def test_neighbouring_positions_and_seeds_are_independent():
    """Breaks: a text's tokens depend on each other beyond the model, although each alone follows its probabilities."""
    logits = np.zeros(6, np.float32)

    def token(seed, position):
        return Sampler(GenerationParams(temperature=1.0, seed=seed), 6).sample(logits, TEXT[:position])

    pairs = [token(7, n) * 6 + token(7, n + 1) for n in range(0, 4000, 2)]
    seeds = [token(n, 5) * 6 + token(n + 1, 5) for n in range(0, 4000, 2)]
    for both in (pairs, seeds):
        statistic, limit = chi_square(both, np.full(36, 1 / 36))
        assert statistic < limit


def test_large_vocabularies_are_drawn_from_like_small_ones():
    """Breaks: tokens at the edges of the blocks that noise is made in come too often, or impossible ones come."""
    logits, places = np.full(3 * 8192 + 7, -np.inf, np.float32), [0, 1, 8191, 8192, 16384, 24582]
    weights = np.array([0.1, 0.2, 0.25, 0.15, 0.1, 0.2])
    logits[places] = np.log(weights)
    sampler = Sampler(GenerationParams(temperature=1.0, seed=3), logits.size)
    drawn = [sampler.sample(logits, TEXT[:position]) for position in range(2500)]
    assert set(drawn) == set(places)
    statistic, limit = chi_square([places.index(token) for token in drawn], weights)
    assert statistic < limit


PINNED_KEY = [16920295385781661272, 610735763742393210]
PINNED_WORDS = [12236641264844013871, 12480472567253291448, 198211449576522936, 15757705707144038194, 6142247083691690911]
PINNED_NOISE = [0.8904937318250682, 0.9397572961257454, 1.1953236174628317]
PINNED_TOKEN = 9972


def test_noise_is_that_of_the_generator():
    """Breaks: recorded seeds give other text after an update: of numpy, of the blocks, or of the transform."""
    params = GenerationParams(temperature=1.0, seed=7)
    key = np.random.SeedSequence(7).generate_state(2, np.uint64)
    assert key.tolist() == PINNED_KEY
    words = np.random.Philox(key=key, counter=[0, 11, 0, 0]).random_raw(20_000)
    assert words[[0, 1, 8191, 8192, 19_999]].tolist() == PINNED_WORDS
    np.testing.assert_allclose(gumbel(words[:3]), PINNED_NOISE, rtol=1e-13)
    logits = np.random.default_rng(0).normal(0, 0.1, 20_000).astype(np.float32)
    scores = logits.astype(np.float64) - logits.max()
    assert Sampler(params, 20_000, 5).sample(logits, TEXT[:11]) == int(np.argmax(scores + gumbel(words))) == PINNED_TOKEN


@pytest.mark.parametrize("kept", [1, 5, 127, 128, 129, 4000])
def test_few_tokens_have_the_noise_that_they_have_among_many(kept):
    """Breaks: a text changes where a filter keeps few tokens, whose noise is drawn one by one."""
    for position in range(5):
        random = np.random.default_rng(position)
        ids, logits = np.sort(random.choice(20_000, kept, replace=False)), random.normal(0, 0.1, 20_000).astype(np.float32)
        scores = np.full(20_000, -np.inf)
        scores[ids] = logits[ids] / 0.7
        words = np.random.Philox(key=np.array(PINNED_KEY, np.uint64), counter=[0, position, 0, 0]).random_raw(20_000)
        assert GumbelNoise(7).winner(position, logits[ids], 0.7, ids) == int(np.argmax(scores + gumbel(words)))


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 12.0])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 8.0])
def test_the_race_has_the_winner_of_all_sums(spread, temperature):
    """Breaks: a token whose sum is the largest is passed over, because a bound from rounded numbers excludes it."""
    random = np.random.default_rng(int(10 * spread))
    for position in range(60):
        logits = (40 + random.normal(0, spread, 40_000)).astype(np.float32)
        logits[random.random(40_000) < 0.1] = -np.inf
        words = np.random.Philox(key=np.array(PINNED_KEY, np.uint64), counter=[0, position, 0, 0]).random_raw(40_000)
        sums = logits.astype(np.float64) / temperature + gumbel(words)
        assert GumbelNoise(7).winner(position, logits, temperature) == int(np.argmax(sums))


def test_uniform_numbers_at_the_ends_give_finite_noise():
    """Breaks: one draw in 2^52 is of infinite noise, so that a token of any probability wins."""
    extremes = gumbel(np.array([0, 2**64 - 1], np.uint64))
    assert np.isfinite(extremes).all()
    assert extremes.tolist() == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)])


@settings(max_examples=200, deadline=None)
@given(requests(), st.integers(0, 99), st.integers(0, 50))
def test_filters_do_not_move_the_noise(request_, seed, position):
    """Breaks: a draft of an exit and the model's token are drawn with other noise where other tokens are kept, and rarely agree.

    Among tokens that a filter kept, the winner is the one of the same noise without a filter.
    """
    logits, seen, params = request_
    seen = np.resize(seen, max(1, position))
    filtered = Sampler(replace(params, seed=seed), logits.size)
    kept = filtered.distribution(logits, seen) > 0
    plain = Sampler(replace(params, seed=seed, top_k=0, top_p=1.0, min_p=0.0), logits.size)
    assert filtered.sample(logits, seen) == plain.sample(np.where(kept, logits, -np.inf).astype(np.float32), seen)


def draws(seed):
    sampler = Sampler(GenerationParams(temperature=1.0, seed=seed), 1000)
    return [sampler.sample(np.zeros(1000, np.float32), TEXT[:position]) for position in range(40)]


def test_seed_reproduces_a_sequence():
    """Breaks: the same request gives other text, two seeds give the same text, or no seed repeats itself."""
    assert draws(7) == draws(7)
    assert len({tuple(draws(seed)) for seed in (0, 1, 7, 8, 2**64, 2**64 + 1, 2**200)}) == 7
    assert draws(None) != draws(None)


def top_p_by_sorting_all(logits, params):
    """Whether each token is kept, from all tokens sorted and summed up one by one."""
    scores = (logits.astype(np.float64) - np.float64(logits.max())) / params.temperature
    weights = np.exp(scores.astype(np.float32))
    probabilities = (weights / weights.sum(dtype=np.float64)).astype(np.float32)
    ascending = np.argsort(scores, kind="stable")
    sums = np.cumsum(probabilities[ascending], dtype=np.float64).astype(np.float32)
    kept = np.ones(logits.size, bool)
    kept[ascending[:-1][sums[:-1] <= np.float32(1 - params.top_p)]] = False
    return kept & (scores > -np.inf)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 9, 100, 3000]),
    st.sampled_from([0.0, 0.01, 1.0, 4.0]),
    st.booleans(),
    st.sampled_from([0.95, 0.9, 0.5, 1e-6, 1 - 1e-9, 1 - 1e-12]),
)
def test_top_p_sorts_only_candidates(seed, size, spread, masked, top_p):
    """Breaks: the nucleus has a token more or less than with all tokens sorted."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, spread, size).astype(np.float32)
    if masked:
        logits[random.random(size) < 0.3] = -np.inf
        logits[0] = 1
    params = GenerationParams(temperature=0.7, top_p=top_p)
    kept = Sampler(params, size).distribution(logits, NOTHING) > 0
    np.testing.assert_array_equal(kept, top_p_by_sorting_all(logits, params))


def test_top_p_sorts_all_where_rounding_could_decide():
    """Breaks: sums added up in another order fall on the other side of 1 - p. Ten even tokens reach it within rounding."""
    with patch.object(sampling_filters, "_top_p_of_all", wraps=sampling_filters._top_p_of_all) as of_all:
        Sampler(GenerationParams(temperature=1.0, top_p=0.9), 10).distribution(np.zeros(10, np.float32), NOTHING)
        assert of_all.call_count == 1
        Sampler(GenerationParams(temperature=1.0, top_p=0.93), 10).distribution(np.zeros(10, np.float32), NOTHING)
        assert of_all.call_count == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GenerationParams(), GenerationParams(temperature=1.0, repetition_penalty=1.2)])
def test_broken_logits_are_reported(bad, params):
    """Breaks: a model that overflowed yields fluent-looking nonsense."""
    logits = np.array([1, bad, 3], np.float32)
    with pytest.raises(NumericsError, match="NaN" if math.isnan(bad) else "infinite"):
        Sampler(params, 3).sample(logits, np.array([0]))
    with pytest.raises(NumericsError):
        Sampler(params, 3).logprobs(logits, 0, 1)


def test_nothing_to_choose_is_reported():
    """Breaks: with every token masked, token 0 is chosen."""
    with pytest.raises(NumericsError):
        Sampler(GenerationParams(), 3).sample(np.full(3, -np.inf, np.float32), NOTHING)


def test_wrong_vocabulary_is_reported():
    """Breaks: parts of two bundles mixed up decode to nonsense."""
    with pytest.raises(BundleError, match=r"\(1, 3\)"):
        Sampler(GenerationParams(), 3).sample(np.zeros((1, 3), np.float32), NOTHING)


def test_logprobs_are_the_log_softmax_of_raw_logits():
    """Breaks: reported log-probabilities are NaN for large logits, or change with the temperature."""
    logits = (np.random.default_rng(0).normal(0, 5, 50) + 3e4).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    got = Sampler(GenerationParams(temperature=0.1), 50).logprobs(logits, 17, 5)
    assert got.token == 17 and got.logprob == pytest.approx(expected[17], abs=1e-9)
    assert [i for i, _ in got.top] == np.argsort(-expected)[:5].tolist()
    np.testing.assert_allclose([p for _, p in got.top], np.sort(expected)[::-1][:5], atol=1e-9)


def test_top_logprobs_of_tied_tokens_are_in_id_order():
    """Breaks: the same request lists other tokens from run to run; or asking for more than there are fails."""
    sampler = Sampler(GenerationParams(), 4)
    assert [i for i, _ in sampler.logprobs(np.zeros(4, np.float32), 0, 2).top] == [0, 1]
    assert [i for i, _ in sampler.logprobs(np.zeros(4, np.float32), 0, 9).top] == [0, 1, 2, 3]
    assert sampler.logprobs(np.zeros(4, np.float32), 0, 0).top == ()


# --- OpenAI's penalties, biases, and masks


def test_presence_and_frequency_penalties_count_output_tokens_only() -> None:
    """The formula of OpenAI's reference: c * frequency + (c > 0) * presence, over generated tokens, not the prompt's."""
    params = GenerationParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits, seen = np.array([1.0, 2.0, 3.0, 0.5], np.float32), np.array([2, 2, 0, 1, 1])
    found = Sampler(params, 4, prompt_tokens=2).distribution(logits, seen)
    wanted = np.exp(np.array([1.0 - 0.75, 2.0 - 1.0, 3.0, 0.5]))
    assert found == pytest.approx(wanted / wanted.sum(), abs=1e-6)


def test_biases_ban_and_force_tokens() -> None:
    """-100 and 100 are what clients send to ban and to force a token; others are added to its logit."""
    logits = np.array([5.0, 1.0, 0.0], np.float32)
    assert Sampler(GenerationParams(logit_bias=((1, 4.5),)), 3).sample(logits, NOTHING) == 1
    assert Sampler(GenerationParams(logit_bias={0: -100}), 3).sample(logits, NOTHING) == 1  # type: ignore[arg-type]
    assert Sampler(GenerationParams(logit_bias=((2, 100.0),)), 3).sample(logits, NOTHING) == 2


def test_a_mask_leaves_allowed_tokens_their_proportions() -> None:
    params = GenerationParams(temperature=1.0, grammar=Grammar.regex("x"))
    logits, allowed = np.array([9.0, 1.0, 2.0], np.float32), np.array([False, True, True])
    found = Sampler(params, 3).distribution(logits, NOTHING, allowed)
    assert found[0] == 0 and found[2] / found[1] == pytest.approx(np.e, rel=1e-6)


def test_a_nan_does_not_hide_behind_a_mask() -> None:
    """A broken model must be reported, not sampled from among the tokens that are left."""
    sampler = Sampler(GenerationParams(grammar=Grammar.regex("x")), 3)
    with pytest.raises(NumericsError):
        sampler.sample(np.array([np.nan, 1.0, 2.0], np.float32), NOTHING, np.array([False, True, True]))
