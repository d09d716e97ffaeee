"""Reports of benchmarks on a GPU: they name the GPU, and the targets that ran on it."""

from __future__ import annotations

from typing import Any

import onnxruntime
from tide_bench.report import Report


def gpu_report(benchmark: str, gpu: str, **settings: Any) -> Report:
    """The report of a run on ``gpu``, by its name. It names no targets until they have run: see `executed`."""
    report = Report(benchmark, targets=[], **settings)
    report.machine |= {"gpu": gpu, "onnxruntime": onnxruntime.__version__}  # whose package is onnxruntime-gpu here
    return report


def executed(report: Report, target: str) -> None:
    """Note that ``target`` has run: what README's "Verified how" goes by."""
    if target not in report.settings["targets"]:
        report.settings["targets"].append(target)
