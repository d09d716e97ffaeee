"""The text for gptq: which of its tokens are read, what is refused, and that calibration and export read the same."""

import argparse
from pathlib import Path

import pytest
import torch
from cli_in_process import cli_runner
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.errors import DataError, ParamsError, TideError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tide_export import ExportConfig, cli
from tide_export.export import quantize_loaded
from tide_export.load import fingerprint, load_model
from tide_export.progress import ExportProgress
from tide_export.quantize.gptq import MAX_TOKENS, WINDOW, calibration_tokens

DEMO = Path(__file__).parents[3] / "examples" / "demo_model" / "layerskip"
TEXT = str(argparse.__file__)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Llama of 128 positions with the demo model's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gptq") / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ignore(_: str) -> None: ...


def test_windows_begin_as_prompts_do(tokenizer: PreTrainedTokenizerFast) -> None:
    """Gemma's states without BOS are others: with scales that were measured on them w8a8 raised its perplexity by 3%."""
    with_bos = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 7)])
    windows = calibration_tokens(TEXT, with_bos, None, ignore)
    assert (windows[:, 0] == 7).all() and windows.shape[1] == WINDOW
    assert (windows[:, 1:] == calibration_tokens(TEXT, tokenizer, None, ignore)[:, :-1]).all()


def test_windows_are_spread_over_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """The first file of a folder, or a licence at its top, would decide how the whole model is rounded."""
    ids = tokenizer(Path(TEXT).read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    assert len(ids) > MAX_TOKENS
    windows = calibration_tokens(TEXT, tokenizer, None, ignore)
    assert windows.shape == (MAX_TOKENS // WINDOW, WINDOW)
    places = [next(i for i in range(0, len(ids), WINDOW) if ids[i : i + WINDOW] == row) for row in windows.tolist()]
    assert places[0] == 0 and places[-1] > 0.9 * len(ids) and places == sorted(set(places))
    assert torch.equal(windows, calibration_tokens(TEXT, tokenizer, 2048, ignore))


def test_unusable_text(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A traceback after minutes of loading, or weights fitted to a handful of tokens."""
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time")
    with pytest.raises(DataError, match=rf"short.txt has \d+ tokens, and gptq needs at least {WINDOW}; give more text"):
        calibration_tokens(str(short), tokenizer, None, ignore)
    with pytest.raises(DataError, match="there is no file"):
        calibration_tokens(str(tmp_path / "gone.txt"), tokenizer, None, ignore)
    with pytest.raises(DataError, match="no fast tokenizer"):
        calibration_tokens(TEXT, None, None, ignore)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(weights="int4", quantizer="gptq"), "add --text FILE"),
        (dict(weights="int4", quantizer="gptq", data="a", text="b"), "leave out --text"),
        (dict(weights="int4", text="b"), "only --weights w8a8 and"),
        (dict(weights="int8", quantizer="gptq", text="b"), "only --weights w8a8 and"),
    ],
)
def test_contradictory_options(options: dict[str, str], words: str) -> None:
    """A typing mistake would be found after the model is loaded, or the text be ignored in silence."""
    with pytest.raises(ParamsError, match=words):
        ExportConfig(**options)


def test_another_text_makes_another_model(model: Path) -> None:
    """Exits calibrated for weights that one text gave would be put on those of another text."""
    found = []
    for text in (TEXT, TEXT, torch.__file__):
        loaded = quantize_loaded(load_model(str(model), "fp32"), "int4", "gptq", ExportProgress(quiet=True), text)
        found.append(fingerprint(loaded))
    assert found[0] == found[1] != found[2]


def test_command_line(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing text ends in a traceback, or the given text does not reach the quantizer."""
    run = cli_runner("tide-export", cli.main, monkeypatch, capsys, 200)
    options = (model, "--out", tmp_path / "engine", "--weights", "int4", "--quantizer", "gptq", "--max-seq-len", "64")
    refused = run(*options)
    assert refused.code == TideError.exit_code and "--text FILE" in refused.err
    assert not (tmp_path / "engine").exists()
    done = run(*options, "--text", TEXT, "--head-bits", "8")
    assert done.code == 0, done.err  # the bundle was compared with the eager model
    assert read_manifest(tmp_path / "engine").weights == {"int8 rtn": 2, "int4 gptq": 14}
