"""Bundles with weights w8a8: right by the exporter's own verification, and the same text under every policy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from export.architectures import FEW_LAYERS, MAX_POSITIONS, tiny_model
from safetensors.numpy import load_file
from slow_cases import slow_but
from tide_runtime import Engine, GenerationParams
from tide_runtime.bundle.manifest import INTEGER_PRODUCTS, SMOOTHING_FILE
from tide_runtime.errors import ParamsError

from tide_export.chosen_weights import chosen_weights
from tide_export.config import ExportConfig
from tide_export.export import export, quantize_loaded, write_bundle
from tide_export.load import fingerprint, load_model
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.targets import TARGETS
from tide_export.weights.quantized_weight import symmetric_int4

QUIET = ExportProgress(quiet=True)
CONFIG = ExportConfig(checkpoints="1", max_seq_len=MAX_POSITIONS // 2, weights="w8a8")
PROMPTS = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [9, 8, 7], [5] * 12]


def bundle(name: str, directory: Path) -> Path:
    """Exported and verified; raises VerificationError otherwise."""
    loaded = quantize_loaded(LoadedModel(tiny_model(name, layers=FEW_LAYERS), None, name), "w8a8", "rtn", QUIET)
    write_bundle(loaded, directory, CONFIG, QUIET)
    return directory


@pytest.mark.parametrize("name", slow_but(["qwen3", "phi", "gpt2", "gemma3", "qwen3_moe"], "qwen3", "gemma3"))
def test_text_of_every_policy(name: str, tmp_path: Path) -> None:
    """A family's biases, tied head, transposed or gated products would be read wrongly; or a token depend on its launch."""
    engine = Engine.load(bundle(name, tmp_path))
    assert INTEGER_PRODUCTS in engine.bundle.manifest.weights
    params = GenerationParams(max_new_tokens=24, ignore_eos=True)
    alone = [engine.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    assert [one.token_ids for one in engine.generate(PROMPTS, params)] == alone
    full = engine.with_options(replace(engine.options, policy="full"))
    assert [full.generate([prompt], params)[0].token_ids for prompt in PROMPTS] == alone


def test_all_matrices_are_integers(tmp_path: Path) -> None:
    """A product left dense or in blocks costs as much for a second token as for the first."""
    directory = bundle("llama", tmp_path)
    graph = onnx.load(directory / "onnx" / "cpu.uncut.onnx", load_external_data=False).graph
    operators = [node.op_type for node in graph.node]
    assert operators.count("MatMulIntegerToFloat") == 4 * FEW_LAYERS + 1 and "MatMulNBits" not in operators
    scales = load_file(directory / SMOOTHING_FILE) if (directory / SMOOTHING_FILE).exists() else {}
    assert all(np.isfinite(one).all() and (one > 0).all() for one in scales.values())


def test_other_precisions_are_refused() -> None:
    """ONNX Runtime's products of integers give fp32 on processors."""
    with pytest.raises(ParamsError, match="w8a8 need activations in fp32"):
        ExportConfig(weights="w8a8", dtype="fp16")


@pytest.mark.parametrize(
    "name, options, targets, free, weights, reason",
    [
        ("llama", {}, ["cpu"], 1e9, "w8a8", "products of integers"),
        ("llama", {}, ["cpu"], 1e5, "int4", "8 bits a weight would take 0.0 GB"),
        ("llama", {}, ["cpu", "torch"], 1e9, "source", "every target"),
        ("llama", {"dtype": "fp16"}, ["cpu"], 1e9, "source", "every target"),
        ("llama", {"quantizer": "rtn", "head_bits": "8"}, ["cpu"], 1e9, "int4", "--head-bits"),
        ("mixtral", {}, ["cpu"], 1e9, "int4", "experts"),
    ],
)
def test_weights_that_a_command_chooses(
    name: str,
    options: dict[str, str],
    targets: list[str],
    free: float,
    weights: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A 7B would not fit the memory that is there; a GPU would get products that it does not have."""
    monkeypatch.setattr("tide_export.chosen_weights.free_memory", lambda: int(free))
    loaded = LoadedModel(tiny_model(name), None, name)
    found, why = chosen_weights(loaded, ExportConfig(weights="auto", **options), [TARGETS[target] for target in targets])
    assert found == weights and reason in why


@pytest.mark.parametrize("large, weights", [(10**9, "w8a8"), (1000, "source")])
def test_a_large_file_keeps_its_blocks(large: int, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a large model waits for memory, where 8 bits a weight are twice as many."""
    monkeypatch.setattr("tide_export.chosen_weights._LARGE", large)
    block = symmetric_int4(np.ones((2, 32), np.float32), 32)
    loaded = LoadedModel(tiny_model("llama"), None, "llama", quantized={"lm_head.weight": block})
    assert chosen_weights(loaded, ExportConfig(weights="auto"), [TARGETS["cpu"]])[0] == weights


def test_the_manifest_names_the_files_that_were_rounded(tmp_path: Path) -> None:
    """tide-bench would refuse the eager model of a rounded bundle, as that of another model."""
    tiny_model("llama", layers=FEW_LAYERS).save_pretrained(tmp_path / "model")
    info = export(str(tmp_path / "model"), tmp_path / "out", replace(CONFIG, tokenizer="none", verify=False)).model
    assert (
        info.source_fingerprint == fingerprint(load_model(str(tmp_path / "model"), "fp32", tokenizer="none")) != info.fingerprint
    )
