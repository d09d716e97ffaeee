"""Placement: dynamic programming against brute force, what may never be chosen, and the suitability gate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from calibrate.cost_model import LAYERS, table, trace
from tide_calibrate.placement.candidates import exit_options, exit_speedup
from tide_calibrate.placement.dynamic_program import best_chains, chain_costs
from tide_calibrate.placement.search import GATE, Placement, choose_exits, predict
from tide_calibrate.simulation.exact import simulate_exact
from tide_calibrate.traces.trace import SplitTrace
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.costs.cost_model import StepCurve
from tide_runtime.errors import CalibrationError, ParamsError


def easy_text(seed: int = 0, tokens: int = 240, checkpoints: tuple[int, ...] = (2, 4, 6), head: str = "identity") -> SplitTrace:
    """Every exit is right as often as it says, more often the deeper it is."""
    random = np.random.default_rng(seed)
    ease = random.random(tokens) ** 0.5
    chance = {c: ease ** (2 - 1.5 * c / LAYERS) for c in checkpoints}
    exits = {c: (p, random.random(tokens) < p) for c, p in chance.items()}
    return trace(exits, window=np.arange(tokens) // 60, head=head)


@pytest.fixture(scope="module")
def placed() -> Placement:
    """What is chosen for the easy text."""
    return choose_exits(easy_text(), table())


@pytest.mark.parametrize("wrong_ms", [0.0, 3.0])
@pytest.mark.parametrize("most_exits", [1, 2, 3])
def test_dynamic_programming_finds_what_brute_force_finds(wrong_ms, most_exits):
    """A wrong recurrence would propose poor checkpoints, and nobody would notice: the polishing hides it."""
    times = StepCurve.of(table(), 16)
    options = exit_options(easy_text(tokens=300), times, "max_probability")
    costs = chain_costs(options, LAYERS, times, wrong_ms)

    def cost(chain: tuple[int, ...]) -> float:
        """The recurrence spelled out from the start: each step is paid by the share that gets there."""
        total, reached, row = 0.0, 1.0, 0
        for option in chain:
            total += reached * costs.step[row, option]
            reached *= costs.passed[row, option]
            row = option + 1
        return total + reached * costs.end[row]

    def deeper(chain: tuple[int, ...]) -> bool:
        return all(options[a].checkpoint < options[b].checkpoint for a, b in itertools.pairwise(chain))

    lengths = range(1, most_exits + 1)
    chains = [c for n in lengths for c in itertools.combinations(range(len(options)), n) if deeper(c)]
    for found in best_chains(costs, most_exits):
        brute = min(cost(chain) for chain in chains if chain[0] == found.options[0])
        assert cost(found.options) == pytest.approx(brute)
        assert found.ms == pytest.approx(brute)


def test_one_checkpoint_s_chain_cost_is_the_simulated_one():
    """Without wrong drafts and with room to draft, the recurrence must price a cycle as the simulation does."""
    random = np.random.default_rng(0)
    scores = random.random(4000)
    text, costs = trace({4: (scores, [True] * 4000)}), table()
    options = exit_options(text, StepCurve.of(costs, 16), "max_probability")
    chains = {c.options[0]: c.ms for c in best_chains(chain_costs(options, LAYERS, StepCurve.of(costs, 16), 0.0), 1)}
    for index, option in enumerate(options[2:], 2):  # thresholds that keep enough back for cycles shorter than the limit
        simulated = simulate_exact(text, [option.info], costs, draft_limit=60).ms_per_token
        assert chains[index] == pytest.approx(simulated, rel=0.02)


def test_an_easy_text_is_given_exits_that_pay(placed):
    """The chosen exits must be at least as good as the best of a plain grid over one checkpoint."""
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
    """Same data, same costs, same file."""
    first, second = (choose_exits(easy_text(tokens=120), table(), router="mlp+max_probability") for _ in range(2))
    assert first == second
    assert first.exits


def test_no_exit_at_the_last_layer_or_inside_its_own_tail():
    """An exit that runs all layers is no exit; even a perfect one there must never be chosen."""
    perfect = ([1.0] * 300, [True] * 300)
    placed = choose_exits(trace({3: perfect, 8: perfect, LAYERS: perfect}, head="tail:2"), table())
    assert [exit.checkpoint for exit in placed.exits] == [3]
    assert placed.checkpoints == [3, 8]


def test_exits_share_one_tail():
    """A bundle has one last segment, and a token that stopped without it leaves a gap in its keys and values. Here a router
    knows which tokens are easy for the head at 2, and which for the one at 4: without the rule, the two heads are mixed."""
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
def test_the_gate_recommends_full_when_agreement_is_chance(agreement):
    """Scores that know nothing about agreement: nobody may be sent away from `full`."""
    random = np.random.default_rng(1)
    exits = {c: (random.random(300), random.random(300) < agreement) for c in (2, 4, 6)}
    placed = choose_exits(trace(exits), table(), router="max_probability")
    assert placed.recommended == "full"
    assert (placed.exits, placed.draft_limit, placed.checkpoints) == ([], 0, [])
    assert placed.exact_speedup < GATE
    assert ("never agree" if agreement == 0.0 else "best exits found") in placed.reason


def test_an_mlp_that_knows_as_much_is_preferred_to_asking_the_head(placed):
    """`--router auto` is a matter of cost: an MLP with the same scores spares the head, and must win."""
    assert "mlp" in placed.exits[0].router
    assert placed.predicted["exact"] >= choose_exits(easy_text(), table(), router="max_probability").predicted["exact"]


@pytest.mark.parametrize(("seed", "gated"), [(1, False), (7, False), (0, True), (2, True)])
def test_a_second_threshold_has_to_gain_a_percent(seed, gated):
    """An MLP before the probability can be fitted to a few thousand tokens; on others the gain was gone (calibration_quality)."""
    text, random = easy_text(seed), np.random.default_rng(seed + 100)
    for exit in text.exits.values():  # an MLP that half knows what the probability knows
        exit.scores["mlp"] = ((exit.scores["mlp"] + random.random(len(exit.agrees))) / 2).astype(np.float32)
    auto, *others = (choose_exits(text, table(), router) for router in ("auto", "mlp", "max_probability"))
    assert [exit.mlp_threshold is not None for exit in auto.exits] == [gated]
    assert (auto.predicted["exact"] > 1.01 * max(other.predicted["exact"] for other in others)) == gated


def test_exit_is_predicted_once_thresholds_are_certified():
    """The certificate comes after placement; the prediction of `exit` must follow from its thresholds alone."""
    text = easy_text()
    exits = [ExitInfo(4, "identity", "max_probability", 0.5)]
    assert set(predict(text, table(), exits, 4).predicted) == {"full", "exact"}
    exits = [ExitInfo(4, "identity", "max_probability", 0.5, exit_threshold=0.9)]
    assert set(predict(text, table(), exits, 4).predicted) == {"full", "exact", "exit"}


def test_bad_options_say_what_to_set():
    """An unknown router, or a text whose router was never trained, is named."""
    with pytest.raises(ParamsError, match="router is 'magic'"):
        choose_exits(easy_text(), table(), router="magic")
    with pytest.raises(ParamsError, match="most_exits is 0"):
        choose_exits(easy_text(), table(), most_exits=0)
    with pytest.raises(CalibrationError, match="scores of the router mlp"):
        text = easy_text()
        for exit in text.exits.values():
            del exit.scores["mlp"]
        choose_exits(text, table(), router="mlp")


def test_exits_that_draft_alike_are_chosen_for_policy_exit():
    """Drafts may be wrong, exits may not: where `exact` is as fast with one exit as with two, `exit` may gain by the second."""
    random = np.random.default_rng(2)
    easy, unsure = random.random(400) < 0.5, random.random(400)
    shallow = (np.where(easy, 0.99, 0.6 * unsure), easy | (unsure < 0.8))
    deeper = (np.full(400, 0.999), np.ones(400, bool))
    text = trace({3: shallow, 5: deeper}, window=np.arange(400) // 50)
    one, two = [ExitInfo(3, "identity", "max_probability", 0.0)], [
        ExitInfo(3, "identity", "max_probability", 0.5), ExitInfo(5, "identity", "max_probability", 0.0)
    ]  # fmt: skip
    assert exit_speedup(text, two, table(), 0.01) > exit_speedup(text, one, table(), 0.01) > 1
    hopeless = trace({3: (random.random(400), np.zeros(400, bool))})
    assert exit_speedup(hopeless, one, table(), 0.01) == 1
