"""libtide_plugins.so against TensorRT's real headers: it builds without warnings, and its life cycle runs without a GPU.

Set TENSORRT_INCLUDE_DIR to a checkout of github.com/NVIDIA/TensorRT, or to several separated by ':' (10.4 or newer, 11.x).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from plugins.host_driver import host_library

SOURCES = Path(__file__).parents[2] / "plugins" / "trt"
IMAGES = sorted(str(image) for image in (SOURCES / "test" / "images").iterdir())
HEADERS: list[str | None] = [folder for folder in os.environ.get("TENSORRT_INCLUDE_DIR", "").split(os.pathsep) if folder] or [
    None
]
TESTS = 28

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


def configure(build: Path, headers: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(SOURCES), "-B", str(build), f"-DTENSORRT_INCLUDE_DIR={headers}", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module", params=HEADERS, ids=lambda folder: str(folder).strip("/").replace("/", "-"))
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library and its test programs, built from scratch with warnings as errors."""
    if request.param is None:
        pytest.skip("TensorRT's headers are not here; name a checkout of NVIDIA/TensorRT in TENSORRT_INCLUDE_DIR")
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    folder = tmp_path_factory.mktemp("trt")
    kernels = (f"-DTIDE_KERNEL_IMAGES={';'.join(IMAGES)}", f"-DTIDE_HOST_KERNELS={host_library()}")
    options = ("-DTIDE_WERROR=ON", "-DTIDE_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DTIDE_CUDA_ARCHITECTURES=", *kernels)
    configured = configure(folder, request.param, *options)
    assert configured.returncode == 0, configured.stderr
    built = subprocess.run(["cmake", "--build", str(folder), "--parallel", "2"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "warning" not in (configured.stderr + built.stdout + built.stderr).lower()
    return folder


def test_the_entry_points_are_exported_and_nothing_else(build):
    """Guards against missing entry points, and symbols that collide with other plugin libraries."""
    command = ["nm", "-D", "--defined-only", str(build / "libtide_plugins.so")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[1:] for line in lines] == [["T", "getCreators"], ["T", "setLoggerFinder"]]


def test_nothing_of_cuda_or_tensorrt_is_linked(build):
    """Guards against a library that does not load without CUDA, or loads a second CUDA runtime."""
    command = ["readelf", "-d", str(build / "libtide_plugins.so")]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "libstdc++" in needed and "cuda" not in needed and "nvinfer" not in needed


@pytest.mark.parametrize("program, tests", [("life_cycle", TESTS), ("without_driver", 1)])
def test_the_plugins_whole_life(build, program, tests):
    """Guards against wrong shapes, formats, pointers or fields, from creation to enqueue."""
    command = [str(build / "test" / program), str(build / "libtide_plugins.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * tests


@needs_cmake
def test_missing_headers_are_explained(tmp_path):
    """Guards against an error that does not say that pip packages have no headers."""
    configured = configure(tmp_path, "/nonexistent")
    assert configured.returncode != 0
    for words in ("NvInferRuntime.h", "-DTensorRT_ROOT", "https://github.com/NVIDIA/TensorRT", "-DTENSORRT_INCLUDE_DIR"):
        assert words in configured.stderr


@needs_cmake
def test_headers_that_are_too_old_are_refused(tmp_path):
    """Guards against a later compile error in an interface that TensorRT before 10.4 lacks."""
    old = tmp_path / "include"
    old.mkdir()
    (old / "NvInferRuntime.h").touch()
    (old / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 10 //!< major\n#define NV_TENSORRT_MINOR 3  //!< minor\n")
    configured = configure(tmp_path / "build", str(tmp_path))
    assert configured.returncode != 0 and "is of TensorRT 10.3; the plugins need 10.4" in " ".join(configured.stderr.split())
