"""The figures of the depth-policy benchmarks, on synthetic turns whose right figures are known."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from tide_bench.paired_ratio import paired_ratio
from tide_bench.report import Report
from tide_bench.text_comparison import disagreement_rate, first_difference, identical_share, ngram_hit_share
from tide_runtime import GenerationParams
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.bundle.exits import Exit
from tide_runtime.costs.cost_model import CostModel

from benchmarks.arms.engine_arm import EngineArm
from benchmarks.arms.entropy_exit import matched_threshold, sureness
from benchmarks.arms.launch_log import Launch
from benchmarks.arms.policy_arms import ArmSet
from benchmarks.arms.turns import SLICE, Group, Turn, take_turns
from benchmarks.exits.scripted_exits import Script
from benchmarks.policies_cpu import Taken
from benchmarks.tables.arm_figures import speed_figures, text_figures, theory_figures
from benchmarks.tables.modelled_time import modelled_ms
from benchmarks.tables.policy_table import BASELINE, HEADINGS, add_policy_results, cells

LAYERS = {"segment_0": 6, "segment_1": 18, "exit_6": 0, "head": 0}
UNCUT = {"segment_0": 24, "head": 0}


class FlatCosts(CostModel):
    """Launch 1, layer 2, head 10, exit graph 5, loop 3 at every shape, a tenth more for each token after the first; a tenth of
    a layer projects its keys and values."""

    def __init__(self) -> None:
        steps = [StepCost(1, s, *(part * (1 + 0.1 * (s - 1)) for part in (1.0, 2.0, 10.0, 5.0, 3.0))) for s in (1, 64)]
        super().__init__(CostTable("cpu", "", 1.0, steps, padding=0.0), [0, 6, 24], fill_share=0.1)
        self.fills = {"kv_fill_6": Exit(ExitInfo(6, "identity", "max_probability", 0.5), 1, None)}


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


def test_modelled_time_charges_every_launch() -> None:
    """A launch would be free, and theory promise more than can be had."""
    costs = FlatCosts()
    assert modelled_ms({Launch("segment_0", 1, 1, 1): 2}, LAYERS, costs) == pytest.approx(2 * (1 + 12))
    assert modelled_ms({Launch("head", 1, 1, 1): 1}, LAYERS, costs) == pytest.approx(13)
    assert modelled_ms({Launch("exit_6", 1, 1, 1): 1}, LAYERS, costs) == pytest.approx(5)
    assert modelled_ms({Launch("kv_fill_6", 1, 3, 3): 1}, LAYERS, costs) == pytest.approx(1.2 * (1 + 0.1 * 18 * 2))
    assert modelled_ms({Launch("segment_0", 1, 1, 1): 1}, UNCUT, costs) == pytest.approx(48 + 10 + 3)
    assert modelled_ms({Launch("segment_1", 1, 5, 5): 1}, LAYERS, costs) == pytest.approx(1.4 * (1 + 36 + 9 + 3))


def test_theory_is_the_ratio_of_modelled_times() -> None:
    """Measured over theoretical would compare different things."""
    base = [Turn([[1, 2, 3]], 2.0, Counter({Launch("segment_0", 1, 1, 1): 2}))]
    split = Counter({Launch("segment_0", 1, 1, 1): 2, Launch("segment_1", 1, 2, 2): 1, Launch("head", 1, 1, 1): 2})
    figures = theory_figures([Turn([[1, 2, 3]], 1.0, split, base_seconds=2.0)], LAYERS, base, UNCUT, FlatCosts())
    theory = 2 * 61 / (2 * 13 + 1.1 * (37 + 9 + 3) + 2 * 13)
    assert figures["theoretical"] == pytest.approx(theory)
    assert figures["measured_over_theoretical"] == pytest.approx(2 / theory)
    assert figures["launches_per_token"] == pytest.approx(3 / 2)  # the first token is the prompt's


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


def test_text_figures_take_the_references_groups_in_order() -> None:
    """An arm with fewer groups would be held against other prompts' texts."""
    full = [Turn([[1, 2, 3]], 1.0), Turn([[4, 5, 6]], 1.0)]
    assert text_figures([Turn([[1, 2, 3]], 1.0)], full) == {"disagreement": 0.0, "differing_tokens": 0.0}


def test_ngram_hits_tell_a_loop_from_new_text() -> None:
    """Repetition, which flatters every drafter, would go unseen."""
    assert ngram_hit_share([1, 2, 3, 4], [1, 2, 3, 4] * 5) > 0.8
    assert ngram_hit_share([1, 2, 3], list(range(10, 40))) == 0


class CountingArm:
    """Takes ``seconds`` and notes when its turns came."""

    def __init__(self, name: str, seconds: list[float], order: list[str], most_groups: int | None = None) -> None:
        self.most_groups = most_groups
        self._name, self._seconds, self._order = name, seconds, order

    def turn(self, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        self._order.append(f"{self._name}{params.seed}")
        return Turn([[0, 1]], self._seconds.pop(0))


class PausingArm(CountingArm):
    """Says a token in each of its steps, and notes every slice."""

    def start(self, prompts: Group, params: GenerationParams, rows: int) -> PausingPlay:
        return PausingPlay(self._name, params.max_new_tokens, self._seconds.pop(0), self._order)


class PausingPlay:
    def __init__(self, name: str, tokens: int, seconds: float, order: list[str]) -> None:
        self._name, self._tokens, self._seconds, self._order = name, tokens, seconds, order

    def advance(self, tokens: int) -> bool:
        self._order.append(f"{self._name}{min(tokens, self._tokens)}")
        return tokens <= self._tokens

    def turn(self) -> Turn:
        return Turn([[0, 1]], self._seconds)


def test_arms_and_the_baseline_go_on_in_slices_and_take_the_lead_in_turn() -> None:
    """The machine's speed would change between an arm and its baseline, or one of them always find the other's work."""
    order: list[str] = []
    base, arm = PausingArm("u", [4.0], order), PausingArm("a", [1.0], order)
    times, turns = take_turns(base, {"a": arm}, [[[1]]], GenerationParams(max_new_tokens=2 * SLICE + 1), 1)
    assert order == ["u4", "a4", "a8", "u8", "u9", "a9"]
    assert turns["a"][0].base_seconds == times[0].seconds == 4.0
    order.clear()
    arm, base = PausingArm("a", [1.0], order), PausingArm("u", [4.0], order)
    take_turns(base, {"a": arm}, [[[1]]], GenerationParams(max_new_tokens=2 * SLICE + 1), 1, first=1)
    assert order == ["a4", "u4", "u8", "a8", "a9", "u9"]  # the other way round, or one would always begin


def test_one_that_is_finished_earlier_leaves_the_rest_to_the_other() -> None:
    """A text's end would be cut off, or a finished row advanced."""
    order: list[str] = []
    base, play = PausingArm("u", [4.0], order), PausingPlay("a", 1, 1.0, order)
    arm = PausingArm("a", [], order)
    arm.start = lambda *_: play  # type: ignore[method-assign]
    take_turns(base, {"a": arm}, [[[1]]], GenerationParams(max_new_tokens=2 * SLICE), 1)
    assert order == ["u4", "a1", "u8", "u8"]


def test_the_order_of_arms_turns() -> None:
    """An arm would always run behind the same one."""
    order: list[str] = []
    base = PausingArm("u", [3.0, 5.0, 7.0, 9.0], [])
    arms = {name: PausingArm(name, [1.0, 1.0], order) for name in "ab"}
    times, turns = take_turns(base, arms, [[[1]], [[2]]], GenerationParams(max_new_tokens=1), 1)
    assert order == ["a1", "b1", "b1", "a1"]
    assert [turn.seconds for turn in times] == [4.0, 8.0]
    beside = {name: [turn.base_seconds for turn in own] for name, own in turns.items()}
    assert beside == {"a": [3.0, 9.0], "b": [5.0, 7.0]}


def test_an_arm_that_cannot_pause_runs_between_two_turns_of_the_baseline() -> None:
    """HF's arms would be held against a baseline far from them in time."""
    order: list[str] = []
    base, arm = CountingArm("u", [1.0, 3.0], order), CountingArm("a", [1.0], order)
    times, turns = take_turns(cast(EngineArm, base), {"a": arm}, [[[1]]], GenerationParams(), 1)
    assert order == ["u0", "a0", "u0"]
    assert turns["a"][0].base_seconds == times[0].seconds == 2.0


def test_a_slow_arm_takes_part_in_its_first_groups_only() -> None:
    """HF's arms would make the benchmark take hours."""
    base, slow = CountingArm("u", [1.0] * 4, []), CountingArm("s", [1.0] * 3, [], most_groups=1)
    _, turns = take_turns(cast(EngineArm, base), {"s": slow}, [[[1]]] * 3, GenerationParams(), 1)
    assert len(turns["s"]) == 1


def test_every_load_takes_the_next_prompts() -> None:
    """Some prompts would be measured twice, others never; a slow arm would stand for prompts that it has not seen."""
    order: list[str] = []
    taken = Taken([[[1]], [[2]], [[3]]])
    for end in (2, 3):
        arms = ArmSet("m", cast(EngineArm, CountingArm("u", [1.0] * 9, order)), None)
        arms.arms["a"] = CountingArm("a", [1.0] * 9, order)
        arms.arms["s"] = CountingArm("s", [1.0] * 9, order, most_groups=1)
        taken.take(arms, ["a", "s"], GenerationParams(), 1, end)
    warm_up = ["uNone", "aNone", "sNone"]
    first = [*warm_up, "u0", "a0", "u0", "u0", "s0", "u0", "u1", "a1", "u1"]
    assert order == [*first, *warm_up, "u2", "a2", "u2"]
    assert [len(taken.base), len(taken.turns["a"]), len(taken.turns["s"])] == [3, 3, 1]
    assert [row["groups"] for row in taken.rows(arms, greedy=True)] == [3, 3, 1]


def test_sureness_is_one_for_certainty_and_one_over_v_for_none() -> None:
    """Entropy would order tokens the wrong way round."""
    assert sureness(np.array([0.0, 100.0, 0.0], np.float32)) == pytest.approx(1)
    assert sureness(np.zeros(8, np.float32)) == pytest.approx(1 / 8)


def test_matched_threshold_takes_as_many() -> None:
    """Confidence and entropy would be compared at different exit rates."""
    answers = [(0.9, 0.5), (0.8, 0.7), (0.3, 0.6), (0.2, 0.1)]
    threshold = matched_threshold(answers, 0.8)
    assert threshold == 0.6 and sum(sure >= threshold for _, sure in answers) == 2
    assert matched_threshold(answers, 0.95) == 1.0


def test_a_script_keeps_its_rate_and_its_answers() -> None:
    """Scripted exits would exit at another rate, or differently in every turn."""
    assert not any(Script(0.0).accepts() for _ in range(100)) and all(Script(1.0).accepts() for _ in range(100))
    script = Script(0.5)
    first = [script.accepts() for _ in range(400)]
    script.rewind()
    assert first == [script.accepts() for _ in range(400)] and 150 < sum(first) < 250


def _row(arm: str, ratio: float, temperature: float = 0.0, share: float = 1.0) -> dict[str, object]:
    speed = {"ratio_median": ratio, "ratio_low": ratio, "ratio_high": ratio, "ratio_total": ratio, "tokens_per_s": 900.0}
    place = {"model": "layerskip", "batch": 1, "temperature": temperature}
    return {"arm": arm, **place, **speed, "ngram_hits": 0.3, "measured_over_theoretical": share, "groups": 2}


def test_results_have_the_names_that_the_bars_are_set_for() -> None:
    """A script that checks the bars would find nothing."""
    report = Report("policies_cpu")
    report.rows = [
        _row(BASELINE, 1.0), _row("full", 0.99), _row("exact_both", 1.8, share=0.96), _row("exit1", 1.3, share=0.9),
        _row("exact_both", 0.97, temperature=0.8), _row("static", 0.5), {"model": "layerskip", "arm": "early_exit", "note": "no"},
    ]  # fmt: skip
    add_policy_results(report)
    results = report.results
    assert results["exact_both_layerskip_b1"] == 1.8 and results["exit1_layerskip_b1"] == 1.3
    assert results["exact_both_layerskip_b1_t08"] == 0.97
    assert results["measured_over_theoretical"] == pytest.approx(0.93)
    assert results["worst_case"] == 0.97  # `static` is no policy of ours


def test_a_table_row_has_a_cell_for_every_heading() -> None:
    """Columns of the README's table would slip."""
    assert len(cells(_row("exact_both", 1.8))) == len(HEADINGS)
    assert len(cells(_row(BASELINE, 1.0))) == len(HEADINGS)
