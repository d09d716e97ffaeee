"""Prompts from text that the demo models were not trained on: windows of tokens, spread evenly over the held-out files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.exits.exit_traces import held_out_documents
from benchmarks.models.model_folders import DEMO_MODELS

TOKENIZER = DEMO_MODELS / "layerskip" / "tokenizer.json"  # all demo models have it


@dataclass(frozen=True)
class Prompt:
    """``ids``: tokens ``offset`` … of the file ``file``."""

    file: str
    offset: int
    ids: list[int]


def held_out_prompts(count: int, tokens: int, source: str, tokenizer: Path = TOKENIZER) -> list[Prompt]:
    """``count`` windows of ``tokens`` tokens that do not overlap; neighbours in the list come from different files.

    Args:
        source: ``demo``: the files of examples/demo_model/held_out.txt that this Python has (3.11: 23), several windows of each
            when ``count`` is larger; the demo's calibration learns from these files too. ``library``: the other held-out
            files of this installation's packages, some 500, which nothing has learned from.
        tokenizer: the model's tokenizer.json.

    Raises ValueError when the files have fewer windows.
    """
    documents = held_out_documents(source)
    if source == "library":
        known = {document.text for document in held_out_documents("demo")}
        documents = [document for document in documents if document.text not in known]
    encode = Tokenizer.from_file(str(tokenizer)).encode
    encoded = [encode(document.text).ids for document in documents]
    places = spread_windows([len(ids) for ids in encoded], count, tokens)
    return [Prompt(documents[i].name, offset, encoded[i][offset : offset + tokens]) for i, offset in places]


def spread_windows(lengths: Sequence[int], count: int, width: int) -> list[tuple[int, int]]:
    """``count`` windows of ``width`` tokens over documents of ``lengths`` tokens, as (document, offset).

    Every document gives as many as any other while it has room for them; they lie in the middles of its equal parts. First
    come the first windows of all documents, then the second ones. Raises ValueError when there is no room.
    """
    room = [length // width for length in lengths]
    if count > sum(room):
        raise ValueError(f"{count} windows of {width} tokens do not fit into the documents; take at most {sum(room)}")
    shares = [0] * len(lengths)
    while (left := count - sum(shares)) > 0:
        open_ = [i for i in range(len(lengths)) if shares[i] < room[i]]
        for k in range(min(left, len(open_))):
            shares[open_[k * len(open_) // min(left, len(open_))]] += 1
    places = [(nth, i, _middle(lengths[i], nth, share, width)) for i, share in enumerate(shares) for nth in range(share)]
    return [(i, offset) for _, i, offset in sorted(places)]


def _middle(length: int, nth: int, parts: int, width: int) -> int:
    """Offset of a window in the middle of part ``nth`` of ``parts`` equal parts."""
    begin, end = nth * length // parts, (nth + 1) * length // parts
    return begin + (end - begin - width) // 2
