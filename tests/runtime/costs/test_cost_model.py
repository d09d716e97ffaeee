"""What steps of several rows are taken to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.tiny_generation import Request, make_row
from runtime.tiny_transformer import TinyTransformer
from tide_runtime.backends.step_arrays import StepShape
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.bundle.exits import bundle_exits
from tide_runtime.bundle.manifest import HEAD
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy
from tide_runtime.generation_params import GenerationParams
from tide_runtime.scheduling.step import run

ROWS, LAYERS, PADDING = 8, 4, 0.5


def measured_costs(layer_ms: dict[tuple[int, float], float]) -> CostModel:
    """Costs of a model that is not cut, from the ms of a layer by (batch size, tokens of each sequence)."""
    rest = {"launch_ms": 0.1, "head_ms": 0.1, "exit_ms": 0.1, "host_ms": 0.1}
    steps = [StepCost(rows, seq, layer_ms=ms, **rest) for (rows, seq), ms in layer_ms.items()]
    return CostModel(CostTable("cpu", "", 1.0, steps, padding=PADDING), [0, LAYERS])


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
    plain = COSTS.segments(ROWS, ROWS, 0, 1)
    packed, padded = (COSTS.segments(ROWS, tokens, 0, 1) for tokens in (ROWS - 1 + seq, ROWS * seq))
    assert plain < packed < COSTS.segments(ROWS, ROWS - 1 + seq, 0, 1, seq) < padded


def test_a_draft_that_fills_a_step_up_is_nearly_free() -> None:
    """Uneven steps are padded to what products take at a time; drafts were weighed as if the last cost as much as the first."""
    nine, ten, eleven, twelve = (COSTS.segments(ROWS, tokens, 0, 1, 2) for tokens in (9, 10, 11, 12))
    assert nine == ten < eleven == twelve < COSTS.segments(ROWS, 13, 0, 1, 2)


def test_padding_takes_its_share_of_a_token() -> None:
    """The share that was measured on the machine would be left out of account."""
    packed, padded = (COSTS.step(ROWS, tokens).layer_ms for tokens in (2 * ROWS, 4 * ROWS))
    assert COSTS.step(ROWS, 2 * ROWS, 4).layer_ms == pytest.approx((1 - PADDING) * packed + PADDING * padded)


def test_even_rows_are_not_priced_by_what_lies_between() -> None:
    """Ten plain rows are 1.25 tokens for each of eight: they would cost what eight rows with two drafts do, form and all."""
    measured = {(ROWS, 1): 1.0, (ROWS, 2): 1.6, (ROWS, 8): 2.0}
    without, with_uneven = measured_costs(measured), measured_costs(measured | {(ROWS, 1.25): 1.5})
    assert with_uneven.step(10, 10) == without.step(10, 10)
    assert with_uneven.step(ROWS, 9, 2).layer_ms == pytest.approx(1.5 + PADDING * 0.1)
    assert with_uneven.step(6, 7, 2).layer_ms > with_uneven.step(6, 6).layer_ms + 0.4  # the form, with fewer rows too


def test_even_rows_cost_what_was_measured() -> None:
    """Rows that go on together would pay for padding that is not there."""
    assert COSTS.segments(ROWS, 2 * ROWS, 0, 1, 2) == COSTS.segments(ROWS, 2 * ROWS, 0, 1)


def test_rounding_adds_no_more_than_padding_would() -> None:
    """Engines are compiled for so many rows of so many tokens: a step of more would be refused in the middle of a request."""
    assert StepShape.of(0, [4, 3], [4, 3])[-2:] == (8, 8)
    assert StepShape.of(0, [5, 1, 1], [1, 1, 1])[-2:] == (10, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_draw_at_random_pay_for_it(temperature: float) -> None:
    """Exits' drafts are drawn, and weighed again: where that takes long, asking on would make sampling slower than `full`."""

    def asked(draw_ms: float) -> int:
        model = TinyTransformer(0, (0.5, 0.5, 0.0, 0.0), 11, 40)  # an exit after 2 layers says what the model says
        manifest = tiny_manifest(model, (2,), [ExitInfo(2, "identity", "max_probability", 0.0)])
        assert manifest.calibration is not None
        steps = [StepCost(1, seq, 0.1, 1.0, 0.2, 0.0, 0.1) for seq in (1, 16)]
        calibration = replace(manifest.calibration, costs=CostTable("numpy", "", 4.0, steps, draw_ms=draw_ms))
        policy = make_policy("exact", replace(manifest, calibration=calibration), DepthOptions(draft="router"))
        backend = NumpyBackend(manifest, model)
        params = GenerationParams(max_new_tokens=30, temperature=temperature, seed=1)
        list(run(policy, backend.context(1), [make_row(Request((1, 2), params, 0), manifest)]))
        return backend.launches[HEAD]

    assert (asked(100.0) < asked(0.0) / 2) is (temperature > 0)
    assert asked(0.0) > 10


def test_an_exit_asked_after_a_deep_token_finds_the_caches_cold() -> None:
    """A lone question in vain was priced as one of many: random weights were asked five times a text, at a quarter step each."""
    exit = ExitInfo(2, "identity", "max_probability", 0.5, exit_threshold=0.5)
    manifest = tiny_manifest(TinyTransformer(0, (0.5,) * 4, 11, 40), (2,), [exit])
    assert manifest.calibration is not None
    steps = [StepCost(1, seq, 0.1, 1.0, 0.2, 0.0, 0.1) for seq in (1, 16)]
    table = CostTable("numpy", "", 4.0, steps, warm_shares={"2": [0.6]})
    costs = CostModel.of(replace(manifest, calibration=replace(manifest.calibration, costs=table)))
    (asked,) = bundle_exits(manifest)
    shallow = costs.segments(1, 1, 0, asked.boundary)
    assert costs.evaluation(1, 0, asked, again=False) - costs.evaluation(1, 0, asked) == pytest.approx(0.4 * shallow)


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
