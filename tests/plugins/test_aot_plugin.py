"""The router as ahead-of-time plugins: what the real bindings make of them, and what is refused before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from api import bindings
from tide_plugins.launch.exit_router_launch import float_bits
from tide_plugins.trt import aot
from tide_runtime.errors import ParamsError, TargetError


@pytest.mark.parametrize("hidden, down", [((2, 64), (257, 64)), ((2, 64), (8, 65)), ((64,), (8, 64)), ((2, 64), (8, -1))])
def test_shapes_that_do_not_fit_are_refused(hidden, down):
    """Guards against kernels that read past the end of their weights."""
    states, matrix = (SimpleNamespace(shape=shape) for shape in (hidden, down))
    with pytest.raises(ParamsError, match=r"expected \["):
        aot.add_exit_router(None, states, matrix, None, None, None)


@pytest.mark.parametrize("installed, said", [(None, r"pip install 'tide-llm\[tensorrt\]'"), ("10.8.0", r"10\.8.*need 10\.9")])
def test_a_missing_or_old_tensorrt_is_explained(monkeypatch, installed, said):
    """Guards against an ImportError that does not say what to install, and an AttributeError inside TensorRT 10.8."""
    module = None if installed is None else ModuleType("tensorrt")
    if module is not None:
        module.__version__ = installed
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", module)
    aot.registered.cache_clear()
    with pytest.raises(TargetError, match=said):
        aot.registered()


def test_scores_through_the_real_bindings_are_those_of_the_reference(tmp_path):
    """Guards against engines whose exits differ from the calibrated ones, and against wrong names, order or types of arguments,
    which only the real tensorrt.plugin checks."""
    installed = bindings.folder("11.4")
    if installed is None:
        pytest.skip(f"TensorRT's bindings 11.4 are not in {bindings.FOLDER}: make bindings")
    stubs = bindings.empty_libraries(installed, tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *sys.path])}
    command = [sys.executable, str(Path(__file__).with_name("aot_in_real_bindings.py")), *map(str, stubs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    groups, chunks, slices = 2, 16, 7  # of 15 rows in eights, 4096 in 256s, 100 in sixteens
    launch = {"grid_y": 1, "grid_z": 1, "block_x": 256, "block_y": 1, "block_z": 1, "shared_mem": 0}
    assert found["project"] == {
        "output": [groups * chunks * 8 * (slices * 16 + 1)],
        "launch": launch | {"grid_x": chunks, "grid_y": slices, "grid_z": groups},
        "scalars": [15, 4096, 100, 256],
    }
    assert found["score"] == {
        "output": [3, 5],
        "launch": launch | {"grid_x": groups, "shared_mem": 8 * slices * 16 * 4},
        "scalars": [15, 4096, 100, 256, float_bits(1e-5)],
    }
