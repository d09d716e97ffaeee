"""Tiny GGUF files with made-up vocabularies, and texts on which their tokenizers can go wrong.

A vocabulary has tokens for pairs that occur in the texts across every border that a pre-tokenizer might draw: where it cuts
differently, other pairs join, and the ids differ.
"""

import random
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
_PARTS = [
    *("a", "b", "Z", "hello", " World", "camelCase", "HTTPServer", "snake_case", "def f(x):", "    return x", "//comment"),
    *("'s", "'S", "'T", "'ll", "'LL", "'Re", "'ve", "'", "’s", "ſ", "1", "12", "123", "1234567", "3.14", "1,000", "٣", "²", "½"),
    *(" ", "  ", "   ", "        ", "\t", "\n", "\r\n", "\r", "\n\n", "\u00a0", "\u3000", "\u2003", "\x0b", "\x85"),
    *('!?~$+<=^`|@#/\\-_()[]{}"*%&,.:;。，！、…—“”（•¿'),
    *(
        "...",
        "~~",
        "//",
        "漢字",
        "中",
        "あい",
        "カナ",
        "ｶﾅ",
        "한국",
        "ㄱ",
        "ㄅ",
        "ไทย",
        "ລາວ",
        "ខ្មែរ",
        "မြန်",
        "عربي",
        "שלום",
        "हिन्दी",
        "дом",
        "ДОМ",
    ),
    *("é", "e\u0301", "É", "ñ", "ß", "ǅ", "ʰ", "Ω", "\u0301", "\u200d", "\u200c", "\ufeff", "\x01", "\ufffd", "𝒜", "①", "Ⅳ"),
    *("👍", "👨\u200d👩\u200d👧", "🇩🇪", "❤\ufe0f", "€", "™", "→", "∑", "<sentinel:12>", "IMGIMGABZ"),
]
_SPECIAL = {
    **{"<s>": CONTROL, "</s>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": NORMAL, "<|endoftext|>": CONTROL},
    **{"<tool>": USER_DEFINED, "<unk>": UNKNOWN},
}


def texts(count: int, seed: int = 0, special: bool = True) -> list[str]:
    """``count`` texts of a few parts each, with special tokens in some; then the empty text and those of blanks only."""
    rng = random.Random(seed)
    parts = [*_PARTS, *list(_SPECIAL) * (4 if special else 0)]
    made = ["".join(rng.choice(parts) for _ in range(rng.randint(1, 9))) for _ in range(count)]
    return [*made, "", " ", "\n", "  \n  9", "\n\n\n", "word " * 60, "x" * 300]


def write_byte_pairs(file: Path, pre: str, *, bytes_as_letters: bool = True, seed: int = 0) -> Path:
    """A file of the model ``gpt2`` with the pre-tokenizer ``pre``. Without ``bytes_as_letters`` tokens are plain text."""
    tokens, kinds, merges = _byte_pairs(bytes_as_letters, seed)
    return _write(file, "gpt2", tokens, kinds, pre=pre, merges=merges)


@cache  # it is the same under every pre-tokenizer, and takes most of a file's time
def _byte_pairs(bytes_as_letters: bool, seed: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their kinds, and merges."""
    alphabet = _alphabet()
    spelt = [_spelt(text, alphabet if bytes_as_letters else None) for text in texts(2000, seed + 1, special=False)]
    rng = random.Random(seed)
    pairs = sorted({pair for text in spelt for pair in pairwise(text) if "\n" not in pair})
    pairs = rng.sample(pairs, len(pairs) * 5 // 6)
    byte_tokens = [] if bytes_as_letters else _byte_tokens()
    single = alphabet if bytes_as_letters else [*byte_tokens, *sorted({c for text in spelt for c in text} | {"\n"})]
    runs = [] if bytes_as_letters else ["\n" * length for length in range(2, 6)]
    tokens = list(dict.fromkeys([*single, *map("".join, pairs), *runs]))
    kinds = [BYTE if token in byte_tokens else NORMAL for token in tokens]
    return tokens, kinds, [" ".join(pair) for pair in pairs]


def write_sentencepiece(file: Path, *, prefix: bool = True, seed: int = 0) -> Path:
    """A file of the model ``llama``. ``prefix``: a space goes before a text."""
    rng = random.Random(seed)
    spelt = [text.replace(" ", "▁") for text in texts(2000, seed + 1, special=False)]
    pieces = {text[at : at + size] for text in spelt for size in (2, 3, 4) for at in [rng.randrange(len(text) or 1)]}
    pieces |= {"▁" * size for size in range(2, 9)} | {"aaa", "aba", "abab"}
    # Every token but a character is made of a token and a character.
    closed = {piece[:size] for piece in pieces for size in range(2, len(piece) + 1)}
    longer = rng.sample(sorted(closed), len(closed))
    single = sorted({character for text in (*spelt, *longer) for character in text})
    tokens = list(dict.fromkeys([*_byte_tokens(), *longer, *single]))
    kinds = [BYTE] * 256 + [NORMAL] * (len(tokens) - 256)
    scores = [0.0] * 256 + [-float(place) for place in range(len(tokens) - 256)]
    return _write(file, "llama", tokens, kinds, scores=scores, prefix=prefix)


def _alphabet() -> list[str]:
    return sorted(ByteLevel.alphabet())


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _spelt(text: str, alphabet: Sequence[str] | None) -> str:
    if alphabet is None:
        return text.replace(" ", "▁")
    return "".join(piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))


def _write(
    file: Path,
    model: str,
    tokens: list[str],
    kinds: list[int],
    *,
    pre: str = "default",
    merges: Iterable[str] | None = None,
    scores: list[float] | None = None,
    prefix: bool | None = None,
) -> Path:
    """One layer of zeros: llama.cpp loads vocabularies with models only."""
    from gguf import GGUFWriter

    width = 32
    tokens, kinds = [*tokens, *_SPECIAL], [*kinds, *_SPECIAL.values()]
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges is not None:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores([*scores, *[-1000.0] * len(_SPECIAL)])
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), width), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(width, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((width, width), np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
