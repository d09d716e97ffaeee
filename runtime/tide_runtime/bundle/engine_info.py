"""Manifest entries of engines: optimization profiles, bound tensors, build facts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tide_runtime.errors import ParamsError


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a graph or engine; symbolic dimensions are names."""

    name: str
    dtype: str
    shape: list[int | str]


@dataclass(frozen=True)
class ProfileInfo:
    """One kind of step that engines are optimized for.

    Args:
        name: ``decode`` or ``prefill``; a profile's index in an engine is its index in the target's list.
        rows: least, usual and greatest batch size of a step: the dimension ``batch``.
        tokens: least, usual and greatest number of tokens per sequence: the dimension ``seq``. ``wanted``, the number of
            tokens with logits, is at most rows × tokens.
    """

    name: str
    rows: list[int]
    tokens: list[int]

    def __post_init__(self) -> None:
        for name, sizes in (("rows", self.rows), ("tokens", self.tokens)):
            if len(sizes) != 3 or sorted(sizes) != sizes or sizes[0] < 1:
                raise ParamsError(f"{name} of the profile {self.name} is {sizes}, expected fewest, usual and most, from 1 up")

    def takes(self, rows: int, tokens: int) -> bool:
        """Whether a step of ``rows`` sequences of ``tokens`` tokens is within the profile."""
        return self.rows[0] <= rows <= self.rows[2] and self.tokens[0] <= tokens <= self.tokens[2]

    def shape(self, dims: list[int | str], which: int) -> tuple[int, ...]:
        """The smallest (0), usual (1) or largest (2) shape of a tensor with dimensions ``dims``."""
        rows = self.rows[which]
        tokens = self.tokens[which]
        sizes = {"batch": rows, "seq": tokens, "wanted": rows * tokens}
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in dims)


@dataclass(frozen=True)
class EngineInfo:
    """One compiled graph.

    Args:
        build_seconds: build time; an engine from the exporter's cache has the time of its original build.
        attention: ``fused`` into one kernel each, ``decomposed`` into products, or ``none``.
        attentions: number of attention layers.
        inputs: tensors to bind, in the engine's dtypes.
        outputs: tensors to bind.
        aliases: cache output → cache input, which must be bound to the same memory.
    """

    build_seconds: float
    attention: str
    attentions: int
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    aliases: dict[str, str] = field(default_factory=dict)
