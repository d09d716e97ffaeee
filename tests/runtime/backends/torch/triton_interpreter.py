"""Tests of Triton's kernels run in its interpreter, on the processor: `make test-triton` installs Triton and runs them."""

from __future__ import annotations

import importlib.util
import os


def interpreted() -> bool:
    return importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
