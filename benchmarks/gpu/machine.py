"""What a GPU machine is and lacks, how long its imports take, and whether the kernels can be built and loaded there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import distributions
from typing import Any

from tide_plugins.build.builder import Builder
from tide_plugins.build.compiler import compiler
from tide_plugins.kernels import KERNELS
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime.bundle.architectures import Architecture, architecture_for

from benchmarks.gpu.absent_gpu import AbsentGpu
from benchmarks.gpu.kit.bare_image import PACKAGES
from benchmarks.gpu.kit.case import Bench, Figures, KitCase

_TOOLS = ("nvcc", "compute-sanitizer", "gcc")
# Read from the disk before the stages that need them, and timed: the first import on a fresh machine is slow.
_IMPORTS = ("torch", "transformers", "onnx", "onnxruntime", "cuda.core")


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    if argument == "imports":
        for name in _IMPORTS:
            yield KitCase(name, partial(_imported, name), partial(_imported, name))
        return
    for look in (_system, _packages, _gpu):
        yield KitCase(look.__name__.strip("_"), look, look)
    yield KitCase("kernels_built", lambda: _built(_here()), lambda: _built(architecture_for(bench.compute)))
    yield KitCase("kernels_loaded", lambda: _loaded(CudaDriver()), lambda: _loaded(AbsentGpu(bench.compute)))


def _imported(name: str) -> Figures:
    """In a process of its own; torch's first context too, as far as there is a GPU."""
    touch = "; torch.cuda.is_available() and torch.zeros(8, device='cuda').sum().item()" if name == "torch" else ""
    code = f"import time; begin = time.perf_counter(); import {name}{touch}; print(time.perf_counter() - begin)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return {"seconds": float(done.stdout.split()[-1])}


def _system() -> Figures:
    """Kernel, cores, free disk and memory, tools."""
    free = {place: round(shutil.disk_usage(place).free / 2**30, 1) for place in (".", "/tmp", "/dev/shm")}
    versions = {tool: _last_lines([tool, "--version"]) for tool in _TOOLS if shutil.which(tool)}
    absent = [tool for tool in _TOOLS if tool not in versions]
    return {"kernel": os.uname().release, "cores": len(os.sched_getaffinity(0)), "free_gib": free, "tools": versions} | {
        "tools_absent": absent,
        "python": sys.version.split()[0],
    }


def _packages() -> Figures:
    """Versions of what the image has, and what it has besides."""
    found = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in distributions() if dist.metadata["Name"]}
    known = {name: found[name] for name in sorted(PACKAGES & found.keys())}
    return {"versions": known, "absent": sorted(PACKAGES - found.keys()), "further": sorted(found.keys() - PACKAGES)}


def _gpu() -> Figures:
    """As nvidia-smi and the driver tell it; without a GPU, why there is none."""
    asked = "name,driver_version,memory.total,compute_cap,clocks.sm,clocks.mem,power.limit,ecc.mode.current"
    smi = _last_lines(["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]) if shutil.which("nvidia-smi") else "absent"
    return {"nvidia_smi": smi, **_driver(), "nvrtc": compiler(13).versions}


def _driver() -> dict[str, Any]:
    from cuda.bindings import driver

    try:
        _, version = driver.cuDriverGetVersion()
        gpu = CudaDriver()
    except Exception as error:  # cuda.bindings raises RuntimeError where libcuda is missing
        return {"driver": f"{type(error).__name__}: {error}"}
    return {"driver": version, "name": gpu.name, "compute": gpu.compute, "sm_count": gpu.sm_count}


def _here() -> Architecture:
    return architecture_for(CudaDriver().compute)


def _built(architecture: Architecture) -> Figures:
    """All kernels, compiled in as many threads as there are cores: later stages find them in the cache."""
    builder = Builder()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        built = list(pool.map(lambda kernel: builder.build(kernel, architecture), KERNELS))
    resources = [resource for kernel in built for resource in kernel.image.resources.values()]
    spills = sum(resource.spill_store_bytes + resource.spill_load_bytes for resource in resources)
    return {"kernels": len(built), "bytes": sum(len(b.image.content) for b in built), "spill_bytes": spills}


def _loaded(driver: Any) -> Figures:
    """Every entry point: one that uses a device function the driver cannot link, as cudaGraphSetConditional, is named."""
    builder, architecture = Builder(), architecture_for(driver.compute)
    failed = {}
    for kernel in KERNELS:
        image = builder.build(kernel, architecture).image.content
        for symbol in kernel.entry_points:
            try:
                driver.load(image, architecture.ptx, symbol)
            except Exception as error:  # the others are tried all the same
                failed[symbol] = str(error)
    if failed:
        raise RuntimeError(f"{len(failed)} entry points cannot be loaded: {failed}")
    return {"entry_points": sum(len(kernel.entry_points) for kernel in KERNELS)}


def _last_lines(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    return " | ".join(lines[-2:])[:300]
