"""Looped language models as classes of our own: their layers run several times over, so that no code of a checkpoint has to.

Ouro (Zhu et al. 2025, arXiv:2510.25741) and Nanbeige 4.2 (arXiv:2607.22083) are blocks of Llama whose L layers run in R loops. A
loop ends with the final norm, whose output is the next loop's input and the head's. Layer i keeps keys and values for each loop:
its cache in loop r has number r · L + i. Configurations and tensors have the names of the published checkpoints.

Importing this module registers the model types ``ouro`` and ``nanbeige`` with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from tide_runtime.errors import UnsupportedModelError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

GATE = "early_exit_gate"  # Ouro's, in `OuroModel`


class LoopedConfig(LlamaConfig):
    """Llama's configuration and a number of loops.

    Raises UnsupportedModelError where one of ``unsupported`` is switched on, which the classes here do not compute.
    """

    unsupported: ClassVar[tuple[str, ...]] = ()

    @property
    def loops(self) -> int:
        """How many times the layers run."""
        raise NotImplementedError

    def __post_init__(self, **kwargs: Any) -> None:
        if switched_on := [name for name in self.unsupported if kwargs.get(name)]:
            raise UnsupportedModelError(
                f"{self.model_type} with {', '.join(switched_on)} is not supported; without it TIDE compiles the model"
            )
        super().__post_init__(**kwargs)
        if self.loops < 1:
            raise UnsupportedModelError(
                f"{self.model_type} runs its layers {self.loops} times by its config; at least 1 is needed"
            )


@strict
class OuroConfig(LoopedConfig):
    """Ouro's. ``early_exit_threshold``: the cumulated probability of the gate at which a token leaves the loops."""

    model_type = "ouro"
    unsupported = ("use_sliding_window", "early_exit_step")

    total_ut_steps: int = 4
    early_exit_threshold: float | int | None = 1.0

    @property
    def loops(self) -> int:
        return self.total_ut_steps


@strict
class NanbeigeConfig(LoopedConfig):
    """Nanbeige's. ``loop_loss_weights``: of its training; where given, there is one loop more than weights."""

    model_type = "nanbeige"
    unsupported = (
        "qk_layernorm",
        "emb_neighbor_num",
        "ngram_vocab_size_ratio",
        "insert_ngram_layer_idx",
        "ngram_insert_all_layers",
        "enable_double_loop_split",
        "loop_middle_layers",
        "loop_share_kv",
        "enable_hyper_connection",
        "enable_mhc",
        "enable_h_res_identity",
        "enable_depth_attention",
    )

    num_loops: int = 1
    skip_loop_final_norm: bool = False
    loop_loss_weights: list[float] | None = None

    @property
    def loops(self) -> int:
        return len(self.loop_loss_weights) + 1 if self.loop_loss_weights else self.num_loops


@dataclass
class LoopedOutput(BaseModelOutputWithPast):
    """``loop_states``: what the head reads after each loop, R × [B, S, H]."""

    loop_states: tuple[torch.Tensor, ...] | None = None


class _LoopCache:
    """What a layer sees of a cache in one loop: the numbers from ``first`` on."""

    def __init__(self, cache: Cache, first: int) -> None:
        self.cache, self.first = cache, first

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self.cache.update(keys, values, self.first + layer_idx, *args, **kwargs)


class LoopedModel(LlamaModel):
    """Layers, final norm and embedding; the layers are `layer_class`."""

    config: LoopedConfig
    layer_class: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer
    norms_between = True

    def __init__(self, config: LoopedConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(self.layer_class(config, number) for number in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> LoopedOutput:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, self.config.use_cache if use_cache is None else use_cache)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + seen)[None]
        mask = create_causal_mask(self.config, hidden, attention_mask, cache, position_ids)
        rotary = self.rotary_emb(hidden, position_ids=position_ids)
        states = []
        for loop in range(self.config.loops):
            seen_by_loop = None if cache is None else _LoopCache(cache, loop * len(self.layers))
            for layer in self.layers:
                hidden = layer(
                    hidden,
                    attention_mask=mask,
                    position_ids=position_ids,
                    past_key_values=seen_by_loop,
                    position_embeddings=rotary,
                    **kwargs,
                )
            states.append(self.norm(hidden))
            hidden = states[-1] if self.norms_between else hidden
        return LoopedOutput(last_hidden_state=states[-1], past_key_values=cache, loop_states=tuple(states))

    def _cache(self, given: Cache | None, wanted: bool) -> Cache | None:
        """A cache for all loops. ``given`` grows where transformers made it, who counts the layers once."""
        if given is None:
            return DynamicCache() if wanted else None
        missing = self.config.loops * len(self.layers) - len(given.layers)
        if isinstance(given, DynamicCache) and given.layer_class_to_replicate is None:
            given.layers.extend(DynamicLayer() for _ in range(missing))
        return given


class OuroDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with norms behind its attention and its MLP too."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.input_layernorm_2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, *_: Any, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.input_layernorm_2(attended)
        computed = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.post_attention_layernorm_2(computed)


class OuroModel(LoopedModel):
    """``early_exit_gate`` reads the normed state after each loop: its sigmoid is the probability to leave there."""

    layer_class = OuroDecoderLayer

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.post_init()


class NanbeigeModel(LoopedModel):
    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config)
        self.norms_between = not config.skip_loop_final_norm


class _LoopedForCausalLM(LlamaForCausalLM):
    model_class: ClassVar[type[LoopedModel]]

    def __init__(self, config: LoopedConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class OuroForCausalLM(_LoopedForCausalLM):
    config: OuroConfig
    config_class = OuroConfig
    model_class = OuroModel


class NanbeigeForCausalLM(_LoopedForCausalLM):
    config: NanbeigeConfig
    config_class = NanbeigeConfig
    model_class = NanbeigeModel


AutoConfig.register(OuroConfig.model_type, OuroConfig)
AutoConfig.register(NanbeigeConfig.model_type, NanbeigeConfig)
AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM)
AutoModelForCausalLM.register(NanbeigeConfig, NanbeigeForCausalLM)
