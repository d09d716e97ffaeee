"""Results of measurements of this machine, kept between processes.

They lie in ``$TIDE_CACHE_DIR/<kind>``, else ``$XDG_CACHE_HOME/tide/<kind>``, else ``~/.cache/tide/<kind>``. The folder may be
deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
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
) -> Result:
    """What ``measure`` returns, which is called only if ``folder`` (default: the user's cache) has no result for ``key``.

    A damaged result is measured again. Where ``folder`` cannot be written, every call measures.

    Args:
        encode, decode: between a result and what JSON can hold; ``decode`` raises ValueError, KeyError or TypeError for anything
            else.
    """
    digest = hashlib.sha256(json.dumps([*key]).encode()).hexdigest()
    with suppress(OSError, ValueError, RuntimeError, KeyError, TypeError):  # RuntimeError: there is no home folder
        return decode(json.loads(((folder or cache_folder(kind)) / digest).read_bytes())["result"])
    measured = measure()
    with suppress(OSError, RuntimeError):
        _write(folder or cache_folder(kind), digest, json.dumps({"result": encode(measured), "key": [*key]}))
    return measured


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


def _write(folder: Path, name: str, text: str) -> None:
    """Write to a temporary file and rename it, so that a reader sees a whole result or none."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="new-", delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).rename(folder / name)
