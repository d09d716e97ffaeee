"""Held-out standard-library files as a folder, for prompts and calibration."""

import platform
import shutil
from pathlib import Path

from .corpus import SourceFile

NOTICE = """# Held-out Python source

Files of CPython {version}'s standard library that the demo models were not trained on: those with
`int(sha1(path), 16) % 20 == 0`, path relative to the library folder. Written by
`examples/train_demo_model.py export-heldout`; use them for prompts and calibration.

Copyright (c) Python Software Foundation and contributors; distributed under the PSF License Agreement
(https://docs.python.org/3/license.html). Some files carry notices of their own.

{listing}
"""


def write_held_out(files: list[SourceFile], out: Path, limit: int) -> list[SourceFile]:
    """Write held-out files, in order of their paths, up to `limit` bytes in all; returns those written.

    Raises ValueError if `out` holds anything that an earlier call did not write.
    """
    foreign = {path.name for path in out.glob("*")} - {"stdlib", "README.md"}
    if foreign:
        raise ValueError(f"{out} holds other files ({', '.join(sorted(foreign))}); choose an empty folder")
    chosen, total = [], 0
    for file in sorted((file for file in files if file.held_out), key=lambda file: file.path):
        size = len(file.text.encode())
        if total + size <= limit:
            chosen.append(file)
            total += size
    shutil.rmtree(out, ignore_errors=True)
    for file in chosen:
        target = out / "stdlib" / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.text.encode())
    listing = "\n".join(f"- `stdlib/{file.path}` ({len(file.text.encode()):,} bytes)" for file in chosen)
    (out / "README.md").write_text(NOTICE.format(version=platform.python_version(), listing=listing))
    return chosen
