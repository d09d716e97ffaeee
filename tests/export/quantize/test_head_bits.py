"""The bits of the head: what decides them, and that the bundle computes with the head that was measured."""

import math
from pathlib import Path

import pytest
import torch
from tide_runtime import Engine
from tide_runtime.bundle.manifest import HeadInfo
from tide_runtime.errors import ParamsError
from tiny_tokenizer import write_byte_tokenizer
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tide_export.config import ExportConfig
from tide_export.export import export, quantize_loaded, write_bundle
from tide_export.load import quantized
from tide_export.progress import ExportProgress
from tide_export.quantize import head_bits
from tide_export.quantize.head_bits import with_head
from tide_export.sources.loaded_model import LoadedModel

QUIET = ExportProgress(quiet=True)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tied(folder: Path, hidden: int = 64) -> LoadedModel:
    """A tiny Llama whose head is its embedding, a third of its weights, with a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    write_byte_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return LoadedModel(LlamaForCausalLM(config).eval(), tokenizer, "tiny")


@pytest.mark.parametrize("four, bits", [(10.05, 4), (10.2, 8), (math.nan, 8)])
def test_perplexity_decides(tmp_path, monkeypatch, four, bits):
    """Every export would pay for accuracy that this model does not need, or give away more than a hundredth of it."""
    loaded = quantized(tied(tmp_path), "int4", "rtn")
    before = loaded.model.get_parameter(EMBEDDING)
    monkeypatch.setattr(head_bits, "perplexities", lambda *_: (10.0, four))
    changed = with_head(loaded, "auto", lambda line: None)
    assert changed.head is not None and changed.head.bits == bits and changed.quantized[HEAD].bits == bits
    assert changed.quantized[EMBEDDING].bits == 8 and changed.model.get_parameter(EMBEDDING) is before
    assert (changed.model.lm_head.weight is before) == (bits == 8)
    assert (changed.text != loaded.text) == (bits == 4)  # another model, which a calibration must not be taken for


def test_perplexity_is_measured(tmp_path):
    """The manifest would give figures of another head, or of other text than it names."""
    changed = with_head(quantized(tied(tmp_path), "int4", "rtn"), "auto", lambda line: None)
    assert changed.head is not None and changed.head.perplexity_4 and changed.head.perplexity_8
    assert changed.head.perplexity_4 != changed.head.perplexity_8 and "pydoc_data.topics" in changed.head.text


def test_the_bundle_has_the_head(tmp_path):
    """The graph would take the embedding for the head, which the check against the eager model finds."""
    (tmp_path / "model").mkdir()
    config = ExportConfig(weights="int4", head_bits="4", checkpoints="none", max_seq_len=64)
    loaded = quantize_loaded(tied(tmp_path / "model"), "int4", "rtn", QUIET, head_bits=config.head_bits)
    (tmp_path / "bundle").mkdir()
    manifest, checks = write_bundle(loaded, tmp_path / "bundle", config, QUIET)
    assert checks and manifest.head == HeadInfo(4)
    assert manifest.weights == {"int4 rtn": 7, "int4 symmetric": 1, "int8 rtn": 1}
    with Engine.load(tmp_path / "bundle") as engine:
        assert engine.manifest.head == HeadInfo(4)


@pytest.mark.parametrize("options", [{"head_bits": "3"}, {"head_bits": "4", "weights": "int8"}])
def test_other_bits_are_refused(options):
    """The option would be ignored."""
    with pytest.raises(ParamsError, match="head_bits is"):
        ExportConfig(**options)


def test_a_tokenizer_that_knows_no_word(tmp_path):
    """Spelled in one token again and again, texts neither choose the head's bits nor hold channels to their sizes."""
    source = tmp_path / "model"
    tied(tmp_path).model.save_pretrained(source)
    words = Tokenizer(models.WordLevel({"unknown": 0, **{f"w{n}": n for n in range(1, 128)}}, unk_token="unknown"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    notes = []
    export(str(source), tmp_path / "out", ExportConfig(weights="int4"), progress=_Notes(notes))
    assert any("head in 8 bits: the tokenizer makes 1 tokens of a text" in note for note in notes)
    assert any("24 random ids" in note for note in notes)


class _Notes(ExportProgress):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(quiet=True)
        self._notes = notes

    def note(self, line: str) -> None:
        self._notes.append(line)
