"""Which of a segment's forms runs a step of several rows faster: GroupQueryAttention or plain products.

GroupQueryAttention is one node whose cost follows each row's valid length; it takes one token a row. The plain form is a dozen
nodes whose cost follows all slots of the cache, but query heads that share a KV head come almost for free. Rows of different
lengths may take GroupQueryAttention by another of its kernels (tide_export.passes.attention_ragged).
benchmarks/attention_forms.py measures all of them; docs/measured.md shows its table.
"""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.manifest import Manifest

_SHARING = 8  # query heads a KV head from which on products are faster; with 4 they take as long, with 1 up to 1.5 times


def products_pay(manifest: Manifest) -> bool:
    """Whether products of one token a row are faster than GroupQueryAttention where caches are mostly filled: where many heads
    share keys, and in fp16, which it has no kernel of its own for."""
    return manifest.dtype != "fp32" or manifest.model.attention_heads >= _SHARING * manifest.kv[0].heads


def prefers_plain(lengths: Sequence[int], seq: int, slots: int, pays: bool) -> bool:
    """For rows of ``lengths`` valid tokens and ``seq`` new ones each, over a cache of ``slots``; ``pays``: see `products_pay`."""
    rows = len(lengths)
    if rows == 1:
        return False
    if seq > 1:
        return True  # GroupQueryAttention refuses this over a filled cache
    return pays and 3 * sum(lengths) > 2 * rows * slots  # reading empty slots would cost more than it saves
