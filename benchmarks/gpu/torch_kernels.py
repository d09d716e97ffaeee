"""The Triton kernels of target torch beside the torch calls that they replace, and int4 products beside dense ones: µs in a graph
with cold caches, and the largest difference over the largest number. Tokens drawn on the device beside the host's draws. The rate
at which the GPU reads, and for which numbers of rows an operator gives a row the bits that it has alone.

    python -m benchmarks.gpu.torch_kernels
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sampler import Sampler
from torch import Tensor

from benchmarks.gpu.cuda_timing import gpu_time
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun

_REPEATS = 20
_VOCAB = 128256
_HIDDEN, _MLP, _HEADS, _KV, _DIM = 2048, 8192, 32, 8, 64  # of a model of 1B parameters
_READ_BYTES = 4 * 2**30
_ROWS = (2, 3, 4, 8, 15, 16, 24, 32, 64)
_PRODUCTS = ((3072, 2048), (2048, 8192), (16384, 2048), (128256, 2048))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float16)


def compared(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> Figures:
    """µs of both, and how far apart they are."""
    mine, reference = ours().float(), theirs().float()
    apart = float((mine - reference).abs().max() / reference.abs().max())

    def timed(arm: Callable[[], Tensor]) -> float:
        def work() -> None:
            arm()

        return round(gpu_time(work, _REPEATS), 2)

    if apart > 0.02:
        raise ValueError(f"the results are {apart:.3g} of the largest number apart")
    return {"us": timed(ours), "replaced_us": timed(theirs), "apart": apart}


def sum_and_norm() -> Figures:
    from tide_runtime.backends.torch import fused_kernels

    x, skip, weight = random(8, _HIDDEN), random(8, _HIDDEN), random(_HIDDEN)
    return compared(
        lambda: fused_kernels.add_norm(x, skip, weight, 1e-5)[0], lambda: F.rms_norm(x + skip, (_HIDDEN,), weight, 1e-5)
    )


def gate() -> Figures:
    from tide_runtime.backends.torch import fused_kernels

    gates, up = random(8, 2 * _MLP).split(_MLP, -1)
    return compared(lambda: fused_kernels.gated(gates, up), lambda: F.silu(gates) * up)


def attention(batch: int, slots: int) -> Figures:
    """Over full caches."""
    from tide_runtime.backends.torch import fused_kernels
    from tide_runtime.backends.torch.attention import Attention, Shared

    every, (keys, values) = random(batch, 1, (_HEADS + 2 * _KV) * _DIM), random(2, batch, _KV, slots, _DIM)
    lengths, table = torch.full((batch,), slots - 2, device="cuda", dtype=torch.int32), random(2, slots, _DIM)
    attributes = {"num_heads": _HEADS, "kv_num_heads": _KV, "do_rotary": 1}

    def arm(kernels: Any) -> Tensor:
        return Attention(attributes, Shared(), kernels)(every, None, None, keys, values, lengths, None, table)[0]

    return compared(partial(arm, fused_kernels), partial(arm, None))


def low_bit_product(outputs: int, width: int, rows: int, dtype: torch.dtype) -> Figures:
    """int4 in blocks of 32 against a dense matrix."""
    from tide_runtime.backends.torch import fused_kernels
    from tide_runtime.backends.torch.low_bits import dequantised

    packed = torch.randint(0, 256, (outputs, width // 2), device="cuda", dtype=torch.uint8)
    scales = (torch.rand(outputs, width // 32, device="cuda") / 64).to(dtype)
    x, dense = random(rows, width).to(dtype), dequantised(packed, scales, None, 4, 32)
    return compared(partial(fused_kernels.low_bit_product, x, packed, scales, None, 4, 32), partial(F.linear, x, dense))


def product(outputs: int, width: int, rows: int, dtype: torch.dtype) -> Figures:
    from tide_runtime.backends.torch import fused_kernels

    x, weight = random(rows, width).to(dtype), random(outputs, width).to(dtype)
    return compared(partial(fused_kernels.product, x, weight), partial(F.linear, x, weight))


def draws(changes: Mapping[str, float]) -> Figures:
    """µs to draw a token of 128k from a row in device memory, by what the device finds in it and from a copy of it."""
    from tide_runtime.backends.device.cuda_device import CudaDevice
    from tide_runtime.backends.device.device_rows import DeviceRows
    from tide_runtime.backends.device.element_types import FP32
    from tide_runtime.backends.torch.row_sampling import TorchRowSampling
    from tide_runtime.backends.torch.stream import CudaStream

    stream = CudaStream(CudaDevice(0))
    logits = (2.5 * torch.randn(_REPEATS, _VOCAB, device="cuda")).contiguous()
    logits[:, :20] += 8
    torch.cuda.synchronize()
    sampler = Sampler(GenerationParams(temperature=0.7, seed=1, **changes), _VOCAB)  # type: ignore[arg-type]
    found, took = list[list[int]](), list[float]()
    for sampling in (TorchRowSampling(stream, _VOCAB, torch.float32), None):
        rows = DeviceRows(stream.device, logits.data_ptr(), (_REPEATS, _VOCAB), FP32, logits, None, sampling)  # type: ignore[arg-type]
        for _ in range(2):  # the first compiles kernels
            began = perf_counter()
            tokens = [sampler.sample(rows[n], np.zeros(n, np.int64)) for n in range(_REPEATS)]
            elapsed = perf_counter() - began
        found.append(tokens)
        took.append(round(1e6 * elapsed / _REPEATS, 1))
    if found[0] != found[1]:
        raise ValueError(f"the device's draws are {found[0]}, the host's {found[1]}")
    return {"us": took[0], "replaced_us": took[1], "apart": 0.0}


def read_bandwidth() -> Figures:
    """What decoding cannot be faster than: a sum that reads each byte once and writes one number."""
    source = torch.zeros(_READ_BYTES // 4, device="cuda")
    return {"gb_s": round(_READ_BYTES / gpu_time(lambda: torch.sum(source), _REPEATS) / 1e3, 1)}


def bits_by_rows(operator: Callable[[Tensor], Tensor], width: int) -> Figures:
    """``differ``: numbers of rows in one launch of ``operator`` with which the first row has other bits than alone."""
    x = random(max(_ROWS), width)
    alone = operator(x[:1])[0].clone()
    return {"differ": [rows for rows in _ROWS if not torch.equal(operator(x[:rows])[0], alone)]}


def low_bit_bits(outputs: int, width: int) -> Figures:
    from tide_runtime.backends.torch import fused_kernels
    from tide_runtime.backends.torch.low_bits import LowBitProduct

    packed = torch.randint(0, 256, (outputs, width // 2), device="cuda", dtype=torch.uint8)
    scales = (torch.rand(outputs, width // 32, device="cuda") / 64).half()
    multiply = LowBitProduct({"N": outputs, "bits": 4, "block_size": 32}, fused_kernels)
    return bits_by_rows(lambda x: multiply(x, packed, scales), width)


def dense_bits(outputs: int, width: int) -> Figures:
    weight = random(outputs, width)
    return bits_by_rows(lambda x: F.linear(x, weight), width)


def norm_bits() -> Figures:
    from tide_runtime.backends.torch import fused_kernels

    weight = random(_HIDDEN)
    return bits_by_rows(lambda x: fused_kernels.add_norm(x, x, weight, 1e-5)[0], _HIDDEN)


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    def prepared() -> Figures:
        raise NotRun("Triton's kernels are compiled on the GPU")

    for name, case in cases().items():

        def execute(case: Callable[[], Figures] = case) -> Figures:
            with torch.inference_mode():
                return case()

        yield KitCase(name, execute, prepared)


def cases() -> dict[str, Callable[[], Figures]]:
    made: dict[str, Callable[[], Figures]] = {"read_bandwidth": read_bandwidth, "sum_and_norm": sum_and_norm, "gate": gate}
    for batch in (1, 8):
        made |= {f"attention_b{batch}_{slots}": partial(attention, batch, slots) for slots in (512, 2048)}
    for outputs, width in _PRODUCTS:
        for rows in (1, 8, 16):
            made[f"int4_{outputs}x{width}_b{rows}"] = partial(low_bit_product, outputs, width, rows, torch.float16)
    made["int4_3072x2048_b1_bf16"] = partial(low_bit_product, 3072, 2048, 1, torch.bfloat16)
    for rows in (1, 4, 8):
        made |= {f"fp16_{n}x{k}_b{rows}": partial(product, n, k, rows, torch.float16) for n, k in _PRODUCTS}
    for name, changes in (("plain", {}), ("top_k", {"top_k": 50}), ("top_p", {"top_p": 0.9})):
        made[f"draw_{name}"] = partial(draws, changes)
    made["bits_norm"] = norm_bits
    made |= {f"bits_int4_{n}x{k}": partial(low_bit_bits, n, k) for n, k in _PRODUCTS}
    made |= {f"bits_fp16_{n}x{k}": partial(dense_bits, n, k) for n, k in _PRODUCTS}
    made |= {f"fp32_576x192_b{rows}": partial(product, 576, 192, rows, torch.float32) for rows in (1, 8)}
    return made


def main() -> None:
    for name, case in cases().items():
        with torch.inference_mode():
            print(json.dumps({"case": name, **case()}), flush=True)


if __name__ == "__main__":
    main()
