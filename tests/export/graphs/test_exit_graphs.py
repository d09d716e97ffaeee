"""An exit's graph computes the calibrated formulas for every combination of outputs, precision and shape."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from export.stub_calibration import exit_tensors
from tide_calibrate.exit_heads import Translator
from tide_calibrate.routers import MlpRouter
from tide_runtime.bundle.calibration import ExitInfo

from tide_export.graphs.exit_graphs import exit_graph_model
from tide_export.passes.base import LoweringContext, run_passes
from tide_export.passes.rms_norm import decompose_rms_norm
from tide_export.targets import TARGETS

HIDDEN = 48
EXITS = {
    "score": ExitInfo(3, "identity", "mlp", 0.5),
    "hidden_out": ExitInfo(3, "linear", "max_probability", 0.5),
    "score, hidden_out": ExitInfo(3, "tail:2", "mlp+max_probability", 0.5, mlp_threshold=0.5),
}
NUMPY = {"fp32": np.float32, "fp16": np.float16}
# The graph computes in float32; a state is rounded once more, to its own dtype.
SCORE_TOLERANCE, STATE_TOLERANCE = 2e-6, {"fp32": 2e-6, "fp16": 1e-3}


def reference(tensors: dict[str, np.ndarray], hidden: np.ndarray) -> dict[str, np.ndarray]:
    """The formulas of `tide_export.graphs.exit_graphs`, token by token, in float64."""
    t = {name.split(".", 2)[0] + "." + name.split(".", 2)[2]: array.astype(np.float64) for name, array in tensors.items()}
    score, translated = np.zeros(hidden.shape[:2]), np.zeros(hidden.shape)
    for place in np.ndindex(hidden.shape[:2]):
        h = hidden[place].astype(np.float64)
        n = h / np.sqrt(np.sum(h * h) / len(h) + 1e-6)
        if "router.up" in t:
            inner = t["router.down"] @ n + t["router.down_bias"]
            score[place] = 1 / (1 + np.exp(-(t["router.up"] @ (inner / (1 + np.exp(-inner))) + t["router.up_bias"][0])))
        if "translator.up" in t:
            translated[place] = h + t["translator.up"] @ (t["translator.down"] @ n)
    return {"score": score, "hidden_out": translated}


def run(model: ir.Model, hidden: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"hidden": hidden}), strict=True))


def states(dtype: str, shape: tuple[int, ...] = (3, 5, HIDDEN)) -> np.ndarray:
    return (np.random.default_rng(5).normal(size=shape) * 3).astype(NUMPY[dtype])


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("outputs", EXITS)
def test_outputs_are_those_of_the_formulas(outputs, dtype):
    """Tokens would exit at other layers than calibrated, or draft from another state."""
    info = EXITS[outputs]
    tensors = exit_tensors(info, HIDDEN)
    hidden = states(dtype)
    found, expected = run(exit_graph_model(info, tensors, HIDDEN, dtype).model, hidden), reference(tensors, hidden)
    assert ", ".join(found) == outputs
    if "score" in found:
        assert found["score"].dtype == np.float32 and found["score"].shape == (3, 5)
        assert np.ptp(expected["score"]) > 0.2, "all scores alike would hide most mistakes"
        np.testing.assert_allclose(found["score"], expected["score"], atol=SCORE_TOLERANCE, rtol=0)
    if "hidden_out" in found:
        assert found["hidden_out"].dtype == NUMPY[dtype]
        assert np.abs(expected["hidden_out"] - hidden).max() > 0.5, "a translator that changes nothing would hide most mistakes"
        np.testing.assert_allclose(found["hidden_out"], expected["hidden_out"], atol=STATE_TOLERANCE[dtype] * 12, rtol=0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_lowering_keeps_the_exits_outputs(target, dtype):
    """A target's passes, written for segments, would change an exit or fail on it."""
    info = EXITS["score, hidden_out"]
    tensors, hidden = exit_tensors(info, HIDDEN), states(dtype)
    expected = run(exit_graph_model(info, tensors, HIDDEN, dtype).model, hidden)
    lowered = exit_graph_model(info, tensors, HIDDEN, dtype).model
    run_passes(lowered, TARGETS[target].pieces, LoweringContext(64))
    # A decomposed norm sums in another order.
    tolerance = {"fp32": 1e-6, "fp16": STATE_TOLERANCE["fp16"]}[dtype] if decompose_rms_norm in TARGETS[target].pieces else 0.0
    for name, value in run(lowered, hidden).items():
        np.testing.assert_allclose(value, expected[name], atol=tolerance, rtol=0)


def test_a_token_alone_equals_the_token_in_a_batch():
    """A token's exit would depend on the batch it is in: verification would disagree with drafting."""
    info = EXITS["score, hidden_out"]
    tensors, hidden = exit_tensors(info, HIDDEN), states("fp32")
    model = exit_graph_model(info, tensors, HIDDEN, "fp32").model
    together, alone = run(model, hidden), run(model, np.ascontiguousarray(hidden[1:2, 3:4]))
    for name in together:
        np.testing.assert_allclose(alone[name][0, 0], together[name][1, 3], atol=1e-5, rtol=0)


def test_extreme_states_give_finite_scores():
    """A state of zeros, or one near the largest fp16 number, would give NaN: a token that never exits, or a broken draft."""
    info = EXITS["score, hidden_out"]
    hidden = np.zeros((2, 1, HIDDEN), np.float16)
    hidden[1] = 60_000 * (-1.0) ** np.arange(HIDDEN)
    found = run(exit_graph_model(info, exit_tensors(info, HIDDEN), HIDDEN, "fp16").model, hidden)
    assert np.isfinite(found["score"]).all() and np.isfinite(found["hidden_out"]).all()
    assert (found["hidden_out"][0] == 0).all()


def test_exits_compute_what_was_trained():
    """The runtime would run another formula than the calibration trained and certified."""
    info = EXITS["score, hidden_out"]
    tensors, hidden = exit_tensors(info, HIDDEN), states("fp32")
    router, translator = MlpRouter(HIDDEN, 11), Translator(HIDDEN, 7)
    for module, prefix in ((router, "router.3."), (translator, "translator.3.")):
        module.load_state_dict({n.removeprefix(prefix): torch.tensor(a) for n, a in tensors.items() if n.startswith(prefix)})
    with torch.no_grad():
        trained = {"score": torch.sigmoid(router(torch.tensor(hidden))), "hidden_out": translator(torch.tensor(hidden))}
    for name, value in run(exit_graph_model(info, tensors, HIDDEN, "fp32").model, hidden).items():
        np.testing.assert_allclose(value, trained[name].numpy(), atol=2e-5, rtol=0)
