"""Routers: calibrated scores, labels, reproducibility; and traces aligned with the text."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from calibrate.captured import capture_of
from export.architectures import VOCAB
from tide_calibrate.capture.store import Capture
from tide_calibrate.exit_heads import make_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.routers import TRAINING_FREE, Entropy, MaxProbability, MlpRouter
from tide_calibrate.routers.platt import fit_platt
from tide_calibrate.routers.train import RouterExamples, RouterTraining, fit_router, router_examples, train_router
from tide_calibrate.traces.record import trace_split, windows_of
from tide_runtime.errors import DataError, ParamsError

QUICK = RouterTraining(epochs=3, tokens_per_step=128, width=16)


@pytest.fixture(scope="module")
def captured(llama: FrozenModel) -> Capture:
    random = np.random.default_rng(0)
    windows, tokens = 48, 12
    lengths = np.where(np.arange(windows) % 3 == 0, 7, tokens)
    split = np.repeat([0, 1, 2], [40, 5, 3])
    return capture_of(llama.model, random.integers(0, VOCAB, (windows, tokens)), (2, 3, 4), lengths, split)


def _learnable(count: int, share: float, seed: int) -> RouterExamples:
    """States whose log-odds of being right are linear in one coordinate, so that the optimal scores are known."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn((count, 16), generator=generator)
    odds = 2 * states[:, 0] + math.log(share / (1 - share))
    return RouterExamples(states, torch.rand(count, generator=generator) < odds.sigmoid())


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_calibrated_scores_are_probabilities(share: float) -> None:
    """Class-balanced training shifts scores away from the true odds; after Platt scaling, 0.9 must mean right 90% of the time."""
    router = fit_router(_learnable(4000, share, 0), QUICK)
    held_out, unseen = _learnable(3000, share, 1), _learnable(8000, share, 2)
    with torch.no_grad():
        router.rescale(*fit_platt(router(held_out.states).numpy(), held_out.right.numpy()))
        scores = router.scores(unseen.states).numpy()
    order = np.argsort(scores)
    gaps = [abs(scores[bin].mean() - unseen.right.numpy()[bin].mean()) for bin in np.array_split(order, 8)]
    assert np.mean(gaps) < 0.03
    surest = unseen.right.numpy()[order[-2000:]].mean()
    assert surest > unseen.right.float().mean() + 0.25 * (1 - share), "the router does not tell right from wrong"


def test_platt_scaling_recovers_the_true_odds() -> None:
    """Any linear distortion of the log-odds must be undone."""
    for seed, (slope, offset) in enumerate(product((0.2, 1.0, 5.0), (-2.0, 0.0, 2.0))):
        random = np.random.default_rng(seed)
        odds = random.normal(size=10_000)
        right = random.random(10_000) < 1 / (1 + np.exp(-odds))
        scores = (odds - offset) / slope
        found_slope, found_offset = fit_platt(scores, right)
        calibrated = 1 / (1 + np.exp(-(found_slope * scores + found_offset)))
        assert np.abs(calibrated - 1 / (1 + np.exp(-odds))).max() < 0.06


def test_scores_stay_finite_and_are_never_inverted() -> None:
    """Layers can agree always or never; and an uninformative router may look inverted on a small sample: the worst tokens would
    exit."""
    states = torch.randn((400, 16), generator=torch.Generator().manual_seed(0))
    for answer in (True, False):
        examples = RouterExamples(states, torch.full((400,), answer))
        router = fit_router(examples, QUICK)
        with torch.no_grad():
            router.rescale(*fit_platt(router(states).numpy(), examples.right.numpy()))
            scores = router.scores(states)
        assert torch.isfinite(scores).all() and ((scores > 0.9) if answer else (scores < 0.1)).all()
    odds = np.random.default_rng(0).normal(size=200)
    assert fit_platt(odds, odds < 0.3)[0] > 0


def test_slope_and_offset_are_folded_into_the_last_layer() -> None:
    """The runtime applies no separate scaling, so the weights must contain it."""
    router = MlpRouter(16)
    with torch.no_grad():
        router.up.normal_(generator=torch.Generator().manual_seed(0))
        states = torch.randn((5, 16), generator=torch.Generator().manual_seed(1))
        before = router(states)
        router.rescale(2.0, -0.5)
        assert torch.allclose(router(states), 2 * before - 0.5, atol=1e-6)
        assert torch.allclose(router(7 * states), router(states), atol=1e-4), "the score depends on the state's length"


def test_training_free_scores_match_their_definition() -> None:
    """Both scores must lie in 0 … 1, and higher must mean more confident."""
    logits = torch.randn((6, 50), generator=torch.Generator().manual_seed(0)) * 3
    states, total = torch.zeros(6, 4), logits.logsumexp(-1)
    p = logits.double().softmax(-1)
    assert torch.allclose(MaxProbability().scores(states, logits, total).double(), p.max(-1).values, atol=1e-6)
    entropy = -(p * p.log()).sum(-1)
    assert torch.allclose(Entropy().scores(states, logits, total).double(), 1 - entropy / math.log(50), atol=1e-6)
    assert Entropy().scores(states, torch.zeros(6, 50), total).abs().max() < 1e-6
    assert Entropy().scores(states, torch.eye(6, 50) * 1e4, total).min() == 1


def test_labels_match_their_definition(llama: FrozenModel, captured: Capture) -> None:
    """Routers would be trained on padding, or on another token than the exit's."""
    head = make_head("identity", llama, 3)
    windows = np.array([0, 1])
    examples = router_examples(head, captured, windows)
    assert len(examples.right) == 7 + 12
    state = torch.from_numpy(captured.hidden[3][0, :7]).float()
    with torch.no_grad():
        guess = llama.lm_head(state).argmax(-1)
    first, second = (train_router(make_head("identity", llama, 2), captured, QUICK).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first), "a calibration must be reproducible"
    with pytest.raises(ParamsError, match="epochs must be above 0"):
        RouterTraining(epochs=0)
    assert examples.right[:7].tolist() == (guess == torch.from_numpy(captured.top_ids[0, :7, 0])).tolist()


def test_a_trace_is_aligned_with_the_text(llama: FrozenModel, captured: Capture) -> None:
    """Thresholds and certificate count tokens of a trace; a shifted or padded token would invalidate both."""
    heads = {(c, kind): make_head(kind, llama, c) for c, kind in ((2, "identity"), (3, "tail:1"))}
    routers = {(2, "identity"): [*TRAINING_FREE, MlpRouter(64)]}
    trace = trace_split(captured, "threshold", llama.lm_head, heads, routers)
    windows = windows_of(captured, "threshold")
    lengths = captured.lengths[windows]
    assert trace.window.tolist() == np.repeat(windows, lengths).tolist()
    ends = np.cumsum(lengths) - 1
    assert np.flatnonzero(np.isnan(trace.full_nll)).tolist() == ends.tolist()
    assert set(trace.exits[2, "identity"].scores) == {"max_probability", "entropy", "mlp"}
    assert trace.exits[3, "tail:1"].scores == {}
    for trace_of_exit in trace.exits.values():
        assert len(trace_of_exit.agrees) == len(trace.window) == lengths.sum()
        assert np.isnan(trace_of_exit.nll).sum() == len(windows)
    # tail:1 at checkpoint 3 of 4, untranslated, is the whole model
    assert trace.exits[3, "tail:1"].agrees.all()
    np.testing.assert_allclose(trace.exits[3, "tail:1"].nll, trace.full_nll, atol=0.02)


def test_the_full_models_likelihood_is_exact_for_rare_tokens_too(llama: FrozenModel, captured: Capture) -> None:
    """Only the K largest logits are captured, but the unlikely tokens dominate a text's perplexity."""
    trace = trace_split(captured, "test", llama.lm_head, {}, {})
    window = windows_of(captured, "test")[0]
    ids = torch.from_numpy(captured.tokens[window, : captured.lengths[window]]).long()[None]
    with torch.no_grad():
        log_probabilities = llama.model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    expected = -log_probabilities[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    assert not np.isin(ids[0, 1:], captured.top_ids[window, : len(expected)]).all(), "no rare token in the sample"
    np.testing.assert_allclose(trace.full_nll[: len(expected)], expected, atol=0.02)


def test_windows_are_spread_and_empty_splits_refused(captured: Capture) -> None:
    """A limit must not drop the last documents; an empty split must not give a certificate."""
    assert windows_of(captured, "train", 2).tolist() == [0, 39]
    with pytest.raises(DataError, match="test split holds no text"):
        windows_of(Capture(**{**vars(captured), "split": np.zeros(48, np.int8)}), "test")
