"""The figures of the depth-policy benchmarks, on synthetic turns whose right figures are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tide_bench.output_checks import disagreement_rate, first_difference, identical_share
from tide_bench.paired_ratio import paired_ratio
from tide_runtime import DepthOptions, Engine, GenerationParams
from tide_runtime.depth_tuning import DepthTuning

from benchmarks.arms.policy_arms import speed_figures
from benchmarks.arms.turns import EngineArm, Group, Turn, take_turns


def test_ratio_is_the_median_of_pairs_and_of_the_total() -> None:
    """A slow moment of the machine would decide the ratio, or the interval would not hold it."""
    ratio = paired_ratio([2, 2, 2, 2, 20], [1, 1, 1, 1, 1])
    assert ratio.median == 2 and ratio.total == pytest.approx(28 / 5)
    assert ratio.low <= ratio.median <= ratio.high
    assert paired_ratio([3, 3], [2, 2]).low == paired_ratio([3, 3], [2, 2]).high == 1.5


def test_interval_narrows_with_more_pairs() -> None:
    """The interval would not show how certain the ratio is."""
    times = np.random.default_rng(1).lognormal(sigma=0.2, size=400).tolist()
    few, many = paired_ratio(times[:16], [1.0] * 16), paired_ratio(times, [1.0] * 400)
    assert many.high - many.low < few.high - few.low


def test_unpaired_times_are_refused() -> None:
    """Different prompts would be compared."""
    with pytest.raises(ValueError, match="pairs"):
        paired_ratio([1, 2], [1])


def test_speed_counts_the_tokens_after_the_first_of_every_row() -> None:
    """Prefill would be counted as decoding."""
    turn = Turn(
        [[1, 2, 3], [4, 5, 6]], 0.5, layers_per_token=12.0, depth=8.0, drafted=Counter(router=4), accepted=Counter(router=3)
    )
    figures = speed_figures([replace(turn, base_seconds=1.0)])
    assert figures["tokens_per_s"] == 8 and figures["ratio_median"] == 2
    assert figures["layers_per_token"] == 12 and figures["accepted_router"] == 0.75


def test_disagreement_counts_until_the_first_difference() -> None:
    """One wrong token would be counted again for everything that follows from it."""
    reference = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    rows = [[0, 1, 9, 9, 9], [0, 1, 2, 3, 4]]
    assert disagreement_rate(rows, reference) == pytest.approx(1 / (2 + 4))
    assert identical_share(rows, reference) == pytest.approx(0.7)
    assert disagreement_rate(reference, reference) == 0
    assert first_difference([1, 2], [1, 2, 3]) is None


class CountingArm(EngineArm):
    """Takes ``seconds`` and notes when its turns came."""

    def __init__(self, name: str, seconds: list[float], order: list[str]) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "left", (seconds, order))

    def turn(self, prompts: Group, params: GenerationParams) -> Turn:
        seconds, order = self.left  # type: ignore[attr-defined]
        order.append(f"{self.name}{params.seed}")
        return Turn([[0, 1]], seconds.pop(0))


def test_arms_and_the_baseline_begin_in_turn() -> None:
    """One of two neighbours would always find the caches and clocks that the other leaves, or be held against a far one."""
    order: list[str] = []
    base, arms = CountingArm("u", [3.0, 5.0, 7.0, 9.0], order), {n: CountingArm(n, [1.0, 1.0], order) for n in "ab"}
    times, turns = take_turns(base, arms, [[[1]], [[2]]], GenerationParams(max_new_tokens=1))
    assert order == ["u0", "a0", "u0", "b0", "b1", "u1", "a1", "u1"]
    assert [turn.seconds for turn in times] == [4.0, 8.0]
    beside = {name: [turn.base_seconds for turn in own] for name, own in turns.items()}
    assert beside == {"a": [3.0, 9.0], "b": [5.0, 7.0]}


def test_no_turn_drafts_from_an_earlier_one(load: Callable[..., Engine]) -> None:
    """The baseline, which has a turn beside every arm, would copy its own first answer in all the others."""
    params = GenerationParams(max_new_tokens=16, ignore_eos=True)
    repeatable = DepthOptions(tuning=DepthTuning(clock_rate=0.0))
    with load(policy="exact", depth=repeatable) as engine, engine.with_options(engine.options) as other:
        baseline, arm = EngineArm("exact", engine), EngineArm("exact", other)
        alone = EngineArm("exact", engine).turn([[5, 9, 3]], params)
        base, turns = take_turns(baseline, {"a": arm, "b": arm}, [[[5, 9, 3]]], params)
    assert {turn.layers_per_token for turn in (*base, *turns["a"], *turns["b"])} == {alone.layers_per_token}


def test_a_turn_is_the_engines_own_work(load: Callable[..., Engine]) -> None:
    """The benchmark's counts would not be those of a request."""
    with load(policy="full") as engine:
        with engine.with_options(replace(engine.options, policy="exact", max_batch=2)) as other:
            params = GenerationParams(max_new_tokens=6, ignore_eos=True)
            turn = EngineArm("exact", other).turn([[5, 9, 3], [7, 1]], params)
            assert turn.tokens == [list(one.token_ids) for one in engine.generate([[5, 9, 3], [7, 1]], params)]
        assert turn.decoded == 10 and turn.seconds > 0


def test_texts_of_one_token_have_a_depth(load: Callable[..., Engine]) -> None:
    """A prompt that the model ends at once would end the benchmark: its token went through every layer."""
    with load() as engine:
        turn = EngineArm("auto", engine).turn([[5, 40, 99]], GenerationParams(max_new_tokens=1))
    assert turn.depth == engine.depth and turn.decoded == 0
