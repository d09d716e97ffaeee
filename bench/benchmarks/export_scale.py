"""From a file to its first token, from a 135M to a 7B: `tide-run FILE` with its defaults and nothing cached.

    python -m benchmarks.export_scale                         # 25 GB of disk in --folder; the 7B alone takes seven minutes
    python -m benchmarks.export_scale --cases smollm2,05b     # four minutes on 2 cores

SmolLM2 is its authors' GGUF file. Afterwards it runs once more with nothing in the cache but traces, as a second file of a family
does. The others are random weights in the shapes of Qwen2.5 and of a Llama, made here and deleted afterwards, one at a time.
Seconds until the first text, and until the bundle is verified behind it; memory is what only the exporter has (RssAnon), read 20
times a second: pages of mapped files, which the system takes back when it needs them, are not in it. Disk is the file and all
that the cache holds of it. Files are in the page cache when the command starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated

import psutil
import typer
from tide_bench.build_cache import run_in_process
from tide_bench.report import Report
from tide_bench.tables import console

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import smollm2_file
from benchmarks.models.model_folders import write_llama_1b_bf16
from benchmarks.models.random_gguf import SHAPES, byte_vocabulary, write_random_gguf

_INTERVAL = 0.05  # s between two readings of memory
GIB = 2**30
GB = 1e9


@dataclass(frozen=True)
class Case:
    """``make``: writes the model below a folder, or says where it is. ``options``: of tide-run."""

    title: str
    make: Callable[[Path], Path]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirstRun:
    """Seconds until the first text and until the end; the exporter's largest anonymous memory, the model's files and all files of
    the model and the cache, in bytes; and what was printed on stderr."""

    first_token_s: float
    verified_s: float
    anonymous: int
    source: int
    disk: int
    printed: str


def _random(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        file = folder / f"{name}.gguf"
        run_in_process(write_random_gguf, SHAPES[name], file, partial(byte_vocabulary, many_control=False))
        return file

    return make


def _llama_bf16(folder: Path) -> Path:
    run_in_process(write_llama_1b_bf16, folder / "llama")
    return folder / "llama"


CASES = {
    "smollm2": Case("SmolLM2-135M, Q4_1", lambda folder: smollm2_file()),
    "05b": Case("Qwen2.5 0.5B, random, Q4_K, Q5_0, Q8_0", _random("05b")),
    "7b": Case("Qwen2.5 7B, random, Q4_0", _random("7b")),
    "1b_bf16": Case("Llama 1.1B, random, bf16 to int4", _llama_bf16, ("--weights", "int4")),
}


def first_run(model: Path, cache: Path, options: tuple[str, ...] = ()) -> FirstRun:
    """Run ``model`` with the folder ``cache``. Raises RuntimeError if that fails."""
    command = [
        sys.executable,
        "-m",
        "tide_runtime.cli.run",
        str(model),
        "Why is the sky blue?",
        "--max-new-tokens",
        "4",
        *options,
    ]
    start = perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "TIDE_CACHE_DIR": str(cache)}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout is not None
        memory = _Memory(process.pid)
        printed = process.stdout.read(1)
        first_token_s = perf_counter() - start
        process.communicate()
        seconds = perf_counter() - start
        errors.seek(0)
        text = errors.read()
    if process.returncode or not printed:
        raise RuntimeError(f"tide-run {model.name} failed: {text}")
    source = _bytes(model)
    return FirstRun(first_token_s, seconds, memory.peak(), source, source + _bytes(cache), text)


class _Memory:
    """Reads the anonymous memory of the children of a process until they have ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._largest = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            with suppress(psutil.Error, OSError):
                for child in psutil.Process(self._pid).children():
                    self._largest = max(self._largest, _anonymous_bytes(child.pid))

    def peak(self) -> int:
        self._ended.set()
        self._thread.join()
        return self._largest


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _bytes(path: Path) -> int:
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
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure first runs of model files on this machine."""
    names = chosen_names(cases, CASES, "cases")
    report = Report("export_scale", cases=names)
    for name in names:
        case = CASES[name]
        with _folder(folder) as place:
            model = case.make(place)
            cache = place / "cache"
            try:
                run = first_run(model, cache, case.options)
                if name == "smollm2":
                    shutil.rmtree(cache / "bundles")
                    report.add("second_file_first_token_s", first_run(model, cache, case.options).first_token_s)
            except RuntimeError as error:  # the other cases' figures are kept
                console().print(str(error), markup=False)
                report.rows.append({"case": name, "title": case.title, "failed": str(error)})
                continue
        console().print(run.printed, markup=False)
        report.rows.append({"case": name, "title": case.title, **{k: v for k, v in asdict(run).items() if k != "printed"}})
        report.add(f"first_token_s_{name}", run.first_token_s)
        report.add(f"verified_s_{name}", run.verified_s)
        report.add(f"export_gib_{name}", run.anonymous / GIB)
        report.add(f"disk_ratio_{name}", run.disk / run.source)
    headings = ["model", "file, GB", "first token, s", "verified, s", "exporter's memory, GiB", "disk / file"]
    rows = [
        [row["title"], "", "failed", "", "", ""]
        if "failed" in row
        else [
            row["title"],
            f"{row['source'] / GB:.2f}",
            f"{row['first_token_s']:.0f}",
            f"{row['verified_s']:.0f}",
            f"{row['anonymous'] / GIB:.2f}",
            f"{row['disk'] / row['source']:.2f}",
        ]
        for row in report.rows
    ]
    report.table("From a file to its first token", headings, rows, "Nothing cached; the bundle is verified behind the answer.")
    report.finish(json)
    if any("failed" in row for row in report.rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
