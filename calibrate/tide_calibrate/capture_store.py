"""What one pass over the calibration text leaves on disk: memory-mapped arrays, one row per window of text.

A window is up to ``T`` consecutive tokens of one document; shorter ones are padded on the right and ``lengths`` says how
far they go. Nothing may be read beyond a window's length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SplitName = Literal["train", "threshold", "test"]


@dataclass(frozen=True)
class Capture:
    """Arrays of N windows of T tokens; all are memory maps, so slicing reads only what is used.

    Args:
        tokens: [N, T] int32.
        lengths: [N] int32, valid tokens of each window.
        document: [N] int32, index of the document a window comes from.
        split: [N] int8, index into ("train", "threshold", "test"); all windows of a document have the same.
        hidden: layers run (a checkpoint, or L for the final state) → [N, T, H] float16, or bfloat16 stored as uint16
            (see ``hidden_dtype``): the residual stream before the next layer, before the final norm.
        hidden_dtype: "float16" or "bfloat16".
        top_ids, top_logits: [N, T, K], the full model's K largest logits at each token, largest first; int32, float32.
        logsumexp: [N, T] float32, of all of the full model's logits.
        num_layers: L.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    document: NDArray[np.int32]
    split: NDArray[np.int8]
    hidden: dict[int, NDArray[np.generic]]
    hidden_dtype: str
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]
    num_layers: int
