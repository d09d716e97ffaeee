"""What a pass over several tokens costs on a GPU, against one token: the price of verifying drafts, at real models' shapes.

Layers are torch functions in a CUDA graph, with distinct weights of more bytes than the L2 cache holds, so that each pass reads
them from memory. Attention has the query heads of a KV head as rows of one head: no keys are repeated. Times are medians in µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cuda_timing import gpu_time
from benchmarks.gpu.kit.case import Bench, Figures, KitCase
from benchmarks.gpu.model_shapes import SHAPES, ModelShape

_TOKENS, _ROWS, _SLOTS, _GROUP = (1, 2, 4, 8, 13, 16), (1, 8), 512, 32
_LAYERS = {"1b": 4, "8b": 2}  # that a graph holds
_REPEATS = 20
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """Products of a decoder layer, and caches [B, KV, slots, D]."""

    qkv: Product
    out: Product
    gate_up: Product
    down: Product
    keys: Tensor
    values: Tensor


def layers(shape: ModelShape, dtype: str, rows: int, count: int, device: str) -> list[Layer]:
    """``count`` layers of ``shape`` with random weights, and caches for ``rows`` sequences."""
    width = shape.hidden // shape.heads
    product = _int4_product if dtype == "int4" else _dense_product
    both = partial(product, device=device)
    caches = (rows, shape.kv_heads, _SLOTS, width)
    compute = compute_dtype(dtype)
    return [
        Layer(
            both(shape.hidden, (shape.heads + 2 * shape.kv_heads) * width),
            both(shape.heads * width, shape.hidden),
            both(shape.hidden, 2 * shape.mlp),
            both(shape.mlp, shape.hidden),
            torch.randn(caches, device=device, dtype=compute),
            torch.randn(caches, device=device, dtype=compute),
        )
        for _ in range(count)
    ]


def compute_dtype(dtype: str) -> torch.dtype:
    """torch's int4 product on a GPU takes bf16."""
    return torch.bfloat16 if dtype == "int4" else torch.float16


def _dense_product(inputs: int, outputs: int, device: str) -> Product:
    weight = torch.randn((outputs, inputs), device=device, dtype=torch.float16) * inputs**-0.5
    return lambda x: F.linear(x, weight)


def _int4_product(inputs: int, outputs: int, device: str) -> Product:
    """`_weight_int4pack_mm`; on a processor, which packs otherwise, a dense product stands in."""
    if device == "cpu":
        return lambda x: F.linear(x, torch.zeros((outputs, inputs), dtype=torch.bfloat16))
    packed = torch.randint(-(2**31), 2**31 - 1, (outputs // 8, inputs // 128, 32, 4), device=device, dtype=torch.int32)
    scales = torch.rand((inputs // _GROUP, outputs, 2), device=device, dtype=torch.bfloat16) * inputs**-0.5

    def multiply(x: Tensor) -> Tensor:
        return torch._weight_int4pack_mm(x.flatten(0, -2), packed, _GROUP, scales).unflatten(0, x.shape[:-1])

    return multiply


def run_layer(layer: Layer, x: Tensor, shape: ModelShape, mask: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States [B, S, H] behind a Llama layer; ``mask`` [G·S, slots] of bools, ``slots`` [S] that keys are written to."""
    rows, tokens = x.shape[:2]
    width, group = shape.hidden // shape.heads, shape.heads // shape.kv_heads
    qkv = layer.qkv(F.rms_norm(x, x.shape[-1:])).view(rows, tokens, -1, width).transpose(1, 2)
    turned = torch.cat((-qkv[..., width // 2 :], qkv[..., : width // 2]), -1)
    qkv = qkv * cos + turned * sin
    query, key, value = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    layer.keys.index_copy_(2, slots, key)
    layer.values.index_copy_(2, slots, value)
    grouped = query.reshape(rows, shape.kv_heads, group * tokens, width)
    attended = F.scaled_dot_product_attention(grouped, layer.keys, layer.values, attn_mask=mask)
    attended = attended.reshape(rows, shape.heads, tokens, width).transpose(1, 2).reshape(rows, tokens, -1)
    x = x + layer.out(attended)
    gate, up = layer.gate_up(F.rms_norm(x, x.shape[-1:])).chunk(2, -1)
    return x + layer.down(F.silu(gate) * up)


class Pass:
    """``layers`` layers over ``rows`` sequences of ``tokens`` tokens each; calling it runs them."""

    def __init__(self, stack: list[Layer], shape: ModelShape, dtype: str, rows: int, tokens: int, device: str) -> None:
        self._stack, self._shape, compute = stack, shape, compute_dtype(dtype)
        width, group = shape.hidden // shape.heads, shape.heads // shape.kv_heads
        self.states = torch.randn((rows, tokens, shape.hidden), device=device, dtype=compute)
        self._slots = torch.arange(_SLOTS // 2, _SLOTS // 2 + tokens, device=device)
        self._mask = (torch.arange(_SLOTS, device=device) <= self._slots[:, None]).repeat(group, 1)
        angles = torch.rand((tokens, width), device=device)
        self._cos, self._sin = angles.cos().to(compute), angles.sin().to(compute)

    @torch.no_grad()
    def __call__(self) -> None:
        self._run()

    @torch.no_grad()
    def step(self) -> None:
        """Run them, and keep the states for the next run."""
        self.states.copy_(F.rms_norm(self._run(), self.states.shape[-1:]))

    def _run(self) -> Tensor:
        x = self.states
        for layer in self._stack:
            x = run_layer(layer, x, self._shape, self._mask, self._slots, self._cos, self._sin)
        return x


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    yield KitCase("bandwidth", _bandwidth, dict)
    for name in _LAYERS:
        for dtype in ("fp16", "int4"):
            for rows in _ROWS:
                execute = partial(_measured, SHAPES[name], dtype, rows)
                yield KitCase(f"{name}_{dtype}_b{rows}", execute, partial(_once, dtype, rows))
        yield KitCase(f"{name}_head", partial(_head, SHAPES[name]), dict)
    for slots in (512, 4096):
        yield KitCase(f"attention_{slots}", partial(_attentions, slots), partial(_attention_outputs, "cpu", slots, torch.float32))


@cache
def _gb_s() -> float:
    """Bytes that a large copy reads and writes, in GB/s."""
    source = torch.randint(0, 256, (2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / gpu_time(lambda: target.copy_(source), repeats=_REPEATS) / 1e3


def _bandwidth() -> Figures:
    """And the rate of a product that is bound by arithmetic."""
    a, b = (torch.randn((8192, 8192), device="cuda", dtype=torch.float16) for _ in range(2))
    us = gpu_time(lambda: a @ b, repeats=5)
    return {"gb_s": _gb_s(), "tflop_s": 2 * 8192**3 / us / 1e6, "memory": torch.cuda.get_device_properties(0).total_memory}


def _measured(shape: ModelShape, dtype: str, rows: int) -> Figures:
    """µs a layer of each number of tokens, and as a share of one token's."""
    count = _LAYERS[shape.name]
    stack = layers(shape, dtype, rows, count, "cuda")
    us = {tokens: gpu_time(Pass(stack, shape, dtype, rows, tokens, "cuda"), _REPEATS) / count for tokens in _TOKENS}
    weights = shape.hidden * (2 * shape.hidden + 2 * shape.kv_heads * shape.hidden // shape.heads + 3 * shape.mlp)
    floor = weights * (4.5 / 8 if dtype == "int4" else 2) / _gb_s() / 1e3
    return {"layer_us": us, "relative": {tokens: round(value / us[1], 3) for tokens, value in us.items()}, "floor_us": floor}


def _head(shape: ModelShape) -> Figures:
    head = _dense_product(shape.hidden, shape.vocab, "cuda")
    states = torch.randn((16, shape.hidden), device="cuda", dtype=torch.float16)
    return {"head_us": {n: gpu_time(lambda n=n: head(states[:n]).argmax(-1), _REPEATS) for n in (1, 8, 16)}}  # type: ignore[misc]


def _once(dtype: str, rows: int) -> Figures:
    """One small layer on the processor."""
    shape = ModelShape("small", (dtype,), 1, 128, 4, 2, 256, 512)
    Pass(layers(shape, dtype, rows, 1, "cpu"), shape, dtype, rows, 2, "cpu")()
    return {}


def _attention_arms(device: str, slots: int, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Ways to attend from one token of 32 query heads of 64 numbers over 8 KV heads."""
    heads, kv_heads, width, group = 32, 8, 64, 4
    query = torch.randn((1, heads, 1, width), device=device, dtype=dtype)
    keys, values = (torch.randn((1, kv_heads, slots, width), device=device, dtype=dtype) for _ in range(2))
    mask = torch.arange(slots, device=device)[None] <= slots // 2
    attend = F.scaled_dot_product_attention

    def grouped() -> Tensor:
        rows = query.view(1, kv_heads, group, width)
        return attend(rows, keys, values, attn_mask=mask.expand(group, -1)).view(1, heads, 1, width)

    def products() -> Tensor:
        rows = query.view(kv_heads, group, width)
        scores = torch.bmm(rows, keys[0].transpose(1, 2)) * width**-0.5
        share = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(dtype)
        return torch.bmm(share, values[0]).view(1, heads, 1, width)

    def repeated() -> Tensor:
        return attend(query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), attn_mask=mask)

    return {
        "grouped_rows": grouped,
        "products": products,
        "repeated": repeated,
        "enable_gqa": lambda: attend(query, keys, values, attn_mask=mask, enable_gqa=True),
        "grouped_no_mask": lambda: attend(query.view(1, kv_heads, group, width), keys, values).view(1, heads, 1, width),
    }


def _attentions(slots: int) -> Figures:
    """µs of each way; what torch says of one that it refuses."""
    found: Figures = {}
    for name, arm in _attention_arms("cuda", slots, torch.float16).items():
        try:
            found[name] = gpu_time(arm, _REPEATS)
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0]
    return found | _attention_outputs("cuda", slots, torch.float16)


def _attention_outputs(device: str, slots: int, dtype: torch.dtype) -> Figures:
    """Raises AssertionError unless the ways that mask agree."""
    arms = _attention_arms(device, slots, dtype)
    first = arms["grouped_rows"]()
    for name in ("products", "repeated"):
        torch.testing.assert_close(arms[name](), first, rtol=1e-2, atol=1e-3)
    return {}
