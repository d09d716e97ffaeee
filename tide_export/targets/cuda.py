"""ONNX Runtime on NVIDIA GPUs: the CPU's graphs, as the CUDA provider has kernels for all their operators, and a guarded token.

GroupQueryAttention runs there in fp16 and bf16 only and, over a filled cache, takes several tokens of one row only; what it
does not take runs in the form for several rows. The fused projections and norms save launches rather than bytes there.
"""

from __future__ import annotations

from dataclasses import replace

from tide_export.passes.guard_token import guard_token
from tide_export.targets.base import Machine
from tide_export.targets.cpu import CPU
from tide_export.targets.onnx_files import OnnxFiles

CUDA = replace(
    CPU,
    name="cuda",
    backend="onnxruntime-cuda",
    dtypes=("fp32", "fp16", "bf16"),
    pieces=(*CPU.pieces, guard_token),
    uncut=False,  # every session has weights of its own in the GPU's memory
    machine=Machine(
        compute=(75, 80, 86, 89, 90, 100, 120),
        examples="NVIDIA GPUs from Turing on",
        backend="ONNX Runtime 1.31+",
        cuda="13",
        built="on any machine",
        attention="fused; decomposed in fp32 and for several tokens of several rows",
    ),
    builder=OnnxFiles(),
)
