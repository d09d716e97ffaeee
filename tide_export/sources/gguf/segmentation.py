"""How llama.cpp cuts a text into words, by the value of ``tokenizer.ggml.pre``, and in which order it joins characters to tokens.

Two of its pre-tokenizers are left out and so refused, both of encoders: mmbert and whitespace.

The names and expressions are facts of the models' tokenizers, as llama.cpp states them in src/llama-vocab.cpp
(https://github.com/ggml-org/llama.cpp); where it rewrites a model's own expression for its engine, the rewritten one counts, as
token ids are held against llama.cpp. They are put together here from the parts that they share. Oniguruma, the engine of
`tokenizers`, differs in two ways: ``$`` is the end of a line, and ``\\d``, ``\\w`` and ``\\b`` take all of Unicode.

With a sentencepiece vocabulary llama.cpp joins the pair of neighbours whose joined token has the highest score, of equal scores
the leftmost. `tokenizers` joins the pair that comes first in a list. Both are the same as long as no two tokens of equal score
can claim the same part of a text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tide_runtime.errors import UnsupportedModelError

_CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_LONG_S_CONTRACTION = _CONTRACTION.replace("[s", "[sſ")
_LOWER_CONTRACTION = "'(?:[stmd]|re|ve|ll)"
_LEAD = r"[^\r\n\p{L}\p{N}]?"  # the character before a word that goes with it
_LETTERS = r"\p{L}+"
_MARKED = r"[\p{L}\p{M}]+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LINES = r"\s*[\r\n]+"
_BLANKS = r"\s+(?!\S)|\s+"
_ASCII_PUNCTUATION = r"[!-/:-@\[-`{-~]"
_GPT2 = _LOWER_CONTRACTION + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# Bloom's: everything between blanks and the marks that end a clause.
_SENTENCE = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"


def _range(points: str) -> str:
    """A character class of code points in hexadecimal: an editor that normalises Unicode cannot change them."""
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in points.split()) + "]"


_HAN = _range("3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF 2CEB0-2EBEF 2F800-2FA1F")
_HAN_AND_KANA = _range("4E00-9FA5 3040-309F 30A0-30FF")
# DeepSeek's, with every script from Samaritan on. llama.cpp reads blanks beyond ASCII as ``\\v``, which is not in it.
_EAST_ASIAN = rf"[{_range('800-9FA5 AC00-D7FF')}&&\S]"
_UNSPACED = _range(  # AFMoE's scripts without spaces between words, with all from U+8C48 on
    "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F AA60-AA7F "
    "A9E0-A9FF AC00-D7AF 1100-11FF"
)
_HANGUL, _BOPOMOFO = _range("AC00-D7A3 3131-318E"), _range("3105-312F")
_WIDE_MARKS = _range("FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F")
_MARKS = _range("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002")
_CASED_LETTERS = _range(  # of DeepSeek's list
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 "
    "3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 "
    "1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 "
    "1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 "
    "213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 "
    "A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 "
    "118A0-118DF 1E900-1E943"
)
_LINE_OR_LINE_ENDS = r"[^\n]+|\n+"
# Letters that have upper and lower case in ASCII only: other letters are both, as llama.cpp's engine cannot tell them apart.
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_MARKED_UPPER, _MARKED_LOWER = r"(?:(?=[\p{L}\p{M}])[^a-z])", r"(?:(?=[\p{L}\p{M}])[^A-Z])"
# A text up to the first group of a number's digits, then its groups of three: llama.cpp leaves the text before it attached.
_DIGITS_FROM_THE_RIGHT = r"\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"


def _words(
    letters: str = _LEAD + _LETTERS,
    digits: str = r"\p{N}",
    others: str = _OTHERS,
    lines: str = _LINES,
    first: str = _CONTRACTION,
    blanks: str = _BLANKS,
) -> str:
    """The expression that most tokenizers since GPT-4's share: contraction, word, digits, other characters, line ends, blanks."""
    return "|".join(part for part in (first, letters, digits, others, lines, blanks) if part)


def _cased(upper: str, lower: str, end: str) -> str:
    """A word in which lower case follows upper case, with ``end`` after it."""
    return f"{_LEAD}{upper}*{lower}+{end}|{_LEAD}{upper}+{lower}*{end}"


def _deepseek(marks_end: str, lines: str) -> str:
    word = r"[^\r\n\p{L}\p{P}\p{S}]?" + _MARKED
    return f"{_ASCII_PUNCTUATION}[A-Za-z]+|{word}| ?[\\p{{P}}\\p{{S}}]+{marks_end}|{lines}|{_BLANKS}"


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut a text.

    Args:
        expressions: each cuts the pieces of the one before; what an expression does not match is a piece, too.
        ignore_merges: a piece that is a token is taken whole.
        add_bos: the BOS token begins a text unless the file says otherwise.
        byte_level: tokens are spelt in GPT-2's alphabet of bytes; otherwise in characters, with ``<0x00>`` to ``<0xFF>``.
        escape_spaces: a space is spelt ``▁``.
        whole_line_ends: a run of line ends that is a token is taken whole.
        always_bos: the BOS token begins a text whatever the file says.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True
    escape_spaces: bool = False
    whole_line_ends: bool = False
    always_bos: bool = False


_THREE_DIGITS = r"\p{N}{1,3}"
_LLAMA3 = _words(digits=_THREE_DIGITS)
_QWEN2 = _words()
_DIGIT_THEN_GPT2 = (r"\p{N}", _GPT2)
_GPT4O = _words(_cased(_UPPER, _LOWER, f"(?:{_CONTRACTION})?"), _THREE_DIGITS, _OTHERS.replace("\\n]", "\\n/]"), first="")
_MARKED_THEN_CONTRACTION = _LEAD + _MARKED + f"(?:{_CONTRACTION})?"
_MARKED_GPT4O = _GPT4O.replace(_UPPER, _MARKED_UPPER).replace(_LOWER, _MARKED_LOWER)
_JAIS2_BLANKS = "|".join([rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)] + [r"\s{1,2}(?!\S)", r"\s"])
_SLASH_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_KINDS: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")), "default"),
    (PreTokenizer((_GPT2,)), "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat"),
    (PreTokenizer((_GPT2,)), "a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4"),
    (PreTokenizer(_DIGIT_THEN_GPT2), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")), "falcon"),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe glm4 glm5 chatglm-bpe"),
    (PreTokenizer((_QWEN2,)), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (PreTokenizer((_words(first=""),)), "ufakzeka"),
    (PreTokenizer((_words(_LEAD + _MARKED, others=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)), "qwen35"),
    (PreTokenizer((_LINE_OR_LINE_ENDS, _QWEN2)), "laguna"),
    (PreTokenizer((_THREE_DIGITS, _words(digits=r"\p{N}+")), ignore_merges=True), "minicpm5"),
    (PreTokenizer((_words(digits=_THREE_DIGITS, blanks=_JAIS2_BLANKS),)), "jais-2"),
    (PreTokenizer((_words(others=r" ?[^\s\p{L}\p{N}\r\n]+"),)), "seed-coder"),
    (PreTokenizer((_words(lines=r"\s*[\r\n]"),)), "bailingmoe bailingmoe2 llada-moe"),
    (
        PreTokenizer(
            (_words(_LEAD + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", others=r" ?[^\s\p{L}\p{N}]+[\r\n/]?", lines=r"\s*[\r\n]"),)
        ),
        "exaone-moe",
    ),
    (
        PreTokenizer((_words(_cased(_UPPER, _LOWER, ""), others=_SLASH_OTHERS, first=""),), ignore_merges=True, add_bos=True),
        "tekken",
    ),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (
        PreTokenizer((_MARKED_GPT4O,), ignore_merges=True),
        "granite-embed-multi-97m",
    ),
    (
        PreTokenizer((_DIGITS_FROM_THE_RIGHT, _words(_MARKED_THEN_CONTRACTION, _THREE_DIGITS, _SLASH_OTHERS, first=""))),
        "tiny_aya cohere2moe",
    ),
    (
        PreTokenizer(
            (
                "|".join(f"{part}+" for part in (_HANGUL, _WIDE_MARKS, _BOPOMOFO, _HAN_AND_KANA)),
                _words(_MARKED_THEN_CONTRACTION, others=_SLASH_OTHERS, first=""),
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (
        PreTokenizer((r"[\r\n]", rf"\s?{_CASED_LETTERS}+", rf"\s?{_MARKS}+", r"\s+\z", f"{_EAST_ASIAN}+", r"\p{N}+")),
        "deepseek-llm",
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{_EAST_ASIAN}+", r"\p{N}")), "deepseek-coder"),
    (
        PreTokenizer((_THREE_DIGITS, f"{_HAN_AND_KANA}+", _deepseek(r"[\r\n]*", _LINES))),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    ),
    (PreTokenizer((_THREE_DIGITS, f"{_HAN_AND_KANA}+", _deepseek("", r"[\r\n]"), r"\p{N}")), "spark2_5"),
    (
        PreTokenizer(
            (
                _DIGITS_FROM_THE_RIGHT,
                f"{_UNSPACED}+",
                _deepseek(r"[\r\n]*", _LINES),
            )
        ),
        "afmoe",
    ),
    (
        PreTokenizer((_words(rf"{_HAN}+|{_LEAD}[\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION})?", _THREE_DIGITS, first=""),)),
        "kimi-k2",
    ),
    (
        PreTokenizer((_words(_LEAD + r"[\p{L}\p{M}\x{200C}\x{200D}]+", _THREE_DIGITS, first=_LONG_S_CONTRACTION),)),
        "k2-horizon",
    ),
    (PreTokenizer((_SENTENCE,)), "poro-chat bloom gpt3-finnish"),
    (PreTokenizer((_SENTENCE, r"\p{N}")), "viking"),
    (PreTokenizer((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))")), "superbpe"),
    (
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
        "chameleon",
    ),
    (
        PreTokenizer(
            (_LINE_OR_LINE_ENDS,), byte_level=False, escape_spaces=True, whole_line_ends=True, always_bos=True, add_bos=True
        ),
        "gemma4 granite-embed-multi-311m",
    ),
    (PreTokenizer((_LINE_OR_LINE_ENDS,), byte_level=False, escape_spaces=True), "sarvam-moe"),
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: kind for kind, names in _KINDS for name in names.split()}
"""By the value of ``tokenizer.ggml.pre``; a file without the key has ``default``."""

Merge = tuple[str, str]
OTHER = "name the model's own tokenizer with --tokenizer DIR"


def spm_merges(tokens: Sequence[str], scores: Sequence[float], never_joined: Collection[str]) -> list[Merge]:
    """Merges of a sentencepiece vocabulary: pairs of tokens, the first to be joined first.

    ``never_joined``: tokens that are found in a text before its rest is joined.

    Raises UnsupportedModelError where two tokens of equal score overlap, as in a file without scores, or a character of a token
    is no token.
    """
    known = set(tokens)
    splits: dict[str, list[Merge]] = {}
    for token in sorted(known - set(never_joined), key=len):
        if found := _splits(token, known, splits):
            splits[token] = found
    score_of = dict(zip(tokens, scores, strict=True))
    _check_ties(splits, score_of)
    # Runs of one character (white space) may tie: from the left they grow one by one, which is "the longest first" as a list.
    ordered = sorted(splits, key=lambda token: (-score_of[token], -len(token), token))
    return [pair for token in ordered for pair in splits[token]]


def _splits(token: str, known: set[str], joined: Collection[str]) -> list[Merge]:
    """The pairs of characters and ``joined`` tokens that make ``token``, as llama.cpp prefers those that overlap.

    Of x|y and y|z, both ``token``, in a text x y z, it takes x|y: there the right part is also the token's beginning.
    """
    last = len(token) - 1
    found = [
        (token[:at], token[at:])
        for at in range(last, 0, -1)
        if (at == 1 or token[:at] in joined) and (at == last or token[at:] in joined)
    ]
    for pair in found:
        if not set(pair) <= known:
            raise UnsupportedModelError(
                f"its tokenizer makes {token!r} of {pair[0]!r} and {pair[1]!r}, of which one is no token, which tokenizer.json "
                f"cannot express; {OTHER}"
            )
    return sorted(found, key=lambda pair: not token.startswith(pair[1]))


def _check_ties(splits: Mapping[str, list[Merge]], score_of: Mapping[str, float]) -> None:
    tied: dict[float, list[str]] = defaultdict(list)
    for token in splits:
        tied[score_of[token]].append(token)
    for group in tied.values():
        starts: dict[str, str] = {}
        for token in group if len(group) > 1 else ():
            for left, _ in splits[token]:
                if left not in starts or _is_run(starts[left]):
                    starts[left] = token
        for token in group:
            for _, right in splits[token]:
                other = starts.get(right, token)
                if other != token and not (_is_run(token) and _is_run(other)):
                    raise UnsupportedModelError(
                        f"its tokenizer gives the tokens {token!r} and {other!r} the same score, so what a text becomes depends "
                        f"on llama.cpp's order of work, which tokenizer.json cannot express; {OTHER}"
                    )


def _is_run(token: str) -> bool:
    return len(set(token)) == 1
