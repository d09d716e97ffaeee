"""What steps of several rows are taken to cost."""

from dataclasses import replace

import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy

ROWS, LAYERS = 8, 4


def measured_costs(layer_ms: dict[tuple[int, float], float]) -> CostModel:
    """Costs of a model that is not cut, from the ms of a layer by (batch size, tokens of each sequence)."""
    rest = {"launch_ms": 0.1, "head_ms": 0.1, "exit_ms": 0.1, "host_ms": 0.1}
    steps = [StepCost(rows, seq, layer_ms=ms, **rest) for (rows, seq), ms in layer_ms.items()]
    return CostModel(CostTable("cpu", "", 1.0, steps), [0, LAYERS])


# Of one row many tokens are expensive; of eight rows the last shape was measured in a good moment of the machine.
COSTS = measured_costs({(1, 1): 0.7, (1, 64): 4.0, (ROWS, 1): 1.0, (ROWS, 2): 1.3, (ROWS, 8): 1.9})


def test_without_a_calibration_tokens_of_low_bit_models_cost_more() -> None:
    """Prompt lookup would draft as far as with fp32 weights, where a further token is nearly free, and lose time."""
    manifest = tiny_manifest(TinyTransformer(0, (0.5,) * 4, 11, 40), (2,))
    plain, low = (replace(manifest, weights=weights, calibration=None) for weights in ({}, {"int4 rtn": 7}))
    costs = [CostModel.of(manifest) for manifest in (plain, low)]
    first, ninth = ([model.full(1, tokens, tokens) for model in costs] for tokens in (1, 9))
    assert first[0] == first[1] and ninth[1] > 2 * ninth[0]


@pytest.mark.parametrize("seq", [2, 3, 8])
def test_one_row_that_is_longer_makes_a_step_dearer(seq: int) -> None:
    """Batches copied whatever they could: a step with one long row was taken to be cheaper than one without."""
    plain = COSTS.run(0, 1, ROWS, ROWS)
    packed, padded = (COSTS.run(0, 1, ROWS, tokens) for tokens in (ROWS - 1 + seq, ROWS * seq))
    assert plain < packed <= COSTS.run(0, 1, ROWS, ROWS - 1 + seq, seq) < padded


def test_a_draft_that_fills_a_step_up_is_nearly_free() -> None:
    """Uneven steps are padded to what products take at a time; drafts were weighed as if the last cost as much as the first."""
    nine, ten, eleven, twelve = (COSTS.run(0, 1, ROWS, tokens, 2) for tokens in (9, 10, 11, 12))
    assert nine == ten < eleven == twelve < COSTS.run(0, 1, ROWS, 13, 2)


def test_even_rows_cost_what_was_measured() -> None:
    """Rows that go on together would pay for padding that is not there."""
    assert COSTS.run(0, 1, ROWS, 2 * ROWS, 2) == COSTS.run(0, 1, ROWS, 2 * ROWS)


def test_rounding_adds_no_more_than_padding_would() -> None:
    """Engines are compiled for so many rows of so many tokens: a step of more would be refused in the middle of a request."""
    assert StepShape.of(0, [4, 3], [4, 3])[-2:] == (8, 8)
    assert StepShape.of(0, [5, 1, 1], [1, 1, 1])[-2:] == (10, 3)


def test_a_token_that_asks_nobody_runs_all_layers_all_the_same() -> None:
    """With `max_exit_streak` exits would seem to gain where they lose: of every deep token the first layers came for nothing."""
    manifest = tiny_manifest(
        TinyTransformer(0, (0.5,) * LAYERS, 11, 16), (1, 3), [ExitInfo(c, "identity", "mlp", 0.5, 0.5) for c in (1, 3)]
    )
    assert manifest.calibration is not None
    steps = [StepCost(1, seq, 0.1, 1.0, 0.3, 0.3, 0.2) for seq in (1, 16)]
    measured = replace(manifest, calibration=replace(manifest.calibration, costs=CostTable("cpu", "", 5.0, steps)))
    policy = make_policy("exit", measured, DepthOptions(max_exit_streak=2))
    assert isinstance(policy, ExitDepth)
    assert 1.0 <= policy.token_cost([0, 0], 1) < policy.token_cost([1, 1], 1)
    assert policy.token_cost([1, 0], 0) < min(1.0, policy.token_cost([1, 1], 0))
