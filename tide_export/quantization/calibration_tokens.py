"""The text that a quantizer reads, as windows of tokens."""

from __future__ import annotations

import torch
from tide_runtime.errors import DataError
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tide_export.documents import Note, load_documents

WINDOW = 512  # tokens that the model reads from an empty cache
MAX_TOKENS = 32 * WINDOW


def calibration_tokens(source: str, tokenizer: FastTokenizer | None, positions: int | None, note: Note) -> torch.Tensor:
    """Windows [N, T] of token ids, evenly spaced over the text in ``source``: up to MAX_TOKENS in all, T = WINDOW.

    Args:
        source: as `load_documents` takes it, and ``note``.
        positions: of the model; T where it is less. None: any number.

    Raises DataError if the text is missing, unreadable or shorter than a window, or the model has no tokenizer.
    """
    if tokenizer is None:
        raise DataError("the model has no fast tokenizer (tokenizer.json), so text cannot be cut into its tokens; add one")
    encoded = (tokenizer(d.text, add_special_tokens=False, verbose=False) for d in load_documents(source, note))
    ids = [token for text in encoded for token in text["input_ids"]]
    window = min(WINDOW, positions or WINDOW)
    whole = len(ids) // window
    if not whole:
        raise DataError(
            f"{source} has {len(ids)} tokens, and gptq needs at least {window}; give more text, best {MAX_TOKENS} tokens"
        )
    count = min(whole, MAX_TOKENS // window)
    starts = [window * (i * whole // count) for i in range(count)]
    return torch.tensor([ids[start : start + window] for start in starts])
