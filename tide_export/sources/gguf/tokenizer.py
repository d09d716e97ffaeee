"""The tokenizer that a GGUF file's metadata describe, so that texts get the ids that llama.cpp gives them, and where texts end.

Formats: src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp. Like it, no text is normalised (not even where the model's
own tokenizer does), and tokens of the types control, user-defined and unknown are found in a text before the rest is cut into
words. Two differences remain: characters of Unicode 16, which llama.cpp's tables lack, and of two special tokens that overlap in
a text the leftmost is taken, not the longest.

The ids that end a text: `llama_vocab::impl::load`. A file names one or two of them; a chat ends with another one, which only its
text tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from tide_runtime.errors import ModelFilesError, UnsupportedModelError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tide_export.sources.gguf.file import Metadata, read_file
from tide_export.sources.gguf.segmentation import OTHER, PRE_TOKENIZERS, Merge, PreTokenizer, spm_merges

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_IDS = {"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad", "mask": "mask"}  # GGUF spells so
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "gpt2": {"bos": 11, "eos": 11},
}
# Tokens that end a generation, whatever the file says of them.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>",
    "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# Tokens that llama.cpp treats as control tokens whatever their type in the file is.
_CONTROL_TEXTS = (*_ENDS, "<|ifm|im_end|>")
# The same for fill-in-the-middle, where the file does not name the token by its id.
_FILL_TEXTS = {
    "fim_pre prefix": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    "fim_suf suffix": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid middle": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
# Advice that the runtime has no counterpart for → what it does.
_NOT_APPLIED = {
    "general.sampling.sequence": "the order of the samplers",
    "general.sampling.xtc_probability": "the likeliest tokens are left out at random",
    "general.sampling.penalty_last_n": "repetitions count in the last tokens only",
    "general.sampling.mirostat": "draws have an even surprise",
}
_NO_ID = 0xFFFFFFFF  # -1, which converters write for "none"
_CHANNEL_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # gpt-oss's marks, which are part of the text


@dataclass(frozen=True)
class _Vocabulary:
    """The metadata of one file. ``values``: GGUF's keys that begin with ``tokenizer.`` or ``general.``."""

    file: str
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(_PREFIX + key, default)

    @property
    def model(self) -> str:
        return str(self.get("model", ""))

    @cached_property
    def tokens(self) -> list[str]:
        tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(self.get("tokens", []))]
        if len(set(tokens)) < len(tokens):
            twice = next(token for token_id, token in enumerate(tokens) if token in tokens[:token_id])
            raise ModelFilesError(f"{self.file} has the token {twice!r} twice; convert the model again")
        return tokens

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    @cached_property
    def types(self) -> list[int]:
        """The type of each token as llama.cpp changes it."""
        types = self._each("token_type", _NORMAL)
        fill = [text for keys, texts in _FILL_TEXTS.items() if not self._names(keys) for text in texts.split()]
        for text in (*_CONTROL_TEXTS, *fill):
            if text in self.ids and types[self.ids[text]] != _USER_DEFINED:
                types[self.ids[text]] = _CONTROL
        in_text = list(_CHANNEL_TEXTS)
        if {"<|return|>", "<|call|>"} <= self.ids.keys() or {"<|calls|>", "<|flush|>"} <= self.ids.keys():
            in_text.append("<|end|>")
        for text in in_text:
            if text in self.ids:
                types[self.ids[text]] = _USER_DEFINED
        if "<|tool_response>" in self.ids and "</s>" in self.ids:
            types[self.ids["</s>"]] = _NORMAL
        return types

    @cached_property
    def scores(self) -> list[float]:
        return [float(score) for score in self._each("scores", 0.0)]

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of the special tokens by their short names, of llama.cpp's defaults where the file names none."""
        found = dict(_DEFAULT_IDS.get(self.model, {}))
        if self.get("pre") in ("glm4", "glm5", "chatglm-bpe"):
            found.pop("bos", None)
        found.update(self.named)
        return {name: token_id for name, token_id in found.items() if token_id < len(self.tokens)}

    @cached_property
    def named(self) -> dict[str, int]:
        """Those that the file names."""
        given = {name: self.get(f"{key}_token_id") for key, name in _IDS.items()}
        return {name: int(token_id) for name, token_id in given.items() if token_id is not None and token_id < len(self.tokens)}

    def _names(self, keys: str) -> bool:
        return any(self.get(f"{key}_token_id") is not None for key in keys.split())

    def _each(self, key: str, default: Any) -> list[Any]:
        values = self.get(key)
        if values is None:
            return [default] * len(self.tokens)
        if len(values) < len(self.tokens):
            raise ModelFilesError(f"{self.file} has {len(values)} {_PREFIX}{key} for {len(self.tokens)} tokens; convert it again")
        return list(values[: len(self.tokens)])


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of the file, with its chat templates; None where it has no vocabulary.

    Raises UnsupportedModelError, with the name of what is not known, for a tokenizer that cannot be built exactly.
    """
    vocabulary = _Vocabulary(path.name, read_file(path)[0].starting_with("tokenizer.", "general."))
    if vocabulary.model in ("no_vocab", "none", ""):
        return None
    if not vocabulary.tokens:
        raise ModelFilesError(f"{path.name} has a tokenizer without tokens; convert the model again, or {OTHER}")
    if vocabulary.model == "llama":
        backend = _sentencepiece(vocabulary)
        add_bos = True
    elif vocabulary.model in ("gpt2", "gemma4"):
        kind = _pre_tokenizer(vocabulary)
        backend = _byte_pairs(vocabulary, kind)
        add_bos = kind.add_bos
    else:
        raise UnsupportedModelError(
            f"{path.name} has a tokenizer of the kind {vocabulary.model!r}, which is not built here: llama, gpt2 and gemma4 are; "
            f"{OTHER}"
        )
    _add_tokens(backend, vocabulary)
    _add_ends(backend, vocabulary, add_bos)
    return _wrapped(backend, vocabulary)


def _pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = "gemma4" if vocabulary.model == "gemma4" else str(vocabulary.get("pre") or "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{vocabulary.file} has the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not known here, so its texts would "
            f"be cut wrongly; {OTHER}"
        )
    return PRE_TOKENIZERS[name]


def _byte_pairs(vocabulary: _Vocabulary, kind: PreTokenizer) -> Tokenizer:
    merges = [*(_line_end_merges(vocabulary) if kind.whole_line_ends else ()), *_merges(vocabulary)]
    model = models.BPE(vocabulary.ids, merges, ignore_merges=kind.ignore_merges, byte_fallback=not kind.byte_level)
    backend = Tokenizer(model)
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in kind.expressions]
    if kind.whole_line_ends:
        runs = sorted((len(token) for token in vocabulary.tokens if set(token) == {"\n"}), reverse=True)
        whole = "|".join(rf"\A\n{{{length}}}\z" for length in runs)
        steps.append(pre_tokenizers.Split(Regex(rf"{whole}|\n" if whole else r"\n"), "isolated"))
    if kind.escape_spaces:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
    if not kind.byte_level:
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        backend.decoder = _characters(kind.escape_spaces)
        return backend
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.ids.keys()
    if missing:  # a byte without a token has no id, and what is before it is not joined with what is after it
        steps.append(pre_tokenizers.Split(Regex("|".join(rf"\x{{{ord(byte):X}}}" for byte in sorted(missing))), "removed"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _characters(spaces: bool, prefix: bool = False) -> decoders.Decoder:
    """Text of tokens that are spelt in characters, with byte tokens. ``prefix``: one space was put before the text."""
    steps: list[Any] = [decoders.Replace(_SPACE, " ")] if spaces else []
    steps += [decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def _merges(vocabulary: _Vocabulary) -> list[Merge]:
    """Those of the file, each once. Raises ModelFilesError where one makes no token."""
    written = vocabulary.get("merges")
    if written is None and vocabulary.get("pre") != "kimi-k2":
        raise ModelFilesError(f"{vocabulary.file} has no {_PREFIX}merges; convert the model again, or {OTHER}")
    merges: dict[Merge, None] = {}
    for line in written or ():
        at = line.find(" ", 1)
        pair = (line[:at], line[at + 1 :])
        if at < 0 or not {*pair, "".join(pair)} <= vocabulary.ids.keys():
            raise ModelFilesError(
                f"{vocabulary.file} has the merge {line!r} of tokens that it has not; convert the model again, or {OTHER}"
            )
        merges.setdefault(pair)
    return list(merges)


def _line_end_merges(vocabulary: _Vocabulary) -> list[Merge]:
    """Pairs that make each token of line ends only, the longest first: such files have no merges of them."""
    runs = sorted((token for token in vocabulary.tokens if set(token) == {"\n"}), key=len, reverse=True)
    return [(run[:at], run[at:]) for run in runs for at in range(len(run) - 1, 0, -1) if {run[:at], run[at:]} <= set(runs)]


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    never_joined = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if _in_text(kind)}
    merges = spm_merges(vocabulary.tokens, vocabulary.scores, {token for token in never_joined if _SPACE not in token})
    unknown = vocabulary.special.get("unk")
    unk = vocabulary.tokens[unknown] if unknown is not None else None
    backend = Tokenizer(models.BPE(vocabulary.ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = bool(vocabulary.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    backend.decoder = _characters(spaces=True, prefix=prefix)
    return backend


def _in_text(kind: int) -> bool:
    """Whether tokens of this type are found in a text as they are written."""
    return kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)


def _add_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    left, right = _stripping(vocabulary)
    kinds = [pair for pair in zip(vocabulary.tokens, vocabulary.types, strict=True) if _in_text(pair[1])]
    for special, group in groupby(kinds, lambda pair: pair[1] != _USER_DEFINED):  # each call builds the search for all anew
        options = {"normalized": False, "special": special}
        added = [AddedToken(token, lstrip=token in left, rstrip=token in right, **options) for token, _ in group]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _stripping(vocabulary: _Vocabulary) -> tuple[set[str], set[str]]:
    """Tokens that take the white space before them, and after them: GGUF does not say, llama.cpp goes by names."""
    name = str(vocabulary.values.get("general.name", "")).lower()
    if any(part in str(vocabulary.get("pre", "")) for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        return {"<mask>"}, set()
    if "phi-3" in name or "phi3" in name:
        return set(), set(vocabulary.tokens) - {"<unk>", "<s>", "<|endoftext|>"}
    return ({"[MASK]"} if "modern-bert" in name else set()), set()


def _add_ends(backend: Tokenizer, vocabulary: _Vocabulary, add_bos: bool) -> None:
    """BOS and EOS around a text that is encoded with special tokens."""
    always = vocabulary.model != "llama" and _pre_tokenizer(vocabulary).always_bos
    wanted = {
        "bos": always or bool(vocabulary.get("add_bos_token", add_bos)),
        "eos": bool(vocabulary.get("add_eos_token", False)),
    }
    ends = {name: token_id for name in wanted if wanted[name] and (token_id := vocabulary.special.get(name)) is not None}
    lacking = [name for name in wanted if wanted[name] and name not in ends]
    if lacking:
        raise ModelFilesError(
            f"{vocabulary.file} adds the {lacking[0]} token to each text and has none ({_PREFIX}{lacking[0]}_token_id); "
            "convert the model again"
        )
    if ends:
        parts = [name for name in ("bos", "$A", "eos") if name == "$A" or name in ends]
        special = [{"id": name, "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]} for name, token_id in ends.items()]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)


def _wrapped(backend: Tokenizer, vocabulary: _Vocabulary) -> PreTrainedTokenizerFast:
    named = vocabulary.special if vocabulary.model == "llama" else vocabulary.named
    special = {f"{name}_token": vocabulary.tokens[token_id] for name, token_id in named.items()}
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": str(text)
        for key, text in vocabulary.values.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    if templates:
        special["chat_template"] = templates["default"] if list(templates) == ["default"] else templates
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def end_of_generation(keys: Metadata, vocabulary: int) -> list[int]:
    """The ids that end a generation, the file's own first. Raises ModelFilesError for an id outside the ``vocabulary``."""
    tokens = [str(token) for token in keys.full("tokenizer.ggml.tokens") or ()]
    ids = {token: number for number, token in enumerate(tokens)}
    known = max(len(tokens), vocabulary)
    named = [_id(keys, name, known) for name in ("eos", "eot", "eom")]
    if named[0] is None and keys.full("tokenizer.ggml.model") == "llama":
        named[0] = _DEFAULT_IDS["llama"]["eos"]
    found = [number for number in named if number is not None]
    for name in ("fim_pad", "fim_rep", "fim_sep"):
        number = _id(keys, name, known)
        texts = _FILL_TEXTS[name].split()
        found += [number] if number is not None else [ids[text] for text in tokens if text in texts][:1]
    found += [ids[text] for text in _ENDS if text in ids]
    ends = {tokens[number] for number in found if number < len(tokens)}
    parts = {"</s>"} if "<|tool_response>" in ends else set()  # in these vocabularies a token of the list ends only a part
    if ends & {"<|return|>", "<|flush|>"} and ends & {"<|call|>", "<|calls|>"}:
        parts.add("<|end|>")
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
