"""Formatting of byte counts."""

from __future__ import annotations


def human_size(count: int) -> str:
    """``count`` bytes as ``12.1 MiB``."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
