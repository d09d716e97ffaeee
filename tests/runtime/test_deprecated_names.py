"""Names that users of the last release import keep working for one release."""

from __future__ import annotations

import importlib
import sys

import pytest
from tide_runtime import DepthOptions


def test_the_old_place_of_depth_options_warns_and_works() -> None:
    """Guards against services of the last release that end with an ImportError after an upgrade."""
    sys.modules.pop("tide_runtime.policies.options", None)
    with pytest.warns(DeprecationWarning, match="import DepthOptions from tide_runtime"):
        old = importlib.import_module("tide_runtime.policies.options")
    assert old.DepthOptions is DepthOptions
