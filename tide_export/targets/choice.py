"""Which targets an export builds: those named, what fits this machine (``auto``), or all that can be built here (``all``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tide_runtime.errors import TargetError
from tide_runtime.targets.gpu_probe import present_gpu, runs_code_for

from tide_export.targets import TARGETS, find_target
from tide_export.targets.base import Target
from tide_export.targets.trt_options import TrtOptions

AUTO, ALL = "auto", "all"


def choose_targets(names: Sequence[str], dtype: str) -> tuple[list[Target], dict[str, TargetError]]:
    """The targets to build, in the order asked for, and those that cannot be built here, with the reason.

    Raises TargetError for a name that does not exist, and when none of those asked for can be built.
    """
    wanted = list(dict.fromkeys(one for name in names for one in _named(name, dtype)))
    chosen: list[Target] = []
    refused: dict[str, TargetError] = {}
    for name in wanted:
        try:
            chosen.append(checked(name, dtype))
        except TargetError as error:
            refused[name] = error
    if not chosen:
        reasons = "; ".join(map(str, refused.values())) or f"no target of this machine has {dtype} kernels"
        raise TargetError(f"{reasons}. Here can be built in {dtype}: {', '.join(buildable(dtype)) or 'nothing'}")
    return chosen, refused


def check_options(options: TrtOptions, chosen: Sequence[Target], refused: Collection[str] = ()) -> None:
    """Raise TargetError for options that no target asked for takes, or that TensorRT does not offer for the GPU of one."""
    engines = [t for t in (*chosen, *(TARGETS[name] for name in refused)) if t.backend == "tensorrt"]
    if options.asked and not engines:
        raise TargetError(f"{', '.join(options.asked)}: only targets trt-sm_* take that, and none is asked for; leave it out")
    for target in engines:
        options.check(*target.machine.compute)


def buildable(dtype: str) -> list[str]:
    """Names of the targets that this machine can compile for."""
    names = []
    for name in TARGETS:
        try:
            names.append(checked(name, dtype).name)
        except TargetError:
            continue
    return names


def checked(name: str, dtype: str) -> Target:
    """The target ``name``. Raises TargetError when it lacks ``dtype`` kernels or cannot be built on this machine."""
    target = find_target(name, dtype)
    target.builder.check(target)
    return target


def _named(name: str, dtype: str) -> list[str]:
    if name == ALL:
        return buildable(dtype)
    if name == AUTO:
        return ["cpu", *_fitting(dtype)]
    if name not in TARGETS:
        find_target(name, dtype)
    return [name]


def _fitting(dtype: str) -> list[str]:
    """What can be built for the GPU present, if any, but for engines that serve others as well."""
    gpu = present_gpu()
    if gpu is None:
        return []
    targets = (TARGETS[name] for name in buildable(dtype))
    return [t.name for t in targets if _fits(t, gpu.compute)]


def _fits(target: Target, compute: int) -> bool:
    if target.backend == "onnxruntime-cuda":  # it picks its kernels when it runs
        return runs_code_for(target.machine.compute, compute)
    return target.machine.compute == (compute,)
