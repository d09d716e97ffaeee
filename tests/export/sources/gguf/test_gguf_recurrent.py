"""GGUF files of recurrent models: every key and tensor counts, and the model is what llama.cpp computes of the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export.sources.gguf.llamacpp import LlamaCpp
from export.sources.gguf.tiny_gguf import CONTEXT, VOCAB, GgufFile
from export.sources.gguf.tiny_recurrent import MODELS, tiny_recurrent
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError, TideError, UnsupportedModelError
from transformers import PreTrainedModel

from tide_export.model.fake_parameters import materialise
from tide_export.model.traced_recurrence import with_limits_of_config
from tide_export.sources.gguf.source import GgufParameters, load_gguf

IDS = np.random.default_rng(0).integers(0, 256, 60).tolist()


def log_probs(model: PreTrainedModel) -> NDArray[np.float64]:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([IDS])).logits[0, -1].double(), -1).numpy()


def loaded(content: GgufFile, folder: Path, kind: str = "F32") -> tuple[PreTrainedModel, GgufParameters]:
    """The file as a model, before it is asked whether it can be exported."""
    model, parameters, _ = load_gguf(content.write(folder / "model.gguf", kind=kind), torch.float32)
    materialise(model, parameters.value)
    return with_limits_of_config(model.eval()), parameters


@pytest.mark.parametrize("name", MODELS)
def test_the_models_are_llama_cpps(name: str, tmp_path: Path) -> None:
    """A transform that is left out, or keys that transformers' defaults stand for, would give another model."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is the reference")
    content = tiny_recurrent(name)
    found = log_probs(loaded(content, tmp_path)[0])
    reference = LlamaCpp(tmp_path / "model.gguf", 2 * CONTEXT).log_probs(IDS, VOCAB)
    assert np.abs(found - reference).max() < 1e-3


@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "granitehybrid", "nemotron_h"])
def test_blocks_are_kept(name: str, tmp_path: Path) -> None:
    """Matrices that the converter cut, joined or reordered would be dequantised, in a bundle of eight times the size, or their
    blocks would be those of other heads."""
    wide = {"linear_value_head_dim": 32} if name.startswith("qwen3") else {}
    content = tiny_recurrent(name, wide)
    model, parameters = loaded(content, tmp_path, "Q8_0")
    matrices = {n: p.detach().numpy() for n, p in model.named_parameters(remove_duplicate=False) if p.ndim == 2}
    whole = {n for n in matrices if n.endswith("shared_expert_gate.weight")}  # one row of floating point
    assert parameters.low_bits.keys() == matrices.keys() - whole
    for matrix, weight in parameters.low_bits.items():
        np.testing.assert_allclose(weight.materialize().dequantized(), matrices[matrix], rtol=0, atol=1e-6)
    for one, values in content.model.named_parameters(remove_duplicate=False):
        assert (model.get_parameter(one) - values).abs().max() <= values.abs().max() / 200


def test_blocks_across_heads_are_dequantised(tmp_path: Path) -> None:
    """Value heads of 16 columns lie in blocks of 32 with others, which cannot be put into another order."""
    _, parameters = loaded(tiny_recurrent("qwen35"), tmp_path, "Q8_0")
    assert parameters.notes == ["3 tensors of type Q8_0 were dequantised: that has blocks of other columns than the parameter's"]
    assert not [name for name in parameters.low_bits if name.endswith("out_proj.weight")]


def refused(content: GgufFile, folder: Path, error: type[TideError], message: str) -> None:
    with pytest.raises(error, match=message):
        load_gguf(content.write(folder / "model.gguf"), torch.float32)


# Name → model, its keys, the error, and what it names.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "rotation in Granite": ("granitehybrid", {"rope.scaling.finetuned": True}, "queries and keys rotate"),
    "no sigmoid": ("lfm2moe", {"expert_gating_func": 1}, "is not the sigmoid"),
    "positions of an image": ("qwen35", {"rope.dimension_sections": [2, 0, 0, 0]}, "dimension_sections"),
    "experts that sum to other than one": ("qwen35moe", {"expert_weights_norm": False}, "expert_weights_norm"),
    "lengths of queries and keys": ("qwen35", {"attention.layer_norm_rms_epsilon": 1e-5}, "rms_epsilon"),
    "layers of unequal width": ("lfm2", {"feed_forward_length": [64, 96, 64, 64]}, "feed_forward_length"),
    "heads of no whole width": ("falcon-h1", {"ssm.time_step_rank": 7}, "ssm.inner_size"),
    "groups of experts": ("nemotron_h_moe", {"expert_group_count": 2}, "expert_group_count"),
    "a scale of scores": ("falcon-h1", {"attention.scale": 0.5}, "attention.scale"),
    "an unknown key": ("mamba2", {"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_model_has_no_place_for(case: str, tmp_path: Path) -> None:
    """The key would be dropped, and the bundle would be another model."""
    name, keys, message = REFUSED[case]
    refused(tiny_recurrent(name, **keys), tmp_path, UnsupportedModelError, message)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen35", "blk.1.attn_gate.weight"),
        ("lfm2moe", "blk.2.exp_probs_b.bias"),
        ("granitehybrid", "blk.0.ffn_up.weight"),
        ("falcon-h1", "blk.0.ssm_a"),
    ],
)
def test_a_tensor_is_missing_or_has_no_place(name: str, tensor: str, tmp_path: Path) -> None:
    """A parameter would keep random numbers."""
    content = tiny_recurrent(name)
    values = content.tensors.pop(tensor)
    refused(content, tmp_path, ModelFilesError, f"has no tensor {tensor}")
    content.tensors |= {tensor: values, "blk.0.shortconv.conv.bias": np.zeros(64, np.float32)}
    refused(content, tmp_path, ModelFilesError, "shortconv.conv.bias")


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    """Files of Qwen3.5 have one layer more, which the text does not depend on."""
    content = tiny_recurrent("qwen35", block_count=5, nextn_predict_layers=1)
    content.tensors |= {f"blk.4.{name}.weight": np.ones(64, np.float32) for name in ("attn_norm", "nextn.enorm")}
    model, parameters = loaded(content, tmp_path)
    assert np.abs(log_probs(model) - log_probs(content.model)).max() < 1e-4
    assert parameters.notes == [
        "2 tensors were left out, such as blk.4.attn_norm.weight: the model's own output does not depend on them"
    ]


def experts_of_one_tensor(content: GgufFile) -> None:
    for layer in range(4):
        parts = [content.tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        content.tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)


def projection_of_one_tensor(content: GgufFile) -> None:
    """As the first converters wrote it: in HuggingFace's order."""
    for layer in range(3):
        for part in ("qkv", "gate"):
            del content.tensors[f"blk.{layer}.attn_{part}.weight"]
        joined = content.model.get_parameter(f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight")
        content.tensors[f"blk.{layer}.ssm_in.weight"] = joined.detach().numpy()


@pytest.mark.parametrize(("name", "join"), [("qwen35moe", experts_of_one_tensor), ("qwen3next", projection_of_one_tensor)])
def test_tensors_that_other_releases_join(name: str, join: Callable[[GgufFile], None], tmp_path: Path) -> None:
    """Files of other converters would be refused, or have their rows in another order."""
    content = tiny_recurrent(name)
    join(content)
    assert np.abs(log_probs(loaded(content, tmp_path)[0]) - log_probs(content.model)).max() < 1e-4


def test_decays_that_grow(tmp_path: Path) -> None:
    """Their logarithm is no number, and neither would be any logit."""
    content = tiny_recurrent("mamba2")
    content.tensors["blk.1.ssm_a"] = -content.tensors["blk.1.ssm_a"]
    with pytest.raises(ModelFilesError, match="not below zero"):
        loaded(content, tmp_path)
