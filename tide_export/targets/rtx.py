"""TensorRT-RTX: engines compiled ahead of time for GPUs that need not be there, one target for each compute capability.

``rtx-ampere+`` is one engine for all capabilities from 8.0 on, hardly larger than one for a single capability. When an engine is
loaded, the runtime compiles its kernels for the GPU it finds. https://docs.nvidia.com/deeplearning/tensorrt-rtx/
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tide_runtime.manifest import TargetInfo

from tide_export.passes.attention_standard import lower_attention_standard
from tide_export.passes.canonicalize import canonicalize
from tide_export.passes.fold_weights import fold_weights
from tide_export.passes.guard_token import guard_token
from tide_export.passes.inline_functions import inline_functions
from tide_export.passes.rms_norm import fuse_rms_norm
from tide_export.passes.static_caches import static_caches
from tide_export.passes.static_reshape import static_reshape

from .base import BuildJob, Machine, Target
from .engines import build_engines
from .tensorrt_module import RTX

if TYPE_CHECKING:
    from tide_export.lower import LoweredModel

# Volta, Hopper and the data centre's Blackwell are not among what this release compiles for.
_GPUS = {
    75: "T4, RTX 20",
    80: "A100, A30",
    86: "A10, A40, RTX 30",
    89: "L4, L40, RTX 40",
    120: "RTX 50, RTX PRO Blackwell",
    121: "GB10 (DGX Spark)",
}


class RtxEngines:
    """Builds on any machine that has the package ``tensorrt-rtx``."""

    def check(self, target: Target) -> None:
        RTX.load()

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        trt = RTX.load()

        def configure(trt: Any, config: Any) -> None:
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # what allocates in a step cannot be part of a CUDA graph
            config.num_compute_capabilities = len(target.machine.compute)
            for place, compute in enumerate(target.machine.compute):
                config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{compute}"), place)

        return build_engines(target, trt, f"tensorrt-rtx {trt.__version__}", configure, lowered, job)


def _target(name: str, compute: tuple[int, ...]) -> Target:
    narrow = min(compute) < 80  # the first GPUs with bf16 are Ampere's
    layers = (static_caches, inline_functions, lower_attention_standard)
    return Target(
        name=name,
        backend="tensorrt-rtx",
        dtypes=("fp32", "fp16") if narrow else ("fp32", "fp16", "bf16"),
        machine=Machine(
            compute=compute,
            examples="; ".join(_GPUS[number] for number in compute),
            backend="TensorRT-RTX 1.7",
            cuda="13",
            built="on any machine",
            attention="fused; decomposed in fp32 and with soft-cap",
        ),
        builder=RtxEngines(),
        whole=(canonicalize, static_reshape, fold_weights, fuse_rms_norm),
        pieces=(*layers, guard_token),
        kv_fill=layers,
    )


RTX_TARGETS = (
    *(_target(f"rtx-sm_{compute}", (compute,)) for compute in _GPUS),
    _target("rtx-ampere+", tuple(compute for compute in _GPUS if compute >= 80)),
)
