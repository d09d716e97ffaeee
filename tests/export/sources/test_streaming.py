"""Streamed exports: parameters without memory, values from the files one at a time, and the bundle of a model in memory."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export.architectures import ARCHITECTURES, FEW_LAYERS, GEMMA3, LAYERS, MISTRAL3, tiny_model
from export.sources.gguf.test_gguf_source import written
from export.sources.gguf.tiny_gguf import tiny
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from tide_runtime.errors import ModelFilesError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from tide_export.config import ExportConfig
from tide_export.export import quantize_loaded, write_bundle
from tide_export.load import held_in_memory, load_model
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

QUIET = ExportProgress(quiet=True)


def is_fake(model: nn.Module) -> bool:
    return any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def saved(architecture: str, folder: Path, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> Path:
    """Parameters other than the initial ones and zeros."""
    model = tiny_model(architecture, layers=layers).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(folder)
    return folder


def loaded(source: Path, dtype: str, weights: str, stream: bool, quantizer: str = "rtn") -> LoadedModel:
    model = load_model(str(source), dtype, weights=weights, tokenizer="none", stream=stream)
    assert is_fake(model.model) == stream == (model.streamed is not None)
    return quantize_loaded(model, weights, quantizer, QUIET)


def same_model(streamed: LoadedModel, whole: LoadedModel) -> bool:
    """Whether values, dtypes, buffers and what is shared are equal."""
    buffers = zip(streamed.model.named_buffers(), whole.model.named_buffers(), strict=True)
    parameters = dict(whole.model.named_parameters(remove_duplicate=False))
    values = {name: streamed.parameters.value(name) for name in streamed.parameters.names()}
    assert values.keys() == parameters.keys()
    assert [name for name, _ in streamed.model.named_parameters()] == [name for name, _ in whole.model.named_parameters()]
    return all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in buffers) and all(
        values[name].dtype == one.dtype and torch.equal(values[name], one) for name, one in parameters.items()
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_parameters_of_a_checkpoint(architecture: str, tmp_path: Path) -> None:
    """A renamed, merged or tied tensor, or a buffer that nothing computed, would give another model than transformers loads."""
    folder = saved(architecture, tmp_path)
    streamed = loaded(folder, "fp32", "source", stream=True)
    assert same_model(streamed, loaded(folder, "fp32", "source", stream=False))
    for name in streamed.parameters.names():
        assert torch.equal(streamed.parameters.rows(name, 1, 2), streamed.parameters.value(name)[1:3])


@pytest.mark.parametrize("config", [GEMMA3, MISTRAL3], ids=["gemma3", "mistral3"])
def test_a_text_model_beside_an_encoder(config: PreTrainedConfig, tmp_path: Path) -> None:
    """A checkpoint that reads images too would be refused for its initialisers, which read fake values, or for its class."""
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    streamed = loaded(tmp_path, "fp32", "source", stream=True)
    assert len(streamed.layers) == 2 and same_model(streamed, loaded(tmp_path, "fp32", "source", stream=False))


# Kind of source → dtype, weights, quantizer.
SOURCES = {
    "gguf, mixed": ("fp32", "source", "rtn"),
    "gguf, tied": ("fp16", "int4", "rtn"),
    "gguf gemma2": ("fp32", "source", "rtn"),
    "llama bf16": ("fp16", "source", "rtn"),
    "qwen3_moe": ("fp32", "int8", "rtn"),
    "gpt2": ("fp32", "int4", "rtn"),
}  # fmt: skip


def source_of(kind: str, folder: Path) -> Path:
    folder.mkdir()
    if kind == "gguf, mixed":
        kinds = {"attn_v": "Q6_K", "token_embd": "Q8_0", "output": "F16", "ffn_down": "Q4_1"}
        return written(folder, lambda name: kinds.get(name.split(".")[-2], "Q4_K"))[0]
    if kind.startswith("gguf,"):
        return written(folder, "Q5_0", tied=True)[0]
    if kind.startswith("gguf"):
        return tiny(kind.removeprefix("gguf ")).write(folder / "model.gguf")
    return saved(kind.split()[0], folder, torch.bfloat16 if kind.endswith("bf16") else torch.float32, FEW_LAYERS)


def files(bundle: Path) -> dict[str, str]:
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in bundle.rglob("*") if path.is_file()}
    return {path.relative_to(bundle).as_posix(): digest for path, digest in digests.items() if path.name != "manifest.json"}


@pytest.mark.parametrize("kind", slow_but(SOURCES, "gguf, mixed"))
def test_the_bundle_is_that_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    """Whoever has less memory would get another bundle."""
    dtype, weights, quantizer = SOURCES[kind]
    source = source_of(kind, tmp_path / "source")
    bundles = {}
    config = ExportConfig(dtype=dtype, weights=weights, quantizer=quantizer, max_seq_len=64, checkpoints="none", verify=False)
    for stream in (True, False):
        folder = tmp_path / str(stream)
        folder.mkdir()
        manifest, _ = write_bundle(loaded(source, dtype, weights, stream, quantizer), folder, config, QUIET)
        bundles[stream] = (replace(manifest, created=""), files(folder))
    assert bundles[True] == bundles[False] and len(bundles[True][1]) >= 3


def test_nothing_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a 7B would be taken before its first tensor is written."""
    folder = saved("llama", tmp_path)
    streamed = loaded(folder, "fp32", "int4", stream=True)
    read: list[str] = []
    value = streamed.parameters.value
    monkeypatch.setattr(streamed.streamed, "value", lambda name: read.append(name) or value(name))
    config = ExportConfig(max_seq_len=64, checkpoints="none", verify=False)
    (tmp_path / "bundle").mkdir()
    write_bundle(streamed, tmp_path / "bundle", config, QUIET)
    parameters = dict(streamed.model.named_parameters())
    assert read and all(parameters[name].ndim == 1 for name in read)  # norms; matrices are read in low bits
    assert is_fake(streamed.model)


def test_tied_parameters_with_two_values(tmp_path: Path) -> None:
    """The head would have the embedding's values, or the other way round."""
    folder = saved("gemma", tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    loaded(folder, "fp32", "source", stream=True)
    stored["lm_head.weight"] = stored["lm_head.weight"] + 1
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFilesError, match="different values"):
        loaded(folder, "fp32", "source", stream=True)


def test_what_is_held_in_memory_is_said_first(tmp_path: Path) -> None:
    """A machine with too little memory would stop without a word."""
    streamed = loaded(saved("llama", tmp_path), "fp32", "source", stream=True)
    notes: list[str] = []

    def note(text: str) -> None:
        assert is_fake(streamed.model)
        notes.append(text)

    whole = held_in_memory(streamed, "a test wants it", note)
    assert not is_fake(whole.model) and whole.streamed is None
    assert notes == ["the whole model is held in memory, 0.0 GiB for its parameters, because a test wants it"]
    assert held_in_memory(whole, "again", note) is whole and len(notes) == 1
