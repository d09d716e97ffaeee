"""Low-bit weights in the graphs of GPU targets: their numbers, computed by ONNX Runtime on the CPU, and what kernels take."""

from copy import deepcopy
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
import torch
from runtime.cuda_kernels import CUDA_KERNELS
from targets.lowered_graphs import logits_on_cpu
from targets.tiny_graphs import DTYPES, SLOTS, copy_of, retyped, traced
from transformers import PreTrainedModel

from tide_export.graphs.cut import CutGraph
from tide_export.passes.base import LoweringContext
from tide_export.targets import TARGETS
from tide_export.targets.lower import lower, prepare
from tide_export.weights.quantized_weight import QuantizedWeight

STEPS = (9, 1, 1)  # tokens of each step of one sequence: a prompt, two decode steps
TOLERANCE = 1e-3  # of the largest logit; fp32
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@cache
def low_bits() -> tuple[dict[str, QuantizedWeight], PreTrainedModel]:
    """Weights of the tiny Llama in 4 bits, some with zero points, its embedding and head in 8; and the eager fp32 model with
    their values."""
    model, random = deepcopy(traced("llama").model).float(), np.random.default_rng(0)
    weights = {}
    for name, parameter in model.named_parameters():
        bits = 8 if name in (HEAD, EMBEDDING) else 4 if name.endswith("_proj.weight") else 0
        if not bits:
            continue
        (rows, columns), blocks = parameter.shape, (parameter.shape[0], parameter.shape[1] // 32)
        scales = np.ldexp(random.integers(4, 8, blocks).astype(np.float32), -bits - 5)  # so that weights are exact in fp16
        zeros = random.integers(0, 16, blocks, np.uint8) if "down" in name else None
        weights[name] = QuantizedWeight(bits, random.integers(0, 1 << bits, (rows, columns), np.uint8), scales, zeros)
        parameter.data = torch.from_numpy(weights[name].dequantized())
    return weights, model


def graph_of(target: str, dtype: str) -> CutGraph:
    """The whole tiny Llama with `low_bits`, lowered for ``target``."""
    trace, context = copy_of(traced("llama").trace), LoweringContext(SLOTS, low_bits()[0])
    for name, weight in low_bits()[0].items():  # as an export does, so that weights that stay dense have the same values
        trace.model.graph.initializers[f"model.{name}"].const_value = ir.tensor(weight.dequantized().astype(np.float16))
    prepare(trace, TARGETS[target], context)
    graph = lower(trace, TARGETS[target], [], context).graphs[0]
    return CutGraph(graph.name, retyped(graph.model, DTYPES[dtype]), graph.layers)


@pytest.mark.parametrize(
    ("target", "operator", "count"),
    [
        ("rtx-sm_75", "DequantizeLinear", 0),
        ("rtx-sm_80", "DequantizeLinear", 14),
        ("rtx-ampere+", "DequantizeLinear", 14),
        ("trt-sm_90", "DequantizeLinear", 14),
        ("cuda", "MatMulNBits", 11),
    ],
)
def test_logits_are_those_of_the_dequantised_model(target, operator, count):
    """An engine would multiply with shifted weights, another block's scale or swapped halves of a byte."""
    model = graph_of(target, "fp32").model
    nodes = [node for node in model.graph if node.op_type == operator]
    assert len(nodes) == count  # on ``cuda`` query, key and value are one product; the head has 8 bits
    for node in nodes:
        if operator == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)  # the CPU would round activations to int8
    ids = np.random.default_rng(1).integers(3, 100, sum(STEPS))
    with torch.no_grad():
        expected = low_bits()[1](torch.from_numpy(ids[None])).logits[0].numpy()
    np.testing.assert_allclose(logits_on_cpu(model, ids, STEPS, SLOTS), expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_cuda_has_a_kernel_for_every_operator():
    """A node on the processor would be refused when the bundle is loaded, on the first GPU."""
    used = {(node.domain, node.op_type) for node in graph_of("cuda", "fp16").model.graph}
    assert {"MatMulNBits", "GatherBlockQuantized"} <= {name for _, name in used} and used <= CUDA_KERNELS, used - CUDA_KERNELS


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_cuda_has_kernels_for_its_products(dtype):
    """ONNX Runtime would refuse the node, or write the dense matrix in every step, which is slower than a dense weight."""
    products = [node for node in graph_of("cuda", dtype).model.graph if node.op_type == "MatMulNBits"]
    assert {node.attributes["bits"].value for node in products} == {4, 8}
    for node in products:
        sizes = {name: node.attributes[name].value for name in ("N", "K", "block_size")}
        assert sizes["N"] % 8 == 0 and sizes["K"] % sizes["block_size"] == 0 and sizes["block_size"] in (16, 32, 64, 128)
        source, values, scales, *zeros = node.inputs
        assert source.dtype == scales.dtype == DTYPES[dtype] and values.dtype == ir.DataType.UINT8
        assert not zeros or zeros[0].dtype == ir.DataType.UINT8
