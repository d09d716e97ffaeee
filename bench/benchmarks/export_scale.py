"""How long an export takes and how much memory, from a 135M to a 7B: `tide-export` with its defaults, each file in a process.

    python -m benchmarks.export_scale                         # about 12 minutes on 2 cores, 20 GB of disk in --folder
    python -m benchmarks.export_scale --cases smollm2,05b

SmolLM2 is its authors' GGUF file; for it also the time until `tide-run FILE` has printed a token, with nothing cached. The others
are random weights in the shapes of Qwen2.5 and of a Llama, made here and deleted afterwards, one at a time; their bundles too.
Memory is what only the process has (RssAnon), read 20 times a second: pages of mapped files, which the system takes back when it
needs them, are not in it. Files are in the page cache when the export starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated

import typer
from tide_bench.build_cache import run_in_process
from tide_bench.report import Report
from tide_bench.tables import console

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import smollm2_file
from benchmarks.models.model_folders import write_llama_1b_bf16
from benchmarks.models.random_gguf import SHAPES, write_random_gguf

_INTERVAL = 0.05  # s between two readings of memory
GIB, GB = 2**30, 1e9


@dataclass(frozen=True)
class Case:
    """``make``: writes the model below a folder, or says where it is. ``options``: of tide-export."""

    title: str
    make: Callable[[Path], Path]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """Seconds, largest anonymous memory in bytes, bytes of the model's files and of the bundle, and the phases as printed."""

    seconds: float
    anonymous: int
    source: int
    bundle: int
    printed: str


class ExportFailedError(Exception):
    """An export failed; the message is what it printed."""


def _random(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        file = folder / f"{name}.gguf"
        run_in_process(write_random_gguf, SHAPES[name], file)
        return file

    return make


def _llama_bf16(folder: Path) -> Path:
    run_in_process(write_llama_1b_bf16, folder / "llama")
    return folder / "llama"


CASES = {
    "smollm2": Case("SmolLM2-135M, Q4_1", lambda folder: smollm2_file()),
    "05b": Case("Qwen2.5 0.5B, random, Q4_K, Q5_0, Q8_0", _random("05b")),
    "18b": Case("Qwen2.5 1.8B, random, Q4_0", _random("18b")),
    "7b": Case("Qwen2.5 7B, random, Q4_0", _random("7b")),
    "1b_bf16": Case("Llama 1.1B, random, bf16 to int4", _llama_bf16, ("--weights", "int4")),
}


def measure(source: Path, out: Path, options: tuple[str, ...]) -> Measured:
    """Export ``source``. Raises ExportFailedError if that fails."""
    command = [sys.executable, "-c", "from tide_export.cli import main; main()", str(source), "--out", str(out), *options]
    start, anonymous = perf_counter(), 0
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        while process.poll() is None:
            anonymous = max(anonymous, anonymous_bytes(process.pid))
            sleep(_INTERVAL)
        seconds = perf_counter() - start
        printed.seek(0)
        text = printed.read()
    if process.returncode:
        raise ExportFailedError(text)
    return Measured(seconds, anonymous, measured_bytes(source), measured_bytes(out), text)


def first_token_seconds(file: Path, folder: Path) -> float:
    """Seconds until `tide-run` prints the first text of the model in ``file``, with nothing in its cache, which is ``folder``."""
    command = [sys.executable, "-m", "tide_runtime.cli.run", str(file), "Why is the sky blue?", "--chat", "--max-new-tokens", "4"]
    environment, start = {**os.environ, "TIDE_CACHE_DIR": str(folder)}, perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    printed, seconds = process.stdout.read(1), perf_counter() - start
    _, errors = process.communicate()
    if process.returncode or not printed:
        raise RuntimeError(f"tide-run {file.name} failed: {errors.decode()}")
    return seconds


def anonymous_bytes(pid: int) -> int:
    """Bytes of memory that belong to the process alone; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def measured_bytes(path: Path) -> int:
    """Bytes of a file, or of a bundle's or a folder's files."""
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(
    cases: Annotated[str, typer.Option(help="Which models, in this order.")] = ",".join(CASES),
    folder: Annotated[Path, typer.Option(help="Where models and bundles lie while they are needed.")] = Path("build"),
    options: Annotated[str, typer.Option(help="More options of tide-export, separated by spaces.")] = "",
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure exports on this machine."""
    names = chosen_names(cases, CASES, "cases")
    report = Report("export_scale", cases=names, options=options)
    for name in names:
        case = CASES[name]
        with _folder(folder) as place:
            source = case.make(place)
            try:
                found = measure(source, place / "bundle", (*case.options, *options.split()))
            except ExportFailedError as error:  # the other cases' figures are kept
                console().print(str(error), markup=False)
                report.rows.append({"case": name, "title": case.title, "failed": str(error)})
                continue
            if name == "smollm2":  # which has a tokenizer
                report.add(f"first_token_s_{name}", first_token_seconds(source, place / "cache"))
        console().print(found.printed, markup=False)
        report.rows.append({"case": name, "title": case.title, **{k: v for k, v in vars(found).items() if k != "printed"}})
        report.add(f"export_s_{name}", found.seconds)
        report.add(f"export_gib_{name}", found.anonymous / GIB)
        report.add(f"bundle_ratio_{name}", found.bundle / found.source)
    headings = ["model", "file, GB", "seconds", "memory, GiB", "bundle / file"]
    rows = [
        [row["title"], "", "failed", "", ""]
        if "failed" in row
        else [row["title"], f"{row['source'] / GB:.2f}", f"{row['seconds']:.0f}", f"{row['anonymous'] / GIB:.2f}",
         f"{row['bundle'] / row['source']:.2f}"]
        for row in report.rows
    ]  # fmt: skip
    verified = "Not verified" if "--no-verify" in options.split() else "Verified"
    report.table("Export", headings, rows, f"{verified}. Memory of the process alone, without pages of mapped files.")
    report.finish(json)
    if any("failed" in row for row in report.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
