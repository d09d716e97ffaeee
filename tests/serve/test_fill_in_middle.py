"""``suffix`` of /v1/completions: the prompts that models were trained on."""

from typing import Any

import httpx
import pytest
import tokenizers
from tide_runtime.text.tokenizer import Tokenizer
from tide_serve.request.fill_in_middle import _form, _ids


def test_a_model_without_the_tokens_refuses(http: httpx.Client, model: str) -> None:
    """Breaks: a model that never saw a gap writes anything into it."""
    answer = http.post("/v1/completions", json={"model": model, "prompt": "a", "suffix": "b"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "suffix", "unsupported_parameter")


def _tokenizer(added: list[str], sentencepiece: bool = False) -> Tokenizer:
    """One token a character, behind a begin token <s>."""
    characters = ["<s>", "?", "▁", *"abcdefghijklmnopqrstuvwxyz0☺"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(characters)}, "?"))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    if sentencepiece:
        space: Any = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([space, split])
        backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    else:
        backend.pre_tokenizer = split
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in added])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("added", "prompt"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<s> <|fim_prefix|> a b <|fim_suffix|> c d <|fim_middle|>"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<s> <fim_prefix> a b <fim_suffix> c d <fim_middle>"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<s> <｜fim▁begin｜> a b <｜fim▁hole｜> c d <｜fim▁end｜>"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "<s> ▁<PRE> ▁ a b ▁<SUF> c d ▁<MID>"),
        (["[PREFIX]", "[SUFFIX]"], "<s> [SUFFIX] c d [PREFIX] ▁ a b"),
    ],
)
def test_prompts_are_those_of_the_models_authors(added: list[str], prompt: str) -> None:
    """Breaks: a model fills gaps worse than it can, as it never saw such a prompt: the suffix has no space of its own."""
    tokenizer = _tokenizer(added, sentencepiece="▁ a" in prompt)
    form = _form(tokenizer)
    assert form is not None
    assert [tokenizer.token(token) for token in _ids(tokenizer, form, "ab", "cd")] == prompt.split()


def test_part_of_the_tokens_is_not_enough() -> None:
    """Breaks: a tokenizer that happens to have one of the tokens fails the request."""
    assert _form(_tokenizer(["<|fim_prefix|>", "<|fim_suffix|>"])) is None
