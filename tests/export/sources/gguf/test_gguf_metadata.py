"""Every key and tensor of a GGUF file counts: the model is what llama.cpp computes of the file, or the key is named."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from export.sources.gguf.llamacpp import LlamaCpp
from export.sources.gguf.tiny_gguf import ARCHITECTURES, CONTEXT, VOCAB, GgufFile, byte_tokens, tiny
from numpy.typing import NDArray
from tide_runtime.bundle.manifest import GenerationInfo
from tide_runtime.errors import ModelFilesError, TideError, UnsupportedModelError
from transformers import PreTrainedModel

from tide_export.load import load_model
from tide_export.sources.generation_defaults import generation_info

IDS = np.random.default_rng(0).integers(0, 256, 120).tolist()


def gelu_of_llamacpp(x: torch.Tensor) -> torch.Tensor:
    """It is looked up in a table of fp16."""
    rounded = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
    return torch.where(x.abs() < 10, rounded, x.relu())


def log_probs(model: PreTrainedModel) -> NDArray[np.float64]:
    for module in model.modules():
        if "GELU" in type(module).__name__:
            module.forward = gelu_of_llamacpp
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([IDS])).logits[0, -1].double(), -1).numpy()


def loaded(content: GgufFile, folder: Path) -> PreTrainedModel:
    return load_model(str(content.write(folder / "model.gguf")), "fp32").model


def reference(content: GgufFile, folder: Path) -> NDArray[np.float64]:
    pytest.importorskip("xllamacpp", reason="llama.cpp is the reference")
    return LlamaCpp(content.write(folder / "reference.gguf"), 2 * CONTEXT).log_probs(IDS, VOCAB)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_models_are_llama_cpps(architecture: str, tmp_path: Path) -> None:
    """A default of transformers in place of a key (windows, soft-caps, epsilons, rotary widths) would give another model."""
    content = tiny(architecture)
    difference = np.abs(log_probs(loaded(content, tmp_path)) - reference(content, tmp_path)).max()
    assert difference < 1e-3


def frequency_factors(content: GgufFile) -> None:
    content.tensors["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)


def biases(content: GgufFile) -> None:
    rng = np.random.default_rng(1)
    for name, tensor in list(content.tensors.items()):
        if name.startswith("blk.") and ".attn_" in name and tensor.ndim == 2:
            content.tensors[name.replace("weight", "bias")] = rng.normal(0, 1, len(tensor)).astype(np.float32)


def long_factors(content: GgufFile) -> None:
    content.tensors["rope_factors_long.weight"] = np.array([1.5, 2, 4, 8], np.float32)
    content.tensors["rope_factors_short.weight"] = np.array([1, 1.1, 1.2, 1.3], np.float32)


def other_name(content: GgufFile) -> None:
    content.keys["general.name"] = "mistral"


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
MISTRAL_YARN = {"rope.scaling.yarn_log_multiplier": 0.7, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}
# Kind → architecture, keys, what else changes the file.
KINDS: dict[str, tuple[str, dict[str, Any], Callable[[GgufFile], None] | None]] = {
    "linear": ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, None),
    "factor without a type": ("llama", {"rope.scaling.factor": 4.0}, None),
    "yarn": ("llama", YARN, None),
    "yarn's attention": ("llama", {**YARN, "rope.scaling.attn_factor": 1.5}, None),
    "yarn of a half-rotated head": ("stablelm", YARN, None),
    "frequency factors": ("llama", {}, frequency_factors),
    "frequency factors and a linear factor": ("llama", {"rope.scaling.factor": 2.0}, frequency_factors),
    "longrope, long": ("phi3", {"rope.scaling.attn_factor": 1.2, "rope.scaling.original_context_length": 64}, long_factors),
    "longrope by its name": ("phi3", {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 64}, long_factors),
    "linear, full layers alone": ("gemma3", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, None),
    "window": ("gemma2", {"attention.sliding_window": 64}, None),
    "soft-caps": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}, None),
    "epsilon": ("llama", {"attention.layer_norm_rms_epsilon": 0.1}, None),
    "yarn of mistral3": ("mistral3", {**YARN, **MISTRAL_YARN}, None),
    "frequency factors of exaone4": ("exaone4", {}, frequency_factors),
    "experts used": ("qwen3moe", {"expert_used_count": 3}, None),
    "biases": ("llama", {}, biases),
    "named mistral": ("llama", {"rope.scaling.factor": 4.0}, other_name),
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_applied_as_llama_cpp_does(kind: str, tmp_path: Path) -> None:
    """The key would be dropped: the text gets worse the longer it is, and verification sees nothing of it."""
    architecture, keys, change = KINDS[kind]
    content = tiny(architecture, **keys)
    if change is not None:
        change(content)
    found = log_probs(loaded(content, tmp_path))
    assert np.abs(found - reference(content, tmp_path)).max() < 1e-3
    assert np.abs(found - log_probs(content.model)).max() > 0.1  # the key matters


def test_a_short_text_takes_short_factors_as_in_a_short_context(tmp_path: Path) -> None:
    """llama.cpp chooses by the size of its context, and transformers by the text's length."""
    llamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is the reference") and LlamaCpp
    content = tiny("phi3", **{"rope.scaling.attn_factor": 1.2, "rope.scaling.original_context_length": CONTEXT})
    long_factors(content)
    wanted = llamacpp(content.write(tmp_path / "reference.gguf"), CONTEXT).log_probs(IDS, VOCAB)
    assert np.abs(log_probs(loaded(content, tmp_path)) - wanted).max() < 1e-3


WITHOUT_EFFECT: dict[str, Any] = {
    "rope.scaling.type": "none",
    "rope.scaling.finetuned": True,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "attention.causal": True,
    "attention.max_alibi_bias": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.scale": 0.25,
    "attention.sliding_window": 4096,
    "logit_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "pooling_type": 0,
    "vocab_size": VOCAB,
    "tensor_data_layout": "Meta AI original pth",
}
NAMED: dict[str, Any] = {
    "general.type": "model",
    "general.name": "Tiny",
    "general.file_type": 0,
    "general.quantization_version": 2,
    "general.languages": ["en"],
    "general.base_model.0.repo_url": "https://example.org",
    "quantize.imatrix.entries_count": 3,
    "mradermacher.quantize_version": "2",
    "split.count": 1,
}


def test_keys_without_effect(tmp_path: Path) -> None:
    """Files carry dozens of keys that describe them; refusing these would refuse every file."""
    content = tiny("llama", **WITHOUT_EFFECT)
    content.keys |= NAMED
    assert np.array_equal(log_probs(loaded(content, tmp_path)), log_probs(content.model))


def test_as_many_key_heads_as_query_heads_need_no_key(tmp_path: Path) -> None:
    """llama.cpp's default; without it transformers leaves the rows of queries and keys in llama.cpp's order."""
    content = tiny("llama", {"num_key_value_heads": 4}, **{"attention.head_count_kv": None})
    assert np.array_equal(log_probs(loaded(content, tmp_path)), log_probs(content.model))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "longrope": (
        "llama",
        {"rope.scaling.type": "longrope"},
        r"llama\.rope\.scaling\.type = longrope.*rope_factors_long\.weight",
    ),
    "linear attention factor": ("llama", {"rope.scaling.attn_factor": 1.5}, r"rope\.scaling\.attn_factor = 1\.5"),
    "yarn mix": ("llama", {**YARN, "rope.scaling.yarn_ext_factor": 0.5}, r"yarn_ext_factor = 0\.5"),
    "yarn that shortens": ("llama", {**YARN, "rope.scaling.factor": 0.5}, r"scaling\.factor = 0\.5"),
    "yarn's attention in local layers": ("gemma3", {**YARN, "rope.scaling.attn_factor": 1.5}, r"attn_factor = 1\.5"),
    "weights of experts that sum to one": ("qwen2moe", {"expert_weights_norm": True}, r"expert_weights_norm = True"),
    "weights of experts that do not": ("qwen3moe", {"expert_weights_norm": False}, r"expert_weights_norm = False"),
    "window of starcoder2": ("starcoder2", {"attention.sliding_window": 64}, r"attention\.sliding_window = 64"),
    "no window": ("gemma3", {"attention.sliding_window": 0}, r"attention\.sliding_window = 0"),
    "granite without rotation": ("granite", {"rope.scaling.finetuned": False}, r"rope\.scaling\.finetuned = False"),
    "a last layer with a window": ("gemma4", {"attention.sliding_window_pattern": [True] * 5}, r"sliding_window_pattern"),
    "sections": ("qwen2", {"rope.dimension_sections": [4, 4, 8, 0]}, r"rope\.dimension_sections = \[4, 4, 8, 0\]"),
    "half a head": ("llama", {"rope.dimension_count": 8}, r"rope\.dimension_count = 8.*rotates whole heads"),
    "soft-cap of scores": ("llama", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping = 50"),
    "experts": ("llama", {"expert_count": 8, "expert_used_count": 2}, r"llama\.expert_count = 8"),
    "draft layers": ("llama", {"nextn_predict_layers": 1}, r"nextn_predict_layers = 1"),
    "heads that differ": (
        "llama",
        {"attention.head_count_kv": [2, 4]},
        r"attention\.head_count_kv = \[2, 4\].*between the layers",
    ),
    "parallel": ("stablelm", {"use_parallel_residual": True}, r"use_parallel_residual = True.*contradicts"),
    "unknown layout": ("llama", {"tensor_data_layout": "other"}, r"tensor_data_layout = other"),
    "a key of the future": ("llama", {"attention.gate_every": 2}, r"llama\.attention\.gate_every = 2.*nothing applies"),
    "no context length": ("llama", {"context_length": None}, r"no key llama\.context_length"),
    "other vocabulary": ("llama", {"vocab_size": 300}, rf"vocab_size = 300 and an embedding of {VOCAB}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_has_no_place_for_is_named(case: str, tmp_path: Path) -> None:
    """The bundle would be another model than the file's, and be verified against itself."""
    architecture, keys, message = REFUSED[case]
    with pytest.raises(TideError, match=message):
        loaded(tiny(architecture, **keys), tmp_path)


NAMES_REFUSED = {
    "an adapter": ("general.type", "adapter"),
    "an older layout of blocks": ("general.quantization_version", 1),
    "a foreign key": ("acme.attention", 3),
    "extra of tensors": ("general.tensor_extra.name", "x"),
}


@pytest.mark.parametrize("case", NAMES_REFUSED)
def test_other_keys_are_named(case: str, tmp_path: Path) -> None:
    """A key outside the architecture may matter as much."""
    key, value = NAMES_REFUSED[case]
    content = tiny("llama")
    content.keys[key] = value
    with pytest.raises(UnsupportedModelError, match=rf"{key} = "):
        loaded(content, tmp_path)


def drop(name: str) -> Callable[[GgufFile], None]:
    def change(content: GgufFile) -> None:
        del content.tensors[name]

    return change


def add(name: str, *shape: int) -> Callable[[GgufFile], None]:
    return lambda content: content.tensors.update({name: np.ones(shape, np.float32)})


TENSORS: dict[str, tuple[str, Callable[[GgufFile], None], str]] = {
    "one missing": ("llama", drop("blk.1.ffn_up.weight"), r"no tensor blk\.1\.ffn_up\.weight"),
    "half of the experts' matrices": ("qwen3moe", drop("blk.1.ffn_up_exps.weight"), r"no tensor blk\.1\.ffn_up_exps\.weight"),
    "experts missing": ("qwen3moe", add("blk.1.ffn_down_exps.weight", 3, 64, 32), r"experts\.down_proj has shape \(3, 64, 32\)"),
    "a layer more": ("llama", add("blk.2.ffn_up.weight", 96, 64), r"tensor blk\.2\.ffn_up\.weight, but its config says 2 layers"),
    "unknown": ("llama", add("blk.1.ffn_gate_inp.weight", 4, 64), r"tensor blk\.1\.ffn_gate_inp\.weight.*no place for"),
    "factors elsewhere": ("qwen2", add("rope_freqs.weight", 8), r"tensor rope_freqs\.weight"),
    "factors of another width": ("llama", add("rope_freqs.weight", 4), r"rope_freqs\.weight has 4 factors"),
    "another shape": ("llama", add("blk.1.ffn_up.weight", 48, 64), r"up_proj\.weight has shape \(48, 64\), expected \(96, 64\)"),
    "a layer's bias alone": ("llama", add("blk.1.attn_q.bias", 64), r"tensor blk\.1\.attn_q\.bias"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named(case: str, tmp_path: Path) -> None:
    """The parameter would be random or zero, or the tensor be dropped."""
    architecture, change, message = TENSORS[case]
    content = tiny(architecture)
    change(content)
    with pytest.raises(TideError, match=message):
        loaded(content, tmp_path)


def test_a_part_of_a_file_is_no_model(tmp_path: Path) -> None:
    """The first of several parts has all keys and half of the tensors."""
    content = tiny("llama")
    content.keys |= {"split.no": 0, "split.count": 2, "split.tensors.count": len(content.tensors)}
    with pytest.raises(ModelFilesError, match=r"part 1 of 2.*llama-gguf-split --merge model\.gguf"):
        loaded(content, tmp_path)


def test_bytes_in_the_other_order(tmp_path: Path) -> None:
    """The scales of its blocks would be read backwards."""
    other = gguf.GGUFEndian.LITTLE if sys.byteorder == "big" else gguf.GGUFEndian.BIG
    with pytest.raises(ModelFilesError, match="gguf-convert-endian"):
        load_model(str(tiny("llama").write(tmp_path / "model.gguf", other)), "fp32")


LLAMA_3 = ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]
FILL = ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
# Tokens at the vocabulary's end, ids of keys as texts → the texts that end a generation.
ENDS: dict[str, tuple[list[str], dict[str, str], set[str]]] = {
    "eos alone": (["<a>", "<b>"], {"eos": "<a>"}, {"<a>"}),
    "eot": (["<a>", "<b>"], {"eos": "<a>", "eot": "<b>"}, {"<a>", "<b>"}),
    "Llama 3": (LLAMA_3, {"eos": LLAMA_3[0]}, set(LLAMA_3)),
    "ChatML": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos": "<|im_end|>"}, {"<|im_end|>", "<|endoftext|>"}),
    "no key at all": (["</s>", "<|im_end|>"], {}, {"</s>", "<|im_end|>"}),
    "fill in the middle": (FILL, {}, set(FILL)),
    "fill in the middle by key": (["<a>", "[PAD]"], {"fim_pad": "<a>"}, {"<a>"}),
    "harmony": (["<|return|>", "<|call|>", "<|end|>"], {"eos": "<|return|>"}, {"<|return|>", "<|call|>"}),
    "tool response": (["</s>", "<|tool_response>"], {"eos": "<|tool_response>"}, {"<|tool_response>"}),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_a_generation(case: str, tmp_path: Path) -> None:
    """A chat would not stop: the file's eos ends documents, and another token ends a turn."""
    controls, ids, expected = ENDS[case]
    content = tiny("llama")
    content.tokens = byte_tokens(VOCAB, controls)
    del content.keys["tokenizer.ggml.eos_token_id"]
    content.keys |= {f"tokenizer.ggml.{name}_token_id": content.tokens.index(text) for name, text in ids.items()}
    ends = loaded(content, tmp_path).generation_config.eos_token_id
    assert {content.tokens[i] for i in ends} == expected and (not ids or content.tokens[ends[0]] == next(iter(ids.values())))


def test_an_end_outside_the_vocabulary(tmp_path: Path) -> None:
    """Nothing would end the text; 2^32 - 1 is what converters write for none."""
    content = tiny("llama")
    content.keys["tokenizer.ggml.eot_token_id"] = 2**32 - 1
    loaded(content, tmp_path)
    content.keys["tokenizer.ggml.eot_token_id"] = VOCAB
    with pytest.raises(ModelFilesError, match=rf"eot_token_id = {VOCAB}, and {VOCAB} tokens"):
        loaded(content, tmp_path)


def test_advised_sampling(tmp_path: Path) -> None:
    """Breaks: the model samples otherwise than in llama.cpp, which takes the file's advice as its defaults."""
    content = tiny("llama")
    advice = {"temp": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "penalty_repeat": 1.5}
    content.keys |= {f"general.sampling.{name}": value for name, value in {**advice, "mirostat": 2}.items()}
    model = load_model(str(content.write(tmp_path / "model.gguf")), "fp32")
    assert "general.sampling.mirostat (draws have an even surprise), which TIDE does not apply" in " ".join(model.notes)
    info = generation_info(model)
    assert info == GenerationInfo(info.eos_token_ids, temperature=0.5, top_k=20, top_p=0.75, min_p=0.125, repetition_penalty=1.5)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"general.sampling.penalty_repeat": 1.5}, {"repetition_penalty": 1.5}),
        ({"general.sampling.penalty_repeat": 1.5, "general.sampling.penalty_last_n": 0}, {}),
        ({"general.sampling.temp": 0.0, "general.sampling.top_k": 20}, {}),
        ({"tokenizer.ggml.suppress_tokens": [7, 4]}, {"suppress_tokens": [4, 7]}),
    ],
)
def test_advice_without_draws(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    """Breaks: a penalty alone makes a model draw its tokens, or a model writes marks of images, which the file forbids."""
    content = tiny("llama")
    content.keys |= keys
    model = load_model(str(content.write(tmp_path / "model.gguf")), "fp32")
    info = generation_info(model)
    assert info == GenerationInfo(info.eos_token_ids, **expected) and all(type(token) is int for token in info.suppress_tokens)


def test_the_writer_knows_the_keys() -> None:
    """A renamed key of the package gguf would leave the tests above with a key that no file has."""
    known = {
        key.removeprefix("{arch}.")
        for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
        for key in vars(group).values()
        if isinstance(key, str)
    }
    tried = {key for _, keys, _ in (*KINDS.values(), *REFUSED.values()) for key in keys} | set(WITHOUT_EFFECT)
    assert tried - known <= {"rope.scale_linear", "attention.gate_every"}
