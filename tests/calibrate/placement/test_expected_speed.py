"""Expected speeds against figures worked out by hand, and against cycles that are counted one by one."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from calibrate.cost_model import EXIT, EXTRA, HEAD, HOST, LAUNCH, LAYER, LAYERS, LOGITS, table, trace
from tide_calibrate.placement.decisions import exit_depths
from tide_calibrate.placement.expected_speed import exact_speedups, exit_speedup
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.errors import CalibrationError

UNCUT = table().unsplit_ms
EVALUATION = HEAD + HOST


def exit_at(checkpoint: int, threshold: float | None = 0.5, **changes) -> ExitInfo:
    info = ExitInfo(checkpoint, "identity", "max_probability", threshold or 0.0, exit_threshold=threshold)
    return replace(info, **changes)


def segment(layers: int, tokens: int = 1) -> float:
    return LAUNCH + layers * (LAYER + EXTRA * (tokens - 1))


def rest(tokens: int) -> float:
    """The layers after the exit at 4, for ``tokens`` tokens."""
    return segment(LAYERS - 4, tokens) + LOGITS + HOST


@pytest.mark.parametrize(
    ("scores", "agrees", "limit", "tokens", "ms"),
    [
        ([0.1] * 4, [True] * 4, 3, 1, segment(4) + EVALUATION + rest(1)),  # never confident: one token a cycle
        ([0.9] * 4, [True] * 4, 1, 2, segment(4) + EVALUATION + segment(4) + rest(2)),  # the draft at the limit is not evaluated
        ([0.9] * 4, [True] * 4, 3, 4, 3 * (segment(4) + EVALUATION) + segment(4) + rest(4)),
        ([0.9] * 4, [False] * 4, 3, 1, 3 * (segment(4) + EVALUATION) + segment(4) + rest(4)),  # all drafts are wrong
    ],
    ids=["never confident", "limit 1", "always right", "always wrong"],
)
def test_a_cycle_by_hand(scores: list[float], agrees: list[bool], limit: int, tokens: int, ms: float) -> None:
    """What a user is promised, and which exits are measured, is built from such cycles."""
    speedup = exact_speedups(trace({4: (scores, agrees)}), exit_at(4), table())[limit - 1]
    assert speedup == pytest.approx(UNCUT * tokens / ms)


def test_cycles_counted_one_by_one() -> None:
    """Guards the sums in closed form: every outcome of a cycle's tokens, with its probability."""
    confident, right, count = 0.75, 2 / 3, 12
    scores, agrees = [0.9] * 9 + [0.1] * 3, [True] * 6 + [False] * 6
    speedups = exact_speedups(trace({4: (scores, agrees)}), exit_at(4), table())
    assert count == len(scores) and len(speedups) == 15
    kinds = {"right": confident * right, "wrong": confident * (1 - right), "unsure": 1 - confident}
    for limit in (1, 2, 4):
        tokens = ms = 0.0
        for outcome in product(kinds, repeat=limit):
            chance = float(np.prod([kinds[kind] for kind in outcome]))
            drafts = next((place for place, kind in enumerate(outcome) if kind == "unsure"), limit)
            gained = next((place for place in range(drafts) if outcome[place] == "wrong"), drafts) + 1
            evaluated = min(drafts + 1, limit)
            tokens += chance * gained
            ms += chance * ((drafts + 1) * segment(4) + evaluated * EVALUATION + rest(drafts + 1))
        assert speedups[limit - 1] == pytest.approx(UNCUT * tokens / ms)


@pytest.mark.parametrize(("router", "heads", "mlps"), [("max_probability", 4, 0), ("mlp", 1, 4), ("mlp+max_probability", 3, 4)])
def test_what_each_router_costs(router: str, heads: int, mlps: int) -> None:
    """An MLP saves the head of the tokens that it keeps: `--router auto` compares exactly this."""
    text = trace({4: ([0.9, 0.2, 0.4, 0.3], [True] * 4)})
    info = exit_at(4, router=router, mlp_threshold=0.3 if "+" in router else None)
    evaluation = segment(4) + HOST + (heads * HEAD + mlps * EXIT) / 4
    ms = evaluation + 0.75 * rest(1) + 0.25 * (segment(4) + rest(2))
    assert exact_speedups(text, info, table())[0] == pytest.approx(UNCUT * 1.25 / ms)


def test_a_tail_is_paid_for_and_cuts_the_model() -> None:
    """tail:3 runs the last three layers for every draft, and its cut costs one launch more in the deep pass."""
    text = trace({4: ([0.9] * 4, [True] * 4)}, head="tail:3")
    draft = segment(4) + HOST + EXIT + segment(3) + LOGITS
    deep = segment(4) + segment(6, 2) + LAUNCH + LOGITS + HOST
    assert exact_speedups(text, exit_at(4, head="tail:3"), table())[0] == pytest.approx(UNCUT * 2 / (draft + deep))


def test_exit_by_hand() -> None:
    """Three of four tokens stop after layer 4, and the fourth takes their layers along."""
    text = trace({4: ([0.9, 0.9, 0.1, 0.9], [True] * 4)})
    ms = segment(4) + EVALUATION + 0.25 * rest(4)
    assert exit_speedup(text, [exit_at(4)], table()) == pytest.approx(UNCUT / ms)
    slow_host = replace(table(), steps=[replace(step, extra_host_ms=0.25) for step in table().steps])
    assert exit_speedup(text, [exit_at(4)], slow_host) == pytest.approx(UNCUT / (ms + 1.25 * 0.25))
    assert exact_speedups(text, exit_at(4), slow_host)[0] < exact_speedups(text, exit_at(4), table())[0]


def test_depths_are_of_the_first_exit_that_lets_a_token_go() -> None:
    """The runtime decides by these shares whether exits pay among several sequences."""
    text = trace({2: ([0.9, 0.1, 0.1, 0.1], [True] * 4), 6: ([0.9, 0.9, 0.1, 0.1], [True] * 4)})
    assert exit_depths(text, [exit_at(2), exit_at(6)]) == {2: 0.25, 6: 0.25, LAYERS: 0.5}
    assert exit_depths(text, [exit_at(2, None), exit_at(6)]) == {6: 0.5, LAYERS: 0.5}
    assert exit_speedup(text, [exit_at(2, None), exit_at(6)], table()) == exit_speedup(text, [exit_at(6)], table())


def test_what_gives_no_expectation_is_refused() -> None:
    """One size does not determine the cost of further tokens, and no tokens no share."""
    text = trace({4: ([0.9], [True])})
    with pytest.raises(CalibrationError, match=r"measured at \[1\] tokens"):
        exact_speedups(text, exit_at(4), replace(table(), steps=table().steps[:1]))
    with pytest.raises(CalibrationError, match="no tokens"):
        exact_speedups(trace({4: ([], [])}), exit_at(4), table())
