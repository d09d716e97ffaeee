"""An arm whose text breaks its promise is found out; ratios of paired times."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tide_bench.output_checks import Terms, broken_promise, disagreement_rate, first_difference, identical_share
from tide_bench.paired_ratio import paired_ratio

PROMPTS = [[7], [8]]


REFERENCE = [[1, 2, 3, 4], [5, 6, 7, 8]]


OTHER = [[1, 2, 9, 4], [5, 6, 7, 8]]


def _gap(apart: float):
    def gap(text: Sequence[int], one: int, other: int) -> float:
        assert (list(text), one, other) == ([7, 1, 2], 9, 3)  # the prompt and the common text
        return apart

    return gap


def test_the_models_own_tokens_are_kept() -> None:
    """Right arms would lose their rank."""
    assert broken_promise("same", PROMPTS, REFERENCE, REFERENCE, _gap(9), Terms(1e-3, None)) == ""


def test_another_token_is_marked_with_its_place() -> None:
    """A fast arm with another text would win the comparison."""
    reason = broken_promise("same", PROMPTS, OTHER, REFERENCE, _gap(0.5), Terms(1e-3, None))
    assert "text 1, new token 3 is 9, the model's 3" in reason


def test_a_near_tie_is_no_difference() -> None:
    """Two right programs that sum in another order would be told apart."""
    assert broken_promise("same", PROMPTS, OTHER, REFERENCE, _gap(1e-5), Terms(1e-3, None)) == ""


def test_certified_texts_may_differ_as_often_as_certified() -> None:
    """Policy exit would be marked for what its certificate allows, or not for what it does not."""
    texts, references = [[0] * 100] * 19 + [[0] * 50 + [1] * 50], [[0] * 100] * 20
    assert broken_promise("certified", [[0]] * 20, texts, references, _gap(0), Terms(0, 0.01)) == ""
    often = [[0, 1] + [1] * 98] * 20
    assert "promised at most 1.0%" in broken_promise("certified", [[0]] * 20, often, references, _gap(0), Terms(0, 0.01))
    assert "not certified" in broken_promise("certified", [[0]] * 20, texts, references, _gap(0), Terms(0, None))


def test_a_certificate_against_another_model_leaves_room_for_the_full_depth() -> None:
    """Policy exit would be marked where it repairs what rounded weights break: its bound is not about the bundle's full depth."""
    certificate = SimpleNamespace(max_disagreement=0.05, full_disagreement=0.02)
    manifest: Any = SimpleNamespace(dtype="fp32", calibration=SimpleNamespace(certificate=certificate))
    assert Terms.of(manifest).certified == pytest.approx(0.07)


def test_ratio_is_the_median_of_pairs_and_of_the_total() -> None:
    """A slow moment of the machine would decide the ratio, or the interval would not hold it."""
    ratio = paired_ratio([2, 2, 2, 2, 20], [1, 1, 1, 1, 1])
    assert ratio.median == 2 and ratio.total == pytest.approx(28 / 5)
    assert ratio.low <= ratio.median <= ratio.high
    assert paired_ratio([3, 3], [2, 2]).low == paired_ratio([3, 3], [2, 2]).high == 1.5


def test_unpaired_times_are_refused() -> None:
    """Different prompts would be compared."""
    with pytest.raises(ValueError, match="pairs"):
        paired_ratio([1, 2], [1])


def test_disagreement_counts_until_the_first_difference() -> None:
    """One wrong token would be counted again for everything that follows from it."""
    reference = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    rows = [[0, 1, 9, 9, 9], [0, 1, 2, 3, 4]]
    assert disagreement_rate(rows, reference) == pytest.approx(1 / (2 + 4))
    assert identical_share(rows, reference) == pytest.approx(0.7)
    assert disagreement_rate(reference, reference) == 0
    assert first_difference([1, 2], [1, 2, 3]) is None
