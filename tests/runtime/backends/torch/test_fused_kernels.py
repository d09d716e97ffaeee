"""The Triton kernels of target torch compute what its torch calls do. See `triton_interpreter`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runtime.backends.torch.test_low_bits import EXPERTS, MIXTURES, Mixture
from runtime.backends.torch.triton_interpreter import interpreted
from tide_runtime.backends.torch.attention import Attention, Shared, cache_scales, rotation_table
from tide_runtime.backends.torch.backend import TorchBackend
from tide_runtime.backends.torch.kernel_check import compare_kernels
from tide_runtime.backends.torch.low_bits import dequantised
from tide_runtime.backends.torch.stream import ProcessorDevice, ProcessorStream
from tide_runtime.bundle import Bundle

from tide_export.config import ExportConfig
from tide_export.export import export

if not interpreted():
    pytest.skip("needs Triton, and TRITON_INTERPRET=1: make test-triton", allow_module_level=True)

from tide_runtime.backends.torch import fused_kernels

CLOSE = 1e-6  # fp32


def test_sum_and_norm() -> None:
    """Guards against a norm of another width, or without its epsilon."""
    x, skip, weight = torch.randn(2, 3, 100), torch.randn(2, 3, 100), torch.randn(100)
    normed, total = fused_kernels.add_norm(x, skip, weight, 0.1)
    torch.testing.assert_close(total, x + skip)
    torch.testing.assert_close(normed, F.rms_norm(x + skip, (100,), weight, 0.1))


def test_gate_of_parts_of_one_product() -> None:
    """Guards against rows read at another distance than they lie."""
    both = torch.randn(2, 3, 2200)
    gate, up = both.split(1100, -1)
    torch.testing.assert_close(fused_kernels.gated(gate, up), F.silu(gate) * up)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv", "width", "rotated", "interleaved", "window", "slots"),
    [
        (2, 1, 8, 2, 48, 48, False, -1, 512),
        (1, 5, 4, 4, 64, 32, True, -1, 100),
        (3, 4, 4, 1, 40, 40, False, 20, 200),
        (2, 1, 6, 2, 16, 0, False, -1, 64),
        (1, 40, 4, 2, 32, 32, False, -1, 600),
        (2, 33, 4, 2, 32, 32, False, 40, 300),
    ],
)
@pytest.mark.parametrize("int8", [False, True])
def test_attention(
    batch: int, tokens: int, heads: int, kv: int, width: int, rotated: int, interleaved: bool, window: int, slots: int, int8: bool
) -> None:
    """Guards against a wrong mask, slot, angle or scale, in any part of the slots."""
    every = torch.randn(batch, tokens, (heads + 2 * kv) * width)
    keys, values = torch.randn(2, batch, kv, slots, width)
    scales = cache_scales(*torch.rand(2, 1, kv, 1, width) / 40 + 0.01) if int8 else None
    if int8:
        keys, values = torch.randint(-128, 128, (2, batch, kv, slots, width), dtype=torch.int8)
    angles = torch.randn(slots, rotated // 2)
    table = rotation_table(angles.cos(), angles.sin(), interleaved) if rotated else None
    lengths = torch.randint(tokens, slots, (batch,), dtype=torch.int32)
    attributes = {"num_heads": heads, "kv_num_heads": kv, "scale": 0.13, "local_window_size": window}
    attributes |= {"do_rotary": int(rotated > 0), "rotary_interleaved": int(interleaved)}
    found = []
    for kernels in (None, fused_kernels):
        caches = keys.clone(), values.clone()
        made = Attention(attributes, Shared(), kernels)(every, None, None, *caches, lengths, None, table, None, scales)
        found.append((made[0], *caches))
    for plain, fused in zip(*found, strict=True):
        unit = int8 and fused.dtype == torch.int8  # the last bit of an angle may round a cached number to its neighbour
        torch.testing.assert_close(fused, plain, atol=1 if unit else 2e-4 if int8 else CLOSE, rtol=0 if unit else CLOSE)


@pytest.mark.parametrize(("first", "slots"), [(3, 64), (250, 512)])
@pytest.mark.parametrize("window", [-1, 40])
def test_attention_of_a_token_has_the_same_bits_in_every_launch(first: int, slots: int, window: int) -> None:
    """Breaks: a text depends on the drafts verified with its tokens, on other requests, or on when the caches grew."""
    batch, tokens, heads, kv, width = 3, 16, 4, 2, 32
    every = torch.randn(batch, tokens, (heads + 2 * kv) * width)
    keys, values = torch.randn(2, batch, kv, slots, width)
    angles = torch.randn(2 * slots, width // 2)
    table = rotation_table(angles.cos(), angles.sin(), False)

    def run(rows: slice, counts: list[int], slots: int = slots) -> torch.Tensor:
        """Attention of the ``rows``, as many tokens at a time as ``counts`` says, in caches of ``slots``."""
        caches = [torch.zeros(batch, kv, slots, width)[rows] for _ in range(2)]
        for cache, known in zip(caches, (keys, values), strict=True):
            cache[:, :, : known.shape[2]] = known[rows]
        parts, done = [], 0
        for count in counts:
            lengths = torch.full((len(caches[0]),), first + done + count - 1, dtype=torch.int32)
            step = every[rows, done : done + count]
            parts.append(fused_kernels.attention(step, table, lengths, *caches, heads, 0.2, False, window))
            done += count
        return torch.cat(parts, 1)

    whole = run(slice(None), [16])
    assert torch.equal(run(slice(None), [1] * 16), whole)
    assert torch.equal(run(slice(1, 2), [5, 1, 8, 2]), whole[1:2])
    assert torch.equal(run(slice(0, 2), [4, 12], 2 * slots), whole[:2])


@pytest.mark.parametrize(
    ("bits", "block", "has_zeros"), [(4, 32, False), (4, 32, True), (4, 16, True), (8, 64, True), (8, 32, False)]
)
def test_products_with_low_bit_weights(bits: int, block: int, has_zeros: bool) -> None:
    """Guards against another block's scale, shifted weights or swapped halves of a byte."""
    outputs, width, rows = 23, 5 * block, 19
    values = torch.randint(0, 256, (outputs, width * bits // 8), dtype=torch.uint8)
    scales = torch.rand(outputs, width // block)
    zeros = torch.randint(0, 256, (outputs, -(-5 * bits // 8)), dtype=torch.uint8) if has_zeros else None
    x = torch.randn(rows, width)
    expected = F.linear(x, dequantised(values, scales, zeros, bits, block))
    found = fused_kernels.low_bit_product(x, values, scales, zeros, bits, block)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-5)
    ids = torch.tensor([[3, outputs - 1]])
    looked_up = fused_kernels.look_up(values, ids, scales, zeros, bits, block)
    torch.testing.assert_close(looked_up, dequantised(values, scales, zeros, bits, block)[ids])


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("rows", [3, 13])
def test_products_with_the_matrices_of_experts(mixture: Mixture, rows: int) -> None:
    """Breaks: on a GPU a token gets another expert's matrices, scales or zero points than on a processor."""
    mixture.check(torch.randint(0, EXPERTS, (rows,)), fused_kernels)


def test_products_of_few_rows() -> None:
    """Guards against rows or columns behind the last one, and against a width that no block divides."""
    x, weight = torch.randn(19, 1, 600), torch.randn(37, 600)
    torch.testing.assert_close(fused_kernels.product(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-5)


def test_the_likeliest_token() -> None:
    """Guards against another of several equal logits, and against a token of logits that are not finite."""
    logits = torch.randn(2, 3, 5000)
    logits[0, 0, [7, 2100, 4999]] = 9.0
    logits[0, 1, 3000], logits[0, 2, 1], logits[1, 0, 0] = torch.nan, torch.inf, -torch.inf
    logits[1, 1] = -torch.inf
    found = fused_kernels.token(logits)
    assert found[0].tolist() == [7, -1, -1] and found[1, 1] == -1
    assert found[1, [0, 2]].tolist() == logits[1, [0, 2]].argmax(-1).tolist()


def test_the_comparison_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a model runs on kernels that this GPU or this version of Triton computes wrongly."""
    place = torch.device("cpu")
    compare_kernels(fused_kernels, place)
    right = fused_kernels.skinny_product
    monkeypatch.setattr(fused_kernels, "skinny_product", lambda *given, **named: (right(*given, **named)[0].roll(1, -1), None))
    with pytest.raises(ValueError, match="the kernel of a product is off by 1"):
        compare_kernels(fused_kernels, place)


FORMS = {"fp32": {}, "fp16": {"dtype": "fp16"}, "int4": {"dtype": "fp16", "weights": "int4"}}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_computes_what_torch_calls_do(form: str, hf_model_directory: Path, tmp_path: Path) -> None:
    """Breaks: on a GPU a graph calls kernels with other operands, or a fused product lacks its norm, residual or gate."""
    export(str(hf_model_directory), tmp_path / "b", ExportConfig(max_seq_len=64, verify=False, targets=("torch",), **FORMS[form]))
    tokens, logits = np.arange(3, 15), []
    for kernels in (None, fused_kernels):
        stream = ProcessorStream(ProcessorDevice())
        stream.kernels = kernels
        context = TorchBackend(Bundle.open(tmp_path / "b"), "torch", stream).context(2)
        step = context.step(0, [6, 6], [6, 6])
        step.input_ids[: len(tokens)] = tokens
        step.place([0, 0])
        step.run_all(context.every_layer)
        logits.append(np.asarray(step.logits[: len(tokens)]).astype(np.float64))
    assert np.linalg.norm(logits[0] - logits[1]) < (1e-5 if form == "fp32" else 3e-3) * np.linalg.norm(logits[0])
