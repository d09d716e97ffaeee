"""Where lazy depth could go wrong and random examples seldom go: each test one way."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from runtime.numpy_backend import NumpyBackend, Script, tiny_manifest
from runtime.simulated_exit import SimulatedExit
from runtime.tiny_generation import FAR_DRAFTS, Request, exits_pay, generate, make_row, output
from runtime.tiny_transformer import Array, TinyTransformer
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.bundle.manifest import HEAD
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import BackendFacts
from tide_runtime.depth.registry import make_policy
from tide_runtime.depth.tuning import DepthTuning
from tide_runtime.errors import NumericsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.outputs import finished
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

LAYERS = 5
SLOTS = 20
LIVELY, SILENT = (0.5,) * LAYERS, (0.5, 0.5, 0.0, 0.0, 0.0)  # with silent layers an exit after 2 says what the model says


def model_of(strengths: tuple[float, ...] = LIVELY, seed: int = 0) -> TinyTransformer:
    return TinyTransformer(seed, strengths, 11, SLOTS)


def exit_after(checkpoint: int, head: str = "identity", router: str = "max_probability", threshold: float = 0.0) -> ExitInfo:
    return ExitInfo(checkpoint, head, router, threshold, threshold, 0.5)


def requests(*prompts: tuple[int, ...], count: int = 12, **changes: Any) -> list[Request]:
    return [Request(p, GenerationParams(max_new_tokens=count, **changes), seat) for seat, p in enumerate(prompts)]


def rows_of(
    policy: str,
    model: TinyTransformer,
    exits: list[ExitInfo],
    asked: list[Request],
    *,
    checkpoints: tuple[int, ...] = (2, 3),
    options: DepthOptions | None = None,
    script: Script | None = None,
) -> list[TokenSequence]:
    manifest = tiny_manifest(model, checkpoints, exits)
    made = exits_pay(make_policy(policy, manifest, options or DepthOptions(draft="router")))
    return generate(made, NumpyBackend(manifest, model, script), asked, len(asked))


def full(model: TinyTransformer, asked: list[Request]) -> list[object]:
    return [output(row) for row in rows_of("full", model, [], asked)]


# --- Neighbours


@pytest.mark.parametrize("seed", range(6))
def test_a_neighbour_going_deep_leaves_a_drafts_tail_alone(seed: int) -> None:
    """A row between two that go deep, or that ask a later exit, carries garbage. Over the keys and values that its own exits
    left in the tail, that garbage would change its next token."""
    model = model_of(seed=seed)
    exits = [exit_after(1, "tail:2", threshold=0.55), exit_after(2, "tail:2", threshold=0.55)]
    manifest = tiny_manifest(model, (1, 2, 3), exits)
    policy = exits_pay(ExitDepth(manifest, DepthOptions(max_wait_steps=0)))
    random = np.random.default_rng(seed)
    asked = requests(*(tuple(random.integers(0, 11, n).tolist()) for n in (1, 4, 2, 3, 7)))
    rows = generate(policy, NumpyBackend(manifest, model), asked, 5)
    for request, row in zip(asked, rows, strict=True):
        simulated = SimulatedExit(policy, manifest, model, request)
        assert output(row) == (simulated.run(), simulated.reason)
        assert row.depth.token_depths == simulated.depths
    assert {3, LAYERS} <= {depth for row in rows for depth in row.depth.token_depths}  # a tail counts


def test_a_neighbours_mlp_does_not_speak_for_others() -> None:
    """The head is run for the whole batch when one MLP agrees; a row whose own refused must go deep all the same."""
    model = model_of()
    asked = requests((1, 2), (3, 4), (5, 6))

    def one_agrees(graph: str, states: Array) -> Array:
        return np.array([0.0, 1.0, 0.0])[: len(states)]

    rows = rows_of("exit", model, [exit_after(2, router="mlp+max_probability")], asked, script=one_agrees)
    assert [set(row.depth.token_depths) for row in rows] == [{LAYERS}, {2}, {LAYERS}]
    assert [output(rows[0]), output(rows[2])] == [full(model, asked)[0], full(model, asked)[2]]
    for end in range(rows[1].prompt_tokens + 1, rows[1].num_tokens):
        shallow = model.states_of(rows[1].tokens[:end]).hidden[2][-1]
        assert rows[1].tokens[end] == model.logits(shallow).argmax()


def test_a_held_row_in_a_full_cache_has_no_room_for_garbage() -> None:
    """While the others draft through the tail, it stands between them with its cache full to the last slot."""
    model = model_of()
    asked = requests((1,), (2,), (3,) * (SLOTS - 1), (4,), (5,), count=6)

    def the_middle_refuses(graph: str, states: Array) -> Array:
        return np.array([1.0, 1.0, 0.0, 1.0, 1.0] if len(states) == 5 else [1.0] * len(states))

    options = DepthOptions(max_wait_steps=2)
    rows = rows_of("exit", model, [exit_after(2, "tail:2", "mlp", 0.5)], asked, options=options, script=the_middle_refuses)
    assert output(rows[2]) == full(model, asked)[2] and rows[2].depth.token_depths == [LAYERS]


def test_a_held_row_whose_waiting_room_is_full_keeps_its_last_state() -> None:
    """Made room for while it was held, a row has nothing left to run when its turn comes; its neighbour has."""
    model = model_of()
    asked = requests(*((n, n + 1) for n in range(5)), count=16)
    answers = np.random.default_rng(0)
    options = DepthOptions(max_wait_steps=2, tuning=DepthTuning(exit_room=3))

    def random_scores(graph: str, states: Array) -> Array:
        return np.asarray(answers.random(len(states)))

    manifest = tiny_manifest(model, (2, 3), [exit_after(2, router="mlp", threshold=0.2)])
    rows = generate(exits_pay(ExitDepth(manifest, options)), NumpyBackend(manifest, model, random_scores), asked, 5)
    for row in rows:  # deep tokens are the model's own for the text so far
        for place in [i for i, depth in enumerate(row.depth.token_depths) if depth == LAYERS]:
            before = row.tokens[: row.prompt_tokens + 1 + place]
            assert row.new_tokens[1 + place] == model.full_logits(before)[-1].argmax()


@pytest.mark.parametrize("policy", ["exact", "exit"])
@pytest.mark.parametrize("head", ["identity", "tail:2"])
def test_rows_near_the_end_of_the_cache_run_alone(policy: str, head: str) -> None:
    """A nearly full row cannot take the garbage of a neighbour with several tokens; a write behind its cache would fail."""
    model = model_of()
    asked = requests((1,) * 17, (2, 3) * 5, (4,) * 18, (5, 6), (7, 8, 9) * 6, count=20)
    exits = [exit_after(2, head, threshold=0.5)]
    rows = rows_of(policy, model, exits, asked, options=DepthOptions(draft="all", draft_limit=6))
    if policy == "exact":
        assert [output(row) for row in rows] == full(model, asked)
    assert [row.finish_reason for row in rows] == ["cache_full"] * 5


# --- Ends inside a draft


def test_eos_inside_a_draft_ends_the_text_there() -> None:
    """Tokens behind the end would be accepted, or be in the output, the log-probabilities or the depths."""
    model = model_of(SILENT)
    [free] = rows_of("full", model, [], requests((1, 2, 3)))
    new = free.new_tokens.tolist()
    place = next(i for i in range(2, len(new)) if new[i] not in new[:i])
    asked = requests((1, 2, 3), eos_token_ids=(new[place],), logprobs=1)
    [row] = rows_of(
        "exact", model, [exit_after(2)], asked, options=DepthOptions(draft="router", draft_limit=place + 3, tuning=FAR_DRAFTS)
    )
    assert output(row) == (new[: place + 1], "eos")
    assert row.depth.accepted["router"] == place and row.depth.deep_passes == 1
    assert [entry.token for entry in row.logprobs] == new[: place + 1]
    assert row.depth.token_depths == [2] * place


@pytest.mark.parametrize("prompt", [SLOTS - 6, SLOTS - 3, SLOTS - 1, SLOTS])
def test_the_cache_fills_in_the_middle_of_a_draft(prompt: int) -> None:
    """Drafts stop where the cache does; the last token needs no slot."""
    model = model_of(SILENT)
    asked = requests(tuple(i % 11 for i in range(prompt)), count=50)
    for drafter in ("router", "ngram", "all"):
        options = DepthOptions(draft=drafter, draft_limit=4)  # type: ignore[arg-type]
        [row] = rows_of("exact", model, [exit_after(2)], asked, options=options)
        assert [output(row)] == full(model, asked)
        assert (row.finish_reason, len(row.new_tokens)) == ("cache_full", SLOTS + 1 - prompt)


# --- Routers and heads that have gone wrong


@pytest.mark.parametrize("router", ["mlp", "mlp+max_probability"])
@pytest.mark.parametrize("policy", ["exact", "exit"])
def test_a_nan_score_never_exits(policy: str, router: str) -> None:
    """Even where the threshold is 0 and everything else exits."""
    model, asked = model_of(), requests((1, 2), (3,))

    def nan(graph: str, states: Array) -> Array:
        return np.full(len(states), np.nan)

    rows = rows_of(policy, model, [exit_after(2, "linear", router)], asked, script=nan)
    assert [output(row) for row in rows] == full(model, asked)
    assert all(set(row.depth.token_depths) == {LAYERS} and not row.depth.drafted for row in rows)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("router", ["max_probability", "mlp"])
@pytest.mark.parametrize("policy", ["exact", "exit"])
def test_an_exit_head_that_overflows_is_not_believed(policy: str, router: str) -> None:
    """The model itself is fine: its own logits decide, and no error is raised."""
    model, asked = model_of(), requests((1, 2), (3,))
    model.weights["translate.2"][:] = np.inf
    rows = rows_of(policy, model, [exit_after(2, "linear", router)], asked, script=lambda _, states: np.ones(len(states)))
    assert [output(row) for row in rows] == full(model, asked)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("draft", ["router", "ngram", "none"])
def test_nan_logits_are_an_error_and_leave_the_slots_usable(draft: Any) -> None:
    """Every drafter is covered; a failed request leaves nothing in the caches that the next one could read."""
    model, asked = model_of(), requests((1, 2, 1, 2, 1, 2), (3,))
    manifest = tiny_manifest(model, (2, 3), [exit_after(2)])
    policy, backend = exits_pay(ExactDepth(manifest, DepthOptions(draft=draft))), NumpyBackend(manifest, model)
    slots, sound = backend.context(2), model.weights["out.4"].copy()
    events = run(policy, slots, [make_row(request, manifest) for request in asked])
    next(events)
    model.weights["out.4"][:] = np.nan
    with pytest.raises(NumericsError, match="NaN"):
        list(events)
    model.weights["out.4"][:] = sound
    rows = [make_row(request, manifest) for request in asked]
    list(run(policy, slots, rows))
    assert [output(row) for row in rows] == full(model, asked)


# --- Bounds on exits


def test_a_depth_budget_is_kept_by_exits_that_are_unsure() -> None:
    """A request would cost more than its caller allowed, or the forced tokens would pass for certified ones."""
    model, never = model_of(), [exit_after(2, threshold=1.0)]
    for budget, forced in ((2.0, 11), (3.5, 6), (5.0, 0)):
        (row,) = rows_of("exit", model, never, requests((1, 2), depth_budget=budget))
        depths = row.depth.token_depths
        assert set(depths) <= {2, LAYERS} and sum(depths) <= budget * len(depths)
        assert row.depth.forced == depths.count(2) == forced


@pytest.mark.parametrize("policy", ["exit", "exact"])
def test_exits_that_cost_more_than_they_save_in_a_batch_are_not_asked(policy: str) -> None:
    """Several rows share every launch: `exit` and `exact` would be slower than `full` where a row alone gains."""
    model = model_of(SILENT)
    manifest = tiny_manifest(model, (2, 3), [exit_after(2)])
    assert manifest.calibration is not None
    dear_head = [StepCost(rows, seq, 0.1, 1.0, 30.0, 0.0, 0.1) for rows in (1, 4) for seq in (1, 16)]
    # Without expectations `exit` does what it was asked for, and `exact` has no reason to ask.
    for shares, ran_full in (({"2": 0.9, "5": 0.1}, True), ({}, policy == "exact")):
        info = replace(manifest.calibration, costs=CostTable("numpy", "", 5.0, dear_head), exit_depths=shares)
        asked = requests((1, 2), (3, 4), (5, 6))
        rows = [make_row(request, manifest) for request in asked]
        facts = BackendFacts(concurrency=len(rows))
        made = exits_pay(make_policy(policy, replace(manifest, calibration=info), DepthOptions(draft="router"), facts))
        backend = NumpyBackend(manifest, model)
        list(run(made, backend.context(3), rows))
        assert (HEAD not in backend.launches) is ran_full
        if policy == "exit":  # what differs from it is said
            assert {finished(row, policy, None).stats.policy for row in rows} == {"full" if ran_full else "exit"}
        assert [output(row) for row in rows] == full(model, asked)
