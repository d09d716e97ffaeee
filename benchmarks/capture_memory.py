"""Growth of memory with the calibration text: peak resident memory above the model while few and many tokens are captured.

Each capture runs in a process of its own. Peak memory is the kernel's count (VmHWM), mapped files and all, from the moment
the model is loaded. Every second layer is kept, and the last two states.

python -m benchmarks.capture_memory
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.in_process import run_in_process
from tide_bench.report import Report
from tide_calibrate.capture.capture import capture
from tide_calibrate.config import candidate_layers
from tide_calibrate.text.documents import Windows
from tide_runtime.errors import ParamsError

from benchmarks.models.demo import BENCH_MODELS
from tide_export.progress import ExportProgress
from tide_export.trace import decoder_layers

LENGTH = 256
STATUS = Path("/proc/self/status")


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(BENCH_MODELS)}.")] = "1b",
    tokens: Annotated[int, typer.Option(help="Of the larger capture; the smaller one has a quarter.")] = 8192,
    threads: Annotated[int, typer.Option(help="Of torch.")] = 2,
    folder: Annotated[Path | None, typer.Option(help="Where captures are written for a while.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Capture ``tokens`` and a quarter of them; print peak memory above the model and tokens/s of both."""
    if model not in BENCH_MODELS or tokens < 4 * LENGTH:
        raise ParamsError(f"give one of the models {', '.join(BENCH_MODELS)}, and at least {4 * LENGTH} tokens")
    report = Report("capture_memory", model=model, tokens=tokens, threads=threads)
    for count in (tokens // 4, tokens):
        report.rows.append(run_in_process(measure, model, count // LENGTH, threads, folder))
    Console().print(_table(report))
    last = report.rows[-1]
    report.add("capture_peak_above_model_gib", last["peak_above_model_gib"])
    report.add("capture_tokens", last["tokens"])
    report.add("capture_tokens_per_s", last["tokens_per_s"])
    report.finish(json)


def measure(name: str, count: int, threads: int, folder: Path | None) -> dict[str, float]:
    """Capture ``count`` windows of random tokens; sizes in GiB."""
    torch.set_num_threads(threads)
    loaded = BENCH_MODELS[name]()
    layers = len(decoder_layers(loaded.model))
    candidates = sorted({*candidate_layers("every:2", layers), layers - 1, layers})
    windows = random_windows(count, loaded.model.config.get_text_config().vocab_size)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
    model_gib = _status_gib("VmRSS")
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        begin = time.perf_counter()
        capture(loaded, windows, np.zeros(1, np.int8), candidates, Path(directory), progress=ExportProgress())
        seconds = time.perf_counter() - begin
        files = sum(path.stat().st_size for path in Path(directory).iterdir()) / 2**30
    return {
        "tokens": windows.total_tokens,
        "model_gib": model_gib,
        "files_gib": files,
        "peak_above_model_gib": _status_gib("VmHWM") - model_gib,
        "tokens_per_s": windows.total_tokens / seconds,
    }


def random_windows(count: int, vocab: int) -> Windows:
    tokens = np.random.default_rng(0).integers(0, vocab, (count, LENGTH)).astype(np.int32)
    return Windows(tokens, np.full(count, LENGTH, np.int32), np.zeros(count, np.int32))


def _status_gib(field: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 2**20


def _table(report: Report) -> Table:
    table = Table(title=f"capture of {report.settings['model']}, {report.settings['threads']} threads")
    for column in report.rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in report.rows:
        table.add_row(*(f"{value:,.0f}" if value >= 1000 else f"{value:.3f}" for value in row.values()))
    return table


if __name__ == "__main__":
    typer.run(main)
