"""Stage 1: whether a kernel can steer a graph at all, and what a captured cuBLAS call consists of (review item A1)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime.bundle.architectures import architecture_for

from benchmarks.gpu.conditional_kernel import EXPECTED, CountDown
from benchmarks.gpu.cublas_capture import ARMS
from benchmarks.gpu.driver_api import AbsentDriverApi, DriverApi
from benchmarks.gpu.kit.case import Bench, Figures, KitCase


def cases(bench: Bench) -> Iterator[KitCase]:
    yield KitCase("count_down", 4, _count_down, lambda: _assembled(bench))
    for arm in ARMS:
        yield KitCase(f"cublas_{arm}", 6, lambda arm=arm: _cublas(arm), lambda arm=arm: _cublas(arm, "--dry"))  # type: ignore[misc]


def _count_down() -> Figures:
    """WHILE and a nested IF, set by kernels, without any library."""
    architecture = architecture_for(CudaDriver().compute)
    graph = CountDown(DriverApi(), architecture.name)
    found = [graph.run() for _ in range(2)]
    assert found == [EXPECTED] * 2, f"the counts are {found}, expected {EXPECTED} after both launches"
    return {"counts": found}


def _assembled(bench: Bench) -> Figures:
    api = AbsentDriverApi()
    CountDown(api, bench.arch)
    return {"calls": len(api.calls)}


def _cublas(*arguments: str) -> Figures:
    command = [sys.executable, "-m", "benchmarks.gpu.cublas_capture", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])
