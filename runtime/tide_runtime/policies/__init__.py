"""Depth policies by name."""

from __future__ import annotations

from collections.abc import Callable

from tide_runtime.errors import ParamsError
from tide_runtime.manifest import Manifest
from tide_runtime.policies.base import DepthPolicy
from tide_runtime.policies.full import FullDepth

POLICIES: dict[str, Callable[[Manifest, int], DepthPolicy]] = {"full": FullDepth}


def make_policy(name: str, manifest: Manifest, prefill_chunk: int) -> DepthPolicy:
    if name not in POLICIES:
        raise ParamsError(f"policy is {name!r}; set it to one of: {', '.join(POLICIES)}")
    return POLICIES[name](manifest, prefill_chunk)
