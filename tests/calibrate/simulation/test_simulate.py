"""Simulated policies: figures worked out by hand, closed forms, and bounds that hold for every text."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from calibrate.cost_model import EXIT, EXTRA, HEAD, HOST, LAUNCH, LAYER, LAYERS, LOGITS, table, trace
from hypothesis import given
from hypothesis import strategies as st
from tide_calibrate.simulation.exact import simulate_exact as from_the_start
from tide_calibrate.simulation.exit import simulate_exit, simulate_full
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.errors import CalibrationError, ParamsError

# Where drafts have been accepted, so that short texts show whole cycles; one test is about a text's start.
FAR = DepthTuning(first_exit_drafts=64)
simulate_exact = partial(from_the_start, tuning=FAR)


def exit_at(checkpoint: int, threshold: float = 0.5, **changes) -> ExitInfo:
    info = ExitInfo(checkpoint, "identity", "max_probability", threshold, exit_threshold=threshold)
    return replace(info, **changes)


def segment(layers: int, tokens: int = 1) -> float:
    return LAUNCH + layers * (LAYER + EXTRA * (tokens - 1))


def test_one_cycle_by_hand():
    """Two right drafts and an unsure token, then a wrong draft: the prediction a user sees is built from such cycles."""
    text = trace({4: ([0.9, 0.9, 0.1, 0.9, 0.1], [True, True, True, False, True])})
    done = simulate_exact(text, [exit_at(4)], table(), draft_limit=8)
    shallow, ask = segment(4), HEAD + HOST
    # Tokens 0-2 in one cycle. Token 3 drafts wrongly, token 4 (the last of the text) goes deep with it and comes again.
    first = 3 * (shallow + ask) + segment(6, 3) + LOGITS + HOST
    second = 2 * shallow + ask + segment(6, 2) + LOGITS + HOST
    third = segment(LAYERS) + LOGITS + HOST  # not asked, so it goes through the uncut graph
    assert done.ms_per_token * 5 == pytest.approx(first + second + third)
    assert done.tokens_per_cycle == pytest.approx(5 / 3)
    assert done.acceptance == pytest.approx(2 / 3)
    assert done.layers_per_token * 5 == 6 * 4 + 3 * 6
    assert done.stops == {4: 3 / 6, LAYERS: 3 / 6}


def test_first_cycles_of_a_text_draft_few():
    """The runtime finds out whether drafts are right before it makes many; a prediction from whole cycles would be too high."""
    text = trace({4: ([1.0] * 14, [True] * 14)})
    done = from_the_start(text, [exit_at(4)], table(), draft_limit=4)
    assert done.tokens_per_cycle == 14 / 4  # cycles of 1, 2 and 4 drafts, and a token more in each, leave two tokens
    wrong = trace({4: ([1.0] * 14, [False] * 14)})
    assert from_the_start(wrong, [exit_at(4)], table(), draft_limit=4).tokens_per_cycle == 1


def test_no_exit_is_asked_at_the_draft_limit():
    """At the limit nothing more can be drafted; a prediction that pays for asking would undersell short limits."""
    text = trace({4: ([1.0] * 4, [True] * 4)})
    done = simulate_exact(text, [exit_at(4)], table(), draft_limit=1)
    cycle = 2 * (segment(4) + HOST) + HEAD + segment(6, 2) + LOGITS
    assert done.ms_per_token * 4 == pytest.approx(2 * cycle)


def test_a_deeper_exit_carries_what_waits_at_a_shallower_one():
    """Token 0 waits after layer 2; token 1 goes on to layer 6 and takes it along in one launch, and so on to the end."""
    text = trace({2: ([0.9, 0.1, 0.1], [True] * 3), 6: ([0.1, 0.9, 0.1], [True] * 3)})
    done = simulate_exact(text, [exit_at(2), exit_at(6)], table(), draft_limit=8)
    ask = (HEAD + HOST) * (1 + 2)  # token 0 asks once, token 1 at both; token 2 ends the text
    deep = segment(4, 2) + segment(4, 1) + segment(4, 3) + LOGITS + HOST
    assert done.ms_per_token * 3 == pytest.approx(3 * segment(2) + ask + deep)
    assert done.layers_per_token * 3 == 3 * 2 + 2 * 4 + 4


def test_a_tail_head_is_paid_for_and_cuts_the_model():
    """tail:3 runs the last three layers for every draft, and its cut costs one launch more in the deep pass."""
    text = trace({4: ([0.9, 0.1], [True, True])}, head="tail:3")
    done = simulate_exact(text, [exit_at(4, head="tail:3")], table(), draft_limit=1)
    draft = segment(4) + HOST + EXIT + segment(3) + LOGITS
    deep = segment(4) + HOST + segment(6, 2) + LAUNCH + LOGITS
    assert done.ms_per_token * 2 == pytest.approx(draft + deep)
    assert done.layers_per_token * 2 == 4 + 3 + 4 + 6


@pytest.mark.parametrize(
    ("router", "asks"),
    [("max_probability", 3 * HEAD), ("mlp", 3 * EXIT + HEAD), ("mlp+max_probability", 3 * EXIT + 2 * HEAD)],
)
def test_what_each_router_costs(router, asks):
    """The MLP spares the head where it says no: `--router auto` compares exactly this."""
    text = trace({4: ([0.9, 0.2, 0.4, 0.0], [True] * 4)})
    info = exit_at(4, router=router, mlp_threshold=0.3 if "+" in router else None)
    done = simulate_exact(text, [info], table(), draft_limit=8)
    cycles = segment(6, 2) + segment(6) + segment(LAYERS) + 3 * LOGITS  # the last token is not asked
    turns = 3 + 3  # three tokens ask, three cycles end
    assert done.ms_per_token * 4 == pytest.approx(3 * segment(4) + turns * HOST + asks + cycles)


def test_deferred_layers_run_when_a_later_token_goes_deep():
    """Tokens 0 and 1 exit, token 2 takes their layers along; token 3 exits and its layers are never run."""
    text = trace({4: ([0.9, 0.9, 0.1, 0.9], [True, False, True, True])})
    done = simulate_exit(text, [exit_at(4)], table())
    assert done.ms_per_token * 4 == pytest.approx(4 * (segment(4) + HOST + HEAD) + segment(6, 3) + LOGITS + HOST)
    assert done.disagreement == 0.25
    assert done.acceptance == pytest.approx(2 / 3)
    assert done.tokens_per_cycle == 4


def test_full_runs_the_uncut_graph():
    """Cuts that nobody stops at cost nothing, so a calibration never makes `full` slower."""
    text = trace({4: ([0.9], [True])})
    assert simulate_full(text, table()).speedup == pytest.approx(1)


def test_what_is_measured_of_the_host_is_charged():
    """Evaluating an exit or finishing a token takes longer on the host. Without it a prediction is a fifth too high."""
    text = trace({4: ([0.9, 0.9, 0.1, 0.9], [True] * 4)})
    slow_host = replace(table(), steps=[replace(step, extra_host_ms=0.25) for step in table().steps])
    for play, evaluated, deep in ((simulate_exit, 4, 1), (partial(simulate_exact, draft_limit=8), 3, 1)):
        before, after = (play(text, [exit_at(4)], costs=costs).ms_per_token * 4 for costs in (table(), slow_host))
        assert after - before == pytest.approx((evaluated + deep) * 0.25)


def test_asking_that_does_not_pay_rests():
    """The runtime stops asking exits that are never sure; a prediction that goes on asking would be too low."""
    text = trace({4: ([0.0] * 30, [True] * 30)})
    done = simulate_exit(text, [exit_at(4)], table())
    asks = segment(4) + HOST + HEAD + segment(6) + LOGITS + HOST
    plain = segment(LAYERS) + LOGITS + HOST
    lost = (done.ms_per_token * 30 - 30 * plain) / (asks - plain)
    assert lost == pytest.approx(3)  # 8.8 tokens are credited for 8 steps' time; an evaluation loses a fifth of one


def test_windows_are_separate_texts():
    """Nothing is drafted across the end of one text into the next."""
    scores, agrees = [0.9] * 6, [True] * 6
    parts = simulate_exact(trace({4: (scores, agrees)}, window=[0, 0, 0, 1, 1, 1]), [exit_at(4)], table(), 8)
    one = simulate_exact(trace({4: (scores[:3], agrees[:3])}), [exit_at(4)], table(), 8)
    assert parts.ms_per_token == pytest.approx(one.ms_per_token)


def test_a_score_that_is_not_a_number_never_stops_a_token():
    """A broken router must cost speed, not tokens."""
    done = simulate_exit(trace({4: ([math.nan] * 3, [False] * 3)}), [exit_at(4, 0.0)], table())
    assert done.disagreement == 0
    assert done.stops == {4: 0.0, LAYERS: 1.0}


def test_an_exit_without_a_threshold_is_passed_by():
    """Policy `exit` must not use an exit that was never certified."""
    text = trace({4: ([1.0] * 3, [False] * 3)})
    done = simulate_exit(text, [exit_at(4, exit_threshold=None)], table())
    assert (done.disagreement, done.ms_per_token) == (0, pytest.approx(table().unsplit_ms))


@given(limit=st.integers(1, 12), checkpoint=st.integers(1, LAYERS - 1), cycles=st.integers(1, 4))
def test_an_oracle_gains_the_closed_form(limit, checkpoint, cycles):
    """All drafts right and none held back: d + 1 tokens per cycle, the most that this checkpoint can ever give."""
    tokens = (limit + 1) * cycles
    text = trace({checkpoint: ([0.0] * tokens, [True] * tokens)})
    done = simulate_exact(text, [exit_at(checkpoint, 0.0)], table(), limit)
    cycle = (limit + 1) * (segment(checkpoint) + HOST) + limit * HEAD + segment(LAYERS - checkpoint, limit + 1) + LOGITS
    assert done.speedup == pytest.approx(table().unsplit_ms * (limit + 1) / cycle)
    assert done.tokens_per_cycle == limit + 1


texts = st.integers(1, 60).flatmap(
    lambda n: st.tuples(*[st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=n, max_size=n)] * 2)
)


@given(text=texts, limit=st.integers(0, 8), threshold=st.floats(0, 1))
def test_exact_bounds_hold_for_every_text(text, limit, threshold):
    """Wrong counts of tokens or layers would make every prediction, and the placement built on it, wrong."""
    shallow, deep = text
    traced = trace({3: tuple(zip(*shallow, strict=True)), 6: tuple(zip(*deep, strict=True))})
    done = simulate_exact(traced, [exit_at(3, threshold), exit_at(6, threshold)], table(), limit)
    assert done.tokens == len(shallow)
    assert 1 <= done.tokens_per_cycle <= limit + 1
    assert 3 + (LAYERS - 3) / (limit + 1) <= done.layers_per_token + 1e-9
    assert done.layers_per_token <= (limit + 1) * 6 + LAYERS - 6 + 1e-9
    assert sum(done.stops.values()) == pytest.approx(1)


@given(tokens=st.integers(1, 40), limit=st.integers(1, 8))
def test_wrong_drafts_never_count_as_tokens(tokens, limit):
    """When every draft is wrong, each cycle still gives exactly one token: the deep pass's own."""
    done = simulate_exact(trace({4: ([1.0] * tokens, [False] * tokens)}), [exit_at(4)], table(), limit)
    assert done.tokens_per_cycle == 1
    assert done.acceptance == 0 or tokens == 1
    assert done.speedup <= 1


@given(scores=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=80))
def test_deferred_exits_run_every_layer_that_later_tokens_attend_to(scores):
    """Each batch of deep layers holds the token that asked for them and everything since the last such token."""
    no_cooldown = DepthTuning(cooldown=0)
    done = simulate_exit(trace({4: (scores, [True] * len(scores))}), [exit_at(4)], table(), tuning=no_cooldown)
    deep = np.flatnonzero(np.array(scores, np.float32) < 0.5)
    batches = np.diff([-1, *deep])
    expected = len(scores) * (segment(4) + HOST + HEAD) + sum(segment(6, int(m)) + LOGITS + HOST for m in batches)
    assert done.ms_per_token * len(scores) == pytest.approx(expected)


@pytest.mark.parametrize(
    "exits", [[exit_at(6), exit_at(4)], [exit_at(4), exit_at(4)], [exit_at(4, head="tail:6")], [exit_at(LAYERS)]]
)
def test_exits_out_of_order_are_refused(exits):
    """A table of exits that no bundle can have must not get a prediction."""
    with pytest.raises(CalibrationError, match="shallow first"):
        simulate_exact(trace({4: ([1.0], [True])}), exits, table(), 4)


def test_bad_options_say_what_to_set():
    """A typo in a policy's option must not silently simulate something else."""
    text = trace({4: ([1.0], [True])})
    with pytest.raises(ParamsError, match="draft_limit is -1"):
        simulate_exact(text, [exit_at(4)], table(), -1)
    with pytest.raises(CalibrationError, match="no tokens"):
        simulate_exact(trace({4: ([], [])}), [exit_at(4)], table(), 4)
