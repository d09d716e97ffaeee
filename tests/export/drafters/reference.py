"""EAGLE-3 and MTP layers in plain tensor operations over whole texts, without caches, and random ones as files.

Nothing of tide_export or transformers computes here.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, WIDTH = 64, 96, 4, 2, 16
EPSILON, THETA = 1e-5, 20000.0
SIZES: dict[str, Any] = dict(
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=WIDTH,
    num_hidden_layers=1,
    rms_norm_eps=EPSILON,
    rope_theta=THETA,
    hidden_act="silu",
    max_position_embeddings=128,
)


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def attention(inputs: Tensor, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    """Causal attention over ``inputs`` [T, …] at positions 0, 1, 2, …"""
    length = len(inputs)

    def heads(name: str, count: int) -> Tensor:
        product = inputs @ tensors[f"{prefix}{name}_proj.weight"].T + tensors.get(f"{prefix}{name}_proj.bias", torch.tensor(0.0))
        split = product.view(length, count, WIDTH)
        weight = tensors.get(f"{prefix}{name}_norm.weight")
        return (split if weight is None else norm(split, weight)).transpose(0, 1)

    angles = torch.arange(length)[:, None] * THETA ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))

    def rotated(states: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        return states * cos + torch.cat([-second, first], -1) * sin

    query, key = rotated(heads("q", HEADS)), rotated(heads("k", KV_HEADS))
    key, value = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (key, heads("v", KV_HEADS)))
    scores = query @ key.transpose(1, 2) / WIDTH**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    attended = (scores.softmax(-1) @ value).transpose(0, 1).reshape(length, -1)
    return attended @ tensors[f"{prefix}o_proj.weight"].T


def mlp(states: Tensor, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up = (states @ tensors[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ tensors[f"{prefix}down_proj.weight"].T


@dataclass
class Eagle3:
    """A random EAGLE-3 head. ``tensors``: under EAGLE's names; ``embedding`` [V, H]: what it reads of tokens."""

    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    biases: bool = False
    head_norms: bool = False
    own_embedding: bool = False
    vocab: int = 128
    draft_vocab: int = 128
    seed: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random) * 0.2

        def weight(size: int) -> Tensor:
            return 0.5 + torch.rand(size, generator=random)

        made, kv = self.tensors, KV_HEADS * WIDTH
        made["fc.weight"] = matrix(HIDDEN, 3 * HIDDEN)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            made[f"midlayer.{name}.weight"] = weight(HIDDEN)
        for name, rows in (("q", HEADS * WIDTH), ("k", kv), ("v", kv)):
            made[f"midlayer.self_attn.{name}_proj.weight"] = matrix(rows, 2 * HIDDEN)
            if self.biases:
                made[f"midlayer.self_attn.{name}_proj.bias"] = matrix(rows)
        made["midlayer.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * WIDTH)
        if self.head_norms:
            made |= {f"midlayer.self_attn.{name}_norm.weight": weight(WIDTH) for name in ("q", "k")}
        made |= {f"midlayer.mlp.{name}_proj.weight": matrix(INNER, HIDDEN) for name in ("gate", "up")}
        made["midlayer.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        made["norm.weight"], made["lm_head.weight"] = weight(HIDDEN), matrix(self.draft_vocab, HIDDEN)
        if self.norm_before_fc:
            made["input_norm.weight"] = weight(3 * HIDDEN)
        if self.fc_norm:
            made |= {f"fc_norm.{place}.weight": weight(HIDDEN) for place in range(3)}
        if self.own_embedding:
            made["embed_tokens.weight"] = matrix(self.vocab, HIDDEN)
        if self.draft_vocab < self.vocab:
            known = torch.randperm(self.vocab, generator=random)[: self.draft_vocab].sort().values
            made["d2t"] = known - torch.arange(self.draft_vocab)
            made["t2d"] = torch.zeros(self.vocab, dtype=torch.bool).index_fill(0, known, True)

    def fuse(self, tapped: Tensor) -> Tensor:
        """[T, H] of the model's states [T, 3H]."""
        if self.norm_before_fc:
            tapped = norm(tapped, self.tensors["input_norm.weight"])
        if self.fc_norm:
            weights = [self.tensors[f"fc_norm.{place}.weight"] for place in range(3)]
            tapped = torch.cat([norm(part, weight) for part, weight in zip(tapped.chunk(3, -1), weights, strict=True)], -1)
        return tapped @ self.tensors["fc.weight"].T

    def guess(self, embedded: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, N] and states [T, H] of the pairs (before [T, H], embedded [T, H])."""
        own = self.tensors
        normed = norm(before, own["midlayer.hidden_norm.weight"])
        joined = torch.cat([norm(embedded, own["midlayer.input_layernorm.weight"]), normed], -1)
        state = (normed if self.norm_before_residual else before) + attention(joined, own, "midlayer.self_attn.")
        state = state + mlp(norm(state, own["midlayer.post_attention_layernorm.weight"]), own, "midlayer.mlp.")
        output = norm(state, own["norm.weight"])
        return output @ own["lm_head.weight"].T, output if self.norm_output else state

    def write(self, folder: Path, prefix: str = "", layer: str = "midlayer.", **config: object) -> Path:
        """Save it as tools do: with another prefix, another name of the layer, other settings."""
        folder.mkdir(parents=True, exist_ok=True)
        renamed = {name.replace("midlayer.", layer): tensor for name, tensor in self.tensors.items()}
        kept = ("lm_head.", "d2t", "t2d")
        save_file(
            {name if name.startswith(kept) else prefix + name: t for name, t in renamed.items()}, folder / "model.safetensors"
        )
        settings = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": self.vocab, **SIZES}
        settings |= {"draft_vocab_size": self.draft_vocab, "norm_before_residual": self.norm_before_residual}
        (folder / "config.json").write_text(json.dumps(settings | config))
        return folder


def mtp_tensors(seed: int = 0) -> dict[str, Tensor]:
    """A random MTP layer of MiMo with a Qwen2 block, under MiMo's names."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"input_proj.weight": (HIDDEN, 2 * HIDDEN), "self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH)}
    for name, rows in (("q", HEADS * WIDTH), ("k", KV_HEADS * WIDTH), ("v", KV_HEADS * WIDTH)):
        shapes |= {f"self_attn.{name}_proj.weight": (rows, HIDDEN), f"self_attn.{name}_proj.bias": (rows,)}
    shapes |= {f"mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (HIDDEN, INNER)
    made = {name: torch.randn(shape, generator=random) * 0.2 for name, shape in shapes.items()}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    made |= {f"{name}.weight": 0.5 + torch.rand(HIDDEN, generator=random) for name in norms}
    return {f"model.mtp_layers.0.{name}": tensor for name, tensor in made.items()}


def mtp_guess(tensors: dict[str, Tensor], head: Tensor, embedded: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of a MiMo layer, and its states behind the norm [T, H]."""
    own = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in tensors.items()}
    parts = [norm(before, own["hidden_layernorm.weight"]), norm(embedded, own["token_layernorm.weight"])]
    state = torch.cat(parts, -1) @ own["input_proj.weight"].T
    state = state + attention(norm(state, own["input_layernorm.weight"]), own, "self_attn.")
    state = state + mlp(norm(state, own["post_attention_layernorm.weight"]), own, "mlp.")
    normed = norm(state, own["final_layernorm.weight"])
    return normed @ head.T, normed
