"""GPTQ: less error in the products than rounding to nearest, on the inputs of the quantised model, the same each time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from export.architectures import FEW_LAYERS, MAX_POSITIONS, VOCAB, tiny_model
from torch import Tensor

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.load import quantized
from tide_export.model.probe import probe_layers
from tide_export.progress import ExportProgress
from tide_export.quantize.gptq import gptq, visit_inputs
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify.verify_bundle import verify_bundle
from tide_export.weights.quantized_weight import QuantizedWeight

ROWS, COLUMNS, BLOCK = 48, 128, 32


def correlated_inputs(count: int = 4096) -> Tensor:
    """[count, COLUMNS] in a space of an eighth of the dimensions, and noise."""
    torch.manual_seed(5)
    inputs = torch.randn(count, COLUMNS // 8) @ torch.randn(COLUMNS // 8, COLUMNS)
    return inputs + 0.1 * torch.randn(count, COLUMNS)


def matrix() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(6))


def by_gptq(inputs: Tensor, bits: int = 4) -> QuantizedWeight:
    return gptq(matrix(), inputs.T @ inputs, bits, BLOCK)


def rounded_to_nearest() -> Tensor:
    """The matrix with scale and zero point from the range of each block."""
    blocks = matrix().reshape(ROWS, -1, BLOCK)
    low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    zero = torch.round(-low / scale)
    return ((torch.round(blocks / scale + zero).clamp(0, 15) - zero) * scale).reshape(ROWS, COLUMNS)


def output_error(inputs: Tensor, quantised: Tensor) -> float:
    return float((inputs @ (quantised - matrix()).T).square().mean())


def test_outputs_are_nearer_than_by_rounding() -> None:
    """Errors would be moved to the wrong columns, or with the wrong sign, and the quantizer cost minutes for nothing."""
    inputs = correlated_inputs()
    found = torch.from_numpy(by_gptq(inputs).dequantized())
    assert output_error(inputs, found) < 0.2 * output_error(inputs, rounded_to_nearest())


@pytest.mark.parametrize("bits", [4, 8])
def test_uncorrelated_inputs_are_no_worse_than_rounding(bits: int) -> None:
    """Then there is nothing to move; each value stays within a step of its own."""
    weight = gptq(matrix(), torch.eye(COLUMNS), bits, BLOCK)
    assert (weight.bits, weight.block_size, weight.shape) == (bits, BLOCK, (ROWS, COLUMNS))
    difference = torch.from_numpy(weight.dequantized()) - matrix()
    if bits == 4:
        assert difference.square().mean() < (rounded_to_nearest() - matrix()).square().mean()
    assert difference.abs().mean() < 0.3 * float(weight.scales.mean())


def test_inputs_that_are_always_0() -> None:
    """A feature that the text never uses makes the Hessian singular; one of an expert that it never reaches, all of it."""
    inputs = correlated_inputs()
    inputs[:, 40:50] = 0
    for given in (inputs, torch.zeros_like(inputs)):
        weight = by_gptq(given)
        assert np.isfinite(weight.dequantized()).all()
        steps = weight.scales.repeat(BLOCK, 1)[:, 40:50]
        assert (np.abs(weight.dequantized() - matrix().numpy())[:, 40:50] < 3 * steps).all()


def test_each_matrix_is_given_the_inputs_that_those_before_it_leave() -> None:
    """The inputs of the unquantised model hide the errors that later layers could make up for."""
    model = tiny_model("llama")
    tokens = torch.arange(64).reshape(2, 32) % VOCAB
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    modules = {name: model.get_submodule(name) for name in reversed(names)}
    seen: dict[str, Tensor] = {}

    def zero_the_first(name: str, gram: Tensor) -> None:
        seen[name] = gram
        if name == names[0]:
            modules[name].weight.zero_()

    before: dict[str, Tensor] = {}
    visit_inputs(model, modules, tokens, before.__setitem__)
    visit_inputs(model, modules, tokens, zero_the_first)
    assert list(before) == list(seen) == names  # in the order of the computation
    assert torch.equal(before[names[0]], seen[names[0]]) and not torch.allclose(before[names[1]], seen[names[1]])
    assert seen[names[0]].shape == (64, 64)


def test_a_matrix_that_the_text_does_not_reach_is_rounded() -> None:
    """It would stay in full precision unannounced, or fail the export."""
    model = tiny_model("llama")
    loaded = LoadedModel(model, None, "llama", probed=probe_layers(model))
    last = model.model.layers[-1]
    last.forward = lambda hidden_states, **_: hidden_states
    tokens = torch.arange(64).reshape(2, 32) % VOCAB
    loaded = quantized(loaded, "int4", "gptq", tokens=tokens)
    origins = {name: weight.origin for name, weight in loaded.quantized.items()}
    assert not loaded.notes and origins["model.layers.3.mlp.up_proj.weight"] == "int4 rtn"
    assert origins["model.layers.2.mlp.up_proj.weight"] == "int4 gptq" and origins["lm_head.weight"] == "int8 rtn"


def quantised_model(architecture: str, quantizer: str = "gptq") -> LoadedModel:
    tokens = torch.randint(VOCAB, (4, 64), generator=torch.Generator().manual_seed(1))
    model = tiny_model(architecture, layers=FEW_LAYERS)
    return quantized(LoadedModel(model, None, architecture), "int4", quantizer, tokens=tokens)


@pytest.mark.parametrize(
    ("architecture", "quantizer"),
    [("llama", "gptq"), ("gpt2", "gptq"), ("gpt2", "gptq_mixed"), ("qwen3_moe", "gptq_mixed")],
)
def test_the_bundle_computes_with_the_quantised_matrices(architecture: str, quantizer: str, tmp_path: Path) -> None:
    """Blocks, zero points or the order of a Conv1D's matrix would be others in ONNX Runtime than in the eager model."""
    loaded = quantised_model(architecture, quantizer)
    assert "int4 gptq" in {weight.origin for weight in loaded.quantized.values()}
    config = ExportConfig(checkpoints="1", max_seq_len=MAX_POSITIONS // 2, verify=False)
    write_bundle(loaded, tmp_path, config, ExportProgress(quiet=True))
    assert all(check.passed for check in verify_bundle(loaded, tmp_path, "fp32"))
