"""Candidate exits: the fastest by expected speed, one for each head at a checkpoint, and invalid choices."""

import numpy as np
import pytest
from calibrate.cost_model import LAYERS, table, trace
from tide_calibrate.placement.candidates import EXACT, MAX_CANDIDATES, best_candidates, boldest_threshold
from tide_calibrate.placement.expected_speed import exact_speedups
from tide_calibrate.traces.trace import SplitTrace
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.errors import CalibrationError, ParamsError


def easy_text(seed: int = 0, tokens: int = 240, checkpoints: tuple[int, ...] = (2, 3, 4, 6)) -> SplitTrace:
    """A trace with calibrated exits that agree more often the deeper they are."""
    random = np.random.default_rng(seed)
    ease = random.random(tokens) ** 0.5
    chance = {c: ease ** (2 - 1.5 * c / LAYERS) for c in checkpoints}
    return trace({c: (p, random.random(tokens) < p) for c, p in chance.items()})


def test_the_best_are_as_fast_as_a_grid_search() -> None:
    """A slow exit would be measured and a faster one never seen."""
    text = easy_text()
    candidates = best_candidates(text, table(), "max_probability")
    speeds = [candidate.speedups[EXACT] for candidate in candidates]
    assert len(candidates) == MAX_CANDIDATES == len({candidate.info.checkpoint for candidate in candidates})
    assert speeds == sorted(speeds, reverse=True)
    grid = [
        exact_speedups(text, ExitInfo(checkpoint, "identity", "max_probability", threshold), table()).max()
        for checkpoint in (2, 3, 4, 6)
        for threshold in np.linspace(0, 1, 41)
    ]
    assert speeds[0] >= max(grid) * 0.99
    best = candidates[0]
    assert exact_speedups(text, best.info, table())[best.draft_limit - 1] == speeds[0]
    assert candidates == best_candidates(text, table(), "max_probability"), "a calibration must be reproducible"


def test_no_exit_at_the_last_layer_or_inside_its_own_tail() -> None:
    """An exit that runs all layers skips nothing, so it must not be chosen even if it always agrees."""
    perfect = ([1.0] * 300, [True] * 300)
    text = trace({3: perfect, 8: perfect, LAYERS: perfect}, head="tail:2")
    assert [candidate.info.checkpoint for candidate in best_candidates(text, table())] == [3]


@pytest.mark.parametrize(("noise", "gated"), [(0.5, True), (0.7, False)])
def test_a_second_threshold_has_to_gain_a_percent(noise: float, gated: bool) -> None:
    """A second threshold can overfit a few thousand tokens: its gain disappeared on other text. An MLP with the same scores saves
    the head."""
    auto, probability = (best_candidates(easy_text(), table(), router)[0] for router in ("auto", "max_probability"))
    assert auto.info.router == "mlp" and auto.speedups[EXACT] > probability.speedups[EXACT]
    text, random = easy_text(), np.random.default_rng(100)
    for traced in text.exits.values():  # an MLP with noisier scores than the probability
        mixed = (1 - noise) * traced.scores["mlp"] + noise * random.random(len(traced.agrees))
        traced.scores["mlp"] = mixed.astype(np.float32)
    auto, *others = (best_candidates(text, table(), router)[0] for router in ("auto", "mlp", "max_probability"))
    assert (auto.info.mlp_threshold is not None) == gated
    assert (auto.speedups[EXACT] > 1.01 * max(other.speedups[EXACT] for other in others)) == gated


def test_wrong_exits_count_for_policy_exit() -> None:
    """Wrong drafts only cost time, but wrong exits violate ε: the shallow exit drafts best, and the deep one may be taken."""
    random = np.random.default_rng(2)
    right = random.random(400) < 0.95
    text = trace({2: (np.full(400, 0.9), right), 6: (np.full(400, 0.9), np.ones(400, bool))})
    first = {policy: best_candidates(text, table(), policy=policy)[0].info.checkpoint for policy in (EXACT, "exit")}
    assert first == {EXACT: 2, "exit": 6}
    shallow = ExitInfo(2, "identity", "max_probability", 0.0)
    assert boldest_threshold(text, shallow, 0.01) is None and boldest_threshold(text, shallow, 0.2) == pytest.approx(0.9)
    assert best_candidates(trace({3: (random.random(400), np.zeros(400, bool))}), table())[0].speedups["exit"] == 0


def test_invalid_options_are_refused() -> None:
    """The errors must name an unknown router, and a router without scores."""
    text = easy_text()
    with pytest.raises(ParamsError, match="router is 'magic'"):
        best_candidates(text, table(), router="magic")
    for traced in text.exits.values():
        del traced.scores["mlp"]
    with pytest.raises(CalibrationError, match=r"scores of the router mlp; scored: max_probability"):
        best_candidates(text, table(), router="mlp")
