"""An exit's router on target torch: the fused kernel, run on the host, and the functions that it replaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from plugins.host_driver import HostDriver
from tide_plugins.reference import exit_router
from tide_plugins.router_kernel import RouterKernel
from tide_runtime.backends.torch import router
from tide_runtime.errors import TargetError

EPSILON = 1e-5


def operands(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(*shape, 96, generator=generator).to(dtype)
    down = torch.randn(20, 96, generator=generator) / 10
    return [hidden, down, *(torch.randn(size, generator=generator) for size in (20, 20, 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5)])
def test_the_kernel_and_the_functions_score_alike(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Guards against exits that a GPU takes and a processor does not: wrong addresses, sizes, types or shapes."""
    given = operands(dtype, *shape)
    kernel = router.fused(RouterKernel(HostDriver().kernels()), EPSILON, lambda: 0)
    expected = exit_router(given[0].reshape(-1, 96).double(), *given[1:], epsilon=EPSILON).reshape(shape)
    assert np.ptp(expected) > 0.1 or shape == (1, 1), "all scores alike would hide most mistakes"
    for score in (kernel, router.router({"epsilon": EPSILON}, torch.device("cpu"))):
        made = score(*given)
        assert made.shape == shape and made.dtype == torch.float32
        np.testing.assert_allclose(made.numpy(), expected, rtol=1e-5)


def test_states_need_not_be_contiguous() -> None:
    """Guards against another token's state: a slice of a step is a view."""
    given = operands(torch.float32, 3, 5)
    kernel = router.fused(RouterKernel(HostDriver().kernels()), EPSILON, lambda: 0)
    assert torch.equal(kernel(given[0][:, ::2], *given[1:]), kernel(*given)[:, ::2])


def test_a_gpu_without_the_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an engine that does not load where NVRTC is missing, and against silence."""

    def refuse(name: str) -> Any:
        raise TargetError("NVRTC is not installed")

    monkeypatch.setattr(router, "plugin", refuse)
    with pytest.warns(RuntimeWarning, match="slower, because NVRTC is not installed"):
        score = router.router({"epsilon": EPSILON}, torch.device("cuda", 0))
    given = operands(torch.float32, 2)
    assert torch.equal(score(*given), router.torch_score(*given, epsilon=EPSILON))
