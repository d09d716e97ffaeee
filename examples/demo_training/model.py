"""A Llama decoder whose layers' weights are stacked, written for training throughput.

Hugging Face's modules spend most of a small model's step between the matrix products. Here a layer is one function that
`torch.compile` fuses once and runs for all layers, queries share the keys of a group in one batched product, and the
weights of all layers are one tensor per kind, which is also what a batched Muon step wants.
`StackedLlama.to_hf` gives a state dict that Hugging Face's class loads; a test holds the logits equal.

Shapes: B sequences, S tokens, H hidden, N query heads, G key/value heads, D head size, V vocabulary, L layers.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from .layer_skip import draw_exits, keep_mask
from .variants import Variant

# parameter name here -> name inside a Hugging Face layer
LAYER_WEIGHTS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
JOINED = ("query", "key", "value", "gate", "up")  # into two, as their inputs are the same
BRANCH_NORMS = {"attention_norm_2": "input_layernorm_2", "mlp_norm_2": "post_attention_layernorm_2"}

Tables = tuple[Tensor, Tensor, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in fp32 (Zhang & Sennrich 2019), `[..., H]`, returned in the weight's compute type."""
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(weight.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of `[B, S, N, D]` with tables `[1, S, 1, D/2]`."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Additive mask `[S, S]`: minus infinity on the future."""
    return torch.full((length, length), float("-inf"), device=device).triu(1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of queries `[B, S, N, D]` to keys and values `[B, S, G, D]`; returns `[B, S, N·D]`.

    The N/G query heads of a group are rows of one product with the group's keys: at short S this is far faster
    on a CPU than the fused attention kernel.
    """
    batch, length, heads, size = query.shape
    groups = key.shape[2]
    rows = query.view(batch, length, groups, heads // groups, size).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch * groups, heads // groups * length, size)
    keys = key.transpose(1, 2).reshape(batch * groups, length, size)
    values = value.transpose(1, 2).reshape(batch * groups, length, size)
    scores = torch.bmm(rows, keys.transpose(1, 2)).view(-1, heads // groups, length, length).float() * size**-0.5
    weights = (scores + mask).softmax(-1).to(query.dtype)
    mixed = torch.bmm(weights.view(rows.shape[0], -1, length), values)
    return mixed.view(batch, heads, length, size).transpose(1, 2).reshape(batch, length, heads * size)


def attention_branch(x: Tensor, layer: dict[str, Tensor], tables: Tables, eps: float) -> Tensor:
    """What a layer's attention adds to the residual stream `[B, S, H]`."""
    cos, sin, mask = tables
    batch, length, _ = x.shape
    size = 2 * cos.shape[-1]
    normed = rms_norm(x, layer["attention_norm"], eps)
    projected = F.linear(normed, layer["query_key_value"]).view(batch, length, -1, size)
    heads = layer["output"].shape[1] // size
    groups = (projected.shape[2] - heads) // 2
    query, key, value = projected.split([heads, groups, groups], dim=2)
    attended = causal_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, mask)
    return F.linear(attended, layer["output"])


def mlp_branch(x: Tensor, layer: dict[str, Tensor], eps: float) -> Tensor:
    """What a layer's MLP adds to the residual stream `[B, S, H]`."""
    gate, up = F.linear(rms_norm(x, layer["mlp_norm"], eps), layer["gate_up"]).chunk(2, -1)
    return F.linear((F.silu(gate.float()) * up).to(gate.dtype), layer["down"])


def decoder_layer(x: Tensor, keep: Tensor, layer: dict[str, Tensor], tables: Tables, eps: float) -> Tensor:
    """One decoder layer on the fp32 residual stream `[B, S, H]`; `keep` `[B, 1, 1]` is 0 for sequences that skip it.

    A looped model's layers norm their branches once more (`BRANCH_NORMS`) before they add them.
    """
    attended = attention_branch(x, layer, tables, eps)
    if "attention_norm_2" in layer:
        attended = rms_norm(attended, layer["attention_norm_2"], eps)
    x = x + keep * attended
    computed = mlp_branch(x, layer, eps)
    if "mlp_norm_2" in layer:
        computed = rms_norm(computed, layer["mlp_norm_2"], eps)
    return x + keep * computed


def head_logits(x: Tensor, norm: Tensor, embedding: Tensor, eps: float) -> Tensor:
    """Final norm and tied LM head: `[B, S, H]` to logits `[B, S, V]`."""
    return F.linear(rms_norm(x, norm, eps), embedding)


def head_loss(x: Tensor, targets: Tensor, norm: Tensor, embedding: Tensor, eps: float) -> Tensor:
    """Mean cross-entropy in nats per token of the head on `x` `[B, S, H]` against `targets` `[B, S]`."""
    return F.cross_entropy(head_logits(x, norm, embedding, eps).float().flatten(0, 1), targets.flatten())


class StackedLlama(nn.Module):
    """Llama with one parameter tensor per kind of weight, `[L, out, in]`, and tied embeddings.

    `compute` is the type of the matrix products; the parameters and the residual stream stay in fp32.
    Raises ValueError for a configuration outside what the demo models need.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    run_layer: Callable[..., Tensor]
    run_head_loss: Callable[..., Tensor]
    hf_class: ClassVar[type[LlamaForCausalLM]] = LlamaForCausalLM
    layer_names: ClassVar[dict[str, str]] = LAYER_WEIGHTS

    def __init__(self, config: LlamaConfig, compute: torch.dtype = torch.bfloat16, compiled: bool = False):
        super().__init__()
        if not config.tie_word_embeddings or config.attention_bias or config.mlp_bias:
            raise ValueError("the demo model needs tied embeddings and no biases; check config.json")
        rope = dict(config.rope_parameters or {})
        if rope.get("rope_type") != "default":
            raise ValueError(f"the demo model needs plain rotary embeddings, config.json has {rope}")
        self.config, self.compute = config, compute
        self.theta = float(rope["rope_theta"])
        size = self.head_size
        layers = config.num_hidden_layers
        hidden = config.hidden_size
        mlp = config.intermediate_size
        queries, keys = (
            config.num_attention_heads * size,
            (config.num_key_value_heads or config.num_attention_heads) * size,
        )
        shapes = dict(query=(queries, hidden), key=(keys, hidden), value=(keys, hidden), output=(hidden, queries),
                      gate=(mlp, hidden), up=(mlp, hidden), down=(hidden, mlp))  # fmt: skip
        for name, (rows, columns) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(layers, rows, columns)))
        self.attention_norm = nn.Parameter(torch.ones(layers, hidden))
        self.mlp_norm = nn.Parameter(torch.ones(layers, hidden))
        self.final_norm = nn.Parameter(torch.ones(hidden))
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, hidden))
        self.run_layer, self.run_head_loss = decoder_layer, head_loss
        if compiled:
            self.run_layer = torch.compile(decoder_layer, dynamic=False)
            self.run_head_loss = torch.compile(head_loss, dynamic=False)

    @property
    def head_size(self) -> int:
        return self.config.head_dim or self.config.hidden_size // self.config.num_attention_heads

    @property
    def loops(self) -> int:
        """How many times the layers run."""
        return 1

    @property
    def depth(self) -> int:
        """Layers that a token passes."""
        return self.loops * self.config.num_hidden_layers

    @property
    def exit_depths(self) -> list[int]:
        """The exits to report: after a sixth, a quarter, a third and half of the layers."""
        return sorted({max(1, self.depth // part) for part in (6, 4, 3, 2)})

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw fresh weights; what a layer adds to the residual stream starts at zero."""
        generator = torch.Generator().manual_seed(seed)
        for name in (*MATRICES, "embedding"):
            weight = self.get_parameter(name)
            scale = 0.02 if name == "embedding" else 0.5 * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        self.output.zero_()
        self.down.zero_()

    def tables(self, length: int) -> Tables:
        """What all layers share: rotary cosines and sines `[1, S, 1, D/2]`, and the causal mask `[S, S]`."""
        size = self.head_size
        device = self.embedding.device
        frequencies = self.theta ** -(torch.arange(0, size, 2, device=device).float() / size)
        angles = torch.outer(torch.arange(length, device=device).float(), frequencies)[None, :, None]
        return angles.cos(), angles.sin(), causal_mask(length, device)

    def layer_weights(self) -> list[dict[str, Tensor]]:
        """The weights of each layer in the compute type, projections that share an input joined."""
        joined = {
            "query_key_value": torch.cat([self.query, self.key, self.value], 1),
            "gate_up": torch.cat([self.gate, self.up], 1),
            **{name: self.get_parameter(name) for name in self.layer_names if name not in JOINED},
        }
        stacks = {name: weight.to(self.compute).unbind(0) for name, weight in joined.items()}
        return [{name: stack[i] for name, stack in stacks.items()} for i in range(self.config.num_hidden_layers)]

    def hidden_states(self, ids: Tensor, after: Iterable[int], keep: Tensor | None = None) -> dict[int, Tensor]:
        """Residual streams `[B, S, H]` after the given numbers of layers, for token ids `[B, S]`.

        `keep` `[depth, B, 1, 1]` holds 0 where a sequence skips a layer (layer dropout), 1 elsewhere. The final norm is the
        head's; between two loops it is also what the next one reads.
        """
        wanted = set(after)
        eps = self.config.rms_norm_eps
        if keep is None:
            keep = torch.ones(self.depth, ids.shape[0], 1, 1, device=ids.device)
        tables = self.tables(ids.shape[1])
        x = F.embedding(ids, self.embedding.to(self.compute)).float()
        states = {0: x} if 0 in wanted else {}
        for depth, layer in enumerate(self.layer_weights() * self.loops, 1):
            x = self.run_layer(x, keep[depth - 1], layer, tables, eps)
            if depth in wanted:
                states[depth] = x
            if depth % self.config.num_hidden_layers == 0 and depth < self.depth:
                x = rms_norm(x, self.final_norm, eps)
        return states

    def losses(self, ids: Tensor, after: Iterable[int], keep: Tensor | None = None) -> dict[int, Tensor]:
        """Next-token losses of the shared head after the given numbers of layers, for windows `[B, S + 1]`."""
        inputs = ids[:, :-1].contiguous()
        targets = ids[:, 1:].contiguous()
        norm = self.final_norm.to(self.compute)
        embedding = self.embedding.to(self.compute)
        states = self.hidden_states(inputs, after, keep)
        eps = self.config.rms_norm_eps
        return {depth: self.run_head_loss(x, targets, norm, embedding, eps) for depth, x in states.items()}

    def logits(self, ids: Tensor) -> Tensor:
        """Logits `[B, S, V]` of the full model."""
        return self.head(self.hidden_states(ids, [self.depth])[self.depth])

    def head(self, x: Tensor) -> Tensor:
        """Final norm and LM head on residual streams `[B, S, H]`."""
        norm = self.final_norm.to(self.compute)
        embedding = self.embedding.to(self.compute)
        return head_logits(x, norm, embedding, self.config.rms_norm_eps)

    def training_loss(self, ids: Tensor, variant: Variant, generator: torch.Generator) -> tuple[Tensor, float]:
        """Loss of a step on windows `[B, S + 1]`, and the part of it that is the full model's; `generator` makes the draws."""
        keep = keep_mask(self.depth, len(ids), variant.dropout, generator).to(ids.device)
        exits = draw_exits(self.depth, generator) if variant.exit_weight else []
        losses = self.losses(ids, [*exits, self.depth], keep)
        total = losses[self.depth] + variant.exit_weight * sum(losses[depth] for depth in exits)
        return total, losses[self.depth].item()

    def to_hf(self) -> dict[str, Tensor]:
        """The weights under the names of `hf_class`."""
        state = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        for name, hf_name in self.layer_names.items():
            for index, weight in enumerate(self.get_parameter(name)):
                state[f"model.layers.{index}.{hf_name}.weight"] = weight
        return {name: weight.detach().clone() for name, weight in state.items()}

    @torch.no_grad()
    def load_hf(self, state: dict[str, Any]) -> None:
        """Copy the weights of a state dict of `hf_class`; the reverse of `to_hf`."""
        self.embedding.copy_(state["model.embed_tokens.weight"])
        self.final_norm.copy_(state["model.norm.weight"])
        for name, hf_name in self.layer_names.items():
            for index, weight in enumerate(self.get_parameter(name)):
                weight.copy_(state[f"model.layers.{index}.{hf_name}.weight"])
