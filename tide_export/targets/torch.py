"""Target ``torch``: PyTorch's functions on the bundle's weights, on every GPU that torch supports, and on a processor.

The graphs are the CPU's before its attention is padded: `GroupQueryAttention` over packed projections, which the runtime
computes for any number of tokens of any number of sequences. Functions are inlined, because the runtime runs operators,
but for an exit's router, for which it has a kernel.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from tide_export.graphs.router_function import NAME as ROUTER
from tide_export.passes.attention_gqa import lower_attention_gqa
from tide_export.passes.canonicalize import InlineAllBut
from tide_export.passes.guard_token import guard_token
from tide_export.passes.onnxruntime_fusions import fuse_skip_norm
from tide_export.passes.pack_projections import pack_products, pack_projections
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.passes.quantized_matmul import lower_quantized_matmul
from tide_export.targets.base import Machine
from tide_export.targets.onnxruntime import CPU

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_LAYERS = (InlineAllBut(ROUTER), lower_attention_gqa)

TORCH = replace(
    CPU,
    name="torch",
    backend="torch",
    dtypes=("fp32", "fp16", "bf16"),
    machine=Machine(
        compute=(),
        examples="GPUs that torch supports, V100 to Blackwell; any CPU",
        backend="torch 2.11+",
        cuda="12, 13",
        built="on any machine",
        attention="fused; decomposed with soft-cap or sinks",
    ),
    whole=(QuantizeWeights((4, 8), look_ups=True, experts=_FLOATS), *CPU.whole[2:]),
    pieces=(*_LAYERS, pack_projections, fuse_skip_norm, pack_products, lower_quantized_matmul, guard_token),
    padded=(),
    uncut=False,
    mixed_layers=False,
    scores_logits=False,
    long_rotary=False,
)
