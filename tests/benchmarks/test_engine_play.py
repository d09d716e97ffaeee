"""Benchmarks' turns that pause between tokens, on a real engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from tide_runtime import Engine, GenerationParams
from tide_runtime.depth.full import FullDepth

from benchmarks.arms.engine_arm import EngineArm, LoggedEngine

PROMPTS = [[5, 40, 99, 7], [1, 2], [3, 4, 5]]
PARAMS = GenerationParams(max_new_tokens=9, ignore_eos=True)


def arm_on(engine: Engine) -> EngineArm:
    return EngineArm(LoggedEngine(engine), FullDepth())


def test_a_turn_in_slices_is_the_same_turn(load: Callable[..., Engine]) -> None:
    """Pauses would lose tokens or launches, or rows that wait for a place would never get one."""
    with load() as engine:
        arm = arm_on(engine)
        whole, generated = arm.turn(PROMPTS, PARAMS, 2), 0
        play = arm.start(PROMPTS, PARAMS, 2)
        while play.advance(generated):
            generated += 2
        assert generated > 2 * PARAMS.max_new_tokens
        sliced = play.turn()
    assert sliced.tokens == whole.tokens and all(len(row) == 9 for row in sliced.tokens)
    assert sliced.launches == whole.launches and sliced.layers_per_token == whole.layers_per_token


def test_a_second_engine_runs_the_same_sessions(load: Callable[..., Engine]) -> None:
    """The baseline would be faster or slower for where its graph lies, or its launches be counted as the arm's."""
    with load() as engine:
        arm = arm_on(engine)
        beside = EngineArm(arm.engine.second(), arm.policy)
        first, second = (one.engine.sessions for one in (arm, beside))
        assert second.sessions and all(second.sessions[name] is first.sessions[name] for name in second.sessions)
        turns = [one.turn(PROMPTS, PARAMS, 2) for one in (arm, beside, arm)]
        assert turns[1].tokens == turns[0].tokens and turns[1].launches == turns[0].launches
        assert 2 * sum(second.launches.values()) == sum(first.launches.values())


def test_the_clock_stands_still_in_pauses(load: Callable[..., Engine]) -> None:
    """An arm would be charged with the baseline's slices."""
    with load() as engine:
        arm = arm_on(engine)
        arm.turn(PROMPTS, PARAMS, 2)
        play, begin, generated = arm.start(PROMPTS, PARAMS, 2), time.perf_counter(), 9
        while play.advance(generated):
            time.sleep(0.2)
            generated += 9
        assert play.turn().seconds <= time.perf_counter() - begin - 2 * 0.2


def test_texts_of_one_token_have_a_depth(load: Callable[..., Engine]) -> None:
    """A prompt that the model ends at once would end the benchmark: its token went through every layer."""
    with load() as engine:
        turn = arm_on(engine).turn(PROMPTS, GenerationParams(max_new_tokens=1), 2)
    assert turn.depth == engine.manifest.model.num_layers and turn.decoded == 0
