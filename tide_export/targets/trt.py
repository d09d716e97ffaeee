"""TensorRT: engines built on a GPU of the kind that runs them, V100 (TensorRT 10.4, the last release for it) to Blackwell.

No such engine has been built yet. Tests cover the path up to the builder and check its calls against TensorRT's bindings.
https://docs.nvidia.com/deeplearning/tensorrt/
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

from tide_runtime.backends.tensorrt.package import TENSORRT, TENSORRT_VOLTA
from tide_runtime.bundle.architectures import ARCHITECTURES, Architecture
from tide_runtime.bundle.manifest import TargetInfo
from tide_runtime.errors import TargetError
from tide_runtime.targets.gpu_probe import PresentGpu, present_gpu

from tide_export.graphs.cut import LoweredModel
from tide_export.graphs.router_function import NAME as ROUTER
from tide_export.passes.attention_primitives import lower_attention_primitives
from tide_export.passes.attention_standard import lower_attention_standard
from tide_export.passes.base import GraphPass
from tide_export.passes.canonicalize import canonicalize, inline_functions
from tide_export.passes.dequantize_linear import lower_dequantize_linear, weight_only_int4
from tide_export.passes.fold_weights import fold_weights
from tide_export.passes.guard_token import guard_token
from tide_export.passes.quantize_weights import QuantizeWeights
from tide_export.passes.rms_norm import decompose_rms_norm, fuse_rms_norm
from tide_export.passes.static_shapes import static_caches, static_reshape
from tide_export.passes.tensorrt_10_4 import check_tensorrt_10_4, declare_opset_20
from tide_export.targets.base import BuildJob, Machine, Target
from tide_export.targets.engines import ENGINE_FOLDER, build_engines
from tide_export.targets.router_plugin import router_key

_VOLTA = 70
_WHOLE = (canonicalize, static_reshape, fold_weights, fuse_rms_norm)
_LAYERS = (static_caches, lower_attention_standard, lower_dequantize_linear)
# TensorRT 10.4, the last release for V100, lacks attention, cache update and RMSNormalization: the passes decompose all of them
# into operators of opset 20. Rotary embedding keeps the operators of
# the traced model. The graphs are checked against the parser's table and executed by ONNX Runtime; none has run on a V100 yet.
_VOLTA_WHOLE: tuple[GraphPass, ...] = (QuantizeWeights(()), canonicalize, static_reshape, fold_weights)
_VOLTA_LAYERS: tuple[GraphPass, ...] = (inline_functions, static_caches, lower_attention_primitives, decompose_rms_norm)
_VOLTA_CHECKS: tuple[GraphPass, ...] = (declare_opset_20, check_tensorrt_10_4)
_VOLTA_PIECES = (*_VOLTA_LAYERS, guard_token, *_VOLTA_CHECKS)


class TimingCache:
    """The timings of one release on one GPU model, in ``folder``; all builder configurations of an export share them."""

    def __init__(self, folder: Path, tool: str) -> None:
        self.path = folder / (re.sub(r"[^\w.]+", "-", tool) + ".timings")
        self._timings: Any = None

    def attach(self, config: Any) -> None:
        """Set the cache on a builder configuration; the builder reads timings from it and adds new ones."""
        if self._timings is None:
            known = self.path.read_bytes() if self.path.is_file() else b""
            self._timings = config.create_timing_cache(known)
        if not config.set_timing_cache(self._timings, False):  # another driver's or a damaged file
            self._timings = config.create_timing_cache(b"")
            config.set_timing_cache(self._timings, False)

    def save(self) -> None:
        if self._timings is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(bytes(self._timings.serialize()))


class TrtEngines:
    """Builds on a GPU of the target's compute capability, with the router's plugin where the release has such plugins."""

    def check(self, target: Target) -> None:
        _load(target)
        _gpu(target)

    def build(self, target: Target, lowered: LoweredModel, job: BuildJob) -> TargetInfo:
        trt = _load(target)
        gpu = _gpu(target)
        options = job.trt
        router = _router_plugin(target, lowered, job)
        tool = f"tensorrt {trt.__version__} on {gpu.name}{router}"
        timings = TimingCache(job.cache.folder.parent / "timings", tool)

        def configure(trt: Any, config: Any) -> None:
            options.configure(trt, config)
            timings.attach(config)

        info = build_engines(target, trt, f"{tool}{options}", configure, lowered, job, fused_routers=bool(router))
        timings.save()
        if options.strip_weights:
            _keep_weights(target, lowered, job)
        return dataclasses.replace(info, compute=options.runs_on(gpu.compute))


def _router_plugin(target: Target, lowered: LoweredModel, job: BuildJob) -> str:
    """The plugin's part of the cache key; ``""`` where routers stay TensorRT's own operators, which is announced."""
    if not any(file.operators[ROUTER] for file in job.files(lowered)):
        return ""
    if target.machine.compute == (_VOLTA,):
        reason = "TensorRT 10.4 has no ahead-of-time plugins"
    elif job.trt.strip_weights or job.trt.version_compatible:
        reason = "NVIDIA documents ahead-of-time plugins neither for refitted nor for version-compatible engines"
    else:
        try:
            return router_key()
        except TargetError as error:
            reason = str(error)
    job.progress.note(f"{target.name}: routers are TensorRT's own operators, because {reason}")
    return ""


def _load(target: Target) -> Any:
    package = TENSORRT_VOLTA if target.machine.compute == (_VOLTA,) else TENSORRT
    return package.load()


def _gpu(target: Target) -> PresentGpu:
    gpu, (compute,) = present_gpu(), target.machine.compute
    if gpu is None or gpu.compute != compute:
        here = f"a {gpu.name} of {gpu.compute / 10}" if gpu is not None else "none"
        raise TargetError(
            f"{target.name} is built on a GPU of compute capability {compute / 10} ({target.machine.examples}), here is {here}; "
            "export on such a machine, or for a target that is built anywhere (tide-export --list-targets)"
        )
    return gpu


def _keep_weights(target: Target, lowered: LoweredModel, job: BuildJob) -> None:
    """Copy the graphs and their weights to the engines' folder: the runtime refits the engines from them at load."""
    folder = job.directory / ENGINE_FOLDER / target.name
    for file in job.files(lowered):
        for path in (file.path, file.path.with_suffix(".weights")):
            shutil.copyfile(path, folder / path.name)


def _target(architecture: Architecture) -> Target:
    volta = architecture.compute == _VOLTA
    return Target(
        name=f"trt-sm_{architecture.compute}",
        backend="tensorrt",
        dtypes=("fp32", "fp16", "bf16") if architecture.has_bf16 else ("fp32", "fp16"),
        machine=Machine(
            compute=(architecture.compute,),
            examples=architecture.devices,
            backend="TensorRT 10.4" if volta else "TensorRT 11",
            cuda="12" if volta else "13",
            built="on such a GPU",
            attention="decomposed" if volta else "fused; decomposed in fp32 and with soft-cap or sinks",
        ),
        builder=TrtEngines(),
        whole=_VOLTA_WHOLE if volta else (weight_only_int4([architecture.compute]), *_WHOLE),
        pieces=_VOLTA_PIECES if volta else (*_LAYERS, guard_token),
    )


TRT_TARGETS = tuple(_target(architecture) for architecture in ARCHITECTURES if not architecture.ptx)
