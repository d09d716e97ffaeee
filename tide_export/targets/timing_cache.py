"""TensorRT's timing cache on disk: a build reuses the kernel timings of earlier builds on the same GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


class TimingCache:
    """The timings of one release on one GPU model, in ``folder``; all builder configurations of an export share them."""

    def __init__(self, folder: Path, tool: str) -> None:
        self.path = folder / (re.sub(r"[^\w.]+", "-", tool) + ".timings")
        self._timings: Any = None

    def attach(self, config: Any) -> None:
        """Set the cache on a builder configuration; the builder reads timings from it and adds new ones."""
        if self._timings is None:
            known = self.path.read_bytes() if self.path.is_file() else b""
            self._timings = config.create_timing_cache(known)
        if not config.set_timing_cache(self._timings, False):  # another driver's or a damaged file
            self._timings = config.create_timing_cache(b"")
            config.set_timing_cache(self._timings, False)

    def save(self) -> None:
        if self._timings is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(bytes(self._timings.serialize()))
