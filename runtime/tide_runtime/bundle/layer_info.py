"""What a layer keeps of a text: keys and values, and states of fixed size."""

from __future__ import annotations

from dataclasses import dataclass, field

STATE_KINDS = {"convolution": 2, "recurrence": 3}  # dimensions of `StateInfo.shape`


@dataclass(frozen=True)
class KVInfo:
    """One layer's cache: keys [B, heads, T, key_dim], values [B, heads, T, value_dim], T at most max_seq_len."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class StateInfo:
    """A state of fixed size per sequence, in fp32: [B, *shape].

    Args:
        kind: ``convolution``, the last raw inputs [width - 1, channels] of a causal convolution; ``recurrence``, the sum of all
            tokens [heads, key_dim, value_dim] that linear attention and state-space layers keep.
    """

    kind: str
    shape: list[int]


@dataclass(frozen=True)
class LayerInfo:
    """What a decoder layer keeps of a text: keys and values, states, both, or nothing.

    Args:
        states: in the order in which the layer updates them.
        kv_source: the earlier layer whose keys and values it reads in place of its own.
    """

    kv: KVInfo | None = None
    states: list[StateInfo] = field(default_factory=list)
    kv_source: int | None = None

    @property
    def attends(self) -> bool:
        """Whether it reads keys and values, its own or another layer's."""
        return self.kv is not None or self.kv_source is not None
