"""Target ``cuda``: ONNX Runtime on NVIDIA GPUs, with the CPU's graphs and a guarded token.

The CUDA provider has kernels for all operators of the CPU's graphs. Its GroupQueryAttention supports fp16 and bf16, and several
tokens over a filled cache only for one sequence; other steps run the batched form. Fused projections and norms save launches.

MatMulNBits has kernels for few tokens if N is a multiple of 8, for blocks of 16 to 128 and 4 or 8 bits; otherwise each step would
write the dense matrix and multiply with that, which is slower than a dense weight
(https://github.com/microsoft/onnxruntime/tree/main/onnxruntime/contrib_ops/cuda/quantization, matmul_4bits.cu, matmul_8bits.cu).
"""

from __future__ import annotations

from dataclasses import replace

from tide_runtime.bundle.architectures import ONNXRUNTIME_COMPUTE

from tide_export.passes.attention_batched import lower_attention_batched
from tide_export.passes.guard_token import guard_token
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.targets.base import Machine
from tide_export.targets.cpu import CPU, PIECES
from tide_export.targets.onnx_files import OnnxFiles

CUDA = replace(
    CPU,
    name="cuda",
    backend="onnxruntime-cuda",
    dtypes=("fp32", "fp16", "bf16"),
    whole=(QuantizeWeights((4, 8), look_ups=True, multiple=8), *CPU.whole[1:]),
    pieces=(*PIECES, guard_token),
    batched_form=(lower_attention_batched,),
    scattered_form=(),
    padded=(),
    uncut=False,  # every session copies the weights into GPU memory
    machine=Machine(
        compute=tuple(sorted(set().union(*ONNXRUNTIME_COMPUTE.values()))),
        examples="NVIDIA GPUs from Turing on; not B200, B300, Jetson",
        backend="ONNX Runtime 1.31+",
        cuda="13",
        built="on any machine",
        attention="fused; decomposed in fp32 and for several tokens of several rows",
    ),
    builder=OnnxFiles(),
    drafts=False,  # pass costs, which decide how far it drafts, are measured on the CPU only
    int8_kv=False,  # the runtime's device caches hold floats
)
