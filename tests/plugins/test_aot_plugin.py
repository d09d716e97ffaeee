"""The router as ahead-of-time plugins: launches of `add_exit_router`, run on the host, and a check with real bindings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import plugins.fake_tensorrt as fake_tensorrt
import pytest
from api import bindings
from plugins.host_driver import HostDriver, on_host
from tide_plugins.conformance.case import TOLERANCE
from tide_plugins.launch.exit_router import float_bits, prepare_exit_router
from tide_plugins.params import ExitRouterParams
from tide_plugins.plans import LaunchPlan
from tide_plugins.reference import exit_router
from tide_plugins.trt import aot
from tide_runtime.errors import ParamsError, TargetError

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


FIELDS = {
    "project": ("hidden", "down", "rows", "hidden_size", "width", "chunk", "partial"),
    "score": ("hidden", "partial", "down_bias", "up", "up_bias", "rows", "hidden_size", "width", "chunk", "epsilon", "score"),
}


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the stand-in under TensorRT's module names."""
    for name, module in fake_tensorrt.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    aot.registered.cache_clear()
    yield
    aot.registered.cache_clear()


def network(order: int = 0) -> fake_tensorrt.Network:
    """A network whose kernels run on the host, with arguments in TensorRT's order."""
    driver = HostDriver(order)

    def launch(kernel: str, ptx: str, params: Any, inputs: list, scalars: list[int], output: np.ndarray) -> None:
        signature = re.search(rf"\.entry {kernel}\(([^)]*)\)", ptx)
        assert signature, f"{kernel} is not in the PTX"
        kinds = re.findall(r"\.param \.(\w+)", signature[1])
        assert kinds == ["u64"] * len(inputs) + ["u32"] * len(scalars) + ["u64"]
        fields, arguments = FIELDS[kernel.split("_")[-2]], ExitRouterParams()
        values = [*(tensor.ctypes.data for tensor in inputs), *scalars, output.ctypes.data]
        for name, value in zip(fields, values, strict=True):
            setattr(arguments, name, value)
        grid, block = (params.grid_x, params.grid_y, params.grid_z), (params.block_x, 1, 1)
        driver.launch(kernel, LaunchPlan(grid, block, params.shared_mem), arguments, 0, fields)

    return fake_tensorrt.Network(launch)


def router(dtype: str, rows: tuple[int, ...], hidden_size: int, width: int) -> list[np.ndarray]:
    random = np.random.default_rng([*rows, hidden_size, width])
    hidden = random.normal(size=(*rows, hidden_size)).astype(DTYPES[dtype])
    down = (random.normal(size=(width, hidden_size)) / np.sqrt(hidden_size)).astype(np.float32)
    return [hidden, down, *(random.normal(size=size).astype(np.float32) for size in (width, width, 1))]


def add(network: fake_tensorrt.Network, arrays: list[np.ndarray]) -> np.ndarray:
    tensors = [fake_tensorrt.Tensor(array) for array in arrays]
    return aot.add_exit_router(network, *tensors, epsilon=1e-5).array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, hidden_size, width", [((1,), 64, 1), ((2, 3), 111, 17), ((33,), 1030, 128), ((257,), 130, 250)])
def test_scores_are_those_of_the_reference(tensorrt, dtype, rows, hidden_size, width):
    """Guards against engines whose exits differ from the calibrated ones."""
    arrays = router(dtype, rows, hidden_size, width)
    made = network()
    score = add(made, arrays)
    assert made.layers == [f"tide_exit_router_project_{dtype}", f"tide_exit_router_score_{dtype}"]
    flat = [arrays[0].reshape(-1, hidden_size), *arrays[1:]]
    expected = exit_router(*(array.astype(np.float64) for array in flat), epsilon=1e-5)
    assert score.shape == rows and score.dtype == np.float32
    np.testing.assert_allclose(score.ravel(), expected, rtol=TOLERANCE["f32"])


def test_the_engine_and_the_loop_score_with_the_same_bits(tensorrt):
    """Guards against exits that depend on the target, on the number of sequences, or on a race between the two kernels."""
    arrays = router("f16", (40,), 512, 32)
    scores = [add(network(order), arrays) for order in (0, 1, 2)]
    tensors = dict(zip(("hidden", "down", "down_bias", "up", "up_bias"), map(on_host, arrays), strict=True))
    for rows in (40, 1):
        mine = np.zeros(rows, np.float32)
        given = tensors | {"hidden": on_host(arrays[0][:rows]), "score": on_host(mine)}
        prepare_exit_router(HostDriver().kernels(), epsilon=1e-5, stream=0, **given).enqueue(0)
        for score in scores:
            np.testing.assert_array_equal(score[:rows], mine)


@pytest.mark.parametrize("hidden, down", [((2, 64), (257, 64)), ((2, 64), (8, 65)), ((64,), (8, 64)), ((2, 64), (8, -1))])
def test_shapes_that_do_not_fit_are_refused(tensorrt, hidden, down):
    """Guards against kernels that read past the end of their weights."""
    states, matrix = (SimpleNamespace(shape=shape, dtype=fake_tensorrt.float32) for shape in (hidden, down))
    with pytest.raises(ParamsError, match=r"expected \["):
        aot.add_exit_router(None, states, matrix, None, None, None)


def test_missing_tensorrt_is_explained(monkeypatch):
    """Guards against an ImportError that does not say what to install."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    aot.registered.cache_clear()
    with pytest.raises(TargetError, match=r"pip install 'tide-llm\[tensorrt\]'"):
        aot.registered()


def test_an_old_tensorrt_is_explained(tensorrt, monkeypatch):
    """Guards against an AttributeError inside TensorRT 10.8."""
    monkeypatch.delattr(sys.modules["tensorrt.plugin"], "aot_impl")
    with pytest.raises(TargetError, match=r"10\.9"):
        aot.registered()


def test_the_real_bindings_accept_the_plugins(tmp_path):
    """Guards against wrong names, order or types of arguments, which only the real tensorrt.plugin checks."""
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
        "output_type": "DataType.FLOAT",
        "launch": launch | {"grid_x": chunks, "grid_y": slices, "grid_z": groups},
        "scalars": [15, 4096, 100, 256],
        "kernel": "tide_exit_router_project_f16",
        "in_image": True,
    }
    assert found["score"] == {
        "output": [3, 5],
        "output_type": "DataType.FLOAT",
        "launch": launch | {"grid_x": groups, "shared_mem": 8 * slices * 16 * 4},
        "scalars": [15, 4096, 100, 256, float_bits(1e-5)],
        "kernel": "tide_exit_router_score_f16",
        "in_image": True,
    }
