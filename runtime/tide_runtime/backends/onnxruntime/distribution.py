"""The distribution that brings the module ``onnxruntime``: ``onnxruntime``, ``onnxruntime-gpu`` and others install one folder."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import packages_distributions, version

import onnxruntime as ort

CPU_RELEASE = (1, 32)  # the first release whose GroupQueryAttention reads query_seqlens


def installed_distributions() -> dict[str, str]:
    """Name → release of every installed distribution that brings the module; none where it was built from source."""
    return {name: version(name) for name in packages_distributions().get("onnxruntime", [])}


def distribution(installed: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Name and release of the one that is imported: of several, the one whose files were written last.

    ``installed``: `installed_distributions`, which takes half a second; None: looked for.
    """
    found = installed_distributions() if installed is None else installed
    own = [name for name, release in found.items() if release == ort.__version__]
    if len(own) > 1:
        has_cuda = "CUDAExecutionProvider" in ort.get_available_providers()
        own = [name for name in own if ("gpu" in name) == has_cuda] or own
    return (own[0] if own else "onnxruntime"), ort.__version__


def runs_padded_attention() -> bool:
    """Whether this release runs the attention of bundles for the target ``cpu``."""
    major, minor = ort.__version__.split(".")[:2]
    return (int(major), int(minor)) >= CPU_RELEASE
