"""The CUDA kernels' source, compiled for the host and compared with NumPy in float64."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from plugins.host_driver import SANITIZE, HostDriver, host_library, on_host, run_case
from tide_plugins.conformance import CaseSpec, cases
from tide_plugins.kernels import CSRC, KERNELS
from tide_plugins.params import PARAMS

SPECS = {spec.name: spec for spec in cases()}
STRUCTS = {kernel: struct for kernel, struct in PARAMS.items() if kernel != "exit_router"}  # which takes the fields one by one
PER_KERNEL = 4  # cases that also run in other execution orders


def some(kernel: str, count: int) -> list[CaseSpec]:
    """``count`` evenly spaced cases of a kernel."""
    of_kernel = [spec for spec in SPECS.values() if spec.kernel == kernel]
    return of_kernel[:: max(1, len(of_kernel) // count)]


ORDERED = [spec for kernel in KERNELS for spec in some(kernel.name, PER_KERNEL)]
SANITIZED = [spec for spec in ORDERED if not any(f"-h{hidden}-" in spec.name for hidden in (4096, 4097, 8192))]


def test_there_are_as_many_cases_as_promised() -> None:
    """Guards against an empty list of cases."""
    assert len(SPECS) >= 250
    assert set(Counter(spec.kernel for spec in SPECS.values())) == {kernel.name for kernel in KERNELS}


@pytest.mark.parametrize(("place", "name"), enumerate(SPECS), ids=SPECS)
def test_kernel_equals_the_float64_reference(place: int, name: str) -> None:
    """Guards against wrong scores, decisions or tokens."""
    case = SPECS[name].build()
    case.check(run_case(case, HostDriver(order=place % 4)))


@pytest.mark.parametrize("spec", ORDERED, ids=lambda spec: spec.name)
def test_no_order_of_threads_and_blocks_changes_a_bit(spec: CaseSpec) -> None:
    """Guards against results that depend on execution order, such as by a missing barrier."""
    expected = _bits(run_case(spec.build(), HostDriver(order=0)))
    for order in (1, 2, 3):
        assert _bits(run_case(spec.build(), HostDriver(order=order))) == expected


def _bits(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def test_a_launch_can_be_replayed() -> None:
    """Guards against counters that do not return to zero, which break the second launch of a captured graph."""
    [spec] = [s for s in SPECS.values() if s.name == "exit_score-f32-v9001-mlp0"]
    case, driver = spec.build(), HostDriver(order=2)
    launch = case.prepare(driver.kernels(), stream=0, **case.numbers, **{n: on_host(t) for n, t in case.tensors.items()})
    for _ in range(3):
        case.tensors["score"][...] = 77
        launch.enqueue(0)
        case.check(case.tensors)


def test_a_turn_sets_the_graph_condition() -> None:
    """Guards against a WHILE node that stops too early or never."""
    driver = HostDriver()
    for name, proceeds in (("b3-left2-running3", 1), ("b3-left1-running3", 0), ("b3-left9-running0", 0)):
        driver.graph_condition()
        run_case(SPECS[name].build(), driver, graph_condition=1234)
        assert driver.graph_condition() == (1234, proceeds, 1)
        run_case(SPECS[name].build(), driver)
        assert driver.graph_condition() == (0, 0, 0), "no handle was given"


def test_python_structs_are_laid_out_as_the_compilers(tmp_path: Path) -> None:
    """Guards against struct fields at other offsets than the compiler's."""
    source, expected = tmp_path / "layout.cpp", []
    lines = ["#include <cstddef>", "#include <cstdio>", *(f'#include "{kernel}_params.h"' for kernel in STRUCTS), "int main() {"]
    for kernel, struct in STRUCTS.items():
        fields = [name for name, *_ in struct._fields_]
        places = [f"offsetof(tide::{kernel}_params, {name})" for name in fields] + [f"sizeof(tide::{kernel}_params)"]
        lines += [f'std::printf("{kernel} {name} %zu\\n", {at});' for name, at in zip([*fields, "size"], places, strict=True)]
        offsets = [*(getattr(struct, name).offset for name in fields), ctypes.sizeof(struct)]
        expected += [f"{kernel} {name} {at}" for name, at in zip([*fields, "size"], offsets, strict=True)]
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run(["g++", "-std=c++17", f"-I{CSRC}", str(source), "-o", str(tmp_path / "layout")], check=True)
    assert subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True).stdout.splitlines() == expected


_SANITIZED = """
from plugins.host_driver import SANITIZE, HostDriver, host_library, run_case
from plugins.test_kernels_on_host import SANITIZED
driver = HostDriver(order=2, library=host_library(*SANITIZE))
for spec in SANITIZED:
    case = spec.build()
    case.check(run_case(case, driver))
print("clean")
"""


def test_sanitizers_find_nothing() -> None:
    """Guards against out-of-bounds reads of rows or shared memory, which a GPU may not report."""
    library = host_library(*SANITIZE)
    assert library.exists()
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", _SANITIZED], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "clean" in result.stdout, result.stdout + result.stderr[-4000:]
