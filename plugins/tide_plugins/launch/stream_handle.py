"""CUDA handles of streams from other libraries."""

from __future__ import annotations

from typing import Any

from tide_runtime.errors import ParamsError

LEGACY_DEFAULT_STREAM = 1  # CU_STREAM_LEGACY; 0 means another stream where a library has a default stream per thread


def stream_handle(stream: Any) -> int:
    """The ``cudaStream_t`` of ``stream``.

    Args:
        stream: a handle, or an object with ``__cuda_stream__`` (cuda.core, PyTorch, CuPy, Numba).

    Raises:
        ParamsError: it is neither.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream or LEGACY_DEFAULT_STREAM
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise ParamsError(
            f"the stream is {stream!r}; expected a cudaStream_t as a non-negative int, or an object with __cuda_stream__"
        )
    _version, handle = protocol()
    return int(handle) or LEGACY_DEFAULT_STREAM
