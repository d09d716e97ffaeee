"""Quantising here: errors within the steps of each block, ONNX Runtime's own reading of the result, and what is left alone."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from export.architectures import tiny_model
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tide_export.load import LoadedModel, quantized
from tide_export.quantization.quantized_weight import QuantizedWeight
from tide_export.quantization.quantizers import quantize_model, round_to_nearest

BLOCK = 32


def original(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters(remove_duplicate=False)}


def one_matrix(bits: int, offset: float = 0.0) -> tuple[NDArray[np.float32], QuantizedWeight]:
    """A random projection [96, 64] of a model, rounded."""
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
    )
    name = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name).normal_(offset, 1.0, generator=torch.Generator().manual_seed(3))
    matrix = original(model)[name]
    return matrix, quantize_model(model, bits, "rtn", {})[0][name]


def block_ranges(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """max - min of every block with 0 in it, for each of its elements [N, K]."""
    blocks = matrix.reshape(len(matrix), -1, BLOCK)
    span = np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    return span.repeat(BLOCK, 1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [0.0, 5.0, -5.0])
def test_rounding_to_nearest(bits: int, offset: float) -> None:
    """An error above half a step of the block means that values, scales and zero points of different blocks were combined."""
    matrix, weight = one_matrix(bits, offset)
    assert (weight.bits, weight.block_size, weight.shape) == (bits, BLOCK, matrix.shape)
    assert weight.offsets is None and weight.origin == f"int{bits} rtn"
    step = block_ranges(matrix) / (2**bits - 1)
    if bits == 8:  # symmetric: the steps are even on both sides of 0
        step = np.abs(matrix.reshape(len(matrix), -1, BLOCK)).max(-1).repeat(BLOCK, 1) / 127
    # Up to one step where the zero point was rounded, and the block's largest value falls on the edge.
    assert (np.abs(weight.dequantized() - matrix) <= 1.01 * step).all()
    assert np.abs(weight.dequantized() - matrix).mean() < 0.3 * step.mean()


@pytest.mark.parametrize("bits", [4, 8])
def test_onnx_runtime_reads_the_same_matrix(bits: int) -> None:
    """The formula of `QuantizedWeight` would not be the kernel's."""
    _, weight = one_matrix(bits)
    rows, columns = weight.shape
    zeros = weight.packed_zero_points()
    initializers = {"values": weight.packed_values(), "scales": weight.scales} | ({"zeros": zeros} if zeros is not None else {})
    node = helper.make_node(
        "MatMulNBits", ["x", *initializers], ["y"],
        domain="com.microsoft", K=columns, N=rows, bits=bits, block_size=BLOCK, accuracy_level=1,
    )  # fmt: skip
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [columns, size]) for name, size in (("x", columns), ("y", rows))
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in initializers.items()]
    model = helper.make_model(
        helper.make_graph([node], "product", ends[:1], ends[1:], tensors),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": np.eye(columns, dtype=np.float32)})[0].T
    np.testing.assert_allclose(found, weight.dequantized(), rtol=1e-6, atol=1e-6)


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
    found, _ = quantize_model(model, 4, "rtn", {})
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


def test_square_conv1d() -> None:
    """A square [in, out] matrix has the shape of [out, in] and would be put back untransposed."""
    model = tiny_model("gpt2")
    name = "transformer.h.0.attn.c_proj.weight"
    before = original(model)[name]
    assert before.shape[0] == before.shape[1]
    quantized(LoadedModel(model, None, "gpt2"), "int8", "rtn")
    assert np.abs(original(model)[name] - before).max() <= np.abs(before).max() / 127


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
    model = tiny_model("llama")
    first, _ = quantize_model(model, 4, "rtn", {})
    again, _ = quantize_model(model, 4, "rtn", first)
    assert all(again[name] is weight for name, weight in first.items())
    finer, _ = quantize_model(model, 8, "rtn", first)
    assert {weight.bits for weight in finer.values()} == {8}


def test_other_weights_leave_the_model_unchanged() -> None:
    """``--weights source`` would lose what the checkpoint has stored."""
    loaded = LoadedModel(tiny_model("llama"), None, "llama")
    assert quantized(loaded, "source", "rtn") is loaded


def test_progress_counts_every_matrix() -> None:
    """The bar of a search that takes minutes would stand still, or never end."""
    seen: list[tuple[int, int]] = []
    quantize_model(tiny_model("llama"), 8, "rtn", {}, lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)] and len(seen) == 4 * 7 + 2


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
