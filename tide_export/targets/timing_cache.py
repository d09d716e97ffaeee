"""TensorRT's timings of kernels, kept between builds: a layer that was timed on this GPU before is not timed again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


class TimingCache:
    """One release's timings on one model of GPU, in ``folder``. All configurations of an export share them."""

    def __init__(self, folder: Path, tool: str) -> None:
        self.path = folder / (re.sub(r"[^\w.]+", "-", tool) + ".timings")
        self._timings: Any = None

    def attach(self, config: Any) -> None:
        """Let the builder take timings from the cache and add its own."""
        if self._timings is None:
            known = self.path.read_bytes() if self.path.is_file() else b""
            self._timings = config.create_timing_cache(known)
        if not config.set_timing_cache(self._timings, False):  # of another driver or a damaged file
            self._timings = config.create_timing_cache(b"")
            config.set_timing_cache(self._timings, False)

    def save(self) -> None:
        if self._timings is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(bytes(self._timings.serialize()))
