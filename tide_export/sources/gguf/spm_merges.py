"""Merges of byte-pair encoding that do what llama.cpp does with a sentencepiece vocabulary.

llama.cpp joins the pair of neighbours whose joined token has the highest score, of equal scores the leftmost. `tokenizers` joins
the pair that comes first in a list. Both are the same as long as no two tokens of equal score can claim the same part of a text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from tide_runtime.errors import UnsupportedModelError

Merge = tuple[str, str]
OTHER = "name the model's own tokenizer with --tokenizer DIR"


def spm_merges(tokens: Sequence[str], scores: Sequence[float], never_joined: Collection[str]) -> list[Merge]:
    """Pairs of tokens, the first to be joined first.

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
