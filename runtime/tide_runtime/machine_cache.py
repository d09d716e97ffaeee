"""Small files in the machine's cache: results of measurements, compiled kernels and engines.

They lie in ``$TIDE_CACHE_DIR/<kind>``, else ``$XDG_CACHE_HOME/tide/<kind>``, else ``~/.cache/tide/<kind>``. The folder may be
deleted. A file is written under another name and renamed, so that every process sees a whole one or none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

Result = TypeVar("Result")
# Of /proc/cpuinfo: what selects a kernel, on x86 and on Arm.
_PROCESSOR_FIELDS = {
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
}  # fmt: skip


def kept_result(
    kind: str,
    key: Sequence[str],
    measure: Callable[[], Result],
    encode: Callable[[Result], Any],
    decode: Callable[[Any], Result],
    folder: Path | None = None,
    max_queued: float = math.inf,
) -> Result:
    """What ``measure`` returns, which is called only if ``folder`` (default: the user's cache) has no result for ``key``.

    A damaged result is measured again. Where ``folder`` cannot be written, every call measures.

    Args:
        max_queued: a result is kept only if this process waited for a core in at most this share of the time: other processes
            would be part of what every later process believes.
        encode, decode: between a result and what JSON can hold; ``decode`` raises ValueError, KeyError or TypeError for anything
            else.
    """
    digest = key_name(key)
    with suppress(OSError, ValueError, RuntimeError, KeyError, TypeError):  # RuntimeError: there is no home folder
        return decode(json.loads(((folder or cache_folder(kind)) / digest).read_bytes())["result"])
    queued = queued_seconds()
    began = perf_counter()
    measured = measure()
    if queued_seconds() - queued > max_queued * (perf_counter() - began):
        return measured
    with suppress(OSError, RuntimeError):
        kept = json.dumps({"result": encode(measured), "key": [*key]})
        _write(folder or cache_folder(kind), digest, kept.encode())
    return measured


def key_name(parts: Iterable[str]) -> str:
    """The name of the file for what depends on ``parts``, in order."""
    return hashlib.sha256(json.dumps([*parts]).encode()).hexdigest()


def queued_seconds() -> float:
    """Seconds that the threads of this process have been ready and waited for a core; 0 where the system does not count them.

    Source: https://docs.kernel.org/scheduler/sched-stats.html, /proc/<pid>/schedstat, the second field, in nanoseconds.
    """
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread may have ended
            total += int(path.read_text(encoding="ascii").split()[1])
    return total / 1e9


def processor() -> str:
    """What kernels are selected by: the processor's model and instruction sets."""
    with suppress(OSError):
        block = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
        fields = [line.split(":", 1) for line in block.splitlines() if ":" in line]
        return json.dumps({name.strip(): value.strip() for name, value in fields if name.strip() in _PROCESSOR_FIELDS})
    return f"{platform.machine()} {platform.processor()} {platform.platform()}"


def cache_folder(kind: str) -> Path:
    if folder := os.environ.get("TIDE_CACHE_DIR"):
        return Path(folder) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tide" / kind


class CachedFiles:
    """Files below ``folder``, which is made by the first: a line of JSON, then bytes. Processes may share them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """The facts and the content stored for ``key``; None where there are none, or they are damaged on disk."""
        try:
            line, content = (self.folder / key).read_bytes().split(b"\n", 1)
            facts = json.loads(line)
        except (FileNotFoundError, ValueError):
            return None
        return (facts, content) if facts.pop("sha256") == hashlib.sha256(content).hexdigest() else None

    def store(self, key: str, facts: dict[str, Any], content: bytes) -> None:
        """``facts``: what JSON can hold."""
        line = json.dumps(facts | {"sha256": hashlib.sha256(content).hexdigest()})
        _write(self.folder, key, line.encode() + b"\n" + content)


def _write(folder: Path, name: str, content: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="new-", delete=False) as file:
        file.write(content)
    Path(file.name).rename(folder / name)
