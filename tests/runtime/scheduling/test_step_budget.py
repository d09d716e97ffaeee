"""Prompt tokens beside decodes: enough for prompts to get on, few enough for the others' tokens to keep coming."""

from typing import cast

import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.scheduling.budgets import StepBudget, prompt_chunk


class Linear:
    """A step takes ``fixed`` ms and 1 ms a token."""

    def __init__(self, fixed: float) -> None:
        self.fixed = fixed

    def packed(self, batch_size: int, decoded: int, prompt: int) -> float:
        return self.fixed + decoded + prompt


def budget(fixed: float, most: int | None = 256, shared: bool = True) -> StepBudget:
    return StepBudget(cast("CostModel", Linear(fixed)), most, shared)


def test_a_step_without_decodes_takes_all() -> None:
    """Breaks: prompts of an idle engine that are prefilled in small pieces."""
    assert budget(0.0)(0) == 256


def test_launches_that_are_not_shared_take_all() -> None:
    """Breaks: targets whose prompts have launches of their own, which small pieces make slower for everybody."""
    assert budget(0.0, shared=False)(8) == 256


@pytest.mark.parametrize("fixed", [0.0, 10.0, 40.0, 1000.0])
@pytest.mark.parametrize("decoding", [1, 8, 32])
def test_prompts_slow_a_step_down_two_and_a_half_times_at_most(fixed: float, decoding: int) -> None:
    """Breaks: the bound of inter-token latency, and prompts that wait although they would cost little."""
    tokens, alone = budget(fixed)(decoding), fixed + decoding
    assert 16 <= tokens <= 256
    assert tokens == 16 or alone + tokens <= 2.5 * alone
    assert tokens == 256 or alone + tokens + 16 > 2.5 * alone


@pytest.mark.parametrize("most", [1, 3, 16, 40])
def test_the_most_is_never_exceeded(most: int) -> None:
    """Breaks: `EngineOptions.prefill_chunk`."""
    assert budget(1000.0, most)(2) <= most and budget(0.0, most)(2) == min(most, 16)


def test_a_bundle_without_calibration_has_a_budget() -> None:
    """Breaks: engines of bundles that were never measured."""
    model = TinyTransformer(0, (0.5, 0.5), 9, 32)
    made = StepBudget(CostModel.of(tiny_manifest(model, [1])), 256, shared=True)
    assert 16 <= made(1) <= made(16) <= 256


@pytest.mark.parametrize(("fixed", "chunk"), [(0.0, 64), (3.0, 64), (7.0, 128), (14.0, 256), (200.0, 512)])
def test_prompts_are_cut_as_small_as_launches_allow(fixed: float, chunk: int) -> None:
    """Breaks: the time to the first token, half of which attention takes in large chunks and launches in small ones."""
    assert prompt_chunk(cast("CostModel", Linear(fixed)), shared=True) == chunk == budget(fixed, None)(0)
    assert prompt_chunk(cast("CostModel", Linear(fixed)), shared=False) == 512
