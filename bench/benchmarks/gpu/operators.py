"""Operators of a decode step alone, on a GPU: read bandwidth, products and attention against it, and their bits by rows.

    python -m benchmarks.gpu.operators --json operators.json

Products are timed over copies of their weight that do not fit the GPU's cache. `bits_differ` counts the operators of which a row
has other bits beside other rows than alone: with 0, policy auto drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
import typer
from tide_bench.report import Report
from tide_runtime.backends.torch import fused_kernels as kernels
from tide_runtime.backends.torch.skinny_product import Tiling, tiling

from benchmarks.gpu.shapes import SHAPES

_ROWS = (2, 3, 5, 8, 13, 16, 24, 32, 64)
_CACHE_BYTES = 4e8  # read between two reads of one weight
_HEADS, _KV = 32, 8


@triton.jit
def _read(x, y, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK))
    tl.store(y + tl.program_id(0), tl.sum(total, 0))


def microseconds(run: Callable[[int], object], count: int) -> float:
    """Time of one call of ``run`` in a captured graph of ``count`` calls, the median of its replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(count):
                run(number)
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    return 1e3 * sorted(times)[2] / count


def bandwidth() -> float:
    """GB/s of reading 4 GiB."""
    x = torch.randn(1 << 30, device="cuda")
    y = torch.empty(2048, device="cuda")
    programs = 1056
    return x.numel() * 4e-3 / microseconds(lambda _: _read[(programs,)](x, y, x.numel(), 4096, num_warps=8), 3)


def matrices(shape: str) -> Iterator[tuple[str, int, int]]:
    config: dict[str, Any] = SHAPES[shape]
    hidden = config["hidden_size"]
    mlp = config["intermediate_size"]
    width = config["head_dim"]
    yield "qkv", (_HEADS + 2 * _KV) * width, hidden
    yield "o", hidden, _HEADS * width
    yield "gate_up", 2 * mlp, hidden
    yield "down", hidden, mlp
    yield "head", 128256, hidden


def matrix(rows: int, width: int, bits: int) -> Any:
    if bits == 16:
        return kernels.Matrix((torch.randn(rows, width, device="cuda") / 50).half())
    values = torch.randint(0, 256, (rows, width * bits // 8), dtype=torch.uint8, device="cuda")
    return kernels.Matrix(values, (torch.rand(rows, width // 32, device="cuda") / 100).half(), None, bits, 32)


def products(report: Report, read_gb_s: float, search: bool) -> None:
    cells = []
    for shape in SHAPES:
        for name, rows, width in matrices(shape):
            for bits in (16, 4):
                size = rows * width * (bits / 8 if bits == 16 else bits / 8 + 1 / 16)
                copies = [matrix(rows, width, bits) for _ in range(max(2, min(12, int(_CACHE_BYTES / size) + 1)))]
                floor = size / read_gb_s / 1e3
                row = [shape, name, str(bits)]
                for tokens in (1, 16):
                    x = torch.randn(1, tokens, width, device="cuda").half()
                    took = microseconds(lambda i: kernels.skinny_product(x, copies[i % len(copies)]), 2 * len(copies))  # noqa: B023
                    report.add(f"{shape}_{name}_{bits}_rows{tokens}_share", floor / took)
                    row += [f"{took:.1f}", f"{floor / took:.0%}"]
                    if bits == 16:
                        torchs = microseconds(lambda i: F.linear(x, copies[i % len(copies)].values), 2 * len(copies))  # noqa: B023
                        row.append(f"{torchs:.1f}")
                    else:
                        row.append("")
                if search:
                    x = torch.randn(1, 1, width, device="cuda").half()
                    fastest = sorted(_searched(x, copies, tiling(rows, width, bits)), key=lambda one: one[0])[:3]
                    print(shape, name, bits, *(f"{took:.1f} {cut}" for took, cut in fastest), flush=True)
                cells.append(row)
                print(*row, flush=True)
    headings = ["shape", "product", "bits", "µs, 1 row", "of bandwidth", "cuBLAS", "µs, 16 rows", "of bandwidth", "cuBLAS"]
    report.table(f"Products, of {read_gb_s:.0f} GB/s", headings, cells)


def _searched(x: torch.Tensor, copies: list[Any], default: Tiling) -> Iterator[tuple[float, Tiling]]:
    for out, block, stages, split, warps in [
        (64, 128, 4, 1, 4),
        (64, 64, 6, 1, 4),
        (64, 256, 3, 1, 4),
        (128, 64, 4, 1, 4),
        (128, 128, 4, 1, 8),
    ]:
        for factor in (1, 2, 4, 8):
            cut = Tiling(out, block, split * factor, warps, stages)
            if x.shape[-1] // cut.split >= block:
                yield microseconds(lambda i: kernels.skinny_product(x, copies[i % len(copies)], cut=cut), len(copies)), cut  # noqa: B023
    yield microseconds(lambda i: kernels.skinny_product(x, copies[i % len(copies)], cut=default), len(copies)), default


def bits(report: Report) -> None:
    """Rows beside others against rows alone, and the operators that torch has for them."""
    differ, torchs = list[str](), list[str]()
    for shape in SHAPES:
        for name, rows, width in matrices(shape):
            x = torch.randn(1, max(_ROWS), width, device="cuda").half()
            for number in (16, 8, 4):
                weight = matrix(min(rows, 8192), width, number)
                for where, product in (
                    (differ, lambda x, w: kernels.skinny_product(x, w)[0]),
                    (torchs, lambda x, w: F.linear(x, w.values)),
                ):
                    if where is torchs and number < 16:
                        continue
                    alone = torch.cat([product(one.contiguous(), weight) for one in x.split(1, 1)], 1)
                    others = [n for n in _ROWS if not torch.equal(product(x[:, :n].contiguous(), weight), alone[:, :n])]
                    where += [f"{shape} {name} {number} bits beside {others}"] if others else []
        differ += [
            f"{shape} attention at {first}"
            for first in (40, 1000, 3000)
            if not _attention_agrees(SHAPES[shape]["head_dim"], first)
        ]
    report.add("bits_differ", len(differ))
    report.add("bits_differ_torch", len(torchs))
    report.statement("Bits", f"TIDE's kernels: {'; '.join(differ) or 'the same'}. cuBLAS: {'; '.join(torchs) or 'the same'}.")


def _attention(every: torch.Tensor, first: int, caches: torch.Tensor) -> torch.Tensor:
    width = caches.shape[-1]
    lengths = torch.full((len(every),), first + every.shape[1] - 1, dtype=torch.int32, device="cuda")
    table = torch.ones(2, caches.shape[3], width, dtype=torch.float16, device="cuda")
    return kernels.attention(every, table, lengths, caches[0], caches[1], _HEADS, width**-0.5, False, -1)


def _attention_agrees(width: int, first: int) -> bool:
    every = torch.randn(8, 16, (_HEADS + 2 * _KV) * width, device="cuda").half()
    caches = torch.randn(2, 8, _KV, 4096, width, device="cuda").half()
    other = caches.clone()
    alone = caches[:, 2:3].contiguous()
    whole = _attention(every, first, caches)
    steps = [_attention(every[:, i : i + 1].contiguous(), first + i, other) for i in range(16)]
    return torch.equal(torch.cat(steps, 1), whole) and torch.equal(_attention(every[2:3].contiguous(), first, alone), whole[2:3])


def attention(report: Report, read_gb_s: float) -> None:
    cells = []
    for shape, config in SHAPES.items():
        width: int = config["head_dim"]  # type: ignore[assignment]
        for batch, first in ((1, 200), (1, 3000), (8, 3000), (32, 3000)):
            caches = torch.randn(2, batch, _KV, 4096, width, device="cuda").half()
            row = [shape, str(batch), str(first)]
            for tokens in (1, 4, 16):
                every = torch.randn(batch, tokens, (_HEADS + 2 * _KV) * width, device="cuda").half()
                row.append(f"{microseconds(lambda _: _attention(every, first, caches), 8):.1f}")  # noqa: B023
            cells.append([*row, f"{4 * batch * _KV * first * width / read_gb_s / 1e3:.1f}"])
        every = torch.randn(1, 2048, (_HEADS + 2 * _KV) * width, device="cuda").half()
        caches = torch.randn(2, 1, _KV, 4096, width, device="cuda").half()
        took = microseconds(lambda _: _attention(every, 0, caches), 4)  # noqa: B023
        report.add(f"{shape}_prompt2048_attention_tflops", 2 * _HEADS * width * 2048**2 / took / 1e6)
    report.table("Attention, µs", ["shape", "batch", "context", "1 token", "4", "16", "bandwidth alone"], cells)


def main(
    search: Annotated[bool, typer.Option("--search", help="Time other tiles too, most of it Triton's compiler.")] = False,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Time and compare the operators of a decode step on a GPU."""
    report = Report("gpu_operators")
    report.machine |= {"gpu": torch.cuda.get_device_name(0), "triton": triton.__version__}
    read_gb_s = bandwidth()
    report.add("read_gb_s", read_gb_s)
    bits(report)
    attention(report, read_gb_s)
    products(report, read_gb_s, search)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
