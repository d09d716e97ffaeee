"""Triton kernels of a decode step on a GPU. A kernel of a few tokens takes about 3 µs in a graph whatever it does, so those
between two products are one: sum and norm, rotation and the caches' new rows, attention over the slots in use, the gate.

The functions compute what those of `operators` and `attention` do, and round in the same places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_SLOTS = 64
_MOST_ROWS = 64  # of a KV head's queries in one program
MOST_LOW_BIT_ROWS = 16  # above, a weight is dequantised once for all rows
_PRODUCT_COLUMNS, _PRODUCT_BYTES = 16, 256  # of the weight in one program and turn
_PROGRAMS = 256  # enough for every multiprocessor of a large GPU


@triton.jit
def _add_norm(x, skip, weight, normed, total, epsilon, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    both = tl.load(x + row + columns, mask=inside, other=0.0) + tl.load(skip + row + columns, mask=inside, other=0.0)
    tl.store(total + row + columns, both, mask=inside)
    wide = both.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(normed + row + columns, (wide * factor).to(scales.dtype) * scales, mask=inside)


def add_norm(x: Tensor, skip: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + skip, and the sum, [..., H]."""
    width, x, skip = x.shape[-1], x.contiguous(), skip.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // 512))
    _add_norm[(x.numel() // width,)](x, skip, weight, normed, total, epsilon, width, block, num_warps=warps)
    return normed, total


@triton.jit
def _gate(gate, up, made, width, gate_stride, up_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(x.dtype)
    tl.store(made + row * width + columns, opened * tl.load(up + row * up_stride + columns, mask=inside, other=0.0), mask=inside)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, [..., I]; each may be a part of one product's rows."""
    if gate.shape != up.shape or not (_has_rows(gate) and _has_rows(up)):
        return F.silu(gate) * up
    width, block = gate.shape[-1], 1024
    made = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = gate.numel() // width
    _gate[(rows, triton.cdiv(width, block))](gate, up, made, width, gate.stride(-2), up.stride(-2), block)
    return made


def _has_rows(x: Tensor) -> bool:
    """Whether the rows of ``x`` [..., I] lie at equal distances."""
    strides, sizes = x.stride(), x.shape
    return strides[-1] == 1 and all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(x.dim() - 2))


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    every,
    table,
    seqlens,
    queries,
    keys,
    values,
    tokens,
    slots,
    positions,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    batch = row // tokens
    place = tl.load(seqlens + batch) + 1 - tokens + row % tokens
    place = tl.minimum(tl.maximum(place, 0), slots - 1)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    source = every + (row.to(tl.int64) * (HEADS + 2 * KV) + head) * DIM
    x = tl.load(source + columns, mask=inside, other=0.0)
    turns = (columns < WIDTH) & (head < HEADS + KV)
    partner = tl.where(columns < WIDTH // 2, columns + WIDTH // 2, columns - WIDTH // 2)
    if INTERLEAVED:
        partner = columns ^ 1
    swapped = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    cos = tl.load(table + place * WIDTH + columns, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(table + (positions + place) * WIDTH + columns, mask=turns, other=0.0).to(tl.float32)
    turned = (x.to(tl.float32) * cos + swapped * sin).to(x.dtype)
    if head < HEADS:
        tl.store(queries + (row.to(tl.int64) * HEADS + head) * DIM + columns, turned, mask=inside)
    elif head < HEADS + KV:
        kept = ((batch * KV + head - HEADS).to(tl.int64) * slots + place) * DIM
        tl.store(keys + kept + columns, turned, mask=inside)
    else:
        kept = ((batch * KV + head - HEADS - KV).to(tl.int64) * slots + place) * DIM
        tl.store(values + kept + columns, turned, mask=inside)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    seqlens,
    sums,
    peaks,
    weights,
    scale,
    tokens,
    slots,
    chunk,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kept, part = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV
    batch, head = kept // KV, kept % KV
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    wanted, inside = rows < tokens * group, columns < DIM
    first = tl.load(seqlens + batch) + 1 - tokens
    place = tl.minimum(tl.maximum(first + rows // group, 0), slots - 1)
    last = tl.minimum(first + tokens, slots)
    at = ((batch * tokens + rows // group) * HEADS + head * group + rows % group) * DIM
    query = tl.load(queries + at[:, None] + columns[None, :], mask=wanted[:, None] & inside[None, :], other=0.0)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    base = kept.to(tl.int64) * slots * DIM
    begin = part * chunk
    if WINDOW > 0:
        begin = tl.maximum(begin, (first - WINDOW) // SLOTS * SLOTS)
    for start in range(begin, tl.minimum(part * chunk + chunk, last), SLOTS):
        slot = start + tl.arange(0, SLOTS)
        there = slot < last
        key = tl.load(keys + base + slot[None, :] * DIM + columns[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        scores = tl.dot(query, key, input_precision=PRECISION) * scale
        seen = (slot[None, :] <= place[:, None]) & there[None, :]
        if WINDOW > 0:
            seen = seen & (slot[None, :] > place[:, None] - WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
        largest = tl.maximum(peak, tl.max(scores, 1))
        finite = tl.where(largest == -float("inf"), 0.0, largest)
        powers, shrink = tl.exp(scores - finite[:, None]), tl.exp(peak - finite)
        value = tl.load(values + base + slot[:, None] * DIM + columns[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        total = total * shrink[:, None] + tl.dot(powers.to(value.dtype), value, input_precision=PRECISION)
        weight = weight * shrink + tl.sum(powers, 1)
        peak = largest
    here = (kept * tl.num_programs(1) + part) * ROWS + rows
    tl.store(peaks + here, peak)
    tl.store(weights + here, weight)
    tl.store(sums + here[:, None] * BLOCK + columns[None, :], total)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    sums,
    peaks,
    weights,
    made,
    tokens,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    kept, row = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV
    batch, head = kept // KV, kept % KV
    columns = tl.arange(0, BLOCK)
    here = (kept * PARTS + tl.arange(0, PARTS)) * ROWS + row
    peak = tl.load(peaks + here)
    share = tl.exp(peak - tl.max(peak, 0))
    weight = tl.sum(share * tl.load(weights + here), 0)
    total = tl.sum(share[:, None] * tl.load(sums + here[:, None] * BLOCK + columns[None, :]), 0) / weight
    at = ((batch * tokens + row // group) * HEADS + head * group + row % group) * DIM
    tl.store(made + at + columns, total.to(made.dtype.element_ty), mask=columns < DIM)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    zeros,
    made,
    count,
    width,
    stored,
    blocks,
    outputs,
    HAS_ZEROS: tl.constexpr,
    BITS: tl.constexpr,
    QUANT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    each: tl.constexpr = 8 // BITS  # numbers in a byte
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, stored, BYTES):
        place = start + tl.arange(0, BYTES)
        there = (place < stored)[:, None] & (column < outputs)[None, :]
        packed = tl.load(values + column[None, :].to(tl.int64) * stored + place[:, None], mask=there, other=0).to(tl.int32)
        block = place * each // QUANT
        scale = tl.load(scales + column[None, :] * blocks + block[:, None], mask=there, other=0.0)
        middle = tl.full((BYTES, COLUMNS), 1 << (BITS - 1), tl.int32)
        if HAS_ZEROS:
            point = tl.load(
                zeros + column[None, :] * ((blocks + each - 1) // each) + (block // each)[:, None], mask=there, other=0
            ).to(tl.int32)
            middle = point >> (block % each * BITS)[:, None] & ((1 << BITS) - 1)
        from_x = (row < count)[:, None] & (place < stored)[None, :]
        for half in tl.static_range(each):
            number = (packed >> (half * BITS)) & ((1 << BITS) - 1)
            weight = (number - middle).to(scale.dtype) * scale
            given = tl.load(x + row[:, None] * width + (place * each + half)[None, :], mask=from_x, other=0.0)
            total += tl.dot(given, weight, input_precision=PRECISION)
    wanted = (row < count)[:, None] & (column < outputs)[None, :]
    tl.store(made + row[:, None] * outputs + column[None, :], total.to(made.dtype.element_ty), mask=wanted)


def low_bit_product(x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, block: int) -> Tensor:
    """x [..., K] times the transposed weight [N, K], of at most `MOST_LOW_BIT_ROWS` rows; for the operands see `dequantised`."""
    outputs, width, x = values.shape[0], x.shape[-1], x.contiguous()
    made = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(outputs, _PRODUCT_COLUMNS),)](
        x, values, scales, values if zeros is None else zeros, made, x.numel() // width, width, values.shape[1], scales.shape[1],
        outputs, zeros is not None, bits, block, MOST_LOW_BIT_ROWS, _PRODUCT_COLUMNS, _PRODUCT_BYTES, "ieee", num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return made


def fits(tokens: int, group: int, width: int) -> bool:
    """Whether `attention` takes so many tokens a sequence and query heads a KV head of ``width`` channels."""
    return tokens * group <= _MOST_ROWS and width <= 256


def attention(
    every: Tensor,
    table: Tensor,
    seqlens: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    scale: float,
    interleaved: bool,
    window: int,
) -> Tensor:
    """Attention [B, S, N · D] of the packed projections ``every`` [B, S, (N + 2 KV) · D], whose keys and values are cached first.

    Args:
        table: `rotation_table`; of width 0 where nothing is rotated.
        seqlens: [B] int32, tokens of a sequence with those of the step, less one.
        keys: [B, KV, slots, D], as ``values``.
        window: tokens that a token sees; 0 or less: all.
    """
    every = every.contiguous()  # a part of a product with others where a model computes its MLP beside attention
    batch, tokens, _ = every.shape
    kv, slots, dim = keys.shape[1:]
    block = max(16, triton.next_power_of_2(dim))
    queries = torch.empty((batch, tokens, heads, dim), dtype=every.dtype, device=every.device)
    _place[(batch * tokens, heads + 2 * kv)](
        every, table, seqlens, queries, keys, values, tokens, slots, table.shape[1], heads, kv, dim, table.shape[2],
        interleaved, block, num_warps=1,
    )  # fmt: skip
    rows = max(16, triton.next_power_of_2(tokens * (heads // kv)))
    parts = triton.next_power_of_2(min(triton.cdiv(_PROGRAMS, batch * kv), triton.cdiv(slots, _BLOCK_SLOTS)))
    chunk = triton.cdiv(triton.cdiv(slots, parts), _BLOCK_SLOTS) * _BLOCK_SLOTS
    sums = torch.empty((batch * kv, parts, rows, block), dtype=torch.float32, device=every.device)
    peaks, weights = torch.empty((2, batch * kv, parts, rows), dtype=torch.float32, device=every.device)
    _attend[(batch * kv, parts)](
        queries, keys, values, seqlens, sums, peaks, weights, scale, tokens, slots, chunk, max(window, 0), heads, kv, dim, rows,
        block, _BLOCK_SLOTS, "ieee", num_warps=4, num_stages=2,
    )  # fmt: skip
    made = torch.empty((batch, tokens, heads * dim), dtype=every.dtype, device=every.device)
    _combine[(batch * kv, tokens * (heads // kv))](
        sums, peaks, weights, made, tokens, heads, kv, dim, rows, block, parts, num_warps=2
    )  # fmt: skip
    return made
