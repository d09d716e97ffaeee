"""Prompts of /v1/completions with ``suffix``: the model writes what stands between two texts.

Models that were trained for it have tokens of their own around the two texts (https://arxiv.org/abs/2207.14255); which ones, the
tokenizer's vocabulary tells.
"""

from __future__ import annotations

from typing import NamedTuple

from tide_runtime import Engine
from tide_runtime.text.tokenizer import Tokenizer

from tide_serve.errors import ApiError
from tide_serve.request.prompt_ids import Prompt, check_length, check_text, off_loop


class _Form(NamedTuple):
    """Tokens before the texts, and before the answer; where that has none, the suffix comes first."""

    prefix: str
    suffix: str
    middle: str = ""


_FORMS = (
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    _Form("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# Tokens besides the model's own end of text behind which it goes on with another file.
_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<fim_pad>", "<file_sep>", "▁<EOT>", "<|EOT|>")
_MARK = "☺"  # joins no token with the text behind it


async def gap_prompt(engine: Engine, prompt: str | list[int], suffix: str) -> Prompt:
    """The prompt between whose text and ``suffix`` the model writes.

    Raises ApiError for token ids, for texts that are too long, and where the tokenizer has no tokens for it.
    """
    if not isinstance(prompt, str):
        raise ApiError(400, "prompt has token ids, and with suffix it has to be a text; send its text", "prompt")
    if engine.tokenizer is None or (form := _form(engine.tokenizer)) is None:
        message = "suffix is not supported: this model's tokenizer has no tokens for filling a gap; leave it out"
        raise ApiError(400, message, "suffix", "unsupported_parameter")
    for name, text in (("prompt", prompt), ("suffix", suffix)):
        check_text(engine, text, name)
    ids = await off_loop(len(prompt) + len(suffix), _ids, engine.tokenizer, form, prompt, suffix)
    check_length(engine, ids, "suffix" if len(suffix) > len(prompt) else "prompt")
    return Prompt(ids, prompt)


def ends(engine: Engine) -> tuple[int, ...]:
    """Ids of the tokens that end a text which fills a gap."""
    assert engine.tokenizer is not None
    ids = (engine.tokenizer.token_id(token) for token in (*_ENDS, *(token for form in _FORMS for token in form)))
    return (*engine.manifest.generation.eos_token_ids, *(token for token in ids if token is not None))


def _form(tokenizer: Tokenizer) -> _Form | None:
    return next((form for form in _FORMS if all(tokenizer.token_id(token) is not None for token in form if token)), None)


def _ids(tokenizer: Tokenizer, form: _Form, prefix: str, suffix: str) -> list[int]:
    before = [tokenizer.token_id(form.prefix), *tokenizer.encode(prefix, add_special_tokens=False)]
    after = [tokenizer.token_id(form.suffix), *_continuing_ids(tokenizer, suffix)]
    texts = [*before, *after, tokenizer.token_id(form.middle)] if form.middle else [*after, *before]
    return [*tokenizer.encode(""), *(token for token in texts if token is not None)]


def _continuing_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of ``text`` without the space that sentencepiece puts before the beginning of a text."""
    if not tokenizer.lead:
        return tokenizer.encode(text, add_special_tokens=False)
    mark = tokenizer.encode(_MARK, add_special_tokens=False)
    return tokenizer.encode(_MARK + text, add_special_tokens=False)[len(mark) :]
