"""`CudaDriver` with the real cuda.core and cuda.bindings over a fake driver library."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.params import LoopTurnParams
from tide_runtime.errors import TargetError

_HERE = Path(__file__).parent
_PROGRAM = """
import ctypes, gc, sys
from pathlib import Path
from plugins.launch_case import EMPTY_KERNELS, router_tensors, turn_tensors
from tide_plugins.build.builder import Builder
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.decode_loop_launch import prepare_loop_turn
from tide_plugins.launch.exit_router_launch import prepare_exit_router
from tide_plugins.launch.kernel_library import KernelLibrary

driver = CudaDriver()
print(driver.device, driver.compute, driver.sm_count, driver.name)
library = KernelLibrary(driver, Builder(Path(sys.argv[1]), EMPTY_KERNELS))
if sys.argv[2] == "router":
    prepared = prepare_exit_router(library, epsilon=1e-6, stream=0xABC0, **router_tensors(rows=24))
    step, params = prepared.steps[0], prepared.params
    driver.launch(step.entry, step.plan, params, 0xABC0, step.arguments)
    fields = [getattr(type(params), name) for name in step.arguments]
    print(b"".join(bytes(params)[field.offset : field.offset + field.size] for field in fields).hex())
else:
    prepared = prepare_loop_turn(library, stream=0xABC0, slots=512, **turn_tensors())
    prepared.enqueue(0xABC0)
    print(bytes(prepared.params).hex())
"""


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    command = ["gcc", "-shared", "-fPIC", "-O1", str(_HERE / "fake_cuda" / "libcuda.c"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    return folder


def _run(driver_folder: Path, tmp_path: Path, kernel: str, **more: str) -> subprocess.CompletedProcess[str]:
    root = _HERE.parents[1]
    paths = os.pathsep.join(str(root / folder) for folder in ("", "runtime", "plugins", "tests"))
    places = {"LD_LIBRARY_PATH": str(driver_folder), "FAKE_CUDA_LOG": str(tmp_path / "log"), "PYTHONPATH": paths}
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "cache"), kernel]
    return subprocess.run(command, env=os.environ | places | more, capture_output=True, text=True, check=False)


def test_a_launch_reaches_the_driver_as_prepared(driver_folder: Path, tmp_path: Path) -> None:
    """Guards against handles or addresses of the wrong type, and against NVRTC's different behaviour with a driver present."""
    arguments = f"{ctypes.sizeof(LoopTurnParams)},"
    done = _run(driver_folder, tmp_path, "turn", FAKE_CUDA_ARGUMENTS=arguments)
    assert done.returncode == 0, done.stderr
    facts, sent = done.stdout.splitlines()
    assert facts == "0 90 132 made-up GPU"
    log = (tmp_path / "log").read_text().splitlines()
    assert log == [
        "load cubin",
        "kernel tide_loop_turn_f32 of 0xa0",
        f"launch 0xd0 grid 1 1 1 block 256 1 1 shared 0 on 0xabc0 extra 0 {sent}",
    ]


def test_arguments_reach_the_driver_one_by_one(driver_folder: Path, tmp_path: Path) -> None:
    """Guards against a router whose arguments are another field's bytes."""
    done = _run(driver_folder, tmp_path, "router", FAKE_CUDA_ARGUMENTS="8,8,4,4,4,4,8,")
    assert done.returncode == 0, done.stderr
    sent = done.stdout.splitlines()[1]
    log = (tmp_path / "log").read_text().splitlines()
    allocated = next(line for line in log if line.startswith("allocate"))
    size = re.fullmatch(r"allocate (\d+) on 0xabc0", allocated)
    assert size and f"fill 7000000 with 0, {size[1]} on 0xabc0" in log
    assert f"launch 0xd0 grid 16 8 3 block 256 1 1 shared 0 on 0xabc0 extra 0 {sent}" in log


def test_a_failed_launch_says_what_failed(driver_folder: Path, tmp_path: Path) -> None:
    done = _run(driver_folder, tmp_path, "turn", FAKE_CUDA_FAILS="1")
    assert "TargetError: cuLaunchKernel on GPU 0 failed: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure" in done.stderr


def test_no_driver_is_said_in_one_sentence() -> None:
    """Guards against an unclear error without a driver; with a GPU, an ordinal out of range replaces this case."""
    with pytest.raises(TargetError, match=r"^GPU 999 cannot be used: "):
        CudaDriver(999)
