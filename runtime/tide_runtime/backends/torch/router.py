"""The scores of an exit's MLP router: TIDE's fused kernel on a GPU, torch's functions elsewhere.

score = sigmoid(up · silu(down · rmsnorm(hidden) + down_bias) + up_bias)        computed in float32, whatever the states' type
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_runtime.errors import TideError
from tide_runtime.plugins import plugin

Score = Callable[..., Tensor]
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def router(attributes: Mapping[str, Any], device: torch.device) -> Score:
    """The function of a router's node: states [..., H] and weights → scores [...]."""
    epsilon = float(attributes["epsilon"])
    if device.type == "cuda":
        try:
            kernel = plugin("router_kernel")(device.index)
            return fused(kernel, epsilon, lambda: int(torch.cuda.current_stream(device).cuda_stream))
        except TideError as error:
            warnings.warn(f"exits score with torch's functions, which are slower, because {error}", RuntimeWarning, stacklevel=2)
    return lambda *operands: torch_score(*operands, epsilon=epsilon)


def torch_score(hidden: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor, *, epsilon: float) -> Tensor:
    """The formula as it stands: the kernel's reference."""
    wide = hidden.float()
    normed = F.rms_norm(wide, wide.shape[-1:], eps=epsilon)
    return (F.silu(normed @ down.t() + down_bias) @ up + up_bias).sigmoid()


def fused(kernel: Any, epsilon: float, stream: Callable[[], int]) -> Score:
    """The same by ``kernel``, the plugin ``router_kernel``, on the stream that ``stream`` names when it is called."""

    def score(hidden: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
        states = hidden.contiguous().view(-1, hidden.shape[-1])
        made = torch.empty(hidden.shape[:-1], dtype=torch.float32, device=hidden.device)
        size = kernel.partial(states.shape[0], states.shape[1], down.shape[0])
        partial = torch.empty(size, dtype=torch.float32, device=hidden.device)
        tensors = {"hidden": states, "down": down, "down_bias": down_bias, "up": up, "up_bias": up_bias, "partial": partial}
        given = {name: (t.data_ptr(), tuple(t.shape), _DTYPES[t.dtype]) for name, t in tensors.items()}
        kernel.enqueue(epsilon, stream(), **given, score=(made.data_ptr(), (states.shape[0],), "f32"))
        return made

    return score
