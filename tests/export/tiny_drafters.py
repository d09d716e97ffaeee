"""A small drafter of random weights, built as EAGLE-3 heads are: three states, attention over pairs, a vocabulary of its own."""

import torch
from tide_runtime.bundle.manifest import KVInfo
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from tide_export.drafters.base import Drafter, MeasuredDrafter, positions_of
from tide_export.model.boundaries import at_boundaries

SHARPNESS = 12.0  # of the head: its likeliest token is one in spite of rounding


class TinyDrafter(Drafter):
    """Guesses among every second token of ``model``."""

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...], seed: int = 0) -> None:
        text = model.config.get_text_config()
        hidden, heads = text.hidden_size, 4
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden, num_attention_heads=heads, num_key_value_heads=2, num_hidden_layers=1
        )
        config._attn_implementation = "sdpa"
        vocabulary = torch.arange(0, text.vocab_size, 2)
        super().__init__("eagle3", taps, hidden, vocabulary, config, KVInfo(2, hidden // heads, hidden // heads))
        self.fc = nn.Linear(len(taps) * hidden, hidden, bias=False)
        self.norms = nn.ModuleList(LlamaRMSNorm(hidden) for _ in range(4))
        self.attention, self.mlp, self.rotary = LlamaAttention(config, 0), LlamaMLP(config), LlamaRotaryEmbedding(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self.attention, name, nn.Linear(2 * hidden, getattr(self.attention, name).out_features, bias=False))
        self.head = nn.Linear(hidden, len(vocabulary), bias=False)
        random = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=random)
        with torch.no_grad():
            self.head.weight *= SHARPNESS
        self.requires_grad_(False)
        self.eval()

    def fuse(self, tapped: Tensor) -> Tensor:
        return self.fc(tapped)

    def forward(
        self, embedded: Tensor, before: Tensor, position_ids: Tensor, past_key_values: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        pairs = torch.cat([self.norms[0](embedded), self.norms[1](before)], -1)
        attended, _ = self.attention(
            pairs,
            position_embeddings=self.rotary(before, position_ids),
            attention_mask=self.causal_mask(embedded, position_ids, past_key_values),
            past_key_values=past_key_values,
        )
        states = before + attended
        states = states + self.mlp(self.norms[2](states))
        return self.head(self.norms[3](states)), states


def measured(drafter: Drafter) -> MeasuredDrafter:
    return MeasuredDrafter(drafter, [0.5, 0.4], [[0.0, 0.2], [0.5, 0.8]], "as built", {}, "tests", "ab" * 32)


@torch.no_grad()
def guesses_after(drafter: Drafter, model: PreTrainedModel, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
    """``count`` guesses after ``tokens`` by the modules over the whole text, and by how much each logit exceeds the second."""
    kept: dict[int, Tensor] = {}
    with at_boundaries(model, kept.__setitem__):
        model(torch.tensor([tokens]))
    before = drafter.fuse(torch.cat([kept[tap] for tap in drafter.taps], -1))[:, :-1]
    following, guesses, margins = tokens[1:], list[int](), list[float]()
    for _ in range(count):
        embedded = model.get_input_embeddings()(torch.tensor([following]))
        logits, states = drafter(embedded, before, positions_of(before))
        top = logits[0, -1].topk(2)
        guesses.append(int(drafter.vocabulary[top.indices[0]]))
        margins.append(float(top.values[0] - top.values[1]))
        before, following = torch.cat([before, states[:, -1:]], 1), [*following, guesses[-1]]
    return guesses, margins
