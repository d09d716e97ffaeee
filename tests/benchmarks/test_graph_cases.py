"""The check of captured loops, on the simulated GPU: its kernels are compiled for this machine from a GPU's source."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import Structure
from pathlib import Path
from typing import Any

import pytest
from runtime.numpy_loop_kernels import NumpyLoopKernels
from runtime.simulated_gpu import SimulatedGpu
from tide_plugins.build.toolchain import find_toolchain
from tide_runtime.errors import TargetError

from benchmarks.gpu import graph_cases
from benchmarks.gpu.graph_cases import EXITS, GraphCase, refused_capture, run_case
from benchmarks.gpu.graph_cases import graph_cases as all_cases
from benchmarks.gpu.graphs_without_gpu import refuse_on_simulated_gpu
from benchmarks.gpu.small_kernel import compile_cubin
from benchmarks.gpu.stub_model import Wanted, reference
from benchmarks.gpu.stub_segments import SOURCE, SYMBOLS, ExitArguments, HeadArguments, SegmentArguments

_ARGUMENTS = {"stub_segment": SegmentArguments, "stub_head": HeadArguments, "stub_exit": ExitArguments}
_BEFORE = "struct { unsigned x; } blockIdx;\n#define __global__\n#define __device__ static\n"
_AFTER = """
extern "C" void run_{symbol}({type} v, unsigned blocks) {{ for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {symbol}(v); }}
extern "C" long size_{symbol}() {{ return sizeof({type}); }}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stub kernels, compiled by g++."""
    after = "".join(_AFTER.format(symbol=symbol, type=_ARGUMENTS[symbol].__name__) for symbol in SYMBOLS)
    source: Path = tmp_path_factory.mktemp("stub") / "stub.cpp"
    source.write_text(_BEFORE + SOURCE.decode() + after)
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-Wno-multichar",
        "-fPIC",
        "-shared",
        str(source),
        "-o",
        str(source.with_suffix(".so")),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(source.with_suffix(".so")))


class HostStubs:
    """Launches them on the simulated GPU, in streams that may be captured; ``workspaces``: between an allocation and its free."""

    def __init__(self, library: Any, gpu: SimulatedGpu, workspaces: bool) -> None:
        self._library, self._gpu, self._workspaces = library, gpu, workspaces

    def launch(self, symbol: str, blocks: int, arguments: Structure, stream: int) -> None:
        taken = type(arguments).from_buffer_copy(arguments)  # by value, as a launch takes them
        workspace = self._gpu.malloc_async(stream) if self._workspaces else 0
        self._gpu.submit(stream, lambda: self._run(symbol, blocks, taken))
        if self._workspaces:
            self._gpu.free_async(stream, workspace)

    def _run(self, symbol: str, blocks: int, arguments: Structure) -> None:
        run = getattr(self._library, f"run_{symbol}")
        run.argtypes = (type(arguments), ctypes.c_uint)
        run(arguments, blocks)


def figures(case: GraphCase, library: Any, mutation: str = "") -> dict[str, Any]:
    gpu = SimulatedGpu()
    stubs = HostStubs(library, gpu, case.form == "memory_nodes")
    return run_case(case, gpu, NumpyLoopKernels(gpu, mutation), stubs.launch)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_case_passes_on_the_simulated_gpu(case: GraphCase, library: Any) -> None:
    """Guards against a check that fails for another reason than the GPU, which is paid by the minute."""
    found = figures(case, library)
    assert found["texts"] == 16 and found["tokens"] > 200
    assert ("mem_alloc" in found["node_types"]) == (case.form == "memory_nodes")


@pytest.mark.parametrize("mutation", ["eos", "limit", "window", "mlp", "last", "elsewhere", "heads"])
def test_a_broken_kernel_is_found(mutation: str, library: Any) -> None:
    """Guards against a check that cannot fail."""
    with pytest.raises((AssertionError, IndexError, ValueError)):
        for rows in (1, 3):
            figures(GraphCase("three", "conditional", rows), library, mutation)


def test_conditions_that_are_refused_are_found(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a host that drives, generates the same, and lets the check pass."""

    def refuse(self: object, program: object) -> None:
        raise TargetError("no")

    monkeypatch.setattr(graph_cases.GraphDriver, "_conditional", refuse)
    with pytest.raises(AssertionError, match="conditional nodes were refused: no"):
        figures(GraphCase("none", "conditional", 1), library)


def test_every_way_out_is_taken() -> None:
    """Guards against exits that every token takes, or none: whole branches of the graph would not run."""
    for exits in list(EXITS.values())[1:]:
        for first, more in zip(range(len(exits)), range(1, len(exits) + 1), strict=True):
            taken = [reference(Wanted((3, 1), 40), exits[:first]), reference(Wanted((3, 1), 40), exits[:more])]
            assert taken[0] != taken[1], f"exit {more} changes nothing"


def test_arguments_have_the_compilers_layout(library: Any) -> None:
    """Guards against kernels that read other fields than Python wrote."""
    for symbol, arguments in _ARGUMENTS.items():
        assert getattr(library, f"size_{symbol}")() == ctypes.sizeof(arguments)


def test_the_stub_kernels_compile_for_a_gpu() -> None:
    try:
        find_toolchain(13)
    except TargetError as reason:
        pytest.skip(str(reason))
    cubin = compile_cubin(SOURCE, "sm_90")
    assert all(symbol.encode() in cubin for symbol in SYMBOLS)


def test_a_refused_capture_is_told_from_an_accepted_one() -> None:
    """Guards against a check that passes on a machine where a capture that waits is accepted."""
    assert "has made it invalid" in refuse_on_simulated_gpu()["refusal"]
    with pytest.raises(AssertionError, match="was accepted"):
        refused_capture(SimulatedGpu(), lambda stream: None)
