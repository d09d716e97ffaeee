"""What a drafter is: one small decoder layer that guesses tokens from states of the model (EAGLE-3 heads, MTP layers).

It reads, for token t, the state that the model computed for it, at one boundary or several, and the embedding of token t + 1;
from both it guesses token t + 2. A further guess reads the drafter's own state in place of the model's. Its layer attends to all
pairs (state of token p, token p + 1) before, so it has keys and values of its own: slot p of its cache holds that pair, and p is
the position that it is given.

A wrong drafter costs time and never a token, because guesses are verified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tide_runtime.bundle.manifest import KVInfo
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from tide_export.model.traced_attention import TracedLayer, tide_layer

KINDS = ("eagle3", "mtp", "own")


class Drafter(nn.Module):
    """One drafter in eval mode. N: the tokens that it can guess; D: the width of its states; H: that of the model's.

    Args:
        kind: of `KINDS`.
        taps: boundaries, as numbers of layers run before, whose states `fuse` reads; the number of all layers is the final state
            before the model's final norm.
        width: D.
        config: of its attention: ``config._attn_implementation`` names the function, with layer index 0.
        kv: shape of its layer's keys and values; None: it has no attention.
        shares_embedding: `embedded` is the model's own embedding.
    """

    vocabulary: Tensor  # buffer [N] int64: the token id of each logit

    def __init__(
        self,
        kind: str,
        taps: tuple[int, ...],
        width: int,
        vocabulary: Tensor,
        config: PreTrainedConfig,
        kv: KVInfo | None = None,
        shares_embedding: bool = True,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.taps = taps
        self.width = width
        self.config = config
        self.kv = kv
        self.shares_embedding = shares_embedding
        self.register_buffer("vocabulary", vocabulary)

    def fuse(self, tapped: Tensor) -> Tensor:
        """[..., D] of the model's states [..., len(taps) · H], joined in the order of ``taps``; once for each accepted token."""
        raise NotImplementedError

    def embedded(self, input_ids: Tensor) -> Tensor:
        """[B, S, H] of token ids [B, S]."""
        raise NotImplementedError

    def forward(
        self,
        embedded: Tensor,
        before: Tensor,
        position_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, S, N] and states [B, S, D], which stand in for `fuse`'s at the next guess.

        Args:
            embedded: [B, S, H], of the tokens behind those of ``before``.
            before: [B, S, D], from `fuse` or a guess before.
            position_ids: [B, S] of ``before``.
            past_key_values: what the pairs before have left; it is written too.
            attention_mask: [1, 1, S, T], added to the scores; None: causal.
        """
        raise NotImplementedError

    def causal_mask(
        self, embedded: Tensor, position_ids: Tensor, past_key_values: Cache | None, given: Tensor | None = None
    ) -> Tensor | None:
        """What transformers' layers take as mask for ``config._attn_implementation``, ``given`` if there is one; None where that
        function needs none."""
        mask = create_causal_mask(self.config, embedded, given, past_key_values, position_ids=position_ids)
        assert not isinstance(mask, BlockMask)  # of flex attention
        return mask


def observed_kv(drafter: Drafter) -> KVInfo | None:
    """Shape of the keys and values that ``drafter`` caches: it runs over two tokens with TIDE's attention."""
    layer = TracedLayer({}, torch.zeros(1, dtype=torch.long))
    with torch.no_grad(), tide_layer(drafter.config):
        embedded = drafter.embedded(torch.zeros((1, 2), dtype=torch.long))
        drafter(embedded, embedded.new_zeros(1, 2, drafter.width), torch.arange(2)[None], Cache(layers=[layer]))
    return layer.kv


@dataclass(frozen=True)
class Form:
    """One way to read a drafter where its sources contradict each other.

    Args:
        settings: attribute of the drafter → value.
        taps: its taps; empty: those that it has.
    """

    name: str
    settings: Mapping[str, bool]
    taps: tuple[int, ...] = ()

    def apply(self, drafter: Drafter) -> None:
        drafter.taps = self.taps or drafter.taps
        for name, value in self.settings.items():
            setattr(drafter, name, value)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter whose tensors were read in full.

    Args:
        forms: all that it may be; the first one is the most common. None is applied yet if there are several.
        source: folder or hub id.
        sha256: over the names, types, shapes and bytes of its tensors.
    """

    drafter: Drafter
    forms: tuple[Form, ...]
    source: str
    sha256: str

    @property
    def taps(self) -> list[int]:
        """The boundaries that any of its forms reads, rising."""
        return sorted({tap for form in self.forms for tap in form.taps or self.drafter.taps})


@dataclass(frozen=True)
class MeasuredDrafter:
    """A drafter in its best form, and how it did on the model's replies.

    Args:
        acceptance: share of its 1st, 2nd, … guesses after right ones that are right.
        classes: [score, share] with rising scores: the share of guesses with at least this largest probability, and less than
            the next, that are right.
        form: name of the form.
        tried: name of each form → tokens per verification that its guesses would give.
        source, sha256: as in `LoadedDrafter`.
    """

    drafter: Drafter
    acceptance: list[float]
    classes: list[list[float]]
    form: str
    tried: dict[str, float]
    source: str
    sha256: str


def positions_of(before: Tensor, first: int = 0) -> Tensor:
    """[B, S] position ids of states [B, S, D] that follow one another from ``first`` on."""
    return torch.arange(first, first + before.shape[1], device=before.device).expand(before.shape[:2])
