"""Target ``cpu``: ONNX Runtime on the CPU, the default.

Every step runs one form of a segment, padded attention (`pad_attention`): a token's logits have the same bits alone, in a chunk
of any size and beside other sequences.
"""

from __future__ import annotations

from tide_export.passes.attention_batched import lower_attention_batched, pad_attention
from tide_export.passes.attention_gqa import lower_attention_gqa
from tide_export.passes.attention_scattered import lower_attention_scattered
from tide_export.passes.canonicalize import canonicalize
from tide_export.passes.fold_weights import fold_weights
from tide_export.passes.pack_projections import pack_projections
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.passes.quantized_matmul import lower_quantized_matmul
from tide_export.passes.rms_norm import fuse_rms_norm
from tide_export.passes.skip_norm import fuse_skip_norm
from tide_export.passes.static_reshape import static_reshape
from tide_export.passes.tied_head import share_tied_head
from tide_export.targets.base import Machine, Target
from tide_export.targets.onnx_files import OnnxFiles

PIECES = (lower_attention_gqa, pack_projections, fuse_skip_norm, lower_quantized_matmul)

CPU = Target(
    name="cpu",
    backend="onnxruntime-cpu",
    dtypes=("fp32", "fp16"),  # ONNX Runtime has no bf16 kernels for the CPU
    machine=Machine(
        compute=(),
        examples="any x86-64 or Arm CPU",
        backend="ONNX Runtime 1.32+",
        cuda="",
        built="on any machine",
        attention="fused",
    ),
    builder=OnnxFiles(packs_fp32=True),
    whole=(QuantizeWeights((4, 8), look_ups=True), canonicalize, static_reshape, share_tied_head, fold_weights, fuse_rms_norm),
    pieces=PIECES,
    scattered_form=(lower_attention_scattered,),
    padded=(pad_attention,),
    kv_fill=(lower_attention_gqa, lower_attention_batched, lower_quantized_matmul),
    uncut=True,
    int8_kv=True,
    drafts=True,
)
