"""Tokenizers of GGUF files: the ids that llama.cpp gives, or a refusal."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from export.sources.gguf.llamacpp import LlamaCpp
from export.sources.gguf.llamacpp_cases import (
    BLOCKS,
    ROPE,
    VOCAB,
    TokenizerKind,
    block_case,
    differing_ids,
    random_ids,
    rope_case,
    tokenizer_kinds,
)
from export.sources.gguf.tokenizer_files import texts, write_byte_pairs
from tide_runtime.errors import ModelFilesError, UnsupportedModelError

from tide_export.load import load_model
from tide_export.sources.gguf.segmentation import PRE_TOKENIZERS, spm_merges
from tide_export.sources.gguf.tokenizer import read_gguf_tokenizer

needs_llamacpp = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")


def with_key(file: Path, key: str, value: object) -> Path:
    """``file`` with one more key, or another value of it."""
    reader = gguf.GGUFReader(file)
    out = file.with_suffix(".changed.gguf")
    writer = gguf.GGUFWriter(out, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", key):
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
    add(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@needs_llamacpp
@pytest.mark.parametrize("kind", tokenizer_kinds(), ids=lambda kind: kind.name)
def test_the_ids_of_llamacpp(kind: TokenizerKind, tmp_path: Path) -> None:
    """Texts would be cut as another model cuts them, which makes any model worse and none say so."""
    assert differing_ids(kind.write(tmp_path / "model.gguf"), texts(60)) == []


@needs_llamacpp
@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gemma4"])
@pytest.mark.parametrize("value", [False, True])
def test_the_ends_that_the_file_asks_for(key: str, pre: str, value: bool, tmp_path: Path) -> None:
    """A model would read a second BOS, or none."""
    written = write_byte_pairs(tmp_path / "model.gguf", pre, bytes_as_letters=PRE_TOKENIZERS[pre].byte_level)
    assert differing_ids(with_key(written, f"tokenizer.ggml.{key}", value), ["a b", "", "<s>a"]) == []


def test_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    """A newer file would be cut like GPT-2's."""
    file = with_key(write_byte_pairs(tmp_path / "model.gguf", "qwen2"), "tokenizer.ggml.pre", "of-tomorrow")
    with pytest.raises(UnsupportedModelError, match=r"'of-tomorrow'.*--tokenizer DIR"):
        read_gguf_tokenizer(file)


@pytest.mark.parametrize("model", ["bert", "rwkv", "t5", "plamo2", "of-tomorrow"])
def test_unknown_kind_is_named(model: str, tmp_path: Path) -> None:
    """A vocabulary of another algorithm would be read as byte pairs."""
    file = with_key(write_byte_pairs(tmp_path / "model.gguf", "qwen2"), "tokenizer.ggml.model", model)
    with pytest.raises(UnsupportedModelError, match=f"'{model}'.*--tokenizer DIR"):
        read_gguf_tokenizer(file)


def test_scores_that_tie_are_refused() -> None:
    """llama.cpp joins the leftmost of two pairs with equal scores, which a list of merges cannot say."""
    with pytest.raises(UnsupportedModelError, match="the same score"):
        spm_merges(["a", "b", "c", "ab", "bc"], [0.0, 0.0, 0.0, -1.0, -1.0], ())
    assert spm_merges(["a", "b", "c", "ab", "bc"], [0.0, 0.0, 0.0, -2.0, -1.0], ()) == [("b", "c"), ("a", "b")]


def test_merge_of_unknown_tokens_is_refused(tmp_path: Path) -> None:
    """tokenizers' own message names neither the file nor what to do."""
    file = write_byte_pairs(tmp_path / "model.gguf", "qwen2")
    reader = gguf.GGUFReader(file)
    merges = reader.fields["tokenizer.ggml.merges"]
    raw = merges.parts[merges.data[0]]
    data = file.read_bytes()
    file.write_bytes(data.replace(bytes(raw), b"Q" * (len(raw) - 2) + b" Q", 1) if len(raw) > 2 else data)
    with pytest.raises(ModelFilesError, match="merge"):
        read_gguf_tokenizer(file)


def test_chat_templates_by_name(tmp_path: Path) -> None:
    """Calls would be written in the template of chats without tools."""
    file = with_key(write_byte_pairs(tmp_path / "model.gguf", "qwen2"), "tokenizer.chat_template", "plain")
    tokenizer = read_gguf_tokenizer(file)
    assert tokenizer is not None and tokenizer.chat_template == "plain"
    tokenizer = read_gguf_tokenizer(with_key(file, "tokenizer.chat_template.tool_use", "tools"))
    assert tokenizer is not None and tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}


@needs_llamacpp
@pytest.mark.parametrize("kind", [*BLOCKS, *(f"RoPE {kind}" for kind in ROPE if kind != "longrope")])
def test_the_logprobs_of_llamacpp(kind: str, tmp_path: Path) -> None:
    """Blocks, norms or positions read wrongly would pass: verification compares with the same wrong model."""
    case = rope_case(kind.removeprefix("RoPE "), tmp_path) if kind.startswith("RoPE") else block_case(kind, tmp_path)
    ids = random_ids(12)
    reference = LlamaCpp(case.reference, 256)
    wanted = [reference.log_probs(ids[:at], VOCAB)[ids[at]] for at in range(1, len(ids))]
    model = load_model(str(case.exported), "fp32", weights="fp32", tokenizer="none").model
    with torch.no_grad():
        got = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1).numpy()
    np.testing.assert_allclose(got[np.arange(11), ids[1:]], wanted, atol=1e-4)
