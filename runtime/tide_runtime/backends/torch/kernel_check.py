"""A comparison of Triton's kernels with torch's functions on the GPU at hand, before a model runs on them.

What a kernel computes depends on Triton's version and the GPU; a compiler's fault would be a wrong model without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tide_runtime.backends.torch.attention import Attention, Shared, rotation_table
from tide_runtime.backends.torch.low_bits import dequantised

_TOLERANCE = 1e-2  # relative error of norms; fp16 products differ by some 1e-4, a wrong tile by about 1


def compare_kernels(kernels: Any, place: torch.device) -> None:
    """Raise ValueError, with the operator's name, where ``kernels``, the module `fused_kernels`, computes something else."""
    random = torch.Generator(place).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=place, dtype=torch.float16)

    for name, found, expected in (*_products(kernels, draw), *_attention(kernels, draw, place)):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        if not error.item() <= _TOLERANCE:
            raise ValueError(f"the kernel of {name} is off by {error.item():.1%}")


def _products(kernels: Any, draw: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    x = draw(1, 5, 512)
    residual = draw(1, 5, 384)
    weight = draw(384, 512) / 16
    gains = draw(512)
    packed = torch.randint(0, 256, (384, 256), dtype=torch.uint8, device=x.device)
    scales = draw(384, 16).abs() / 100
    norm = kernels.Norm(gains, 1e-5, (x.float() ** 2).sum(-1))
    normed = F.rms_norm(x.float(), (512,), eps=1e-5).half() * gains
    gate, up = F.linear(normed, weight).chunk(2, -1)
    yield "a product", kernels.skinny_product(x, kernels.Matrix(weight), residual=residual)[0], F.linear(x, weight) + residual
    yield "a gated product", kernels.skinny_product(x, kernels.Matrix(weight), norm, gate=True)[0], F.silu(gate) * up
    by_blocks = kernels.Matrix(packed, scales, None, 4, 32)
    yield "a 4-bit product", kernels.skinny_product(x, by_blocks)[0], F.linear(x, dequantised(packed, scales, None, 4, 32))


def _attention(kernels: Any, draw: Any, place: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    angles = draw(512, 32).float()
    table = rotation_table(angles.cos(), angles.sin(), False).half()
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    for tokens in (3, 70):
        every, caches = draw(2, tokens, 8 * 64), draw(2, 2, 2, 512, 64)
        lengths = torch.tensor([tokens + 5, 400], dtype=torch.int32, device=place)
        functions = (Attention(attributes, Shared(), module) for module in (kernels, None))
        found, expected = (f(every, None, None, caches[0].clone(), caches[1].clone(), lengths, None, table)[0] for f in functions)
        yield "attention", found, expected
