"""Handles of streams from other libraries."""

from __future__ import annotations

from typing import Any

import pytest
from tide_plugins.launch.stream_handle import stream_handle
from tide_runtime.errors import ParamsError


class _Stream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0xBEEF


@pytest.mark.parametrize(("stream", "handle"), [(0xBEEF, 0xBEEF), (_Stream(), 0xBEEF), (0, 1)])
def test_streams_of_any_library(stream: Any, handle: int) -> None:
    """Guards against handle 0, which means another stream where a library was compiled with a default stream per thread."""
    assert stream_handle(stream) == handle


@pytest.mark.parametrize("stream", [None, "0", -1, True, object()])
def test_what_is_not_a_stream_is_refused(stream: Any) -> None:
    """Guards against None, which libraries interpret differently."""
    with pytest.raises(ParamsError, match="expected a cudaStream_t"):
        stream_handle(stream)
