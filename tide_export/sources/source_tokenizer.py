"""Find the tokenizer of a model, or the one that is given in its place. A missing or broken one is an error, never silence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tide_runtime.errors import DataError, ModelFilesError, UnsupportedModelError
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tide_export.sources.gguf.file import is_gguf
from tide_export.sources.gguf.source import first_line
from tide_export.sources.gguf.tokenizer import read_gguf_tokenizer

NO_TOKENIZER = "none"
_FILE = "tokenizer.json"
_FILES = ("*token*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
_FEWEST_TOKENS = 5  # a tokenizer made of the special tokens of its class alone has fewer, as it has no vocabulary
_REMEDY = (
    f"copy {_FILE} and tokenizer_config.json of the original model beside the weights, name another tokenizer with "
    f"--tokenizer DIR, or leave it out on purpose with --tokenizer {NO_TOKENIZER}: prompts are token ids then"
)


def load_tokenizer(
    source: str, given: str | None = None, config: PreTrainedConfig | None = None, options: Mapping[str, Any] | None = None
) -> FastTokenizer | None:
    """The tokenizer of ``source``, or the one in ``given``: a directory, a tokenizer.json, a GGUF file, a hub id, or ``none``.

    Args:
        config: the model's, which says what kind of tokenizer it has.
        options: of ``from_pretrained``.

    Returns None where none is wanted, or where a GGUF file says that it has none.

    Raises ModelFilesError where it is missing, damaged or without vocabulary, UnsupportedModelError where it is Python code.
    """
    if given == NO_TOKENIZER:
        return None
    if given is not None:
        source = given
        config = None
        options = {}
        if given.endswith((".json", ".gguf")) and not Path(given).is_file():
            raise ModelFilesError(f"there is no tokenizer {given}; give a directory, a {_FILE} or {NO_TOKENIZER}")
    if is_gguf(source):
        tokenizer = read_gguf_tokenizer(Path(source))
    elif Path(source).is_file():
        tokenizer = FastTokenizer(tokenizer_object=_backend(Path(source)))
    else:
        tokenizer = _from_pretrained(source, config, options or {})
    if tokenizer is not None:
        _check_vocabulary(source, tokenizer)
    elif given is not None:
        raise ModelFilesError(f"{given} has no tokenizer; give a directory with {_FILE}, or {NO_TOKENIZER}")
    return tokenizer


def check_embedded(largest: int, model: PreTrainedModel, source: str) -> None:
    """Raise DataError where the text in ``source`` has a token, of id ``largest``, that ``model`` has no embedding for."""
    vocab = model.config.get_text_config().vocab_size
    if largest >= vocab:
        raise DataError(
            f"{source} has the token id {largest}, the model's ids end at {vocab - 1}: the tokenizer is another model's, or the "
            "text spells a token that was added without training; name the right one with --tokenizer DIR, or take that text out"
        )


def prompt_prefix(tokenizer: FastTokenizer) -> list[int]:
    """The special tokens that the tokenizer puts in front of a prompt, such as BOS; text that measures a model begins so."""
    with_special = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = (i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain)
    return list(with_special[: next(starts, 0)])


def _from_pretrained(source: str, config: PreTrainedConfig | None, options: Mapping[str, Any]) -> FastTokenizer:
    folder = Path(source)
    if folder.is_dir() and not any(file for pattern in _FILES for file in folder.glob(pattern)):
        raise ModelFilesError(f"{source} has no tokenizer files; {_REMEDY}")
    if (folder / _FILE).is_file():
        _backend(folder / _FILE)  # transformers' message names neither the file nor the reason
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, config=config, **options)
    except Exception as error:  # code of many classes, and the plain Exception of tokenizers
        convert = "pip install sentencepiece, which converts tokenizer.model, " if (folder / "tokenizer.model").is_file() else ""
        raise ModelFilesError(
            f"{source} has no tokenizer that can be loaded ({first_line(error)}); {convert}{_REMEDY}"
        ) from error
    if not isinstance(tokenizer, FastTokenizer):
        raise UnsupportedModelError(
            f"{source} has a {type(tokenizer).__name__}, which is Python code, and a bundle needs a {_FILE}; {_REMEDY}"
        )
    return tokenizer


def _backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception for every defect of the file
        raise ModelFilesError(
            f"{file} cannot be read by tokenizers {tokenizers.__version__} ({first_line(error)}): it is damaged or was written "
            "by a newer release; copy it again or upgrade tokenizers, or name another with --tokenizer DIR"
        ) from error


def _check_vocabulary(source: str, tokenizer: FastTokenizer) -> None:
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    tokens = len(tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).keys() - added)
    if tokens < _FEWEST_TOKENS:
        raise ModelFilesError(
            f"{source} has no tokenizer files with a vocabulary: transformers {transformers.__version__} makes a tokenizer of "
            f"{len(tokenizer)} tokens of them, {tokens} beside the special ones; {_REMEDY}"
        )
