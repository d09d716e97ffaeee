"""Faults planted in the loader: each is a model that equals its bundle, and that a named check refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.tiny_configs import tiny_config
from export.architectures import tiny_model
from export.sources.gguf.test_gguf_source import written
from export.sources.gguf.tiny_gguf import ARCHITECTURES as GGUF_ARCHITECTURES
from export.sources.gguf.tiny_gguf import VOCAB, byte_tokens, tiny
from export.sources.gguf.tiny_recurrent import MODELS, tiny_recurrent
from export.verify.planted_faults import BLOCKS, FACTORS, KEYS, TENSORS, TOKENS, Fault, caught_by
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.bundle.manifest import NOT_YET, Manifest, read_manifest
from tide_runtime.errors import VerificationError
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from tide_export import ExportConfig, export
from tide_export.load import load_model, quantized
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify.checks import check_loaded, compare_rest, stored_values

CONFIG = ExportConfig(checkpoints="1", max_seq_len=64)


def compare(loaded: LoadedModel) -> set[str]:
    """All checks that need no bundle; the names of the parameters that were compared."""
    check_loaded(loaded, own_tokenizer=True)
    values = stored_values(loaded)
    assert values is not None
    compare_rest(values, loaded.parameters)
    return values.compared


@pytest.mark.parametrize("name", [*GGUF_ARCHITECTURES, *MODELS])
def test_files_of_every_architecture_pass(name: str, tmp_path: Path) -> None:
    """Right models would be refused, or a parameter of the architecture compared with nothing."""
    content = tiny(name) if name in GGUF_ARCHITECTURES else tiny_recurrent(name)
    loaded = load_model(str(content.write(tmp_path / "tiny.gguf")), "fp32")
    tied = {"lm_head.weight"} if loaded.model.config.tie_word_embeddings else set()
    assert compare(loaded) == {name for name, _ in loaded.model.named_parameters(remove_duplicate=False)} - tied


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "falcon", "phi", "deepseek_v3", "gpt2", "mixtral"])
def test_folders_of_families_pass(name: str, tmp_path: Path) -> None:
    """Right models would be refused for a form of names or angles that the checks do not expect."""
    tiny_model(name).save_pretrained(tmp_path)
    assert compare(load_model(str(tmp_path), "fp16", tokenizer="none"))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("granite_swa", {"layer_rope_theta": [1e4, 0, 5e5, 1e4]}),
        ("granitemoe_swa", {"layer_rope_theta": [1e4, 0, 5e5, 1e4]}),
        ("mimo_v2_flash", {"head_dim": 16}),  # rotates int(0.334 · 16) = 5 channels
    ],
)
def test_rotary_embeddings_that_differ_by_layer_pass(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Right models would be refused as loaded wrongly."""
    config = tiny_config(model_type)
    AutoModelForCausalLM.from_config(type(config)(**config.to_dict() | settings)).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), "fp32", tokenizer="none", stream=True)
    check_loaded(loaded, own_tokenizer=False)
    buffer = next(one for name, one in loaded.model.named_buffers() if name.endswith("inv_freq") and "original" not in name)
    buffer[-1] *= 1.1
    with pytest.raises(VerificationError, match="rotary embedding"):
        check_loaded(loaded, own_tokenizer=False)


@pytest.mark.parametrize("weights", ["source", "int8", "int4"])
def test_rows_in_another_order_are_refused(weights: str, tmp_path: Path) -> None:
    """Rounding to few bits would hide a row in another's place, or be taken for one."""
    tiny_model("llama").save_pretrained(tmp_path)
    loaded = quantized(load_model(str(tmp_path), "fp32", tokenizer="none"), weights, "rtn")
    compare(loaded)
    matrix = loaded.model.get_parameter("model.layers.2.mlp.up_proj.weight").data
    matrix[[4, 5]] = matrix[[5, 4]]
    with pytest.raises(VerificationError, match=r"values: model\.layers\.2\.mlp\.up_proj\.weight .* row 4 differs"):
        compare(loaded)


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a scaling of Llama 3's kind, all in floating point."""
    content = tiny("llama")
    content.tokens = byte_tokens(VOCAB, ("<|user|>", "<|endoftext|>"))
    content.tensors["rope_freqs.weight"] = np.linspace(1, 8, 8, dtype=np.float32)
    return content.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


FAULTS = [*TENSORS, *KEYS, *TOKENS, *FACTORS]
BEHIND = [pytest.param(fault, True, marks=[] if fault is TENSORS[0] else pytest.mark.slow) for fault in FAULTS]


@pytest.mark.parametrize(("fault", "behind"), [*((fault, False) for fault in FAULTS), *BEHIND], ids=str)
def test_a_planted_fault_is_refused(fault: Fault, behind: bool, tiny_file: Path) -> None:
    """The bundle equals the model that was loaded, so it would ship as another model than the file's; or stay in the cache, where
    a command verifies it behind its first answers."""
    message = caught_by(fault, tiny_file, CONFIG, (lambda: None) if behind else None)
    assert message is not None and fault.check in message, message


@pytest.mark.parametrize("kv", ["model", "int8"])
def test_the_file_without_a_fault_is_exported(kv: str, tiny_file: Path, tmp_path: Path) -> None:
    """The checks would be right about every fault by refusing everything; ranges of keys are measured layer by layer too."""
    seen: list[Manifest] = []
    out = tmp_path / "bundle"
    export(str(tiny_file), out, replace(CONFIG, kv=kv), in_place=lambda: seen.append(read_manifest(out)))
    assert [seen[0].targets["cpu"].verified, read_manifest(out).targets["cpu"].verified[:2]] == [NOT_YET, "on"]
    Engine.load(out, EngineOptions(threads=ThreadOptions(1))).close()  # its files are those of the manifest


def test_a_block_with_a_wrong_zero_point_is_refused(tmp_path: Path) -> None:
    """One block of a mapping's matrix is a 600th of a row: rounding to int8 hides it."""
    file, _ = written(tmp_path, "Q4_1")
    message = caught_by(BLOCKS[0], file, CONFIG)
    assert message is not None and ("segment_0 (layers 0 to 0)" in message or "values: " in message), message


def test_a_tokenizer_that_loses_characters_is_refused(tmp_path: Path) -> None:
    """Replies would lack spaces or accents that the prompts had."""
    loaded = load_model(str(tiny("qwen2").write(tmp_path / "tiny.gguf")), "fp32")
    assert loaded.tokenizer is not None
    backend = loaded.tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])
    with pytest.raises(VerificationError, match="round trip"):
        check_loaded(loaded, own_tokenizer=True)


def test_an_untrained_model_is_exported_with_a_note(tiny_file: Path, tmp_path: Path) -> None:
    """Toy models would be refused, or a tokenizer of another model go unnoticed."""
    lines: list[str] = []
    progress = ExportProgress(quiet=True)
    progress.note = lines.append  # type: ignore[method-assign,assignment]
    export(str(tiny_file), tmp_path / "bundle", replace(CONFIG, max_seq_len=128), progress=progress)
    assert any("the tokenizer of another model" in line for line in lines), lines
