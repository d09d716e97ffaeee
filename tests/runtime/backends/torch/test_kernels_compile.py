"""Every Triton kernel of target torch is compiled to machine code for four generations of GPUs, without one: `make test-triton`.

Run with -s it prints each kernel's registers and shared memory.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tide_runtime.backends.torch.attention import cache_scales
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: make test-triton", allow_module_level=True)

import triton
from tide_runtime.backends.torch import fused_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

ARCHITECTURES = [80, 90, 100, 120]
SHARED_MEMORY = {80: 163, 90: 227, 100: 227, 120: 99}  # KiB of a block, CUDA C++ Programming Guide, "Technical Specifications"
MAX_SPILLED = 8  # bytes: two registers, of bf16 in 4 bits with zero points on sm_120
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int8: "i8"}
TYPES |= {torch.int32: "i32", torch.int64: "i64"}


class Launch(NamedTuple):
    kernel: JITFunction[Any]
    given: dict[str, Any]
    options: dict[str, int]

    def source(self) -> ASTSource:
        """What Triton would compile: types of arguments, which of them are multiples of 16, and constants."""
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.given[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[(index,)] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[parameter.name], attributes[(index,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)


def _calls(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """The functions of `fused_kernels` as a model of a billion parameters calls them."""

    def draw(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    x, weight = draw(1, 3, 2048), draw(4096, 2048)
    packed, scales = torch.zeros(4096, 1024, dtype=torch.uint8), draw(4096, 64)
    if dtype != torch.float32:
        for matrix in (
            fused_kernels.Matrix(weight),
            fused_kernels.Matrix(packed, scales, packed[:, :32].contiguous(), 4, 32),
            fused_kernels.Matrix(packed.repeat(1, 2), scales, None, 8, 32),
        ):
            norm = fused_kernels.Norm(draw(2048), 1e-5, torch.zeros(64, 3))
            yield lambda matrix=matrix: fused_kernels.skinny_product(x, matrix)  # type: ignore[misc]
            yield lambda matrix=matrix, norm=norm: fused_kernels.skinny_product(x, matrix, norm)  # type: ignore[misc]
            yield lambda matrix=matrix: fused_kernels.skinny_product(x, matrix, residual=draw(1, 3, 4096))  # type: ignore[misc]
            yield lambda matrix=matrix, norm=norm: fused_kernels.skinny_product(x, matrix, norm, gate=True)  # type: ignore[misc]
    else:
        yield lambda: fused_kernels.product(x, weight)
        yield lambda: fused_kernels.low_bit_product(x, packed, scales, None, 4, 32)
    for tokens, bits, width in product((3, 70), (dtype, torch.int8), (64, 128, 256)):
        if fused_kernels.fits(tokens, width, dtype):
            caches = torch.zeros(2, 1, 8, 4096, width, dtype=bits)
            factors = cache_scales(*torch.ones(2, 1, 8, 1, width)) if bits == torch.int8 else None
            inputs = draw(1, tokens, 48 * width), draw(2, 4096, width), torch.ones(1, dtype=torch.int32)
            yield lambda inputs=inputs, caches=caches, factors=factors: fused_kernels.attention(  # type: ignore[misc]
                *inputs, *caches, 32, 0.1, False, -1, factors
            )
    yield lambda: fused_kernels.add_norm(x, x, x[0, 0], 1e-5)
    yield lambda: fused_kernels.gated(*x.chunk(2, -1))
    yield lambda: fused_kernels.token(draw(1, 3, 128256))
    yield lambda: fused_kernels.look_up(packed, torch.zeros(1, 3, dtype=torch.int64), scales, None, 4, 32)


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    """A launch of each kernel with each set of constants."""
    recorded: dict[Any, Launch] = {}

    def record(kernel: JITFunction[Any], *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        launch = Launch(kernel, dict(zip(names, given, strict=False)) | named, options)
        source = launch.source()
        recorded.setdefault((kernel.fn.__name__, str(source.signature), str(source.constants)), launch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for call in _calls(dtype):
                call()
    return list(recorded.values())


def _resources(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory, to which registers spill."""
    (file := folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return registers, stack + local


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_fits_a_gpu(architecture: int, launches: list[Launch], tmp_path: Path) -> None:
    """Breaks: on a GPU of this generation the first text ends in a compiler's error, or kernels wait for spilled registers."""
    spilled = []
    for launch in launches:
        made = triton.compile(launch.source(), target=GPUTarget("cuda", architecture, 32), options=launch.options)
        registers, spills = _resources(made.asm["cubin"], tmp_path)
        shared = made.metadata.shared / 1024
        constants = {name: value for name, value in launch.given.items() if name.isupper()}
        print(f"sm_{architecture} {launch.kernel.fn.__name__} registers {registers} shared {shared:.0f} KiB {constants}")
        assert shared <= SHARED_MEMORY[architecture], constants
        if spills:
            spilled.append((launch.kernel.fn.__name__, constants, spills))
    print(f"RESULT kernels_compiled_sm_{architecture}={len(launches)}\nRESULT kernels_spilled_sm_{architecture}={len(spilled)}")
    assert all(spills <= MAX_SPILLED for *_, spills in spilled), spilled
