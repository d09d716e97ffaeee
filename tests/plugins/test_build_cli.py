"""The command ``python -m tide_plugins build``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plugins.launch_case import EMPTY_KERNELS
from tide_plugins import cli
from tide_plugins.build import builder, compiler, toolchain
from tide_plugins.cli import app
from tide_plugins.kernels import KERNELS
from typer.testing import CliRunner, Result

_SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) NAME(float* x) {
  float v[64];
  for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  for (int j = 0; j < 64; ++j) { float s = 0; for (int i = 0; i < 64; ++i) s += v[i] * v[i ^ j]; x[j] = s; }
}
"""
_ENTRY_POINTS = sum(len(kernel.entry_points) for kernel in KERNELS)


@pytest.fixture
def empty_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Empty kernels, because the real ones take minutes to compile for all architectures."""
    files = dict(EMPTY_KERNELS)
    monkeypatch.setattr(builder, "sources", lambda: files)
    return files


def _build(cache: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["build", "--cache", str(cache), *arguments])


def test_the_table_has_every_entry_point_and_architecture(empty_kernels: dict[str, bytes], tmp_path: Path) -> None:
    done = _build(tmp_path, "--arch", "sm_70,sm_90,compute_121")
    assert done.exit_code == 0, done.output
    rows = [line for line in done.output.splitlines() if line.startswith("tide_")]
    assert len(rows) == _ENTRY_POINTS and all(re.fullmatch(r"tide_\w+ +\d+ +\d+ +\d+", row) for row in rows)
    images = 3 * len(KERNELS)
    assert f"{images} images" in done.output and f"0 with spills; {images} compiled, 0 from the cache" in done.output
    assert f"0 compiled, {images} from the cache" in _build(tmp_path, "--arch", "sm_70,sm_90,compute_121").output


def test_spills_are_named_and_fail_the_build(empty_kernels: dict[str, bytes], tmp_path: Path) -> None:
    """Guards against a successful exit code despite spills."""
    name = b'extern "C" __global__ void tide_exit_score_f16() {}'
    spilling = _SPILLING.replace("NAME", "tide_exit_score_f16").encode()
    empty_kernels["exit_score.cuh"] = empty_kernels["exit_score.cuh"].replace(name, spilling)
    done = _build(tmp_path, "--arch", "sm_75")
    assert done.exit_code == 1 and re.search(r"tide_exit_score_f16 +\d+ +\d+!", done.output)
    assert re.search(r"spills: tide_exit_score_f16 on sm_75: \d+ bytes stored, \d+ loaded per thread", done.output)
    facts = json.loads(_build(tmp_path, "--arch", "sm_75", "--json").stdout)
    assert len(facts["spills"]) == 1


def test_json_names_every_image_and_its_entry_points(empty_kernels: dict[str, bytes], tmp_path: Path) -> None:
    """Guards against facts that a script cannot read, or that leave out an image."""
    done = _build(tmp_path / "cache", "--arch", "sm_75,compute_121", "--json")
    images = json.loads(done.stdout)["images"]
    assert len(images) == 2 * len(KERNELS)
    router = next(image for image in images if image["file"] == "exit_router.sm_75.cubin")
    assert router["entry_points"][1]["name"] == "tide_exit_router_project_f16" and router["entry_points"][1]["dtype"] == "f16"
    assert router["entry_points"][1]["registers"] > 0


def test_markdown_replaces_what_stands_between_the_marks(empty_kernels: dict[str, bytes], tmp_path: Path) -> None:
    """Guards against changes to the text around the generated tables."""
    document = tmp_path / "README.md"
    document.write_text("# Kernels\n\n<!-- kernels -->\nold\n<!-- /kernels -->\n\nmore\n")
    done = _build(tmp_path / "cache", "--arch", "sm_75,sm_80", "--markdown", str(document))
    assert done.exit_code == 0, done.output
    written = document.read_text()
    head = "| entry point | static shared B | sm_75 | sm_80 |\n| --- | ---: | ---: | ---: |\n"
    assert f"{head}| tide_exit_router_project_f32 |" in written and "Compiled with nvidia-cuda-nvrtc==13." in written
    assert written.startswith("# Kernels\n\n<!-- kernels -->\n**") and written.endswith(".\n<!-- /kernels -->\n\nmore\n")
    assert "old" not in written


def test_a_document_without_marks_is_left_alone(empty_kernels: dict[str, bytes], tmp_path: Path) -> None:
    """Guards against overwriting an unrelated file."""
    document = tmp_path / "notes.md"
    document.write_text("mine")
    done = _build(tmp_path / "cache", "--arch", "sm_75", "--markdown", str(document))
    assert done.exit_code != 0 and "notes.md has no <!-- kernels --> … <!-- /kernels -->" in str(done.exception)
    assert document.read_text() == "mine"


def test_a_mistake_is_one_message_and_exit_code_2() -> None:
    """Guards against a traceback."""
    command = [sys.executable, "-m", "tide_plugins", "build", "--jobs", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "expected at least 1" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_compiler_is_said_and_the_rest_is_built(
    empty_kernels: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a failing build where CUDA 12, which only V100 needs, is not installed."""
    monkeypatch.setattr(cli, "KERNELS", KERNELS[:1])
    monkeypatch.setitem(toolchain._LIBRARY, 12, ("nvidia-cuda-nvrtc-of-nobody", "libnvrtc.so.12"))
    compiler.compiler.cache_clear()
    done = _build(tmp_path)
    compiler.compiler.cache_clear()
    assert done.exit_code == 0, done.output
    assert "not built: sm_70: the package nvidia-cuda-nvrtc-of-nobody is not installed" in done.output
    assert "sm_121" in done.output
