"""The probe runs a model's own code with TIDE's attention: it returns cache shapes, or a reason instead of a traceback."""

import pytest
import torch
from benchmarks.tiny_configs import tiny_config
from export.architectures import LAYERS, tiny_model
from tide_runtime.bundle.manifest import KVInfo, LayerInfo
from tide_runtime.errors import UnsupportedModelError
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    LlamaConfig,
    PhimoeConfig,
    PreTrainedConfig,
)
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from tide_export.model.attention_masks import recorded_windows
from tide_export.model.probe import probe_layers


@pytest.mark.parametrize(
    "name, shape",
    [
        ("llama", KVInfo(2, 16, 16)),
        ("stablelm", KVInfo(2, 16, 16)),  # it repeats its KV heads before it attends
        ("deepseek_v3", KVInfo(4, 32, 32)),  # latents of 32 + 16; keys of 16 + 16, values of 24 filled up with zeros
    ],
)
def test_caches_hold_what_attention_reads(name, shape):
    """The engine would allocate caches of the latents' or the repeated heads' shape, and refuse its own bundle."""
    assert probe_layers(tiny_model(name)) == (LayerInfo(shape),) * LAYERS


def test_the_model_is_restored():
    """The eager model that the bundle is verified against would compute TIDE's placeholder instead of its attention."""
    model, ids = tiny_model("gpt_oss"), torch.arange(3, 12)[None]
    settings = model.config._attn_implementation, model.config._experts_implementation
    with torch.no_grad():
        before = model(ids).logits
        probe_layers(model)
        assert torch.equal(model(ids).logits, before)
    assert (model.config._attn_implementation, model.config._experts_implementation) == settings


def test_errors_of_the_models_code_become_a_reason(monkeypatch):
    """A model from the hub whose code does not take this cache would end in a traceback of that code."""

    def forward(self: object, x: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no attribute 'conv_states'")

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM is not supported, because LlamaMLP\.forward cannot run with"
    ) as raised:
        probe_layers(tiny_model("llama"))
    assert "conv_states" not in str(raised.value) and "Error" not in str(raised.value)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v32", "because its attention is sparse: DeepseekV32Indexer chooses"),
        ("roberta", "because RobertaEmbeddings counts a token's position from those before it"),
    ],
)
def test_parts_without_a_compiled_form_are_refused_by_name(model_type: str, reason: str) -> None:
    """A model would be refused by accident, in words of Python, or for numbers that differ."""
    with pytest.raises(UnsupportedModelError, match=reason):
        probe_layers(AutoModelForCausalLM.from_config(tiny_config(model_type)).eval())


def test_layers_without_a_cache_of_their_own_are_named(monkeypatch):
    """Layers that share a cache would be traced with one that is never written."""

    def forward(self: object, hidden_states: torch.Tensor, **kwargs: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="never used their cache"):
        probe_layers(tiny_model("llama"))


BASE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    pad_token_id=0,
)


def probed(config: PreTrainedConfig) -> None:
    probe_layers(AutoModelForCausalLM.from_config(config))


def test_windows_that_only_the_mask_has_are_refused() -> None:
    """Breaks: texts longer than the window are another model's, which no short text shows at export."""
    with pytest.raises(UnsupportedModelError, match=r"Phimoe.*attends to all earlier tokens, .* show the last 16 tokens"):
        probed(PhimoeConfig(**BASE, num_local_experts=2, sliding_window=16))
    probed(PhimoeConfig(**BASE, num_local_experts=2, sliding_window=128))  # of all positions


def test_caches_that_forget_what_a_pass_sees_are_refused() -> None:
    """Breaks: Moshi attends to all earlier tokens in a pass, and to a window of them in text that it writes."""
    with pytest.raises(UnsupportedModelError, match=r"Moshi.*attends to all earlier tokens in one pass, and its cache .* keeps"):
        probed(tiny_config("moshi"))


def test_masks_that_a_model_computes_are_refused() -> None:
    """Breaks: Doge drops all but the keys that its mask scores highest, from 2,048 tokens on, and the bundle keeps all."""
    with pytest.raises(UnsupportedModelError, match=r"Doge.*a mask that the model makes itself"):
        probed(DogeConfig(**BASE))


def test_masks_that_are_no_window_are_refused() -> None:
    """Breaks: attention in chunks is compiled as attention to all tokens, or to a window."""
    with recorded_windows(LlamaConfig(**BASE), ["tide"]) as windows:
        record = ALL_MASK_ATTENTION_FUNCTIONS["tide"]
        record(mask_function=sliding_window_causal_mask_function(16))
        record(mask_function=causal_mask_function)
        assert windows == {0, 16}
        with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
            record(mask_function=chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.long)))
    assert "tide" not in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
