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

from tide_runtime.backends.torch.attention_kernels import attention, fits
from tide_runtime.backends.torch.skinny_product import Matrix, Norm, skinny_product, takes, takes_logits

__all__ = [
    "MAX_ROWS",
    "Matrix",
    "Norm",
    "add_norm",
    "attention",
    "fits",
    "gated",
    "look_up",
    "low_bit_product",
    "product",
    "skinny_product",
    "takes",
    "takes_logits",
    "token",
]

MAX_ROWS = 16  # activation rows that one program multiplies
_TILE_BYTES = 8192  # bytes of the weight that one program holds at a time
_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


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
    width = x.shape[-1]
    x = x.contiguous()
    skip = skip.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(16, max(4, block // 512))
    _add_norm[(x.numel() // width,)](x, skip, weight, normed, total, epsilon, width, block, num_warps=warps)
    return normed, total


@triton.jit
def _gate(gate, up, output, width, gate_stride, up_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(x.dtype)
    factor = tl.load(up + row * up_stride + columns, mask=inside, other=0.0)
    tl.store(output + row * width + columns, opened * factor, mask=inside)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, [..., I]; each may be a part of one product's rows."""
    if gate.shape != up.shape or not (_has_rows(gate) and _has_rows(up)):
        return F.silu(gate) * up
    width = gate.shape[-1]
    block = 1024
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = gate.numel() // width
    _gate[(rows, triton.cdiv(width, block))](gate, up, output, width, gate.stride(-2), up.stride(-2), block)
    return output


def _has_rows(x: Tensor) -> bool:
    """Whether the rows of ``x`` [..., I] lie at equal distances."""
    strides = x.stride()
    sizes = x.shape
    return strides[-1] == 1 and all(strides[i] == strides[i + 1] * sizes[i + 1] for i in range(x.dim() - 2))


@triton.jit
def _dequantised_product(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    zeros,
    owners,
    output,
    count,
    width,
    stored,
    blocks,
    zero_bytes,
    outputs,
    HAS_ZEROS: tl.constexpr,
    HAS_OWNERS: tl.constexpr,
    BITS: tl.constexpr,
    QUANT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    each: tl.constexpr = 8 // BITS  # numbers in a byte; a number of x holds as many elements
    inner: tl.constexpr = QUANT // each
    half: tl.constexpr = DTYPE.primitive_bitwidth
    bits: tl.constexpr = tl.int16 if half == 16 else tl.int32
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, within = tl.arange(0, ROWS), tl.arange(0, inner)
    if HAS_OWNERS:
        first = tl.program_id(1).to(tl.int64) * count
        owner = tl.load(owners + tl.program_id(1))
        x, output = x + first * (width // each), output + first * outputs
        values, scales = values + owner * outputs * stored, scales + owner * outputs * blocks
        zeros = zeros + owner * outputs * zero_bytes
    else:
        first = tl.program_id(1).to(tl.int64) * ROWS
        x = x + first * (width // each)
        output = output + first * outputs
        count = count - tl.program_id(1) * ROWS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        there = (column < outputs)[:, None] & (block < blocks)[None, :]
        at = column[:, None, None].to(tl.int64) * stored + block[None, :, None] * inner + within[None, None, :]
        packed = tl.load(values + at, mask=there[:, :, None], other=0).to(tl.int32)
        scale = tl.load(scales + column[:, None] * blocks + block[None, :], mask=there, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            point = tl.load(zeros + column[:, None] * zero_bytes + (block // each)[None, :], mask=there, other=0).to(tl.int32)
            middle = ((point >> (block % each * BITS)[None, :]) & ((1 << BITS) - 1)).to(tl.float32)
        else:
            middle = tl.full((COLUMNS, BLOCKS), 1 << (BITS - 1), tl.float32)
        shift = -middle * scale
        low = (packed & ((1 << BITS) - 1)).to(tl.float32) * scale[:, :, None] + shift[:, :, None]
        high = (packed >> 4).to(tl.float32) * scale[:, :, None] + shift[:, :, None]
        from_x = block[:, None] * inner + within[None, :]
        for number in tl.static_range(ROWS):
            known = (block < blocks)[:, None] & (tl.full((1, 1), number, tl.int32) < count)
            given = tl.load(x + number * (width // each) + from_x, mask=known, other=0)
            if each == 2:  # two elements in one number: vectors of bytes then meet vectors of x
                even = (given & ((1 << half) - 1)).to(bits).to(DTYPE, bitcast=True).to(tl.float32)
                odd = (given >> half).to(bits).to(DTYPE, bitcast=True).to(tl.float32)
                products = low * even[None, :, :] + high * odd[None, :, :]
            else:
                products = low * given.to(tl.float32)[None, :, :]
            part = tl.sum(tl.sum(products, 2), 1)
            total = tl.where(row[:, None] == number, total + part[None, :], total)
    valid = (row < count)[:, None] & (column < outputs)[None, :]
    tl.store(output + row[:, None] * outputs + column[None, :], total.to(output.dtype.element_ty), mask=valid)


def low_bit_product(
    x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, block: int, owners: Tensor | None = None
) -> Tensor:
    """x [..., K] times the transposed weight [N, K]; for the operands see `dequantised`. With ``owners`` [M], x is [M, R, K],
    R at most `MAX_ROWS`, and the weight [E, N, K], of which x[m] is multiplied with the matrix owners[m].

    A program holds whole rows of the weight, or as much of them as it has registers for, so that most of a matrix is on its way
    from memory at once.
    """
    (outputs, stored), width, x = values.shape[-2:], x.shape[-1], x.contiguous()
    output = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    parts = 1 if owners is None else len(owners)
    count, inner = x.numel() // width // parts, block * bits // 8
    tile = _TILE_BYTES // (2 if x.dtype == torch.float32 else 1)  # as registers allow
    blocks = min(triton.next_power_of_2(stored // inner), max(1, tile // 2 // inner))
    columns = max(1, tile // (blocks * inner))
    rows = min(MAX_ROWS, triton.next_power_of_2(count))
    pairs = x if bits == 8 else x.view(torch.int64 if x.dtype == torch.float32 else torch.int32)
    _dequantised_product[(triton.cdiv(outputs, columns), triton.cdiv(count, rows) if owners is None else parts)](
        pairs, values, scales, values if zeros is None else zeros, values if owners is None else owners, output, count, width,
        stored, stored // inner, 0 if zeros is None else zeros.shape[-1], outputs, zeros is not None, owners is not None, bits,
        block, _TRITON[x.dtype],
        rows, columns, blocks, num_warps=8,
    )  # fmt: skip
    return output


@triton.jit
def _look_up(  # type: ignore[no-untyped-def]
    table,
    ids,
    scales,
    zeros,
    output,
    width,
    stored,
    blocks,
    zero_bytes,
    HAS_ZEROS: tl.constexpr,
    BITS: tl.constexpr,
    QUANT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    each: tl.constexpr = 8 // BITS
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    token = tl.load(ids + row).to(tl.int64)
    packed = tl.load(table + token * stored + place // each, mask=inside, other=0).to(tl.int32)
    block = place // QUANT
    scale = tl.load(scales + token * blocks + block, mask=inside, other=0.0)
    middle = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    if HAS_ZEROS:
        point = tl.load(zeros + token * zero_bytes + block // each, mask=inside, other=0).to(tl.int32)
        middle = (point >> (block % each * BITS)) & ((1 << BITS) - 1)
    number = (packed >> (place % each * BITS)) & ((1 << BITS) - 1)
    tl.store(output + row.to(tl.int64) * width + place, (number - middle).to(scale.dtype) * scale, mask=inside)


def look_up(table: Tensor, ids: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, block: int) -> Tensor:
    """The rows ``ids`` [...] of a low-bit ``table``, [..., K] in the dtype of ``scales``; for the operands see `dequantised`."""
    stored = table.shape[1]
    ids = ids.contiguous()
    threads = 1024
    width = stored * 8 // bits
    output = torch.empty((*ids.shape, width), dtype=scales.dtype, device=ids.device)
    _look_up[(ids.numel(), triton.cdiv(width, threads))](
        table, ids, scales, table if zeros is None else zeros, output, width, stored, scales.shape[1],
        0 if zeros is None else zeros.shape[1], zeros is not None, bits, block, threads, num_warps=4,
    )  # fmt: skip
    return output


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x, weight, output, count, width, outputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64) * ROWS
    x = x + first * width
    output = output + first * outputs
    count = count - tl.program_id(1) * ROWS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = (column < outputs)[:, None] & (place < width)[None, :]
        part = tl.load(weight + column[:, None].to(tl.int64) * width + place[None, :], mask=there, other=0.0).to(tl.float32)
        for number in tl.static_range(ROWS):
            known = (place < width) & (tl.full((1,), number, tl.int32) < count)
            given = tl.load(x + number * width + place, mask=known, other=0.0).to(tl.float32)
            total = tl.where(row[:, None] == number, total + tl.sum(part * given[None, :], 1)[None, :], total)
    valid = (row < count)[:, None] & (column < outputs)[None, :]
    tl.store(output + row[:, None] * outputs + column[None, :], total.to(output.dtype.element_ty), mask=valid)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times the transposed ``weight`` [N, K], of few rows. For fp32, where cuBLAS's kernels for eight rows take five
    times as long as those for one."""
    (outputs, width), x = weight.shape, x.contiguous()
    output = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    count, numbers = x.numel() // width, _TILE_BYTES // weight.element_size()
    block = min(triton.next_power_of_2(width), numbers)
    rows = min(MAX_ROWS, triton.next_power_of_2(count))
    grid = triton.cdiv(outputs, numbers // block), triton.cdiv(count, rows)
    _product[grid](x, weight, output, count, width, outputs, rows, numbers // block, block, num_warps=8)
    return output


@triton.jit
def _peaks(logits, peaks, places, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, part = tl.program_id(0), tl.program_id(1)
    place = part * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    number = tl.load(logits + row.to(tl.int64) * width + place, mask=inside, other=-float("inf")).to(tl.float32)
    number = tl.where(number == number, number, float("inf"))  # what is no number must be seen
    peak, at = tl.max(number, 0, return_indices=True)
    tl.store(peaks + row * tl.num_programs(1) + part, peak)
    tl.store(places + row * tl.num_programs(1) + part, part * BLOCK + at)


@triton.jit
def _token(peaks, places, tokens, parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    peak, at = tl.max(tl.load(peaks + row * parts + part, mask=part < parts, other=-float("inf")), 0, return_indices=True)
    token = tl.load(places + row * parts + at)
    tl.store(tokens + row, tl.where(tl.abs(peak) < float("inf"), token, -1).to(tl.int64))


def token(logits: Tensor) -> Tensor:
    """The first largest of ``logits`` [..., V], int64; -1 where it is not finite."""
    logits, width, block = logits.contiguous(), logits.shape[-1], 2048
    rows = logits.numel() // width
    parts = triton.cdiv(width, block)
    peaks = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    places = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    _peaks[(rows, parts)](logits, peaks, places, width, block, num_warps=4)
    _token[(rows,)](peaks, places, tokens, parts, triton.next_power_of_2(parts), num_warps=1)
    return tokens
