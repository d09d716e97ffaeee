"""The bundle that tests harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime.bundle.corruption import edit
from tide_runtime.bundle.manifest import UNCUT


@pytest.fixture
def bundle_copy(bundle_copy: Path) -> Path:
    """A copy whose segments are loaded eagerly, as in a bundle with exits."""
    edit(bundle_copy, "targets", "cpu", "graphs", UNCUT, remove=True)
    return bundle_copy
