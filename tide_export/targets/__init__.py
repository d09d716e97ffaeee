"""Registry of targets by name. A new target needs a file in this folder and an entry here; packages add passes to those."""

from __future__ import annotations

from dataclasses import replace

from tide_runtime.errors import TargetError
from tide_runtime.plugins import PASSES, extension, installed, package_of

from tide_export.passes.base import PlacedPass, pass_name
from tide_export.targets.base import Target
from tide_export.targets.onnxruntime import CPU, CUDA
from tide_export.targets.rtx import RTX_TARGETS
from tide_export.targets.torch import TORCH
from tide_export.targets.trt import TRT_TARGETS

TARGETS: dict[str, Target] = {target.name: target for target in (CPU, CUDA, TORCH, *RTX_TARGETS, *TRT_TARGETS)}


def find_target(name: str, dtype: str) -> Target:
    """The target ``name`` with the passes of packages. Raises TargetError if there is none or it has no kernels for ``dtype``."""
    if name not in TARGETS:
        raise TargetError(f"there is no target {name!r}; choose from: {', '.join(TARGETS)}, or auto or all")
    target = TARGETS[name]
    if dtype not in target.dtypes:
        raise TargetError(f"target {name} has no {dtype} kernels; use --dtype {' or '.join(target.dtypes)}")
    return with_packages(target)


def with_packages(target: Target) -> Target:
    """``target`` with the passes that installed packages register for it, each behind the pass that it names.

    Raises TargetError for a pass that follows none of the target's, or names a target that does not exist.
    """
    for entry in installed(PASSES).values():
        placed = replace(extension(PASSES, entry.name), package=package_of(entry))
        if unknown := sorted(set(placed.targets) - TARGETS.keys()):
            raise TargetError(
                f"the pass {entry.name} of {placed.package} is for {', '.join(unknown)}; known are {', '.join(TARGETS)}"
            )
        if target.name in placed.targets:
            target = _with_pass(target, entry.name, placed)
    return target


def _with_pass(target: Target, name: str, placed: PlacedPass) -> Target:
    lists = {part: getattr(target, part) for part in ("whole", "pieces", "padded")}
    for part, passes in lists.items():
        names = [pass_name(one) for one in passes]
        if placed.after in names:
            place = names.index(placed.after) + 1
            return replace(target, **{part: (*passes[:place], placed, *passes[place:])})
    every = ", ".join(pass_name(one) for passes in lists.values() for one in passes)
    raise TargetError(f"the pass {name} of {placed.package} comes after {placed.after}; target {target.name} has {every}")
