"""The quantisation settings are found wherever the field's loaders look for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export.architectures import tiny_model
from export.sources.quantised.test_checkpoints import (
    Checkpoint,
    awq,
    awq_settings,
    compressed_settings,
    gptq,
    gptq_settings,
    pack_quantized,
    same_matrices,
)
from export.sources.quantised.test_checkpoints import checkpoint as checkpoint  # a fixture
from safetensors.torch import load_file, save_file
from tide_runtime.errors import TideError

from tide_export.load import load_model

GPTQ_FIELDS = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": False, "true_sequential": True}
AWQ_FIELDS = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}


def moved(made: Checkpoint, file: str, settings: dict[str, Any]) -> None:
    """Takes the settings out of config.json and writes them to ``file``."""
    place = made.directory / "config.json"
    config = json.loads(place.read_text())
    del config["quantization_config"]
    place.write_text(json.dumps(config))
    if file == "config.json":
        place.write_text(json.dumps({**config, **settings}))
    else:
        (made.directory / file).write_text(json.dumps(settings))


PLACES: dict[str, tuple[dict[str, Any], Any, str, dict[str, Any]]] = {
    "AutoGPTQ": (gptq_settings(), gptq(), "quantize_config.json", GPTQ_FIELDS),
    "GPTQModel": (gptq_settings(), gptq(), "quantize_config.json", gptq_settings()),
    "AutoAWQ": (awq_settings(), awq(), "quant_config.json", AWQ_FIELDS),
    "AutoAWQ, under AutoGPTQ's name": (awq_settings(), awq(), "quantize_config.json", AWQ_FIELDS),
    "compression_config": (
        compressed_settings(),
        pack_quantized(),
        "config.json",
        {"compression_config": compressed_settings()},
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_settings_outside_quantization_config(checkpoint: Callable[..., Checkpoint], case: str) -> None:
    """The packed weights would be dropped and the model be random, or its bits not survive."""
    settings, pack, file, fields = PLACES[case]
    made = checkpoint(settings, pack)
    moved(made, file, fields)
    loaded = load_model(str(made.directory), "fp32", tokenizer="none")
    assert same_matrices(loaded.model, made.matrices) and loaded.quantized.keys() >= made.matrices.keys()


def test_a_file_under_autogptqs_own_name(checkpoint: Callable[..., Checkpoint]) -> None:
    """Its first releases named the weights after bits and group size."""
    made = checkpoint(gptq_settings(), gptq())
    moved(made, "quantize_config.json", GPTQ_FIELDS)
    (made.directory / "model.safetensors").rename(made.directory / "gptq_model-4bit-32g.safetensors")
    assert same_matrices(load_model(str(made.directory), "fp32", tokenizer="none").model, made.matrices)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "none anywhere": ("absent.json", {}, r"packed weights \(.*nothing says how"),
    "another quantizer's": (
        "hf_quant_config.json",
        {"quantization": {"quant_algo": "NVFP4"}},
        r"quantised by 'modelopt', which cannot be read",
    ),
    "other bits": ("quantize_config.json", {**GPTQ_FIELDS, "bits": 8}, "qweight has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_help(checkpoint: Callable[..., Checkpoint], case: str) -> None:
    """Packed integers would be dropped in silence."""
    file, settings, message = REFUSED[case]
    made = checkpoint(gptq_settings(), gptq())
    moved(made, file, settings)
    with pytest.raises(TideError, match=message):
        load_model(str(made.directory), "fp32", tokenizer="none")


def mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """GPT-OSS's experts in blocks of 4-bit floats, which transformers dequantises."""
    tiny_model("gpt_oss").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 120, dtype=torch.uint8)
    return tensors


def test_formats_that_transformers_reads(tmp_path: Path) -> None:
    """Its quantiser renames the tensors; what it did not use, or fill, must be named all the same."""
    tensors = mxfp4(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_model(str(tmp_path), "fp32", tokenizer="none").model.model.layers[0].mlp.experts.gate_up_proj.abs().max() > 0
    for change in ({"model.layers.4.mlp.router.weight": torch.ones(4, 64)}, {"model.layers.1.mlp.extra": torch.ones(4)}):
        save_file({**tensors, **change}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(TideError, match=next(iter(change)).replace(".", r"\.")):
            load_model(str(tmp_path), "fp32", tokenizer="none")
    del tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TideError):
        load_model(str(tmp_path), "fp32", tokenizer="none")
