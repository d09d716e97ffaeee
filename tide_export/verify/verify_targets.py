"""Verify the targets of a finished bundle that run on this machine, and say of the others why they are not verified."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.errors import TargetError
from tide_runtime.targets.gpu_probe import present_gpu
from tide_runtime.targets.target_choice import CPU, DeviceChoice, obstacle

from tide_export.drafters.rounded import RoundedDrafter
from tide_export.graphs.exit_modules import ExitTensors
from tide_export.progress import ExportProgress
from tide_export.quantize.kv_scales import KVScales
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify.check_results import Check
from tide_export.verify.checks import check_tables, stored_values
from tide_export.verify.verify_bundle import Reference, eager_reference, verify_bundle
from tide_export.verify.verify_device import verify_on_device
from tide_export.verify.verify_exits import verify_exits


@dataclass
class Verified:
    """``on``: target → `TargetInfo.verified`. ``checks`` of all targets."""

    on: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)


def unverified(names: Mapping[str, object], reason: str) -> Verified:
    """No target is verified, for the same ``reason``."""
    return Verified({name: _because(reason) for name in names})


def verify_targets(
    loaded: LoadedModel,
    directory: Path,
    dtype: str,
    progress: ExportProgress,
    kv_scales: Mapping[int, KVScales] | None = None,
    drafter: RoundedDrafter | None = None,
    exits: ExitTensors | None = None,
) -> Verified:
    """Hold every target of the bundle in ``directory`` that runs here to the eager model, and its exits to their formulas.

    Args:
        kv_scales: of the bundle's int8 caches.
        drafter: the bundle's draft head.
        exits: tensors of the bundle's exits; None: it has none.

    Raises VerificationError where a difference exceeds rounding.
    """
    manifest = read_manifest(directory)
    found = Verified()
    gpu = present_gpu()
    reference = None
    for name, info in manifest.targets.items():
        reason = obstacle(info, DeviceChoice(), gpu)
        if reason is None:
            with progress.phase(f"verify {name} against the eager model"):
                if reference is None:
                    check_tables(loaded, directory, manifest)
                    reference = eager_reference(loaded, directory, kv_scales, stored_values(loaded), drafter)
                reason = _verify(loaded, directory, name, dtype, kv_scales, reference, found)
        if reason is None and exits is not None:
            _verify_exits(directory, name, exits, progress)
        machine = f"a processor, {platform.machine()}" if name == CPU or gpu is None else gpu.name
        found.on[name] = f"on {machine}" if reason is None else _because(reason)
        if reason is not None:
            progress.note(f"{name}: {found.on[name]}")
    for check in found.checks:
        progress.note(str(check))
    return found


def _verify(
    loaded: LoadedModel,
    directory: Path,
    target: str,
    dtype: str,
    kv_scales: Mapping[int, KVScales] | None,
    reference: Reference,
    found: Verified,
) -> str | None:
    """Add the target's checks to ``found``; returns why it cannot be loaded on the GPU here, or None."""
    if target == CPU:
        found.checks += verify_bundle(loaded, directory, dtype, kv_scales, reference)
        return None
    try:
        found.checks += verify_on_device(Bundle(directory, read_manifest(directory)), target, reference, dtype)
    except TargetError as error:
        return str(error)
    return None


def _verify_exits(directory: Path, target: str, tensors: ExitTensors, progress: ExportProgress) -> None:
    with progress.phase(f"verify the exits of {target} against their formulas"):
        checks = verify_exits(directory, tensors, target)
    for check in checks:
        progress.note(f"{check.graph}: max |Δ{check.output}| {check.max_difference:.1e}")


def _because(reason: str) -> str:
    return f"not verified: {reason}"
