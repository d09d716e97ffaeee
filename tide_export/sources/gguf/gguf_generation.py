"""Where generation ends and how it samples, as llama.cpp reads it from a GGUF file.

The ids: `llama_vocab::impl::load` in src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp. A file names one or two of the
ids that end a text; a chat ends with another one, which only its text tells.
"""

from __future__ import annotations

from typing import Any

from tide_runtime.errors import ModelFilesError
from transformers import GenerationConfig

from tide_export.sources.gguf.gguf_metadata import Metadata

# Tokens that end a generation, whatever the file says of them.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>",
    "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# Advice that the runtime has no counterpart for → what it does.
_NOT_APPLIED = {
    "general.sampling.sequence": "the order of the samplers",
    "general.sampling.xtc_probability": "the likeliest tokens are left out at random",
    "general.sampling.penalty_last_n": "repetitions count in the last tokens only",
    "general.sampling.mirostat": "draws have an even surprise",
}
_NO_ID = 0xFFFFFFFF  # -1, which converters write for "none"
_SENTENCEPIECE_EOS = 2
# Texts of the tokens that end a part of a repository or its padding, where the file does not name them.
_FILL = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# In these vocabularies a token of the list ends only a part of an answer: all of the first are there → it does not end.
_PARTS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|return|>", "<|calls|>"}, "<|end|>"),
    ({"<|flush|>", "<|call|>"}, "<|end|>"),
    ({"<|flush|>", "<|calls|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)


def end_of_generation(keys: Metadata, vocabulary: int) -> list[int]:
    """The ids that end a generation, the file's own first. Raises ModelFilesError for an id outside the ``vocabulary``."""
    tokens = [str(token) for token in keys.full("tokenizer.ggml.tokens") or ()]
    ids = {token: number for number, token in enumerate(tokens)}
    known = max(len(tokens), vocabulary)
    named = [_id(keys, name, known) for name in ("eos", "eot", "eom")]
    if named[0] is None and keys.full("tokenizer.ggml.model") == "llama":
        named[0] = _SENTENCEPIECE_EOS
    found = [number for number in named if number is not None]
    for name, texts in _FILL.items():
        number = _id(keys, name, known)
        found += [number] if number is not None else [ids[text] for text in tokens if text in texts][:1]
    found += [ids[text] for text in _ENDS if text in ids]
    ends = {tokens[number] for number in found if number < len(tokens)}
    parts = {part for whole, part in _PARTS if whole <= ends}
    return [n for n in dict.fromkeys(found) if n < vocabulary and (n >= len(tokens) or tokens[n] not in parts)]


def _id(keys: Metadata, name: str, known: int) -> int | None:
    number: Any = keys.full(f"tokenizer.ggml.{name}_token_id")
    if number is None or number == _NO_ID:
        return None
    if not 0 <= number < known:
        raise ModelFilesError(
            f"{keys.file} has tokenizer.ggml.{name}_token_id = {number}, and {known} tokens; convert the model again"
        )
    return number


def generation_config(keys: Metadata, vocabulary: int) -> GenerationConfig:
    """The end ids, the tokens that are never written, and how the file advises to choose the others (general.sampling):
    llama.cpp's defaults for it."""
    names = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    draws = {name: value for name, key in names.items() if (value := keys.full(f"general.sampling.{key}")) is not None}
    penalised = keys.full("general.sampling.penalty_last_n") != 0
    return GenerationConfig(
        eos_token_id=end_of_generation(keys, vocabulary) or None,
        suppress_tokens=keys.full("tokenizer.ggml.suppress_tokens"),
        repetition_penalty=keys.full("general.sampling.penalty_repeat") if penalised else None,
        do_sample=bool(draws) and draws.get("temperature", 1) > 0,
        **draws,
    )


def sampling_note(keys: Metadata) -> str | None:
    """A sentence on the file's advice that the runtime does not apply; None where there is none."""
    ignored = [f"{name} ({effect})" for name, effect in _NOT_APPLIED.items() if keys.full(name)]
    if not ignored:
        return None
    return f"the file sets {', '.join(ignored)}, which TIDE does not apply: llama.cpp may write other texts"
