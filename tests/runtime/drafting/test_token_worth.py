"""What a token is worth in each row of a batch that only shrinks from here on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.tiny_generation import Request, make_row
from runtime.tiny_transformer import TinyTransformer
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.controller import token_worth
from tide_runtime.sequence import TokenSequence


def step_ms(rows: int) -> float:
    """Most of a step is the same for any number of rows."""
    return 4.0 + rows


def test_rows_that_finish_together_are_worth_the_same() -> None:
    """A batch that just began would favour a row for no reason."""
    assert token_worth([60, 58, 57, 60], step_ms, DepthTuning()) == [1.0] * 4


def test_the_last_row_is_worth_the_steps_it_has_to_itself() -> None:
    """The batch would hurry rows that nobody waits for, and wait for one that it has not hurried."""
    worth = token_worth([20, 60, 30], step_ms, DepthTuning())
    assert worth[1] > 1 > worth[2] == worth[0]
    assert sum(worth) == pytest.approx(3)
    assert worth[1] - 1 == pytest.approx(0.5 * (step_ms(1) / (step_ms(3) / 3) - 1))


@pytest.fixture
def drafting() -> tuple[ExactDepth, Callable[[int], TokenSequence]]:
    """Policy exact where steps of one and of four rows were measured, and what makes a row with so many tokens to go."""
    model = TinyTransformer(0, (0.5, 0.5, 0.0, 0.0), 11, 80)
    manifest = tiny_manifest(model, (2,), [ExitInfo(2, "identity", "max_probability", 0.0)])
    assert manifest.calibration is not None
    steps = [StepCost(rows, seq, 0.1, 1.0 + 0.1 * rows * seq, 0.2, 0.0, 0.1) for rows in (1, 4) for seq in (1, 2)]
    calibration = replace(manifest.calibration, costs=CostTable("numpy", "", 4.0, steps), predicted={"exact:router": 1.25})
    policy = ExactDepth(replace(manifest, calibration=calibration), 8, DepthOptions(draft="both"))
    return policy, lambda left: make_row(Request((1, 2), GenerationParams(max_new_tokens=left), 0), manifest)


def test_sequences_weigh_differently_only_where_none_waits(
    drafting: tuple[ExactDepth, Callable[[int], TokenSequence]],
) -> None:
    """Guards against holding up a queue for the sequence that is last, and against not hurrying it in a batch that shrinks."""
    policy = drafting[0]
    states = [policy.controller.start(greedy=True) for _ in range(2)]
    for state, hit_rate in zip(states, (0.2, 0.1), strict=True):
        state.guess, state.hit_rate = [1] * 8, hit_rate
    shrinking = policy.controller.prompt_lookup_lengths(states, False, [60, 20])
    awaited = policy.controller.prompt_lookup_lengths(states, False, None)
    assert awaited == [0, 0] and shrinking[0] == 1  # the sequence that is last is worth a verification pass


def test_every_row_more_adds_to_a_step(drafting: tuple[ExactDepth, Callable[[int], TokenSequence]]) -> None:
    """Between measured numbers of rows a further one would seem free, or as dear as several: some row would be hurried."""
    costs = drafting[0].costs
    plain = [costs.full_step(rows) for rows in range(1, 7)]
    assert all(more > fewer for fewer, more in pairwise(plain))
    assert [plain[0], plain[3]] == [costs.full(1, 1, 1), costs.full(4, 4, 1)]
    assert plain[2] - plain[1] == pytest.approx(plain[1] - plain[0])


@pytest.mark.parametrize(("temperature", "expected"), [(0.0, 1.25), (0.8, 1.1)])
def test_sampled_text_trusts_exits_less(
    drafting: tuple[ExactDepth, Callable[[int], TokenSequence]], temperature: float, expected: float
) -> None:
    """The calibration foretells greedy decoding: sampling would pay for drafts that are refused until it has learned that."""
    policy, row = drafting
    begun = row(40)
    begun.params = replace(begun.params, temperature=temperature)
    assert policy.controller.start(begun.params.greedy).exits.speedup == pytest.approx(expected)


class WatchedPolicy(FullDepth):
    """Notes at every step how many rows run, and whether others wait."""

    seen: list[tuple[int, set[bool]]]

    def decode(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        self.seen.append((len(rows), {row.others_wait for row in rows}))
        return super().decode(context, rows)


def test_rows_are_awaited_while_others_wait_for_a_place(load: Callable[..., Engine]) -> None:
    """A queue would be served as if it were empty, or its end as if it went on."""
    with load(max_batch=2) as engine:
        policy = WatchedPolicy(engine.manifest, 64)
        policy.seen = []
        engine.policy = policy
        engine.generate([[1, 2]] * 3, GenerationParams(max_new_tokens=4, ignore_eos=True))
    assert policy.seen == [(2, {True})] * 3 + [(1, {False})] * 3
