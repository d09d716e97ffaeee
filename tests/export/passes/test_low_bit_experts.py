"""Mixtures of experts with 4-bit weights: one operator for all experts, and a text that does not depend on its company."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from export.architectures import VOCAB, random_model
from export.passes.test_padded_attention import PLANS, check
from export.test_architectures import prompt_logits
from runtime.backends.uneven_steps import uneven_logits
from slow_cases import slow_but
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.bundle.manifest import read_manifest
from transformers import MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from tide_export import ExportConfig, export
from tide_export.export import quantize_loaded, write_bundle
from tide_export.load import TORCH_DTYPES
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

QUIET = ExportProgress(quiet=True)
ROUNDED = 0.05  # of the largest logit, by which target cpu differs: it rounds activations to int8, target torch does not
_SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TARGETS = ("cpu", "torch")
CONFIGS: dict[str, PreTrainedConfig] = {
    "three experts a token": Qwen3MoeConfig(
        **_SIZES, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32, max_position_embeddings=128
    ),
    "checkpoint": MixtralConfig(**_SIZES, intermediate_size=64, num_local_experts=4, max_position_embeddings=128),
}


@pytest.fixture(scope="module", params=slow_but(CONFIGS, "three experts a token"))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verified bundle of a model in memory or of a checkpoint, by round to nearest."""
    name, folder = request.param, tmp_path_factory.mktemp("experts")
    out = folder / "bundle"
    model, options = (
        random_model(CONFIGS[name]),
        ExportConfig(max_seq_len=64, weights="int4", checkpoints="1", tokenizer="none", targets=TARGETS),
    )
    if name == "checkpoint":
        model.save_pretrained(folder / "model")
        export(str(folder / "model"), out, options)
    else:
        out.mkdir()
        write_bundle(quantize_loaded(LoadedModel(model, None, name), "int4", "rtn", QUIET), out, options, QUIET)
    return out


def test_experts_in_four_bits(bundle: Path) -> None:
    """Experts, most of such a model's weights, would be in fp32; gate and up or two experts mixed up; a token's bits would depend
    on the tokens that go to the same experts."""
    graphs = read_manifest(bundle).targets["cpu"].graphs
    assert_in_few_bits(bundle, [graphs["uncut"]])
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1))) as engine:
        for plan in PLANS.values():
            check(engine, plan)


def assert_in_few_bits(bundle: Path, files: Sequence[str]) -> None:
    """Assert that ``files`` together have the two layers' experts in bytes, and no other copy of them."""
    graphs = [onnx.load(bundle / file, load_external_data=False).graph for file in files]
    assert [node.op_type for graph in graphs for node in graph.node].count("QMoE") == 2
    weights = [one for graph in graphs for one in graph.initializer if ".experts." in one.name and "scales" not in one.name]
    assert len(weights) >= 4 and all(one.data_type == onnx.TensorProto.UINT8 for one in weights)


def test_target_torch_computes_what_target_cpu_does(bundle: Path) -> None:
    """Breaks: on a GPU experts take eight times their memory; or a token gets another expert's matrices, alone, in a prompt, or
    where all tokens choose one expert."""
    info, alike = read_manifest(bundle).targets["torch"], [7] * 40
    assert_in_few_bits(bundle, [info.graphs[f"segment_{number}"] for number in range(2)])
    assert info.verified.startswith("on a processor")
    options = EngineOptions(threads=ThreadOptions(1), policy="full", device="cpu", max_batch=4)
    found = []
    for target in TARGETS:
        with Engine.load(bundle, replace(options, target=target)) as engine:
            prompts = [prompt_logits(engine, ids) for ids in ([5], list(range(5, 45)), alike)]
            found.append(np.concatenate([*prompts, uneven_logits(engine)]))
    (cpu, on_torch), allowed = found, ROUNDED * abs(found[0]).max()
    close = abs(on_torch - cpu).max(1) <= allowed
    clear = close & (np.diff(np.sort(cpu)[:, -2:])[:, 0] > 2 * allowed)
    assert close.mean() > 0.9, "rounding decides for few tokens which experts they choose"
    assert clear.mean() > 0.1 and (on_torch.argmax(1) == cpu.argmax(1))[clear].all()


@pytest.mark.parametrize("dtype", slow_but(["fp16", "bf16"]))
def test_target_torch_takes_experts_in_half_precision(dtype: str, tmp_path: Path) -> None:
    """Breaks: experts of a model in half precision, as models on GPUs are, take the memory that `--weights int4` should save."""
    model = random_model(CONFIGS["three experts a token"], TORCH_DTYPES[dtype])
    config = ExportConfig(max_seq_len=64, weights="int4", checkpoints="1", targets=("torch",), dtype=dtype, verify=False)
    loaded = quantize_loaded(LoadedModel(model, None, "moe"), "int4", "rtn", QUIET)
    manifest, _ = write_bundle(loaded, tmp_path, config, QUIET)
    assert_in_few_bits(tmp_path, [manifest.targets["torch"].graphs[f"segment_{number}"] for number in range(2)])
    with Engine.load(tmp_path, EngineOptions(threads=ThreadOptions(1), device="cpu")) as engine, torch.no_grad():
        found = prompt_logits(engine, ids := list(range(5, 30)))
        expected = loaded.model(torch.tensor([ids])).logits[0].float().numpy()
    assert np.median(abs(found - expected)) <= 0.01 * abs(expected).max()  # some tokens' experts tie but for rounding
