"""Targets whose runtime compiles ONNX when it loads a bundle: ``cpu``, the default, and ``cuda``, ONNX Runtime on NVIDIA GPUs.

Target ``cpu`` runs one form of a segment in every step, padded attention (`pad_attention`): a token's logits have the same bits
alone, in a chunk of any size and in a batch with other sequences.

Target ``cuda`` has the CPU's graphs and a guarded token. Its GroupQueryAttention supports fp16 and bf16, and several tokens over
a filled cache only for one sequence, so that the host runs other steps sequence by sequence. MatMulNBits has
kernels for few tokens if N is a multiple of 8, for blocks of 16 to 128 and 4 or 8 bits; otherwise each step would write the dense
matrix and multiply with that, which is slower than a dense weight
(https://github.com/microsoft/onnxruntime/tree/main/onnxruntime/contrib_ops/cuda/quantization, matmul_4bits.cu, matmul_8bits.cu).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir
from tide_runtime.bundle.architectures import ONNXRUNTIME_COMPUTE
from tide_runtime.bundle.manifest import TargetInfo

from tide_export.bundle_writer import ONNX_FOLDER, WEIGHTS_NAME, write_graphs
from tide_export.graphs.cut import LoweredModel
from tide_export.passes.attention_gqa import lower_attention_gqa
from tide_export.passes.attention_padded import pad_attention
from tide_export.passes.canonicalize import canonicalize
from tide_export.passes.fold_weights import fold_weights
from tide_export.passes.guard_token import guard_token, leave_out_token
from tide_export.passes.integer_products import lower_integer_products
from tide_export.passes.name_products import name_products
from tide_export.passes.onnxruntime_fusions import fuse_skip_norm, share_tied_head
from tide_export.passes.pack_projections import pack_products, pack_projections
from tide_export.passes.pad_recurrence import pad_recurrence
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.passes.quantized_matmul import lower_quantized_matmul
from tide_export.passes.rms_norm import fuse_rms_norm
from tide_export.passes.smoothing import fold_smoothing
from tide_export.passes.static_shapes import static_reshape
from tide_export.targets.base import BuildJob, Machine, Target
from tide_export.targets.products_graph import write_products


@dataclass(frozen=True)
class OnnxFiles:
    """Writes ONNX graphs and their weights; needs no compiler."""

    def check(self, target: Target) -> None:
        """Every machine can build it."""

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        forms = [*lowered.forms, *([lowered.draft] if lowered.draft is not None else [])]
        files = write_graphs(lowered.graphs, forms, target.name, job.weights, job.progress)
        compute = list(target.machine.compute)
        products = write_products([*lowered.graphs, *lowered.forms], target.name, job.directory)
        return TargetInfo(target.backend, files, f"{ONNX_FOLDER}/{WEIGHTS_NAME}", lowered.applied, compute, products=products)


LAYERS, PRODUCTS = (lower_attention_gqa, pack_projections, fuse_skip_norm), (lower_integer_products, lower_quantized_matmul)

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
    builder=OnnxFiles(),
    whole=(
        name_products,
        QuantizeWeights((4, 8), look_ups=True, integers=True, experts=(ir.DataType.FLOAT,)),
        canonicalize,
        static_reshape,
        share_tied_head,
        fold_weights,
        fuse_rms_norm,
        fold_smoothing,
    ),
    pieces=(*LAYERS, pack_products, *PRODUCTS, leave_out_token),
    padded=(pad_attention, pad_recurrence),
    uncut=True,
    int8_kv=True,
    drafts=True,
    mixed_layers=True,
    scores_logits=True,
    long_rotary=True,
)


CUDA = replace(
    CPU,
    name="cuda",
    backend="onnxruntime-cuda",
    dtypes=("fp16", "bf16"),
    whole=(QuantizeWeights((4, 8), look_ups=True, multiple=8), *CPU.whole[2:]),
    pieces=(*LAYERS, *PRODUCTS, guard_token),
    padded=(),
    uncut=False,  # every session copies the weights into GPU memory
    machine=Machine(
        compute=tuple(sorted(set().union(*ONNXRUNTIME_COMPUTE.values()))),
        examples="NVIDIA GPUs from Turing on; not B200, B300, Jetson",
        backend="ONNX Runtime 1.31+",
        cuda="13",
        built="on any machine",
        attention="fused",
    ),
    builder=OnnxFiles(),
    drafts=False,  # pass costs, which decide how far it drafts, are measured on the CPU only
    int8_kv=False,
    mixed_layers=False,  # one layer's, each, and no states
    scores_logits=False,
    long_rotary=False,
)
