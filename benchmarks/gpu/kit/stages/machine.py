"""Stage 0: what the machine is, what it lacks, and whether the kernels can be built and loaded there."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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

_TOOLS = ("nvcc", "compute-sanitizer", "cuobjdump", "ncu", "gcc", "git", "make")
_REGISTRY = ("pypi.org", 443)


def cases(bench: Bench) -> Iterator[KitCase]:
    for name, seconds, look in (("system", 3, _system), ("packages", 1, _packages), ("gpu", 3, _gpu)):
        yield KitCase(name, seconds, look, look)
    yield KitCase("kernels_built", 40, _built_here, lambda: _built(architecture_for(bench.compute)), 80)
    yield KitCase("kernels_loaded", 5, lambda: _loaded(CudaDriver()), lambda: _loaded(AbsentGpu(bench.compute)))


def _system() -> Figures:
    """Kernel, cores, free disk, tools, and whether a package registry answers."""
    free = {place: round(shutil.disk_usage(place).free / 2**30, 1) for place in (".", "/tmp")}
    versions = {tool: _first_lines([tool, "--version"]) for tool in _TOOLS if shutil.which(tool)}
    return {
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
        "free_gib": free,
        "tools": versions,
        "tools_absent": [tool for tool in _TOOLS if tool not in versions],
        "registry": _registry(),
    }


def _registry() -> str:
    try:
        with socket.create_connection(_REGISTRY, timeout=2):
            return "answers"
    except OSError as error:
        return f"none ({error})"


def _packages() -> Figures:
    """Versions of what the image has, and what it has besides."""
    found = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in distributions() if dist.metadata["Name"]}
    known = {name: found[name] for name in sorted(PACKAGES & found.keys())}
    return {"versions": known, "absent": sorted(PACKAGES - found.keys()), "further": sorted(found.keys() - PACKAGES)}


def _gpu() -> Figures:
    """As nvidia-smi and the driver tell it; without a GPU, why there is none."""
    asked = "name,driver_version,memory.total,compute_cap,clocks.sm,clocks.mem,power.limit,ecc.mode.current"
    smi = _first_lines(["nvidia-smi", f"--query-gpu={asked}", "--format=csv"]) if shutil.which("nvidia-smi") else "absent"
    return {"nvidia_smi": smi, **_driver(), "nvrtc": compiler(13).versions}


def _driver() -> dict[str, Any]:
    from cuda.bindings import driver

    try:
        error, version = driver.cuDriverGetVersion()
        gpu = CudaDriver()
    except Exception as error:  # cuda.bindings raises RuntimeError where libcuda is missing
        return {"driver": f"{type(error).__name__}: {error}"}
    return {"driver": version, "name": gpu.name, "compute": gpu.compute, "sm_count": gpu.sm_count}


def _built_here() -> Figures:
    return _built(architecture_for(CudaDriver().compute))


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


def _first_lines(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    return " | ".join(lines[-2:])[:300]
