"""Target ``cuda`` for ONNX Runtime's CPU provider, whose attention takes fp32 too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch


@contextmanager
def cuda_in_fp32() -> Iterator[None]:
    """Exports in fp32 have the target, so that the tests compare its text with that of the target cpu."""
    from tide_export.targets import TARGETS

    with patch.dict(TARGETS, cuda=replace(TARGETS["cuda"], dtypes=("fp32",))):
        yield
