"""Placement: prices against the simulation, invalid choices, ranking by both policies, and the gate of 1.02x."""

from dataclasses import replace

import numpy as np
import pytest
from calibrate.cost_model import LAYERS, table, trace
from slow_cases import slow_but
from tide_calibrate.placement.candidates import exit_options, exit_speedup
from tide_calibrate.placement.search import GATE, Placement, choose_exits, predict
from tide_calibrate.simulation.exact import simulate_exact
from tide_calibrate.traces.trace import SplitTrace
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.errors import CalibrationError, ParamsError


def easy_text(seed: int = 0, tokens: int = 240, checkpoints: tuple[int, ...] = (2, 4, 6), head: str = "identity") -> SplitTrace:
    """A trace with calibrated exits that agree more often the deeper they are."""
    random = np.random.default_rng(seed)
    ease = random.random(tokens) ** 0.5
    chance = {c: ease ** (2 - 1.5 * c / LAYERS) for c in checkpoints}
    exits = {c: (p, random.random(tokens) < p) for c, p in chance.items()}
    return trace(exits, window=np.arange(tokens) // 60, head=head)


@pytest.fixture(scope="module")
def placed() -> Placement:
    """The placement on the easy text."""
    return choose_exits(easy_text(), table())


def test_the_price_of_an_exit_alone_matches_the_simulation():
    """Without wrong drafts and with a large draft limit, the closed form and the simulation must give the same cost."""
    random = np.random.default_rng(0)
    text, costs = trace({4: (random.random(4000), [True] * 4000)}), table()
    for option in exit_options(text, costs, "max_probability")[2:]:  # higher thresholds, for cycles shorter than the limit
        simulated = simulate_exact(text, [option.info], costs, draft_limit=60).ms_per_token
        assert option.ms == pytest.approx(simulated, rel=0.02)


def test_a_table_of_one_size_is_refused():
    """One size does not determine the cost of further tokens."""
    with pytest.raises(CalibrationError, match=r"measured at \[1\] tokens"):
        choose_exits(easy_text(), replace(table(), steps=table().steps[:1]))


def test_the_placement_is_at_least_as_fast_as_a_grid_search(placed):
    """The chosen exits must be at least as fast as the best of a grid over one checkpoint."""
    text, costs = easy_text(), table()
    grid = [
        simulate_exact(text, [ExitInfo(c, "identity", "max_probability", threshold)], costs, limit).speedup
        for c in (2, 4, 6)
        for threshold in (0.0, 0.3, 0.6, 0.9)
        for limit in (1, 3, 8)
    ]
    assert placed.recommended == "exact"
    assert placed.predicted["exact"] >= max(grid) * 0.995
    assert placed.predicted["exact"] == predict(text, costs, placed.exits, placed.draft_limit).predicted["exact"]


def test_the_same_trace_gives_the_same_placement():
    """A calibration must be reproducible from data and costs."""
    first, second = (choose_exits(easy_text(tokens=120), table(), router="mlp+max_probability") for _ in range(2))
    assert first == second
    assert first.exits


def test_no_exit_at_the_last_layer_or_inside_its_own_tail():
    """An exit that runs all layers skips nothing, so it must not be chosen even if it always agrees."""
    perfect = ([1.0] * 300, [True] * 300)
    placed = choose_exits(trace({3: perfect, 8: perfect, LAYERS: perfect}, head="tail:2"), table())
    assert [info.checkpoint for info in placed.exits] == [3]
    assert placed.checkpoints == [3, 8]


def test_exits_share_one_tail():
    """A bundle has one last segment; a token that stops without running it leaves a gap in the segment's KV cache.

    Here an oracle router makes the heads at 2 and at 4 complementary, so that without the rule both would be chosen.
    """
    random = np.random.default_rng(0)
    easy, second = random.random(240) < 0.6, random.random(240) < 0.8
    shallow = trace({2: (easy.astype(float), easy)}, window=np.arange(240) // 60)
    for deeper, head in ((easy | second, "tail:1"), (easy | second, "tail:2")):
        shallow.exits.update(trace({4: (deeper.astype(float), deeper)}, head=head).exits)
    placed = choose_exits(shallow, table(), router="mlp")
    assert placed.exits
    assert len({info.tail_layers for info in placed.exits}) == 1
    CalibrationInfo(placed.exits, placed.draft_limit, placed.recommended)  # refuses tails of several lengths


@pytest.mark.parametrize("agreement", [0.0, 0.3])
def test_full_is_recommended_when_scores_are_uninformative(agreement):
    """With scores independent of agreement no exit pays off, so policy `full` must be recommended."""
    random = np.random.default_rng(1)
    exits = {c: (random.random(300), random.random(300) < agreement) for c in (2, 4, 6)}
    placed = choose_exits(trace(exits), table(), router="max_probability")
    assert placed.recommended == "full"
    assert (placed.exits, placed.draft_limit, placed.checkpoints) == ([], 0, [])
    assert placed.exact_speedup < GATE
    assert ("never agree" if agreement == 0.0 else "best exits found") in placed.reason


def test_an_mlp_with_equal_scores_is_preferred_to_evaluating_the_head(placed):
    """`--router auto` decides by cost: an MLP with the same scores avoids the head's cost, so it must be chosen."""
    assert "mlp" in placed.exits[0].router
    assert placed.predicted["exact"] >= choose_exits(easy_text(), table(), router="max_probability").predicted["exact"]


@pytest.mark.parametrize("seed, gated", slow_but([(1, False), (3, False), (0, True), (2, True)], (3, False), (2, True)))
def test_a_second_threshold_has_to_gain_a_percent(seed, gated):
    """A second threshold can overfit a few thousand tokens: its gain disappeared on other text."""
    text, random = easy_text(seed), np.random.default_rng(seed + 100)
    for traced in text.exits.values():  # an MLP with noisier scores than the probability
        traced.scores["mlp"] = ((traced.scores["mlp"] + random.random(len(traced.agrees))) / 2).astype(np.float32)
    auto, *others = (choose_exits(text, table(), router) for router in ("auto", "mlp", "max_probability"))
    assert [info.mlp_threshold is not None for info in auto.exits] == [gated]
    assert (auto.predicted["exact"] > 1.01 * max(other.predicted["exact"] for other in others)) == gated


def test_exit_is_predicted_once_thresholds_are_certified():
    """Certification comes after placement, so `exit` must be predicted only with certified thresholds."""
    text = easy_text()
    exits = [ExitInfo(4, "identity", "max_probability", 0.5)]
    assert set(predict(text, table(), exits, 4).predicted) == {"full", "exact"}
    exits = [ExitInfo(4, "identity", "max_probability", 0.5, exit_threshold=0.9)]
    assert set(predict(text, table(), exits, 4).predicted) == {"full", "exact", "exit"}


def test_invalid_options_are_refused():
    """The errors must name an unknown router, and a router without scores."""
    with pytest.raises(ParamsError, match="router is 'magic'"):
        choose_exits(easy_text(), table(), router="magic")
    with pytest.raises(ParamsError, match="most_exits is 0"):
        choose_exits(easy_text(), table(), most_exits=0)
    with pytest.raises(CalibrationError, match="scores of the router mlp"):
        text = easy_text()
        for traced in text.exits.values():
            del traced.scores["mlp"]
        choose_exits(text, table(), router="mlp")


def test_exit_speedup_distinguishes_exits_that_draft_equally_well():
    """Wrong drafts only cost time, but wrong exits violate ε: a second exit can speed up `exit` without speeding up `exact`."""
    random = np.random.default_rng(2)
    easy, unsure = random.random(400) < 0.5, random.random(400)
    shallow = (np.where(easy, 0.99, 0.6 * unsure), easy | (unsure < 0.8))
    deeper = (np.full(400, 0.999), np.ones(400, bool))
    text = trace({3: shallow, 5: deeper}, window=np.arange(400) // 50)
    one, two = [ExitInfo(3, "identity", "max_probability", 0.0)], [
        ExitInfo(3, "identity", "max_probability", 0.5), ExitInfo(5, "identity", "max_probability", 0.0)
    ]  # fmt: skip
    assert exit_speedup(text, two, table(), 0.01) > exit_speedup(text, one, table(), 0.01) > 1
    never_agrees = trace({3: (random.random(400), np.zeros(400, bool))})
    assert exit_speedup(never_agrees, one, table(), 0.01) == 1
