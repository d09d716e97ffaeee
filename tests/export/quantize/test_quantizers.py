"""Quantising here: errors within the steps of each block, ONNX Runtime's own reading of the result, and what is left alone."""

import numpy as np
import pytest
from export.architectures import tiny_model
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tide_export.load import quantized
from tide_export.quantize.quantizers import round_to_nearest
from tide_export.sources.loaded_model import LoadedModel


def original(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters(remove_duplicate=False)}


def test_head_and_embedding_have_8_bits() -> None:
    """4 bits there change the likeliest token for little memory saved."""
    model = tiny_model("llama")
    before = original(model)
    loaded = quantized(LoadedModel(model, None, "llama"), "int4", "rtn")
    bits = {name: weight.bits for name, weight in loaded.quantized.items()}
    assert {name for name, number in bits.items() if number == 8} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert bits.keys() == {name for name, matrix in before.items() if matrix.ndim == 2} and not loaded.notes
    for name, parameter in model.named_parameters():
        expected = loaded.quantized[name].dequantized() if name in bits else before[name]
        assert np.array_equal(parameter.detach().numpy(), expected)
    assert loaded.weights == "int4 rtn"


def test_a_tied_head_shares_the_embeddings_weight() -> None:
    """The bundle would hold the largest matrix twice, or the trace's name for it find none."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=40,
            tie_word_embeddings=True,
        )
    )
    found = quantized(LoadedModel(model, None, "llama"), "int4", "rtn").quantized
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]


def test_conv1d_is_quantised_along_its_input() -> None:
    """GPT-2 stores [in, out]; blocks along the output have other scales, and no kernel reads them."""
    model = tiny_model("gpt2")
    before = original(model)
    name = "transformer.h.0.mlp.c_fc.weight"
    loaded = quantized(LoadedModel(model, None, "gpt2"), "int8", "rtn")
    weight = loaded.quantized[name]
    assert weight.shape == before[name].T.shape and weight.shape != before[name].shape
    assert np.abs(weight.dequantized() - before[name].T).max() <= np.abs(before[name]).max() / 127
    assert np.array_equal(model.get_parameter(name).detach().numpy(), weight.dequantized().T)


def test_a_width_that_blocks_do_not_divide_is_left_alone_and_said() -> None:
    """Such a matrix would be cut into blocks over the ends of its rows."""
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2, vocab_size=40)
    )
    before = original(model)
    loaded = quantized(LoadedModel(model, None, "llama"), "int4", "rtn")
    assert not any("down_proj" in name for name in loaded.quantized) and len(loaded.quantized) == 2 * 6 + 2
    assert loaded.notes == ("2 matrices whose input is no multiple of 32 wide keep their precision",)
    assert np.array_equal(original(model)["model.layers.1.mlp.down_proj.weight"], before["model.layers.1.mlp.down_proj.weight"])


def test_stored_weights_of_the_wanted_bits_stay() -> None:
    """A GGUF file in 4 bits, rounded once more, loses what rounding costs a second time."""
    first = quantized(LoadedModel(tiny_model("llama"), None, "llama"), "int4", "rtn")
    again = quantized(first, "int4", "rtn")
    assert all(again.quantized[name] is weight for name, weight in first.quantized.items())
    finer = quantized(first, "int8", "rtn")
    assert {weight.bits for weight in finer.quantized.values()} == {8}


@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (8, True)])
def test_rounding_is_onnxruntimes(bits: int, symmetric: bool) -> None:
    """Bundles would differ from those of other tools that round to nearest, and from earlier ones."""
    from onnxruntime.capi import _pybind_state as ort

    matrix = np.random.default_rng(0).normal(0, 0.05, (300, 896)).astype(np.float32)
    matrix[0, :32], matrix[1, :32], matrix[2, :32], matrix[3, :64] = 0, 1, -1, np.tile(np.arange(-16, 16) / 8, 2)
    rows, blocks = 300, 896 // 32
    values, scales = np.zeros((rows, blocks, 4 * bits), np.uint8), np.zeros(rows * blocks, np.float32)
    zeros = np.zeros(rows * (blocks * bits // 8), np.uint8)
    quantize = ort.quantize_matmul_4bits if bits == 4 else ort.quantize_matmul_8bits
    quantize(values, np.ascontiguousarray(matrix.T), scales, zeros, 32, rows, 896, symmetric)
    weight = round_to_nearest(matrix, bits)
    assert np.array_equal(weight.packed_values(), values) and np.array_equal(weight.scales.reshape(-1), scales)
    assert symmetric or np.array_equal(weight.packed_zero_points(), zeros.reshape(rows, -1))
