"""A segment of projections and ONNX Runtime's GroupQueryAttention over partly filled caches."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from export.passes.graphs import SLOTS, parse, random_feeds

HIDDEN = 11


@dataclass(frozen=True)
class GroupQuery:
    """One attention.

    Args:
        rotary_width: channels of a head that the kernel rotates, 0 for none.
        projections: query, key and value are a product of ``hidden`` each ("separate", "biased"), or one together ("packed").
        sinks: the kernel's input ``head_sink``, a weight with a logit per query head that joins the softmax.
        int8: the caches are int8, with another scale for each channel.
    """

    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    rotary_width: int = 16
    interleaved: bool = False
    window: int = 0
    softcap: float = 0.0
    projections: str = "separate"
    dtype: str = "float"
    sinks: bool = False
    int8: bool = False

    @property
    def widths(self) -> dict[str, int]:
        return {"q": self.heads * self.dim, "k": self.kv_heads * self.dim, "v": self.kv_heads * self.dim}

    def graph(self, replace: tuple[str, str] = ("", "")) -> ir.Model:
        """Outputs: y [B, S, 5], key_cache_out_0 and value_cache_out_0.

        Args:
            replace: one of the projections' nodes, and its replacement.
        """
        cache = f"{'int8' if self.int8 else self.dtype}[batch, {self.kv_heads}, slots, {self.dim}]"
        half = self.rotary_width // 2
        angles = np.arange(SLOTS)[:, None] * 10.0 ** -np.arange(max(1, half))
        weights, nodes, operands = self._projections()
        assert replace[0] in nodes
        nodes = nodes.replace(*replace) if replace[0] else nodes
        tables = "cos, sin" if half else '"", ""'
        optional = ', "", "", ' + ("sinks" if self.sinks else '""') if self.sinks or self.int8 else ""
        optional += ", key_scale, value_scale" if self.int8 else ""
        attributes = (
            f"num_heads = {self.heads}, kv_num_heads = {self.kv_heads}, scale = {self.dim**-0.5}, softcap = {self.softcap}, "
            f"local_window_size = {self.window or -1}, do_rotary = {int(half > 0)}, rotary_interleaved = {int(self.interleaved)}"
        )
        if self.int8:
            attributes += ', k_quant_type = "PER_CHANNEL", v_quant_type = "PER_CHANNEL", kv_cache_bit_width = 8'
        scales = np.linspace(0.02, 0.04, self.kv_heads * self.dim).reshape(1, self.kv_heads, 1, self.dim)
        return parse(
            f"""({self.dtype}[batch, seq, {HIDDEN}] hidden, {cache} key_cache_0, {cache} value_cache_0, int32[batch] seqlens_k,
                int32 total_sequence_length)
            => ({self.dtype}[batch, seq, 5] y, {cache} key_cache_out_0, {cache} value_cache_out_0)
            <{self.dtype}[{SLOTS}, {max(1, half)}] cos, {self.dtype}[{SLOTS}, {max(1, half)}] sin, {weights},
                {self.dtype}[{self.heads}] sinks, float[1, {self.kv_heads}, 1, {self.dim}] key_scale,
                float[1, {self.kv_heads}, 1, {self.dim}] value_scale, {self.dtype}[{self.heads * self.dim}, 5] out,
                {self.dtype}[batch, seq, {self.heads * self.dim}] attended> {{
                {nodes}
                attended, key_cache_out_0, value_cache_out_0 = com.microsoft.GroupQueryAttention<{attributes}>
                    ({operands}, key_cache_0, value_cache_0, seqlens_k, total_sequence_length, {tables}{optional})
                y = MatMul(attended, out)
            }}""",
            cos=np.cos(angles),
            sin=np.sin(angles),
            key_scale=scales,
            value_scale=scales[..., ::-1],
        )

    def _projections(self) -> tuple[str, str, str]:
        """Declared weights, the nodes, and the operands of the attention."""
        if self.projections == "packed":
            return f"{self.dtype}[{HIDDEN}, {sum(self.widths.values())}] w", "qkv = MatMul(hidden, w)", 'qkv, "", ""'
        weights = [f"{self.dtype}[{HIDDEN}, {width}] w_{name}" for name, width in self.widths.items()]
        if self.projections == "separate":
            return ", ".join(weights), "\n".join(f"{name} = MatMul(hidden, w_{name})" for name in "qkv"), "q, k, v"
        weights += [f"{self.dtype}[{width}] b_{name}" for name, width in self.widths.items()]
        nodes = [f"{name}_product = MatMul(hidden, w_{name})\n{name} = Add({name}_product, b_{name})" for name in "qkv"]
        return ", ".join(weights), "\n".join(nodes), "q, k, v"


def step(model: ir.Model, lengths: list[int], seq: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Feeds for ``seq`` tokens of each sequence, after ``lengths`` filled slots."""
    feeds = random_feeds(model, {"batch": len(lengths), "seq": seq, "slots": SLOTS}, seed)
    for value in model.graph.inputs:
        if value.dtype == ir.DataType.INT8:
            shape = (len(lengths), value.shape[1], SLOTS, value.shape[3])
            feeds[value.name] = np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)
    feeds["seqlens_k"] = np.array([length + seq - 1 for length in lengths], np.int32)
    feeds["total_sequence_length"] = np.array(max(lengths) + seq, np.int32)
    return feeds
