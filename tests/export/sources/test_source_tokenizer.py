"""The tokenizer of a model directory: its own, another, none on purpose, or an error."""

import json
from pathlib import Path

import pytest
from tide_runtime.errors import DataError, ModelFilesError, TideError, UnsupportedModelError
from tiny_tokenizer import write_byte_tokenizer
from transformers import LlamaConfig, Qwen2Config

from tide_export.sources.source_tokenizer import check_embedded, load_tokenizer


def _without_files(folder: Path) -> None:
    pass


def _settings_only(folder: Path) -> None:
    settings = {"added_tokens_decoder": {str(i): {"content": f"<{i}>", "special": True} for i in range(20)}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _cut_short(folder: Path) -> None:
    write_byte_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:200])


def _newer_format(folder: Path) -> None:
    write_byte_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"BPE"', '"BPEv2"'))


def _empty_vocabulary(folder: Path) -> None:
    write_byte_tokenizer(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"] |= {"vocab": {}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(state))


def _sentencepiece_only(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"\x0a\x05abcde")


BROKEN = {
    "no files": (_without_files, "has no tokenizer files; copy tokenizer.json"),
    "settings only": (_settings_only, "tokenizer"),
    "cut short": (_cut_short, "tokenizer.json cannot be read by tokenizers"),
    "newer format": (_newer_format, "tokenizer.json cannot be read by tokenizers"),
    "empty vocabulary": (_empty_vocabulary, "no tokenizer files with a vocabulary"),
    "sentencepiece only": (_sentencepiece_only, "pip install sentencepiece"),
}


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config])
@pytest.mark.parametrize("damage", BROKEN)
def test_broken_tokenizers(damage: str, config: type, tmp_path: Path) -> None:
    """The bundle would have no tokenizer, or one of the special tokens alone, and nothing would say so."""
    change, words = BROKEN[damage]
    config().save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(TideError, match=words) as caught:
        load_tokenizer(str(tmp_path), config=config())
    assert "--tokenizer" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert load_tokenizer(str(tmp_path), "none", config()) is None


def test_python_tokenizer_is_refused(tmp_path: Path) -> None:
    """A bundle without tokenizer would be written, as if the model had none."""
    LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with pytest.raises(UnsupportedModelError, match="ByT5Tokenizer, which is Python code"):
        load_tokenizer(str(tmp_path), config=LlamaConfig())


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_another_tokenizer(name: str, tmp_path: Path) -> None:
    """--tokenizer would not help a model whose own files are lost."""
    LlamaConfig().save_pretrained(tmp_path / "model")
    (tmp_path / "other").mkdir()
    write_byte_tokenizer(tmp_path / "other")
    tokenizer = load_tokenizer(str(tmp_path / "model"), str(tmp_path / "other" / name), LlamaConfig())
    assert tokenizer is not None and tokenizer.encode("ab", add_special_tokens=False) == [97, 98]
    with pytest.raises(ModelFilesError, match="there is no tokenizer"):
        load_tokenizer(str(tmp_path / "model"), str(tmp_path / "missing.json"), LlamaConfig())


def test_text_beyond_the_embedding_is_no_index_error() -> None:
    """Calibration text with a token that the model has no embedding for would end in a traceback of torch."""
    model = type("Model", (), {"config": LlamaConfig(vocab_size=300)})()
    check_embedded(299, model, "text.txt")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"text.txt has the token id 300.*end at 299"):
        check_embedded(300, model, "text.txt")  # type: ignore[arg-type]
