"""Attention over cached keys and values, in Triton: few tokens of a sequence in chunks of slots, prompts in one pass.

The keys and values of a step are cached first. A program of a few tokens then reads a chunk of one KV head's slots for 16 rows,
which are the query heads of its tokens. Chunks have one size and are put together in order, so a token's bits do not depend on
the tokens and sequences beside it, or on the slots that the caches have.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 16  # tokens per sequence; steps with more count as prompts
_CHUNK = 256  # KV slots that one program reads
_ROWS = 16  # rows of the smallest matrix instruction
_PROMPT_ROWS = 64
_PARTS = 16  # partial sums of a row that are combined at a time
_MAX_DIM = 256


@triton.jit
def _rounded(x, reciprocals):  # type: ignore[no-untyped-def]
    number = tl.minimum(tl.maximum(x.to(tl.float32) * reciprocals, -128.0), 127.0)
    return (number + 12582912.0 - 12582912.0).to(tl.int8)  # 1.5 · 2^23, whose neighbours are one apart: rounds to even


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    every, base, place, known, table, positions, columns,
    DIM: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The vectors [N, BLOCK] at ``base`` [N] of the packed projections, rotated by the angles of ``place`` [N]."""
    inside = known[:, None] & (columns < DIM)[None, :]
    x = tl.load(every + base[:, None] + columns[None, :], mask=inside, other=0.0)
    if WIDTH > 0:
        turns = known[:, None] & (columns < WIDTH)[None, :]
        partner = tl.where(columns < WIDTH // 2, columns + WIDTH // 2, columns - WIDTH // 2)
        if INTERLEAVED:
            partner = columns ^ 1
        swapped = tl.load(every + base[:, None] + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        angle = table + place[:, None] * WIDTH + columns[None, :]
        cos = tl.load(angle, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(angle + positions * WIDTH, mask=turns, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + swapped * sin).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["tokens"])
def _place(  # type: ignore[no-untyped-def]
    every, table, seqlens, keys, values, scales, tokens, slots, positions,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Cache the keys and values of TOKENS tokens for one head. A token behind the last slot is padding."""
    kv_row = tl.program_id(0)
    batch = kv_row // KV
    head = kv_row % KV
    columns = tl.arange(0, BLOCK)
    number = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(seqlens + batch) + 1 - tokens + number
    known = (number < tokens) & (slot >= 0) & (slot < slots)
    base = ((batch * tokens + number).to(tl.int64) * (HEADS + 2 * KV) + HEADS + head) * DIM
    key = _turned(every, base, slot, known, table, positions, columns, DIM, WIDTH, INTERLEAVED)
    inside = known[:, None] & (columns < DIM)[None, :]
    value = tl.load(every + (base + KV * DIM)[:, None] + columns[None, :], mask=inside, other=0.0)
    if ROUNDS:
        key_scale = tl.load(scales + (KV + head) * DIM + columns, mask=columns < DIM, other=1.0)
        value_scale = tl.load(scales + (3 * KV + head) * DIM + columns, mask=columns < DIM, other=1.0)
        key, value = _rounded(key, key_scale[None, :]), _rounded(value, value_scale[None, :])
    at = (kv_row.to(tl.int64) * slots + slot) * DIM
    tl.store(keys + at[:, None] + columns[None, :], key, mask=inside)
    tl.store(values + at[:, None] + columns[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _attend(  # type: ignore[no-untyped-def]
    every, table, seqlens, keys, values, scales, output, sums, peaks, weights, scale, tokens, slots, positions,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, PROMPT: tl.constexpr,
):  # fmt: skip
    """``PROMPT``: a program reads all slots that its rows see, and divides; else a chunk of them."""
    kv_row, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV
    batch, head = kv_row // KV, kv_row % KV
    rows = block * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside, valid = columns < DIM, rows < tokens * group
    first = tl.load(seqlens + batch) + 1 - tokens
    last = tl.minimum(first + tokens, slots)
    begin = part * CHUNK
    end = tl.minimum(begin + CHUNK, last)
    if PROMPT:
        begin = 0
        end = tl.minimum(first + (block * ROWS + ROWS - 1) // group + 1, last)
    if begin < end:
        number, mine = rows // group, head * group + rows % group
        place = tl.minimum(tl.maximum(first + number, 0), slots - 1)
        base = ((batch * tokens + number).to(tl.int64) * (HEADS + 2 * KV) + mine) * DIM
        query = _turned(every, base, place, valid, table, positions, columns, DIM, WIDTH, INTERLEAVED)
        peak = tl.full((ROWS,), -float("inf"), tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        key_scale, value_scale = weight, weight
        if ROUNDS:
            key_scale = tl.load(scales + head * DIM + columns, mask=inside, other=0.0)
            value_scale = tl.load(scales + (2 * KV + head) * DIM + columns, mask=inside, other=0.0)
        if WINDOW > 0:
            begin = tl.maximum(begin, (first - WINDOW) // SLOTS * SLOTS)
            if PROMPT:
                begin = tl.maximum(begin, (first + block * ROWS // group - WINDOW) // SLOTS * SLOTS)
        memory = kv_row.to(tl.int64) * slots * DIM
        for start in range(begin, end, SLOTS):
            slot = start + tl.arange(0, SLOTS)
            there = slot < last
            read = memory + slot[:, None].to(tl.int64) * DIM + columns[None, :]
            key = tl.load(keys + read, mask=there[:, None] & inside[None, :], other=0)
            value = tl.load(values + read, mask=there[:, None] & inside[None, :], other=0)
            if ROUNDS:
                key = (key.to(tl.float32) * key_scale[None, :]).to(query.dtype)
                value = (value.to(tl.float32) * value_scale[None, :]).to(query.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            seen = (slot[None, :] <= place[:, None]) & there[None, :]
            if WINDOW > 0:
                seen = seen & (slot[None, :] > place[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
            largest = tl.maximum(peak, tl.max(scores, 1))
            finite = tl.where(largest == -float("inf"), 0.0, largest)
            powers, shrink = tl.exp(scores - finite[:, None]), tl.exp(peak - finite)
            total = total * shrink[:, None] + tl.dot(powers.to(value.dtype), value, input_precision=PRECISION)
            weight = weight * shrink + tl.sum(powers, 1)
            peak = largest
        if PROMPT:
            at = ((batch * tokens + number).to(tl.int64) * HEADS + mine) * DIM
            shared = tl.where(valid, weight, 1.0)
            tl.store(output + at[:, None] + columns[None, :], (total / shared[:, None]).to(output.dtype.element_ty),
                     mask=valid[:, None] & inside[None, :])  # fmt: skip
        else:
            here = (kv_row * tl.num_programs(1) + part).to(tl.int64) * (tl.num_programs(2) * ROWS) + rows
            tl.store(peaks + here, peak)
            tl.store(weights + here, weight)
            tl.store(sums + here[:, None] * BLOCK + columns[None, :], total)


@triton.jit(do_not_specialize=["tokens", "parts", "padded"])
def _combine(  # type: ignore[no-untyped-def]
    sums, peaks, weights, seqlens, output, tokens, slots, parts, padded,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """A row's attention from its chunks. ``padded``: rows of each chunk."""
    kv_row, row = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV
    batch, head = kv_row // KV, kv_row % KV
    columns = tl.arange(0, BLOCK)
    used = tl.cdiv(tl.minimum(tl.load(seqlens + batch) + 1, slots), CHUNK)
    largest = -float("inf")
    weight = 0.0
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, used, PARTS):
        part = start + tl.arange(0, PARTS)
        here = (kv_row * parts + part).to(tl.int64) * padded + row
        peak = tl.load(peaks + here, mask=part < used, other=-float("inf"))
        highest = tl.maximum(largest, tl.max(peak, 0))
        finite = tl.where(highest == -float("inf"), 0.0, highest)
        share, shrink = tl.exp(peak - finite), tl.exp(largest - finite)
        sum_of = tl.load(sums + here[:, None] * BLOCK + columns[None, :], mask=(part < used)[:, None], other=0.0)
        weight = weight * shrink + tl.sum(share * tl.load(weights + here, mask=part < used, other=0.0), 0)
        total = total * shrink + tl.sum(share[:, None] * sum_of, 0)
        largest = highest
    at = ((batch * tokens + row // group).to(tl.int64) * HEADS + head * group + row % group) * DIM
    tl.store(output + at + columns, (total / weight).to(output.dtype.element_ty), mask=columns < DIM)


def fits(tokens: int, width: int, dtype: torch.dtype) -> bool:
    """Whether `attention` takes so many tokens a sequence and heads of ``width`` channels. Products in fp32 take
    more registers than there are for prompts and wide heads."""
    return width <= _MAX_DIM if dtype != torch.float32 else width <= _MAX_DIM // 2 and tokens <= MAX_TOKENS


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
    scales: Tensor | None = None,
) -> Tensor:
    """Attention [B, S, N · D] of the packed projections ``every`` [B, S, (N + 2 KV) · D], whose keys and values are cached first.

    Args:
        table: `rotation_table`; of width 0 where nothing is rotated.
        seqlens: [B] int32, tokens of a sequence with those of the step, less one.
        keys: [B, KV, slots, D], as ``values``.
        window: tokens that a token sees; 0 or less: all.
        scales: `cache_scales`, of caches in int8.
    """
    every = every.contiguous()  # a part of a product with others where a model computes its MLP beside attention
    batch, tokens, _ = every.shape
    kv, slots, dim = keys.shape[1:]
    prompt = tokens > MAX_TOKENS
    group = heads // kv
    block = max(16, triton.next_power_of_2(dim))
    rows = _ROWS if not prompt else _PROMPT_ROWS if block <= 128 else _PROMPT_ROWS // 2
    output = torch.empty((batch, tokens, heads * dim), dtype=every.dtype, device=every.device)
    inputs = every, table, seqlens, keys, values, every if scales is None else scales
    shape: dict[str, Any] = {"HEADS": heads, "KV": kv, "DIM": dim, "WIDTH": table.shape[2], "INTERLEAVED": interleaved}
    wide = every.element_size() > 2 or block > 128
    tile = 16 if wide else 32 if prompt else 64  # slots; these and the warps are as registers allow
    shape |= {"ROUNDS": scales is not None, "BLOCK": block}
    placed = min(16, triton.next_power_of_2(tokens))
    _place[(batch * kv, triton.cdiv(tokens, placed))](*inputs, tokens, slots, table.shape[1], TOKENS=placed, **shape)
    parts = 1 if prompt else triton.cdiv(slots, _CHUNK)
    blocks = triton.cdiv(tokens * group, rows)
    sums = peaks = weights = output
    if not prompt:
        sums = torch.empty((batch * kv, parts, blocks * rows, block), dtype=torch.float32, device=every.device)
        peaks, weights = torch.empty((2, batch * kv, parts, blocks * rows), dtype=torch.float32, device=every.device)
    _attend[(batch * kv, parts, blocks)](
        *inputs, output, sums, peaks, weights, scale, tokens, slots, table.shape[1], WINDOW=max(window, 0), ROWS=rows, SLOTS=tile,
        CHUNK=_CHUNK,
        PRECISION="ieee", PROMPT=prompt, num_warps=8 if prompt or wide else 4, num_stages=2, **shape,
    )  # fmt: skip
    if not prompt:
        _combine[(batch * kv, tokens * group)](
            sums, peaks, weights, seqlens, output, tokens, slots, parts, blocks * rows, heads, kv, dim, block, _CHUNK, _PARTS,
            num_warps=2,
        )  # fmt: skip
    return output
