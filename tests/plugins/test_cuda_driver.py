"""`CudaDriver` with the real cuda.core and cuda.bindings over a fake driver library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime.errors import TargetError

_HERE = Path(__file__).parent
_PROGRAM = """
import ctypes, gc, sys
from pathlib import Path
from plugins.launch_case import EMPTY_KERNELS, router_tensors
from tide_plugins.build.builder import Builder
from tide_plugins.build.cubin_cache import CubinCache
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.exit_router import prepare_exit_router
from tide_plugins.launch.kernel_library import KernelLibrary

driver = CudaDriver()
print(driver.device, driver.compute, driver.sm_count, driver.name)
library = KernelLibrary(driver, Builder(CubinCache(Path(sys.argv[1])), EMPTY_KERNELS))
prepared = prepare_exit_router(library, threshold=0.5, epsilon=1e-6, stream=0xABC0, **router_tensors(rows=4096, width=192))
prepared.enqueue(0xABC0)
print(bytes(prepared.params).hex())
"""


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    command = ["gcc", "-shared", "-fPIC", "-O1", str(_HERE / "fake_cuda" / "libcuda.c"), "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, check=True)
    return folder


def _run(driver_folder: Path, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    root = _HERE.parents[1]
    paths = os.pathsep.join(str(root / folder) for folder in ("", "runtime", "plugins", "tests"))
    places = {"LD_LIBRARY_PATH": str(driver_folder), "FAKE_CUDA_LOG": str(tmp_path / "log"), "PYTHONPATH": paths}
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "cache")]
    return subprocess.run(command, env=os.environ | places | more, capture_output=True, text=True, check=False)


def test_a_launch_reaches_the_driver_as_prepared(driver_folder: Path, tmp_path: Path) -> None:
    """Guards against handles or addresses of the wrong type, and against NVRTC's different behaviour with a driver present."""
    done = _run(driver_folder, tmp_path)
    assert done.returncode == 0, done.stderr
    facts, sent = done.stdout.splitlines()
    assert facts == "0 90 132 made-up GPU"
    log = (tmp_path / "log").read_text().splitlines()
    assert log[:3] == ["load cubin", "kernel tide_exit_router_tiled_f16 of 0xa0", "attribute 8 = 61440 for 0xd0 on 0"]
    allocated = re.fullmatch(r"allocate (\d+) on 0xabc0", log[3])
    assert allocated and log[4] == f"fill 7000000 with 0, {allocated[1]} on 0xabc0"
    assert log[5] == f"launch 0xd0 grid 4 1 32 block 384 1 1 shared 61440 on 0xabc0 extra 0 {sent}"
    assert log[6:] in ([], ["free 7000000"])  # cuda.core may or may not free at interpreter exit


def test_a_failed_launch_says_what_failed(driver_folder: Path, tmp_path: Path) -> None:
    done = _run(driver_folder, tmp_path, FAKE_CUDA_FAILS="1")
    assert "TargetError: cuLaunchKernel on GPU 0 failed: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure" in done.stderr


def test_no_driver_is_said_in_one_sentence() -> None:
    """Guards against an unclear error without a driver; with a GPU, an ordinal out of range replaces this case."""
    with pytest.raises(TargetError, match=r"^GPU 999 cannot be used: "):
        CudaDriver(999)
