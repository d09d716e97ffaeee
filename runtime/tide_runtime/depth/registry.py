"""Depth policies by name."""

from __future__ import annotations

from collections.abc import Callable

from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import LoadedPolicy
from tide_runtime.errors import ParamsError

POLICIES: dict[str, Callable[[Manifest, DepthOptions, int], LoadedPolicy]] = {
    "full": FullDepth,
    "exact": ExactDepth,
    "exit": ExitDepth,
}


def make_policy(name: str, manifest: Manifest, options: DepthOptions, concurrency: int = 1) -> LoadedPolicy:
    """The policy ``name`` for ``concurrency`` sequences at once; ``auto``: what the calibration recommends, else ``full``.

    Raises ParamsError for an unknown name, or when the bundle lacks what the policy needs.
    """
    if name == "auto":
        name = manifest.calibration.recommended if manifest.calibration is not None else "full"
    if name not in POLICIES:
        raise ParamsError(f"policy is {name!r}; set it to one of: auto, {', '.join(POLICIES)}")
    return POLICIES[name](manifest, options, concurrency)
