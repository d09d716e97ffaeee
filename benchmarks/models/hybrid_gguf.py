"""The sizes of three hybrid models, for GGUF files of random weights: every matrix in Q4_0, the tied embedding too.

Sizes are those of the models' config.json: Qwen/Qwen3.5-0.8B, LiquidAI/LFM2-1.2B, ibm-granite/granite-4.0-h-350m.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.models.random_gguf import RandomTensor

_KIND = "Q4_0"
CONTEXT = 8192


@dataclass(frozen=True)
class _Hybrid:
    """What the three have in common. ``attention``: which layers attend; the others are recurrent."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    attention: tuple[int, ...]
    kind: str = _KIND

    def common_keys(self) -> dict[str, Any]:
        return {
            "context_length": CONTEXT,
            "embedding_length": self.hidden,
            "block_count": self.layers,
            "feed_forward_length": self.mlp,
            "attention.head_count": self.heads,
        }

    def kv_heads_of_layers(self) -> list[int]:
        return [self.kv_heads if layer in self.attention else 0 for layer in range(self.layers)]

    def attending(self, layer: int, gated: bool = False) -> Iterator[RandomTensor]:
        """``gated``: the query's projection gives a gate of the output as well."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for part, width in (("q", queries * (1 + gated)), ("k", keys), ("v", keys)):
            yield _matrix(f"blk.{layer}.attn_{part}.weight", width, self.hidden)
        yield _matrix(f"blk.{layer}.attn_output.weight", self.hidden, queries)

    def head_norms(self, layer: int) -> Iterator[RandomTensor]:
        for part in "qk":
            yield RandomTensor(f"blk.{layer}.attn_{part}_norm.weight", (self.head_dim,))

    def feed_forward(self, layer: int) -> Iterator[RandomTensor]:
        yield _matrix(f"blk.{layer}.ffn_gate.weight", self.mlp, self.hidden)
        yield _matrix(f"blk.{layer}.ffn_up.weight", self.mlp, self.hidden)
        yield _matrix(f"blk.{layer}.ffn_down.weight", self.hidden, self.mlp)

    def norms(self, layer: int, second: str) -> Iterator[RandomTensor]:
        for name in ("attn_norm", second):
            yield RandomTensor(f"blk.{layer}.{name}.weight", (self.hidden,))


def _matrix(name: str, rows: int, columns: int) -> RandomTensor:
    return RandomTensor(name, (rows, columns), _KIND)


def _decays(layer: int, heads: int, *trailing: int) -> Iterator[RandomTensor]:
    """-exp(A_log) and the bias of the time step."""
    yield RandomTensor(f"blk.{layer}.ssm_a", (heads, *trailing), mean=-4.0, spread=0.3)
    yield RandomTensor(f"blk.{layer}.ssm_dt.bias", (heads,), mean=-3.0)


@dataclass(frozen=True)
class Qwen35Shape(_Hybrid):
    """``linear_heads`` of keys and of values, each ``width`` wide."""

    linear_heads: int = 16
    width: int = 128
    taps: int = 4
    architecture: str = "qwen35"

    def keys(self) -> Mapping[str, Any]:
        return {
            **self.common_keys(),
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e7,
            "rope.dimension_count": self.head_dim // 4,
            "rope.dimension_sections": [11, 11, 10, 0],
            "full_attention_interval": 4,
            "ssm.conv_kernel": self.taps,
            "ssm.state_size": self.width,
            "ssm.group_count": self.linear_heads,
            "ssm.time_step_rank": self.linear_heads,
            "ssm.inner_size": self.linear_heads * self.width,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        yield _matrix("token_embd.weight", self.vocab, self.hidden)
        for layer in range(self.layers):
            yield from self.norms(layer, "post_attention_norm")
            yield from self._mixer(layer)
            yield from self.feed_forward(layer)
        yield RandomTensor("output_norm.weight", (self.hidden,))

    def _mixer(self, layer: int) -> Iterator[RandomTensor]:
        if layer in self.attention:
            yield from self.attending(layer, gated=True)
            yield from self.head_norms(layer)
            return
        inner, prefix = self.linear_heads * self.width, f"blk.{layer}."
        yield _matrix(f"{prefix}attn_qkv.weight", 3 * inner, self.hidden)
        yield _matrix(f"{prefix}attn_gate.weight", inner, self.hidden)
        yield _matrix(f"{prefix}ssm_beta.weight", self.linear_heads, self.hidden)
        yield _matrix(f"{prefix}ssm_alpha.weight", self.linear_heads, self.hidden)
        yield RandomTensor(f"{prefix}ssm_conv1d.weight", (3 * inner, self.taps), mean=0.0, spread=0.3)
        yield from _decays(layer, self.linear_heads)
        yield RandomTensor(f"{prefix}ssm_norm.weight", (self.width,))
        yield _matrix(f"{prefix}ssm_out.weight", self.hidden, inner)


@dataclass(frozen=True)
class Lfm2Shape(_Hybrid):
    taps: int = 3
    architecture: str = "lfm2"

    def keys(self) -> Mapping[str, Any]:
        return {
            **self.common_keys(),
            "attention.head_count_kv": self.kv_heads_of_layers(),
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 1e6,
            "shortconv.l_cache": self.taps,
            "vocab_size": self.vocab,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        yield _matrix("token_embd.weight", self.vocab, self.hidden)
        yield RandomTensor("token_embd_norm.weight", (self.hidden,))
        for layer in range(self.layers):
            yield from self.norms(layer, "ffn_norm")
            if layer in self.attention:
                yield from self.attending(layer)
                yield from self.head_norms(layer)
            else:
                yield _matrix(f"blk.{layer}.shortconv.in_proj.weight", 3 * self.hidden, self.hidden)
                yield RandomTensor(f"blk.{layer}.shortconv.conv.weight", (self.hidden, self.taps), mean=0.0, spread=0.3)
                yield _matrix(f"blk.{layer}.shortconv.out_proj.weight", self.hidden, self.hidden)
            yield from self.feed_forward(layer)


@dataclass(frozen=True)
class GraniteHybridShape(_Hybrid):
    """Mamba2 layers of ``scan_heads`` heads, each ``width`` wide with ``state`` numbers of state for each; one group."""

    scan_heads: int = 48
    width: int = 32
    state: int = 128
    taps: int = 4
    architecture: str = "granitehybrid"

    def keys(self) -> Mapping[str, Any]:
        return {
            **self.common_keys(),
            "attention.head_count_kv": self.kv_heads_of_layers(),
            "attention.layer_norm_rms_epsilon": 1e-5,
            "attention.scale": 0.015625,
            "embedding_scale": 12.0,
            "residual_scale": 0.246,
            "logit_scale": 3.0,
            "rope.dimension_count": self.head_dim,
            "rope.scaling.finetuned": False,
            "vocab_size": self.vocab,
            "expert_shared_feed_forward_length": self.mlp,
            "ssm.conv_kernel": self.taps,
            "ssm.state_size": self.state,
            "ssm.group_count": 1,
            "ssm.time_step_rank": self.scan_heads,
            "ssm.inner_size": self.scan_heads * self.width,
        }

    def tensors(self) -> Iterator[RandomTensor]:
        yield _matrix("token_embd.weight", self.vocab, self.hidden)
        for layer in range(self.layers):
            yield from self.norms(layer, "ffn_norm")
            yield from self.attending(layer) if layer in self.attention else self._scan(layer)
            yield from self.feed_forward(layer)
        yield RandomTensor("output_norm.weight", (self.hidden,))

    def _scan(self, layer: int) -> Iterator[RandomTensor]:
        inner, prefix = self.scan_heads * self.width, f"blk.{layer}."
        channels = inner + 2 * self.state
        yield _matrix(f"{prefix}ssm_in.weight", inner + channels + self.scan_heads, self.hidden)
        yield RandomTensor(f"{prefix}ssm_conv1d.weight", (channels, self.taps), mean=0.0, spread=0.3)
        yield RandomTensor(f"{prefix}ssm_conv1d.bias", (channels,), mean=0.0)
        yield from _decays(layer, self.scan_heads, 1)
        yield RandomTensor(f"{prefix}ssm_d", (self.scan_heads, 1))
        yield RandomTensor(f"{prefix}ssm_norm.weight", (1, inner))
        yield _matrix(f"{prefix}ssm_out.weight", self.hidden, inner)


HYBRID_SHAPES: dict[str, Qwen35Shape | Lfm2Shape | GraniteHybridShape] = {
    "qwen35_08b": Qwen35Shape(24, 1024, 3584, 8, 2, 256, 248320, tuple(range(3, 24, 4))),
    "lfm2_1b": Lfm2Shape(16, 2048, 8192, 32, 8, 64, 65536, (2, 5, 8, 10, 12, 14)),
    "granite4h_350m": GraniteHybridShape(32, 768, 2048, 12, 4, 64, 100352, (10, 13, 17, 27)),
}
