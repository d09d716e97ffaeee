"""Ways to evaluate a router: TIDE's kernel, eager torch, torch.compile. All see the same tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tide_plugins.launch.exit_router import prepare_exit_router
from tide_plugins.launch.kernel_library import KernelLibrary
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cuda_timing import Work
from benchmarks.gpu.router_problem import RouterProblem

EPSILON = 1e-6
_TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RouterTensors:
    """A problem's tensors by name, inputs random, the output empty."""

    problem: RouterProblem
    tensors: dict[str, Any]

    @classmethod
    def random(cls, problem: RouterProblem, device: str = "cuda", seed: int = 0) -> RouterTensors:
        generator = torch.Generator(device).manual_seed(seed)
        scale = {"hidden": 1.0, "down": problem.hidden_size**-0.5, "up": problem.width**-0.5, "down_bias": 0.1, "up_bias": 0.1}
        tensors: dict[str, Any] = {
            name: (torch.randn(shape, generator=generator, device=device) * scale[name]).to(_TORCH[dtype])
            if name in scale
            else torch.empty(shape, dtype=_TORCH[dtype], device=device)
            for name, (dtype, shape) in problem.shapes().items()
        }
        return cls(problem, tensors)

    def scores(self) -> Tensor:
        """In float64, [N]."""
        hidden, down, down_bias, up, up_bias = (
            self.tensors[name].double() for name in ("hidden", "down", "down_bias", "up", "up_bias")
        )
        normed = F.rms_norm(hidden, hidden.shape[-1:], eps=EPSILON)
        return (F.silu(normed @ down.T + down_bias) @ up + up_bias).sigmoid()


def tide_arm(library: KernelLibrary, given: RouterTensors) -> Work:
    """Two launches."""
    prepared = prepare_exit_router(library, epsilon=EPSILON, stream=torch.cuda.current_stream(), **given.tensors)
    return lambda: prepared.enqueue(torch.cuda.current_stream())


def torch_router(hidden: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    """The scores."""
    normed = F.rms_norm(hidden, hidden.shape[-1:], eps=EPSILON)
    return F.linear(F.silu(F.linear(normed, down, down_bias)), up, up_bias).squeeze(-1).float().sigmoid()


def torch_arm(given: RouterTensors, compiled: bool, backend: str = "inductor") -> Work:
    """Weights in the states' dtype, as an eager model has them: half of TIDE's bytes. ``backend``: of `torch.compile`."""
    if compiled:
        torch.compiler.reset()  # one function compiled for nine shapes counts as recompiled too often, and runs eagerly
    dtype, tensors = given.tensors["hidden"].dtype, given.tensors
    down, down_bias, up, up_bias = (tensors[name].to(dtype) for name in ("down", "down_bias", "up", "up_bias"))
    router = torch.compile(torch_router, dynamic=False, backend=backend) if compiled else torch_router

    @torch.no_grad()
    def work() -> None:
        router(tensors["hidden"], down, down_bias, up[None], up_bias)

    return work
