"""Each parameter comes from one tensor and each tensor is used: what differs ends in names, not in random weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export.architectures import ARCHITECTURES, LAYERS, tiny_model
from safetensors.torch import load_file, save_file
from tide_runtime.errors import ModelFilesError, TideError

from tide_export.load import load_model
from tide_export.sources.loaded_model import LoadedModel

Tensors = dict[str, torch.Tensor]
UP_PROJ = "model.layers.1.mlp.up_proj.weight"
UP_BIAS = "model.layers.1.mlp.up_proj.bias"
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def saved(folder: Path, architecture: str = "llama", **config: object) -> Tensors:
    """The architecture's checkpoint in ``folder``, with ``config`` instead of its own values; returns its tensors."""
    tiny_model(architecture).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return load_file(folder / "model.safetensors")


def load(folder: Path, tensors: Tensors) -> LoadedModel:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return load_model(str(folder), "fp32", tokenizer="none")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_whole_checkpoints_load_without_a_change(name: str, tmp_path: Path) -> None:
    """Renamed, merged, tied and computed tensors would be taken for missing or unknown ones."""
    saved(tmp_path, name)
    loaded, expected = load_model(str(tmp_path), "fp32", tokenizer="none"), tiny_model(name).state_dict()
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert loaded.notes == ()


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {re.sub(old, new, name): tensor for name, tensor in tensors.items()}


def added(**more: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, **more}


REFUSED: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "tensor missing": ("llama", without(UP_PROJ), rf"lacks {re.escape(UP_PROJ)};"),
    "another prefix": ("llama", renamed("^", "base_model.model."), r"lacks lm_head.*unknown base_model\.model\.lm_head\.weight"),
    "another prefix inside": ("llama", renamed("self_attn", "attn"), r"lacks .*self_attn.*unknown .*0\.attn"),
    "no head": ("llama", without("lm_head.weight"), r"lacks lm_head\.weight; .*set tie_word_embeddings to true"),
    "no embedding": ("llama", without("model.embed_tokens.weight"), r"lacks model\.embed_tokens\.weight"),
    "a layer more": (
        "llama",
        added(**{f"model.layers.{LAYERS}.mlp.up_proj.weight": torch.zeros(128, 64)}),
        rf"more than the config's {LAYERS} layers \(model\.layers\.{LAYERS}\.mlp",
    ),
    "a layer fewer": ("llama", lambda t: {k: v for k, v in t.items() if "layers.3." not in k}, r"lacks .*layers\.3\."),
    "another shape": ("llama", added(**{UP_PROJ: torch.zeros(64, 64)}), r"up_proj\.weight has shape \(64, 64\), expected"),
    "a transposed matrix": ("llama", added(**{UP_PROJ: torch.zeros(64, 128)}), r"has shape \(64, 128\), expected \(128, 64\)"),
    "a bias that the config lacks": ("llama", added(**{UP_BIAS: torch.ones(128)}), r"unknown .*up_proj\.bias"),
    "an adapter's tensors": (
        "llama",
        added(**{"model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}),
        r"unknown .*lora_A",
    ),
    "one parameter twice": (
        "llama",
        added(**{"layers.1.mlp.up_proj.weight": torch.ones(128, 64)}),
        r"holds layers\.1\.mlp\.up_proj\.weight and model\.layers\.1\.mlp\.up_proj\.weight, which are both",
    ),
    "integers": ("llama", added(**{UP_PROJ: torch.ones(128, 64, dtype=torch.int8)}), r"up_proj\.weight as I8, and no settings"),
    "8-bit floats with scales": (
        "llama",
        added(**{UP_PROJ: torch.ones(128, 64).to(torch.float8_e4m3fn), f"{UP_PROJ}_scale_inv": torch.ones(1, 1)}),
        r"packed weights \(.*weight_scale_inv\), and nothing says how",
    ),
    "packed without settings": (
        "llama",
        lambda t: {**without(UP_PROJ)(t), UP_PROJ.replace("weight", "qweight"): torch.ones(8, 128, dtype=torch.int32)},
        r"packed weights \(model\.layers\.1\.mlp\.up_proj\.qweight\), and nothing says how.*quantize_config\.json",
    ),
    "a bias that only looks like a mask": (
        "gpt2",
        lambda t: {**t, "transformer.h.0.attn.bias": torch.ones(64)},
        r"unknown transformer\.h\.0\.attn\.bias",
    ),
    "an expert missing": ("qwen3_moe", without(EXPERT.format(2)), r"layers\.1\.mlp\.experts\."),
    "an expert under another number": ("qwen3_moe", renamed(r"(1\.mlp\.experts)\.3\.", r"\1.7."), "expected the numbers 0 to 3"),
    "an expert of another shape": ("qwen3_moe", added(**{EXPERT.format(2): torch.ones(16, 64)}), r"layers\.1\.mlp\.experts"),
    "a persistent buffer missing": (
        "deepseek_v3",
        without("model.layers.1.mlp.gate.e_score_correction_bias"),
        r"lacks .*e_score_correction_bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    """The bundle would be made of random numbers, or of a part of the file, and be verified against the same."""
    architecture, change, message = REFUSED[case]
    tensors = saved(tmp_path, architecture)
    with pytest.raises(TideError, match=message):
        load(tmp_path, change(tensors))


def test_a_tied_head_of_other_values(tmp_path: Path) -> None:
    """Loaders differ in which of the two they take."""
    tensors = saved(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ModelFilesError, match=r"lm_head\.weight and model\.embed_tokens\.weight with different values"):
        load(tmp_path, tensors)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    assert load(tmp_path, {**tensors, **head}).model.config.tie_word_embeddings
    load(tmp_path, without("lm_head.weight")(tensors))


@pytest.mark.parametrize(("architecture", "prefix"), [("llama", "model."), ("gpt2", "transformer.")])
def test_the_base_models_names(architecture: str, prefix: str, tmp_path: Path) -> None:
    """GPT-2's own file has no `transformer.` before its names."""
    tensors = saved(tmp_path, architecture)
    loaded = load(tmp_path, renamed(f"^{re.escape(prefix)}", "")(tensors)).model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


LEFTOVERS = {
    "rotary frequencies": ("llama", {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(LAYERS)}),
    "causal masks": (
        "gpt2",
        {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.uint8),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        },
    ),
    "causal masks of NeoX": ("gpt_neox", {"gpt_neox.layers.1.attention.bias": torch.ones(1, 1, 128, 128, dtype=torch.bool)}),
}


@pytest.mark.parametrize("case", LEFTOVERS)
def test_leftovers_without_effect_are_accepted(case: str, tmp_path: Path) -> None:
    """Older checkpoints carry tables that the config gives; refusing them would refuse GPT-2 itself."""
    architecture, more = LEFTOVERS[case]
    load(tmp_path, {**saved(tmp_path, architecture), **more})


def test_declared_draft_layers_are_left_out_and_said(tmp_path: Path) -> None:
    """DeepSeek-V3 stores a layer that drafts the next token but one; an undeclared layer would be lost without a word."""
    tensors = saved(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    draft = {f"model.layers.{LAYERS}.eh_proj.weight": torch.ones(64, 128), "mtp.layers.0.norm.weight": torch.ones(64)}
    (note,) = load(tmp_path, {**tensors, **draft}).notes
    assert note.startswith("2 tensors were left out") and "draft further tokens" in note
    beyond = {f"model.layers.{LAYERS + 1}.eh_proj.weight": torch.ones(64, 128)}
    with pytest.raises(ModelFilesError, match=rf"more than the config's {LAYERS} layers"):
        load(tmp_path, {**tensors, **beyond})
    tensors = saved(tmp_path, "deepseek_v3", num_nextn_predict_layers=0)
    for name, tensor in draft.items():
        with pytest.raises(ModelFilesError, match=re.escape(name)):
            load(tmp_path, {**tensors, name: tensor})


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    """Which of two versions becomes the model would depend on the order of the files."""
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    tensors = load_file(shards[1])
    name = next(iter(load_file(shards[0])))
    save_file({**tensors, name: torch.zeros(1)}, shards[1], metadata={"format": "pt"})
    with pytest.raises(ModelFilesError, match=rf"{shards[1].name} and {shards[0].name} both hold {re.escape(name)}"):
        load_model(str(tmp_path), "fp32", tokenizer="none")
