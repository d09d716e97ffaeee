"""Run a command as on an older processor: the kernels for AVX512-VNNI, AVX2, AVX or SSE4, at this processor's own speed.

    python -m benchmarks.cpu_mask AVX2 python -m benchmarks.tasks --quick

Libraries choose kernels by `cpuid`, which Linux can make fault on Intel's processors; `cpu_mask.c` then answers it. Results are
those of the older processor, bit for bit. Times are those of its kernels on this one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from tide_runtime.machine_cache import processor

SETS = ("VNNI", "AVX2", "AVX", "SSE4")  # VNNI: all of AVX512, and no AMX
FOLDER = Path("build/cpu_mask")


def unavailable() -> str | None:
    """Why instruction sets cannot be hidden here; None: they can."""
    return None if "cpuid_fault" in processor() else "the processor or the kernel cannot trap cpuid (no flag cpuid_fault)"


def masked_environment(stays: str, folder: Path) -> dict[str, str]:
    """Variables with which a program, and all that it starts, sees no instruction set newer than ``stays``, one of `SETS`.

    ``folder`` holds the compiled `cpu_mask.c` and, for each set, the measurements that the runtime keeps of a machine: it knows
    processors by /proc/cpuinfo, where nothing is hidden. Raises subprocess.CalledProcessError when the compiler fails.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "cpu_mask.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, Path(__file__).with_suffix(".c")], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "CPU_MASK": stays, "TIDE_CACHE_DIR": str(folder / stays)}


def main(
    stays: Annotated[str, typer.Argument(help=f"The newest instruction set that stays: {', '.join(SETS)}.")],
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
) -> None:
    """Run a command with newer instruction sets hidden."""
    if stays not in SETS:
        raise typer.BadParameter(f"{stays!r} is not known; give one of {', '.join(SETS)}")
    if (reason := unavailable()) is not None:
        raise typer.BadParameter(reason)
    raise typer.Exit(subprocess.run(command, env=masked_environment(stays, FOLDER)).returncode)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(main)
    app()
