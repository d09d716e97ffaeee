"""The sampled vocabulary: the few tokens whose logits are computed where a result over the whole vocabulary is not promised.

Real vocabularies have 32,000 to 260,000 tokens, and their logits cost more than an exit head's own work. Heads and routers learn
from the logits of the tokens that the full model likes, the most frequent ones of the training text and those of the batch, and
of some tokens at random that stand for the rest, so that a head learns not to prefer those. Thresholds and certificates never
use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tide_calibrate.capture.batches import WindowBatch
from tide_calibrate.capture.store import Capture
from tide_calibrate.model.frozen import FrozenModel

# SmolLM2 (49,152 tokens), linear head after 20 of 30 layers, 60 steps: 7.5 s and 23.4% agreement, on all tokens 67 s and 23.7%.
# Without random tokens a head of 120 steps chose unlisted tokens so often that 29% among the listed ones were 21% among all.
SAMPLED_TOKENS = 4096
RANDOM_TOKENS = 1024
_MIN_RATIO = 2  # size of the vocabulary over the sample's from which sampling pays: the batch's own tokens are added to it


@dataclass(frozen=True)
class SampledVocabulary:
    """Tokens that belong to every batch.

    Args:
        common: [N] int64 ids, ascending.
        size: V.
        random: tokens that are drawn for each batch from those that are not listed.
    """

    common: Tensor
    size: int
    random: int = RANDOM_TOKENS

    @classmethod
    def of(cls, capture: Capture, model: FrozenModel, size: int = SAMPLED_TOKENS) -> SampledVocabulary | None:
        """The ``size`` tokens that are most often the full model's likeliest on the train split.

        None where sampling saves little, or the model's code around its LM head needs the whole vocabulary.
        """
        vocab_size: int = model.model.config.get_text_config().vocab_size
        if vocab_size < _MIN_RATIO * size or not model.lm_head.samples_vocabulary:
            return None
        windows = np.flatnonzero(capture.split == 0)
        valid = np.arange(capture.tokens.shape[1]) < capture.lengths[windows][:, None]
        counts = np.bincount(capture.top_ids[windows, :, 0][valid], minlength=vocab_size)
        common = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))
        return cls(common.to(model.device), vocab_size)

    def sample(self, wanted: Tensor) -> VocabularySample:
        """The common tokens and those in ``wanted``, and random ones; the same for the same ``wanted``."""
        listed = torch.cat([self.common, wanted]).unique()
        others = torch.ones(self.size, dtype=torch.bool, device=listed.device).index_fill(0, listed, False).nonzero()[:, 0]
        if not len(others):
            return VocabularySample(listed, len(listed), 0.0)
        generator = torch.Generator().manual_seed(int(wanted.sum()))
        places = torch.randint(len(others), (self.random,), generator=generator)  # the same on every device
        drawn = others[places.to(others.device)]
        return VocabularySample(torch.cat([listed, drawn]), len(listed), math.log(len(others) / self.random))


@dataclass(frozen=True)
class VocabularySample:
    """Tokens that are scored for one batch.

    Args:
        ids: [n] int64, first the ``listed`` ones, ascending, then random ones of the rest.
        log_weight: logarithm of the number of tokens that a random one stands for.
    """

    ids: Tensor
    listed: int
    log_weight: float

    def places(self, tokens: Tensor) -> Tensor:
        """Places of listed tokens among ``ids``."""
        return torch.searchsorted(self.ids[: self.listed], tokens)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Estimate over the whole vocabulary, [m], from the logits of the sample [m, n]."""
        listed = logits[:, : self.listed].logsumexp(1)
        rest = logits[:, self.listed :].logsumexp(1)
        return torch.logaddexp(listed, rest + self.log_weight)


def narrowed(
    batch: WindowBatch, vocabulary: SampledVocabulary | None, *further: Tensor, max_choices: int | None = None
) -> tuple[WindowBatch, VocabularySample | None]:
    """A sample with the likeliest tokens of ``batch`` in it, and the batch with each token's place in the sample as its id.

    Without a vocabulary the batch stays as it is, and there is no sample: all tokens are scored.

    Args:
        further: ids of more tokens to score.
        max_choices: how many of the K tokens are kept at each token; None: all.
    """
    if vocabulary is None:
        return batch, None
    top_ids = batch.top_ids[..., :max_choices].contiguous()
    sample = vocabulary.sample(torch.cat([top_ids[batch.valid].flatten(), *further]))
    return replace(batch, top_ids=sample.places(top_ids), top_logits=batch.top_logits[..., :max_choices]), sample
