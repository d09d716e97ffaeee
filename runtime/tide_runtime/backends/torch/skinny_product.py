"""Products of few tokens with a weight matrix, in Triton: one kernel for 16-bit weights and for blocks of 8 or 4 bits.

    y [R, N] = epilogue(W [N, K] · prologue(x [R, K])ᵀ)ᵀ

Decoding reads every weight once for a handful of rows, so the weight is the left operand of the matrix instructions, and the rows
are padded to their least width. The order of all sums depends on the matrix alone: K in steps of one size, in as many parts as
suit [N, K], which the program that finishes last adds up in order. So a row has the same bits whatever shares its launch:
decoding, verification of drafts and batches agree.

Prologue: RMSNorm of x, whose sums of squares the product before has left. Epilogues: x + y with the sums of squares of that, or
silu(gate) · up of a matrix that holds both. Each rounds where the separate operators round.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 16  # tokens per sequence in one launch
MAX_LOGITS = 512
_GROUP = 16  # rows of a tile, the least width of Hopper's and Ampere's matrix instructions in use
_ASSEMBLY = os.environ.get("TRITON_INTERPRET") != "1"  # whether inline assembly is used; Triton's interpreter cannot run it
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200


@triton.jit
def _packed_tile(  # type: ignore[no-untyped-def]
    weight, scales, zeros, column, start, known, stored, blocks, zero_bytes, BITS: tl.constexpr, QUANT: tl.constexpr,
    HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """BYTES bytes of each of the weight's rows ``column`` from ``start`` on, with the scale and the zero point of each."""
    each: tl.constexpr = 8 // BITS
    inner: tl.constexpr = QUANT // each
    many: tl.constexpr = BYTES // inner
    k = start + tl.arange(0, BYTES)
    packed = tl.load(
        weight + column[:, None].to(tl.int64) * stored + k[None, :], mask=known[:, None] & (k < stored)[None, :], other=0
    )
    block = start // inner + tl.arange(0, many)
    there = known[:, None] & (block < blocks)[None, :]
    scale = tl.load(scales + column[:, None] * blocks + block[None, :], mask=there, other=0.0)
    if HAS_ZEROS:
        point = tl.load(zeros + column[:, None] * zero_bytes + (block // each)[None, :], mask=there, other=0)
        middle = ((point >> (block % each * BITS)[None, :].to(tl.uint8)) & ((1 << BITS) - 1)).to(DTYPE)
        middle = tl.reshape(tl.broadcast_to(middle[:, :, None], (OUT, many, inner)), (OUT, BYTES))
    else:
        middle = tl.full((OUT, BYTES), 1 << (BITS - 1), DTYPE)
    return packed, tl.reshape(tl.broadcast_to(scale[:, :, None], (OUT, many, inner)), (OUT, BYTES)), middle


@triton.jit
def _rows_tile(x, gains, factor, rows, row, start, width, NORM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of the rows from ``start`` on, normed: [GROUP, BLOCK]."""
    k = start + tl.arange(0, BLOCK)
    given = tl.load(
        x + row[:, None].to(tl.int64) * width + k[None, :], mask=(row < rows)[:, None] & (k < width)[None, :], other=0.0
    )
    if NORM:
        gain = tl.load(gains + k, mask=k < width, other=0.0)
        given = (given.to(tl.float32) * factor[:, None]).to(gain.dtype) * gain[None, :]
    return given


# Four bytes to their low and their high halves, each under the exponent of 1024 (fp16) or 128 (bf16): 1024 + n and 1024 + 16 n,
# or 128 + n for both.
_FP16_HALVES: tl.constexpr = tl.constexpr("""
{
    .reg .b32 low, high;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    lop3.b32 $0, low, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, high, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, low, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $3, high, 0x00f000f0, 0x64006400, 0xea;
}
""")
_BF16_HALVES: tl.constexpr = tl.constexpr("""
{
    .reg .b32 low, high;
    prmt.b32 low, $4, 0, 0x4140;
    prmt.b32 high, $4, 0, 0x4342;
    lop3.b32 $0, low, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $1, high, 0x000f000f, 0x43004300, 0xea;
    shr.b32 low, low, 4;
    shr.b32 high, high, 4;
    lop3.b32 $2, low, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $3, high, 0x000f000f, 0x43004300, 0xea;
}
""")


@triton.jit
def _halves(packed, middle, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low and the high halves of bytes less ``middle``."""
    if ASSEMBLY and tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            _FP16_HALVES, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        low, high = low - (middle + 1024.0), high * 0.0625 - (middle + 64.0)
    elif ASSEMBLY:
        low, high = tl.inline_asm_elementwise(
            _BF16_HALVES, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        low, high = low - (middle + 128.0), high - (middle + 128.0)
    else:
        low, high = (packed & 15).to(DTYPE) - middle, (packed >> 4).to(DTYPE) - middle
    return low, high


@triton.jit
def _dot(  # type: ignore[no-untyped-def]
    total, weight, scales, zeros, given, column, start, width, stored, blocks, zero_bytes, outputs,
    BITS: tl.constexpr, QUANT: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr,
    OUT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """``total`` [OUT, GROUP] with the products of BLOCK columns, those of a row's numbers from ``start`` on."""
    known = column < outputs
    if BITS == 16:
        k = start + tl.arange(0, BLOCK)
        tile = tl.load(
            weight + column[:, None].to(tl.int64) * width + k[None, :], mask=known[:, None] & (k < width)[None, :], other=0.0
        )
        total = tl.dot(tile, tl.trans(given), total)
    else:
        packed, scale, middle = _packed_tile(weight, scales, zeros, column, start, known, stored, blocks, zero_bytes, BITS, QUANT,
                                             HAS_ZEROS, DTYPE, OUT, BLOCK * BITS // 8)  # fmt: skip
        if BITS == 8:
            total = tl.dot((packed.to(DTYPE) - middle) * scale, tl.trans(given), total)
        else:  # the even columns are in the low halves of bytes, the odd ones in the high halves
            even, odd = tl.split(tl.reshape(given, (GROUP, BLOCK // 2, 2)))
            low, high = _halves(packed, middle, DTYPE, ASSEMBLY)
            total = tl.dot(low * scale, tl.trans(even), total)
            total = tl.dot(high * scale, tl.trans(odd), total)
    return total


@triton.jit(do_not_specialize=["rows", "epsilon", "parts_of_squares"])
def _skinny(  # type: ignore[no-untyped-def]
    x, weight, scales, zeros, gains, squares, residual, y, new_squares, partials, turns,
    rows, width, outputs, stored, blocks, zero_bytes, epsilon, parts_of_squares,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    BITS: tl.constexpr, QUANT: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr,
    SQUARES: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    group, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = group * GROUP + tl.arange(0, GROUP)
    column = tile * OUT + tl.arange(0, OUT)
    if GATE:  # a tile holds as many rows of the gate as of what it gates
        pair = tl.arange(0, OUT)
        column = tile * (OUT // 2) + pair % (OUT // 2)
        column = tl.where(column < outputs, column + pair // (OUT // 2) * outputs, 2 * outputs)
    matrix_rows = 2 * outputs if GATE else outputs
    factor = tl.zeros((GROUP,), tl.float32)
    if NORM:
        number = tl.arange(0, SQUARES)
        known = (number < parts_of_squares)[:, None] & (row < rows)[None, :]
        sums = tl.load(squares + number[:, None] * rows + row[None, :], mask=known, other=0.0)
        factor = tl.rsqrt(tl.sum(sums, 0) / width + epsilon)
    total = tl.zeros((OUT, GROUP), tl.float32)
    steps = tl.cdiv(tl.cdiv(width, SPLIT), BLOCK)
    for step in range(part * steps, tl.minimum(part * steps + steps, tl.cdiv(width, BLOCK))):
        given = _rows_tile(x, gains, factor, rows, row, step * BLOCK, width, NORM, BLOCK)
        start = step * (BLOCK * BITS // 8 if BITS < 16 else BLOCK)
        total = _dot(total, weight, scales, zeros, given, column, start, width, stored, blocks, zero_bytes, matrix_rows,
                     BITS, QUANT, HAS_ZEROS, DTYPE, OUT, BLOCK, GROUP, ASSEMBLY)  # fmt: skip
    done = True
    if SPLIT > 1:
        number = group * tl.num_programs(1) + tile
        here = partials + number.to(tl.int64) * (SPLIT * OUT * GROUP) + tl.arange(0, OUT)[:, None] * GROUP + tl.arange(0, GROUP)
        tl.store(here + part * (OUT * GROUP), total)
        tl.debug_barrier()  # all threads' sums are written before this program counts as finished
        done = tl.atomic_add(turns + number, 1, sem="acq_rel") == SPLIT - 1
        if done:
            tl.store(turns + number, 0)
            total = tl.zeros((OUT, GROUP), tl.float32)
            for each in tl.static_range(SPLIT):
                total += tl.load(here + each * (OUT * GROUP), cache_modifier=".cg")
    if done:
        if GATE:
            gate, up = tl.split(tl.permute(tl.reshape(total, (2, OUT // 2, GROUP)), (1, 2, 0)))
            wide = gate.to(DTYPE).to(tl.float32)
            made = (wide / (1.0 + tl.exp(-wide))).to(DTYPE) * up.to(DTYPE)
            output = tile * (OUT // 2) + tl.arange(0, OUT // 2)
        else:
            made = total.to(DTYPE)
            output = column
        at = row[None, :].to(tl.int64) * outputs + output[:, None]
        valid = (row < rows)[None, :] & (output < outputs)[:, None]
        if RESIDUAL:
            made = tl.load(residual + at, mask=valid, other=0.0) + made
            wide = tl.where(valid, made.to(tl.float32), 0.0)
            tl.store(new_squares + tile * rows + row, tl.sum(wide * wide, 0), mask=row < rows)
        tl.store(y + at, made, mask=valid)


@dataclass(frozen=True)
class Tiling:
    """How a product is cut. ``out``, ``block``: rows and columns of a tile of the weight; ``split``: parts of K."""

    out: int
    block: int
    split: int
    warps: int = 4
    stages: int = 4


def tiling(outputs: int, width: int, bits: int) -> Tiling:
    """The cut of a matrix [outputs, width] of numbers of ``bits``: as many programs as keep a large GPU's memory busy."""
    out, block = 64, 128
    split = 1
    while outputs // out * split < _PROGRAMS and width // (2 * split) >= 2 * block:
        split *= 2
    return Tiling(out, block, split, warps=4 if bits == 16 else 8)  # few bits are unpacked in registers


@dataclass(frozen=True)
class Matrix:
    """A weight [N, K] as the kernel reads it: ``values`` of 16 bits, or packed in blocks with ``scales`` and zero points."""

    values: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    bits: int = 16
    block: int = 0

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def width(self) -> int:
        return self.values.shape[1] * 8 // self.bits if self.bits < 16 else self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype if self.scales is None else self.scales.dtype


@dataclass(frozen=True)
class Norm:
    """RMSNorm of a product's rows. ``squares`` [P, R]: sums of squares of parts of each row, which add up to that of the row."""

    gains: Tensor
    epsilon: float
    squares: Tensor


def takes(tokens: int, rows: int) -> bool:
    """Whether `skinny_product` is for steps of so many tokens a sequence. Prompts have more: their products have other bits."""
    return tokens <= MAX_TOKENS


def takes_logits(tokens: int, rows: int) -> bool:
    """The same for logits, of tokens that lie one after the other whatever sequences they are of."""
    return rows <= MAX_LOGITS


@cache
def _turns(device: torch.device) -> Tensor:
    """Counters of finished parts, all 0 between launches, of which one stream runs one at a time."""
    return torch.zeros(1 << 16, dtype=torch.int32, device=device)


def skinny_product(
    x: Tensor,
    matrix: Matrix,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: bool = False,
    cut: Tiling | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [..., K] times the transposed ``matrix``, and with a ``residual`` [..., N] the sums of squares of what is returned.

    Args:
        norm: of x, before the product.
        residual: is added to the product.
        gate: the first half of the matrix's rows are a gate's; [..., N / 2] silu(gate) · up is returned.
        cut: default: `tiling`.
    """
    width = x.shape[-1]
    rows = x.numel() // x.shape[-1]
    outputs = matrix.outputs // (2 if gate else 1)
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    cut = cut or tiling(matrix.outputs, width, matrix.bits)
    tiles, groups = triton.cdiv(matrix.outputs, cut.out), triton.cdiv(rows, _GROUP)
    if gate:
        tiles = triton.cdiv(outputs, cut.out // 2)
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    empty = y
    new_squares = torch.empty((tiles, rows), dtype=torch.float32, device=x.device) if residual is not None else None
    partials = empty
    if cut.split > 1:
        size = groups * tiles * cut.split * cut.out * _GROUP
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    parts = norm.squares.shape[0] if norm is not None else 1
    given: dict[str, Any] = {"num_warps": cut.warps, "num_stages": cut.stages}
    _skinny[(groups, tiles, cut.split)](
        x, matrix.values, empty if matrix.scales is None else matrix.scales, empty if matrix.zeros is None else matrix.zeros,
        empty if norm is None else norm.gains, empty if norm is None else norm.squares, empty if residual is None else residual,
        y, empty if new_squares is None else new_squares, partials, _turns(x.device), rows, width, outputs,
        matrix.values.shape[1], 0 if matrix.scales is None else matrix.scales.shape[1],
        0 if matrix.zeros is None else matrix.zeros.shape[-1], 0.0 if norm is None else norm.epsilon, parts,
        norm is not None, residual is not None, gate, matrix.bits, matrix.block or 1, matrix.zeros is not None,
        _TRITON[x.dtype], triton.next_power_of_2(parts), cut.out, cut.block, cut.split, _GROUP, _ASSEMBLY, **given,
    )  # fmt: skip
    return y, new_squares


_TRITON = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
