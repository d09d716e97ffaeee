"""Which of a segment's forms runs a step of several rows faster: GroupQueryAttention or plain products.

GroupQueryAttention is one node whose cost follows each row's valid length; it takes one token a row. The plain form is a dozen
nodes whose cost follows all slots of the cache, but query heads that share a KV head come almost for free. Measured on two cores
(AMD EPYC with AVX2, ONNX Runtime 1.32), a decode step of 8 rows of different lengths, plain over GroupQueryAttention:

    mean length / slots                    119 / 128   179 / 224   359 / 448   752 / 928
    fp32, 1 query head a KV head                1.03        1.09        1.13        1.11
    fp32, 3 (the demo model)                    1.02        1.09        1.12        0.98
    fp32, 4                                     0.97        1.03        1.02        0.98
    fp16, 4 (no kernel of its own)              0.85        0.86        0.84        0.79

Rows of different lengths take GroupQueryAttention by another of its kernels (tide_export.passes.attention_ragged says why).
"""

from __future__ import annotations

from collections.abc import Sequence


def prefers_plain(lengths: Sequence[int], seq: int, slots: int, fp32: bool) -> bool:
    """For rows of ``lengths`` valid tokens and ``seq`` new ones each, over a cache of ``slots``."""
    rows = len(lengths)
    if rows == 1:
        return False
    if seq > 1:
        return True  # GroupQueryAttention refuses this over a filled cache
    mostly_filled = 3 * sum(lengths) > 2 * rows * slots  # otherwise reading empty slots costs more than it saves
    return not fp32 and mostly_filled
