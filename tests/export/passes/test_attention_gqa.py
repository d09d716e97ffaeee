"""Traced attention lowered to GroupQueryAttention, with rotary embedding and transposes, against NumPy in float64."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.graphs import SLOTS, lowered, only, operators, parse, random_feeds, run
from export.passes.one_attention import attended, written
from export.passes.rotary_text import Rotary

from tide_export.passes.attention_gqa import HEAD_SINK, lower_attention_gqa, optional_input
from tide_export.passes.base import LoweringContext
from tide_export.quantize.kv_scales import KVScales

HEADS, KV_HEADS = 6, 2
NOT_ROTARY = "key_cache_out_0: no rotary embedding recognised in front of it (kept as plain nodes)"
# Steps that the kernel supports: several tokens of one sequence, or several sequences in prefill or with one token each.
STEPS = (([11], 7), ([0, 0, 0], 7), ([0, 11, 19], 1))


@dataclass(frozen=True)
class Segment:
    """Query, key and value [B, S, N·D] are split into heads, rotated, attended to, joined again, and multiplied.

    Args:
        rotary: its ``dim`` is D.
        rotates: False leaves query and key as they are.
        key_table: "_key" rotates keys by a table of their own.
        sinks: one more input, a logit per query head that joins the softmax.
    """

    rotary: Rotary
    rotates: bool = True
    key_table: str = ""
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def graph(self) -> ir.Model:
        rotary, dim = self.rotary, self.rotary.dim
        widths = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        inputs = ", ".join(f"float[batch, seq, {heads * dim}] {x}_flat" for x, heads in widths.items())
        shapes = ", ".join(f"int64[4] {x}_heads = {{0, 0, {heads}, {dim}}}" for x, heads in widths.items())
        split = " ".join(
            f"{x}_rows = Reshape({x}_flat, {x}_heads) {x} = Transpose<perm = [0, 2, 1, 3]>({x}_rows)" for x in widths
        )
        rotation = f"{rotary.tables()} {rotary.tables('_key')} {rotary.rotate('q')} {rotary.rotate('k', self.key_table)}"
        query, key = ("q_rotated", "k_rotated") if self.rotates else ("q", "k")
        attributes = f"scale = {dim**-0.5}, softcap = {self.softcap}, window = {self.window}"
        caches = [f"float[batch, {KV_HEADS}, {SLOTS}, {dim}] {kind}_cache" for kind in ("key", "value")]
        sinks = f"float[{HEADS}] sinks," if self.sinks else ""
        return parse(
            f"""({sinks} {inputs}, {", ".join(f"{cache}_0" for cache in caches)}, int64[batch] write_index,
                int64[batch, seq] position_ids)
            => (float[batch, seq, 5] y, {", ".join(f"{cache}_out_0" for cache in caches)})
            <{rotary.declared}, {shapes}, int64[3] joined = {{0, 0, {HEADS * dim}}}, float[{HEADS * dim}, 5] out,
                float[batch, seq, {HEADS}, {dim}] heads> {{
                {split} {rotation}
                heads, key_cache_out_0, value_cache_out_0 = tide.Attention<{attributes}>
                    ({query}, {key}, v, key_cache_0, value_cache_0, write_index{", sinks" if self.sinks else ""})
                flat = Reshape(heads, joined)
                y = MatMul(flat, out)
            }}""",
            frequencies=rotary.frequencies,
        )

    def check(self, lowered_model: ir.Model, lengths: list[int], seq: int) -> None:
        """Assert that outputs on random inputs match the reference; unfilled slots may hold anything."""
        write_index, dim = np.array(lengths), self.rotary.dim
        feeds = random_feeds(self.graph(), {"batch": len(lengths), "seq": seq})
        feeds["position_ids"] = write_index[:, None] + np.arange(seq)
        feeds["seqlens_k"] = (write_index + seq - 1).astype(np.int32)
        feeds["total_sequence_length"] = np.array(max(lengths) + seq, np.int32)
        query, key, value = (feeds[f"{x}_flat"].reshape(len(lengths), seq, -1, dim).transpose(0, 2, 1, 3) for x in "qkv")
        if self.rotates:
            query, key = (self.rotary.rotated(x, feeds["position_ids"]) for x in (query, key))
        keys, values = (feeds[f"{kind}_cache_0"].astype(np.float64) for kind in ("key", "value"))
        keys, values = written(keys, key, write_index), written(values, value, write_index)
        heads = attended(query, keys, values, write_index, dim**-0.5, self.window, self.softcap, feeds.get("sinks"))
        out = self.graph().graph.initializers["out"].const_value.numpy().astype(np.float64)
        found = run(lowered_model, feeds)
        np.testing.assert_allclose(found["y"], heads.reshape(len(lengths), seq, -1) @ out, rtol=0, atol=5e-5)
        for sequence, length in enumerate(lengths):
            filled = np.s_[sequence, :, : length + seq]
            np.testing.assert_allclose(found["key_cache_out_0"][filled], keys[filled], rtol=0, atol=2e-5)
            np.testing.assert_array_equal(found["value_cache_out_0"][filled], values[filled].astype(np.float32))


FUSED = {
    "halves": Segment(Rotary()),
    "neighbours": Segment(Rotary(interleaved=True)),
    "partial": Segment(Rotary(dim=32)),
    "partial neighbours": Segment(Rotary(dim=32, interleaved=True)),
    "window": Segment(Rotary(), window=5),
    "window and soft-cap": Segment(Rotary(), window=5, softcap=3.0),
    "sinks": Segment(Rotary(), sinks=True),
    "sinks and window": Segment(Rotary(), sinks=True, window=7),
}
UNFUSED = {
    "half the width is no multiple of 8": Segment(Rotary(dim=24, width=24)),
    "key and query use different tables": Segment(Rotary(), key_table="_key"),
}


@pytest.mark.parametrize("lengths, seq", STEPS)
@pytest.mark.parametrize("form", FUSED)
def test_rotary_is_absorbed(form, lengths, seq):
    """Text would change with the kernel: another rotation, scale, window or soft-cap, or heads joined in another order."""
    segment = FUSED[form]
    after, report = lowered(lower_attention_gqa, segment.graph())
    assert (report.applied, report.skipped) == (1, [])
    assert operators(after) == {"GroupQueryAttention": 1, "MatMul": 1}, "transposes, reshapes and rotation are the kernel's own"
    assert (optional_input(only(after, "GroupQueryAttention"), HEAD_SINK) is not None) == segment.sinks
    assert after.graph.initializers["rope.cos_1"].const_value.shape == [
        LoweringContext(SLOTS).cache_slots,
        segment.rotary.width // 2,
    ]
    names = {value.name for value in after.graph.inputs}
    assert {"seqlens_k", "total_sequence_length"} <= names and not {"write_index", "position_ids"} & names
    segment.check(after, lengths, seq)


@pytest.mark.parametrize("form", [*FUSED, *UNFUSED])
def test_caches_are_rounded_by_the_scales_of_their_layer(form):
    """Keys would be rounded by another layer's or channel's scales: a worse model, and no error."""
    segment = (FUSED | UNFUSED)[form]
    dim, seq = segment.rotary.dim, 5
    scales = KVScales(*(np.linspace(*ends, KV_HEADS * dim).reshape(KV_HEADS, dim).astype("f4") for ends in ((1, 2), (3, 4))))
    after, report = lowered(lower_attention_gqa, segment.graph(), kv_scales=[scales])
    assert report.applied == 1
    feeds = random_feeds(segment.graph(), {"batch": 1, "seq": seq})
    feeds |= {"position_ids": np.arange(seq)[None], "seqlens_k": np.array([seq - 1], np.int32)}
    feeds["total_sequence_length"] = np.array(seq, np.int32)
    fp32 = run(lowered(lower_attention_gqa, segment.graph())[0], feeds)
    feeds |= {name: np.zeros(feeds[name].shape, np.int8) for name in ("key_cache_0", "value_cache_0")}
    found = run(after, feeds)
    for name, by_channel in (("key_cache_out_0", scales.key), ("value_cache_out_0", scales.value)):
        assert found[name].dtype == np.int8
        rounded = found[name][0, :, :seq] * by_channel[:, None]
        assert (np.abs(rounded - fp32[name][0, :, :seq]) <= by_channel[:, None] / 2 + 1e-5).all()


@pytest.mark.parametrize("lengths, seq", STEPS)
@pytest.mark.parametrize("reason", UNFUSED)
def test_unsupported_rotary_stays(reason, lengths, seq):
    """The kernel would refuse the graph, or rotate keys by the query's angles."""
    segment = UNFUSED[reason]
    after, report = lowered(lower_attention_gqa, segment.graph())
    assert report.applied == 1 and report.skipped == [NOT_ROTARY]
    assert only(after, "GroupQueryAttention").attributes["do_rotary"].value == 0 and operators(after)["Cos"]
    assert "position_ids" in {value.name for value in after.graph.inputs}
    segment.check(after, lengths, seq)


def test_angles_that_differ_in_a_pair_stay():
    """The kernel's table has one angle per pair: the second channel's angle would be lost."""
    after, report = lowered(lower_attention_gqa, Segment(Rotary(twisted=True)).graph())
    assert report.applied == 1 and report.skipped == [NOT_ROTARY] and operators(after)["Cos"]


@pytest.mark.parametrize("lengths, seq", STEPS)
def test_attention_without_rotary(lengths, seq):
    """A model with learned positions would be rotated, or its heads taken in another order."""
    segment = Segment(Rotary(), rotates=False)
    after, report = lowered(lower_attention_gqa, segment.graph())
    assert report.applied == 1 and report.skipped == [NOT_ROTARY]
    assert operators(after) == {"GroupQueryAttention": 1, "MatMul": 1}
    segment.check(after, lengths, seq)


def test_keys_that_are_the_values() -> None:
    """DeepSeek-V4 has one projection for both, whose rows would have two nodes of one name."""
    model = UNFUSED["half the width is no multiple of 8"].graph()
    attention, seq = only(model, "Attention"), 7
    attention.replace_input_with(2, attention.inputs[1])
    after, _ = lowered(lower_attention_gqa, model)
    lengths = {"seqlens_k": np.array([seq - 1], np.int32), "total_sequence_length": np.array(seq, np.int32)}
    positions = {"position_ids": np.arange(seq)[None]}
    found = run(after, random_feeds(model, {"batch": 1, "seq": seq}) | lengths | positions)
    np.testing.assert_array_equal(found["key_cache_out_0"][:, :, :seq], found["value_cache_out_0"][:, :, :seq])
