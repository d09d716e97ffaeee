"""The predecessor's published router kernel (tide-inference 0.2.1), compiled from a checkout of its repository.

It has float32 weights and no bias. One block of 256 threads a token reads all of them. Nothing of it
is part of this repository.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from cuda.core import LaunchConfig, ObjectCode, Program, ProgramOptions, Stream, launch
from tide_plugins.build.toolchain import find_toolchain
from tide_runtime.errors import TargetError

from benchmarks.gpu.router_arms import EPSILON, RouterTensors

_FOLDER, _FILE = Path("csrc/kernels"), "fused_layernorm_route.cu"
_END_OF_DEVICE_CODE = "} // namespace tide"
_ELEMENT = {"f16": "__half", "bf16": "__nv_bfloat16"}
_THREADS = 256


def symbol(dtype: str, hidden_size: int, width: int) -> str:
    """The form that its own launcher takes for these sizes."""
    return f"tide::fused_layernorm_route_kernel<{_ELEMENT[dtype]}, {hidden_size}, {width}, {_THREADS}>"


def device_code(checkout: Path) -> str:
    """Its kernel file without the host functions, which NVRTC rejects.

    Raises:
        TargetError: this is no checkout of the predecessor, or of another version.
    """
    path = checkout / _FOLDER / _FILE
    if not path.is_file():
        raise TargetError(f"{path} does not exist; expected a checkout of RightNow-AI/TIDE 0.2.1")
    kernels, end, _ = path.read_text(encoding="utf-8").partition(_END_OF_DEVICE_CODE)
    if not end:
        raise TargetError(f"{path} does not look as in version 0.2.1: there is no line {_END_OF_DEVICE_CODE!r}")
    return kernels.replace("#include <cmath>", "") + end


def compile_predecessor(checkout: Path, dtype: str, hidden_size: int, width: int, arch: str) -> ObjectCode:
    """A cubin with one form of its kernel. Needs no GPU."""
    headers = (str(checkout / _FOLDER), str(find_toolchain(13).include))
    options = ProgramOptions(arch=arch, include_path=headers, std="c++17")
    return Program(device_code(checkout), "c++", options).compile("cubin", name_expressions=(symbol(dtype, hidden_size, width),))


def predecessor_arm(checkout: Path, given: RouterTensors, arch: str) -> Callable[[], None]:
    """One launch: scores. Its weights are float32 and transposed."""
    problem, tensors = given.problem, given.tensors
    code = compile_predecessor(checkout, problem.dtype, problem.hidden_size, problem.width, arch)
    kernel = code.get_kernel(symbol(problem.dtype, problem.hidden_size, problem.width))
    config = LaunchConfig(grid=problem.rows, block=_THREADS, shmem_size=4 * (8 + problem.width))
    norm_weight = torch.ones(problem.hidden_size, device="cuda")
    down, scores = tensors["down"].T.contiguous(), torch.empty_like(tensors["score"])
    inputs = [tensors["hidden"], norm_weight, down, tensors["up"], scores]
    pointers = [tensor.data_ptr() for tensor in inputs]

    def work(_keep: list[torch.Tensor] = inputs) -> None:
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        launch(stream, config, kernel, *pointers, np.float32(EPSILON), np.int32(problem.rows))

    return work
