"""Mixtures of experts with 4-bit weights: one operator for all experts, and a text that does not depend on its company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from export.architectures import VOCAB, random_model
from export.test_padded_attention import PLANS, check
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.bundle.manifest import read_manifest
from transformers import MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from tide_export import ExportConfig, export
from tide_export.export import quantize_loaded, write_bundle
from tide_export.load import LoadedModel
from tide_export.progress import ExportProgress
from tide_export.quantization.quantizers import is_experts

QUIET = ExportProgress(quiet=True)
_SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "three experts a token": Qwen3MoeConfig(
        **_SIZES, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, max_position_embeddings=128
    ),
    "k_quant": MixtralConfig(**_SIZES, intermediate_size=64, num_local_experts=4, max_position_embeddings=128),
}


@pytest.fixture(params=CONFIGS)
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A verified bundle of a model in memory by round to nearest, or of a checkpoint by k_quant."""
    name, out = request.param, tmp_path / "bundle"
    model, options = random_model(CONFIGS[name]), ExportConfig(max_seq_len=64, weights="int4", checkpoints="1", tokenizer="none")
    if name == "k_quant":
        model.save_pretrained(tmp_path / "model")
        export(str(tmp_path / "model"), out, replace(options, quantizer=name))
    else:
        out.mkdir()
        write_bundle(quantize_loaded(LoadedModel(model, None, name), "int4", "rtn", QUIET), out, options, QUIET)
    return out


def test_experts_in_four_bits(bundle: Path) -> None:
    """Experts, most of such a model's weights, would be in fp32; gate and up or two experts mixed up; a token's bits would depend
    on the tokens that go to the same experts."""
    graph = onnx.load(bundle / read_manifest(bundle).targets["cpu"].graphs["uncut"], load_external_data=False).graph
    assert [node.op_type for node in graph.node].count("QMoE") == 2
    weights = [one for one in graph.initializer if ".experts." in one.name and not one.name.endswith("scales")]
    assert len(weights) >= 4 and all(one.data_type == onnx.TensorProto.UINT8 for one in weights)
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1))) as engine:
        for plan in PLANS.values():
            check(engine, plan)


def test_other_experts_keep_their_precision() -> None:
    """An activation that QMoE lacks would be replaced by another one."""
    gelu = MixtralConfig(**_SIZES, intermediate_size=64, num_local_experts=4, hidden_act="gelu")
    narrow = MixtralConfig(**_SIZES, intermediate_size=40, num_local_experts=4)
    for config in (gelu, narrow):
        assert not any(is_experts(module) for module in random_model(config).modules())
