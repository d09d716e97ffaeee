"""The sampled vocabulary: the few tokens whose logits are computed where a result over the whole vocabulary is not promised.

Real vocabularies have 32,000 to 260,000 tokens, and their logits cost more than an exit head's own work. Heads and routers learn
as well from the logits of the tokens that the full model likes: the most frequent ones of the training text, and those of the
batch itself. Thresholds and certificates never use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tide_calibrate.capture.batches import WindowBatch
from tide_calibrate.capture.store import Capture
from tide_calibrate.model.frozen import FrozenModel

SAMPLED_TOKENS = 4096
_LEAST_SHARE = 2  # with the batch's own tokens, sampling under half of a vocabulary would save little


@dataclass(frozen=True)
class SampledVocabulary:
    """``common``: [N] int64, ascending ids of tokens that belong to every batch."""

    common: Tensor

    @classmethod
    def of(cls, capture: Capture, model: FrozenModel, size: int = SAMPLED_TOKENS) -> SampledVocabulary | None:
        """The ``size`` tokens that are most often the full model's likeliest on the train split.

        None where sampling saves little, or the model's code around its LM head needs the whole vocabulary.
        """
        vocab_size: int = model.model.config.get_text_config().vocab_size
        if vocab_size < _LEAST_SHARE * size or not model.lm_head.samples_vocabulary:
            return None
        windows = np.flatnonzero(capture.split == 0)
        valid = np.arange(capture.tokens.shape[1]) < capture.lengths[windows][:, None]
        counts = np.bincount(capture.top_ids[windows, :, 0][valid], minlength=vocab_size)
        return cls(torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size])))


def narrowed(batch: WindowBatch, vocabulary: SampledVocabulary | None, *further: Tensor) -> tuple[WindowBatch, Tensor | None]:
    """The batch renumbered to the tokens of ``vocabulary`` and the K likeliest at each of its own tokens, and these ids [n].

    In the renumbered batch a token's id is its place among the n ids, which are ascending. Without a vocabulary the batch stays
    as it is, and the ids are None: all tokens.

    Args:
        further: ids of more tokens to score.
    """
    if vocabulary is None:
        return batch, None
    ids = torch.cat([vocabulary.common, batch.top_ids[batch.valid].flatten(), *further]).unique()
    return replace(batch, top_ids=torch.searchsorted(ids, batch.top_ids)), ids
