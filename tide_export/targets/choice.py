"""Which targets an export builds: those named, what fits this machine (``auto``), or all that can be built here (``all``)."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.errors import TargetError
from tide_runtime.present_gpu import present_gpu

from . import TARGETS, find_target
from .base import Target

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
    return [t.name for t in targets if gpu.compute in t.machine.compute and (len(t.machine.compute) == 1 or t.name == "cuda")]
