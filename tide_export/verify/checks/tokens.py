"""Hold a tokenizer against the file that it was read from, and texts against what they decode to.

A model's loss tells a tokenizer that is wrong for most tokens. One with a few wrong ones, or whose control tokens are found in
plain text, looks right until they come up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tide_runtime.errors import VerificationError
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tide_export.sources.gguf.file import Metadata

TEXTS = (
    "The quick brown fox, 1 2 3; it's 12:30 — isn't it?",
    "def f(x):\n\tif x  >  1:\n        return [x, {'a': 1}]  # two  spaces\n",
    "Zażółć gęślą jaźń. Größe, naïve façade. Быстрая лиса; Ελληνικά.",
    "日本語の文章と中文句子。한국어 문장.",
    "हिन्दी में लिखा वाक्य, ภาษาไทย, نص عربي, טקסט",
    "emoji 🙂👩‍🔬 and \u2028 separators\r\n\n\n",
)
_CONTROL = 3  # tokenizer.ggml.token_type
_SPACE = "▁"
_REMEDY = "texts would reach the model as other tokens: please report the model; --tokenizer DIR takes another tokenizer"


def check_gguf_tokens(tokenizer: FastTokenizer, keys: Metadata, eos: list[int]) -> None:
    """Raise VerificationError where tokens, merges, control tokens or the ends of a reply are not the file's."""
    spelt = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    tokens = keys.full("tokenizer.ggml.tokens")
    kinds = keys.full("tokenizer.ggml.token_type") or []
    _check_spelling(keys.file, spelt, dict(enumerate(tokens)))
    added = tokenizer.added_tokens_decoder
    for token_id, kind in enumerate(kinds[: len(tokens)]):
        if kind == _CONTROL and (token_id not in added or not added[token_id].special) and tokens[token_id] not in _IN_TEXT:
            raise VerificationError(
                f"tokens: {tokens[token_id]!r} is a control token of {keys.file}, and plain text here; {_REMEDY}"
            )
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    written = keys.full("tokenizer.ggml.merges")
    if written is not None:
        known = {pair if isinstance(pair, str) else " ".join(pair): rank for rank, pair in enumerate(model["merges"])}
        ranks = [known.get(line, -1) for line in dict.fromkeys(written)]
        if -1 in ranks or ranks != sorted(ranks):
            raise VerificationError(f"tokens: the merges of {keys.file} are not those of the tokenizer, in its order; {_REMEDY}")
    stored = keys.full("tokenizer.ggml.eos_token_id")
    if stored is not None and stored < len(tokens) and stored not in eos:
        raise VerificationError(f"tokens: {keys.file} ends replies with the token {stored}, and the bundle with {eos}; {_REMEDY}")


# Tokens that llama.cpp finds in plain text although the file calls them control tokens.
_IN_TEXT = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>", "</s>")


def check_tokenizer_file(tokenizer: FastTokenizer, file: Path) -> None:
    """Raise VerificationError where a token has another id than in ``file``, a tokenizer.json."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = stored.get("model", {}).get("vocab")
    ids = dict(vocabulary) if isinstance(vocabulary, Mapping) else {token: i for i, (token, *_) in enumerate(vocabulary or [])}
    ids |= {added["content"]: added["id"] for added in stored.get("added_tokens", [])}
    spelt = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    _check_spelling(file.name, spelt, {token_id: token for token, token_id in ids.items()})


def _check_spelling(file: str, found: Mapping[int, str], wanted: Mapping[int, str]) -> None:
    for token_id, token in wanted.items():
        ours = found.get(token_id)
        if ours != token and (ours is None or (token and ours.replace(_SPACE, " ") != token.replace(_SPACE, " "))):
            raise VerificationError(f"tokens: {token_id} is {token!r} in {file}, and {ours!r} in the tokenizer; {_REMEDY}")


def check_round_trips(tokenizer: FastTokenizer) -> None:
    """Raise VerificationError for a text that is not what its tokens decode to, where the tokenizer claims to keep each byte."""
    if not keeps_bytes(json.loads(tokenizer.backend_tokenizer.to_str())):
        return
    for text in TEXTS:
        back = tokenizer.backend_tokenizer.decode(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        if back not in (text, f" {text}"):  # some put a space before each text
            at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
            raise VerificationError(
                f"round trip: the tokenizer makes {text[at : at + 12]!r} of a text to {back[at : at + 12]!r}; {_REMEDY}"
            )


def keeps_bytes(settings: Mapping[str, Any]) -> bool:
    """Whether any text has tokens that decode to it: all 256 bytes have one, and nothing is normalised away."""
    vocabulary = settings["model"].get("vocab")
    if not isinstance(vocabulary, Mapping) or not _lossless(settings.get("normalizer")):
        return False
    if settings["model"].get("byte_fallback"):
        return {_SPACE, *(f"<0x{byte:02X}>" for byte in range(256))} <= vocabulary.keys()
    return "ByteLevel" in _kinds(settings.get("decoder")) and set(_byte_alphabet()) <= vocabulary.keys()


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def _kinds(step: Mapping[str, Any] | None) -> list[str]:
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("decoders") or []
    return [step["type"], *(kind for one in inner for kind in _kinds(one))]


def _lossless(normalizer: Mapping[str, Any] | None) -> bool:
    """NFC leaves `TEXTS` as they are; spaces are put back by the decoder."""
    return set(_kinds(normalizer)) <= {"Sequence", "NFC", "Prepend", "Replace"}
