"""The targets of an export: named ones, those that fit this machine (``auto``), all it can build (``all``); the table of all."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.table import Table
from tide_runtime.bundle.architectures import onnxruntime_compute
from tide_runtime.bundle.manifest import PAD_ATTENTION, TargetInfo
from tide_runtime.errors import TargetError
from tide_runtime.targets.gpu_probe import present_gpu, runs_code_for
from tide_runtime.targets.target_choice import DeviceChoice, obstacle

from tide_export.config import TrtOptions
from tide_export.targets import TARGETS, find_target
from tide_export.targets.base import Target

_MIN_COMPUTE_TORCH = 70  # its wheels have code for V100 and newer
AUTO, ALL = "auto", "all"
COLUMNS = ("target", "compute capability", "machines", "backend", "CUDA", "dtypes", "low bits", "built", "attention", "here")


def choose_targets(
    names: Sequence[str], dtype: str, kv: str = "model", mixed: str = ""
) -> tuple[list[Target], dict[str, TargetError]]:
    """The targets to build, in the order of ``names``, and the reason for each that this machine cannot build.

    ``mixed``: `LoadedModel.target_restriction`.

    Raises TargetError for an unknown name, and if no target can be built.
    """
    wanted = list(dict.fromkeys(one for name in names for one in _expand(name, dtype, kv, mixed)))
    chosen: list[Target] = []
    refused: dict[str, TargetError] = {}
    for name in wanted:
        try:
            chosen.append(checked(name, dtype, kv, mixed))
        except TargetError as error:
            refused[name] = error
    if not chosen:
        reasons = "; ".join(map(str, refused.values())) or f"no target of this machine has {dtype} kernels"
        raise TargetError(f"{reasons}. Here can be built in {dtype}: {', '.join(buildable(dtype, kv, mixed)) or 'nothing'}")
    return chosen, refused


def without_long_rotary(targets: Sequence[Target], long_from: int | None) -> tuple[list[Target], dict[str, TargetError]]:
    """The targets that run a model whose longer texts take other rotary factors, and why each other one does not.

    Raises TargetError if none is left.
    """
    if long_from is None:
        return list(targets), {}
    able = ", ".join(name for name, one in TARGETS.items() if one.long_rotary)
    refused = {
        one.name: TargetError(
            f"target {one.name} has one set of rotary factors, this model another one for texts of more than {long_from} tokens; "
            f"compile for {able}, or for shorter texts with --max-seq-len {long_from}"
        )
        for one in targets
        if not one.long_rotary
    }
    if len(refused) == len(targets):
        raise TargetError("; ".join(map(str, refused.values())))
    return [one for one in targets if one.name not in refused], refused


def check_options(options: TrtOptions, chosen: Sequence[Target], refused: Collection[str] = ()) -> None:
    """Raise TargetError for TensorRT options without a TensorRT target, or that TensorRT does not support on a target's GPU."""
    engines = [t for t in (*chosen, *(TARGETS[name] for name in refused)) if t.backend == "tensorrt"]
    if options.flags and not engines:
        raise TargetError(f"{', '.join(options.flags)}: only targets trt-sm_* take that, and none is asked for; leave it out")
    for target in engines:
        options.check(*target.machine.compute)


def buildable(dtype: str, kv: str = "model", mixed: str = "") -> list[str]:
    """Names of the targets that this machine can compile for."""
    names = []
    for name in TARGETS:
        try:
            names.append(checked(name, dtype, kv, mixed).name)
        except TargetError:
            continue
    return names


def checked(name: str, dtype: str, kv: str = "model", mixed: str = "") -> Target:
    """The target ``name``.

    Raises TargetError if it lacks ``dtype`` kernels, ``kv`` caches or the model's layers, or this machine cannot build it.
    """
    target = find_target(name, dtype)
    if mixed and not target.mixed_layers:
        able = ", ".join(other for other, one in TARGETS.items() if one.mixed_layers)
        raise TargetError(f"target {name} does not run the model's {mixed}; compile for: {able}")
    if kv == "int8" and not target.int8_kv:
        able = ", ".join(other for other, one in TARGETS.items() if one.int8_kv)
        raise TargetError(f"target {name} has no attention over int8 KV caches; leave out --kv int8, or compile for: {able}")
    target.builder.check(target)
    return target


def why_not_here(target: Target) -> str | None:
    """Reason why bundles for ``target`` do not run here, or None; engines may still be refused when they are loaded."""
    info = TargetInfo(target.backend, {}, None, {PAD_ATTENTION: 1} if target.padded else {}, list(target.machine.compute))
    return obstacle(info, DeviceChoice(), present_gpu())


def _expand(name: str, dtype: str, kv: str, mixed: str) -> list[str]:
    if name == ALL:
        return buildable(dtype, kv, mixed)
    if name == AUTO:
        return ["cpu", *for_present_gpu(dtype, kv, mixed)]
    if name not in TARGETS:
        find_target(name, dtype)
    return [name]


def for_present_gpu(dtype: str, kv: str = "model", mixed: str = "") -> list[str]:
    """Names of the targets for the GPU present, if any; engines for several capabilities are left out."""
    gpu = present_gpu()
    if gpu is None:
        return []
    targets = (TARGETS[name] for name in buildable(dtype, kv, mixed))
    return [t.name for t in targets if _fits(t, gpu.compute)]


def _fits(target: Target, compute: int) -> bool:
    if target.backend == "onnxruntime-cuda":  # one build runs on several capabilities
        return runs_code_for(onnxruntime_compute(), compute)
    if target.backend == "torch":
        return compute >= _MIN_COMPUTE_TORCH
    return target.machine.compute == (compute,)


def targets_table() -> Table:
    """One row per target; the last column is yes if this machine can build it."""
    table = Table(title="Targets (--target NAME)", title_justify="left", title_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold", no_wrap=column == "target")
    for target in TARGETS.values():
        table.add_row(*target_row(target))
    return table


def target_row(target: Target) -> tuple[str, ...]:
    """The cells of a target's row, in the order of ``COLUMNS``."""
    machine = target.machine
    compute = ", ".join(f"{number / 10:.1f}" for number in machine.compute) or "–"
    dtypes = ", ".join(target.dtypes)
    return (
        target.name,
        compute,
        machine.examples,
        machine.backend,
        machine.cuda or "–",
        dtypes,
        ", ".join(f"int{bits}" for bits in target.low_bits) or "–",
        machine.built,
        machine.attention,
        _buildable_here(target),
    )


def _buildable_here(target: Target) -> str:
    try:
        target.builder.check(target)
    except TargetError:
        return "no"
    return "yes"
