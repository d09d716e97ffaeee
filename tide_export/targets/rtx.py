"""TensorRT-RTX: engines compiled ahead of time without a GPU, one target per compute capability.

``rtx-ampere+`` is one engine for all capabilities from 8.0 on, hardly larger than one for a single capability. At load the
runtime compiles the kernels for the GPU present. https://docs.nvidia.com/deeplearning/tensorrt-rtx/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tide_runtime.backends.tensorrt.package import RTX
from tide_runtime.bundle.architectures import ARCHITECTURES, Architecture
from tide_runtime.bundle.manifest import TargetInfo

from tide_export.graphs.cut import LoweredModel
from tide_export.passes.attention_standard import lower_attention_standard
from tide_export.passes.canonicalize import canonicalize, inline_functions
from tide_export.passes.dequantize_linear import lower_dequantize_linear, weight_only_int4
from tide_export.passes.fold_weights import fold_weights
from tide_export.passes.guard_token import guard_token
from tide_export.passes.rms_norm import fuse_rms_norm
from tide_export.passes.static_shapes import static_caches, static_reshape
from tide_export.targets.base import BuildJob, Machine, Target
from tide_export.targets.engines import build_engines

_GPUS = [architecture for architecture in ARCHITECTURES if architecture.rtx]
# TensorRT-RTX 1.7 compiles for A100 and A30, which its support matrix leaves out: it lists 7.5, 8.6, 8.9, 12.0 and 12.1.
_OUTSIDE_MATRIX = (80,)


class RtxEngines:
    """Builds on any machine that has the package ``tensorrt-rtx``."""

    def check(self, target: Target) -> None:
        RTX.load()

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        trt = RTX.load()

        def configure(trt: Any, config: Any) -> None:
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # a CUDA graph cannot contain allocations
            config.num_compute_capabilities = len(target.machine.compute)
            for index, compute in enumerate(target.machine.compute):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{compute}"), index)

        return build_engines(target, trt, f"tensorrt-rtx {trt.__version__}", configure, lowered, job)


def _target(name: str, gpus: Sequence[Architecture]) -> Target:
    layers = (static_caches, inline_functions, lower_attention_standard, lower_dequantize_linear)
    return Target(
        name=name,
        backend="tensorrt-rtx",
        dtypes=("fp32", "fp16", "bf16") if all(gpu.has_bf16 for gpu in gpus) else ("fp32", "fp16"),
        machine=Machine(
            compute=tuple(gpu.compute for gpu in gpus),
            examples="; ".join(_devices(gpu) for gpu in gpus),
            backend="TensorRT-RTX 1.7",
            cuda="13",
            built="on any machine",
            attention="fused; decomposed in fp32 and with soft-cap or sinks",
        ),
        builder=RtxEngines(),
        whole=(weight_only_int4(gpu.compute for gpu in gpus), canonicalize, static_reshape, fold_weights, fuse_rms_norm),
        pieces=(*layers, guard_token),
    )


def _devices(gpu: Architecture) -> str:
    return f"{gpu.devices} (outside NVIDIA's support matrix)" if gpu.compute in _OUTSIDE_MATRIX else gpu.devices


RTX_TARGETS = (
    *(_target(f"rtx-sm_{gpu.compute}", [gpu]) for gpu in _GPUS),
    _target("rtx-ampere+", [gpu for gpu in _GPUS if gpu.compute >= 80]),
)
