"""Depth policies by name."""

from __future__ import annotations

from collections.abc import Callable

from tide_runtime.errors import ParamsError
from tide_runtime.manifest import Manifest
from tide_runtime.policies.base import DepthPolicy
from tide_runtime.policies.exact import ExactDepth
from tide_runtime.policies.exit import ExitDepth
from tide_runtime.policies.full import FullDepth
from tide_runtime.policies.options import DepthOptions

POLICIES: dict[str, Callable[[Manifest, int, DepthOptions], DepthPolicy]] = {
    "full": FullDepth,
    "exact": ExactDepth,
    "exit": ExitDepth,
}


def make_policy(name: str, manifest: Manifest, prefill_chunk: int, options: DepthOptions) -> DepthPolicy:
    """The policy ``name``; ``auto`` is what the calibration recommends, ``full`` without one.

    Raises ParamsError for an unknown name, or when the bundle lacks what the policy needs.
    """
    if name == "auto":
        name = manifest.calibration.recommended if manifest.calibration is not None else "full"
    if name not in POLICIES:
        raise ParamsError(f"policy is {name!r}; set it to one of: auto, {', '.join(POLICIES)}")
    return POLICIES[name](manifest, prefill_chunk, options)
