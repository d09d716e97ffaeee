"""What a bundle says of engines: the steps they take, the tensors they bind, what they were built with."""

from __future__ import annotations

from dataclasses import dataclass, field

from tide_runtime.errors import ParamsError


@dataclass(frozen=True)
class TensorInfo:
    """A graph's or engine's input or output; symbolic dimensions by name."""

    name: str
    dtype: str
    shape: list[int | str]


@dataclass(frozen=True)
class ProfileInfo:
    """One kind of step that engines are optimized for.

    Args:
        name: ``decode`` or ``prefill``; a profile's index in an engine is its place in the target's list.
        rows: fewest, usual and most rows of a step: the dimension ``batch``.
        tokens: fewest, usual and most tokens of a row: the dimension ``seq``. ``wanted`` is at most rows × tokens.
    """

    name: str
    rows: list[int]
    tokens: list[int]

    def __post_init__(self) -> None:
        for name, sizes in (("rows", self.rows), ("tokens", self.tokens)):
            if len(sizes) != 3 or sorted(sizes) != sizes or sizes[0] < 1:
                raise ParamsError(f"{name} of the profile {self.name} is {sizes}, expected fewest, usual and most, from 1 up")

    def takes(self, rows: int, tokens: int) -> bool:
        """Whether a step of ``rows`` rows of ``tokens`` tokens is within the profile."""
        return self.rows[0] <= rows <= self.rows[2] and self.tokens[0] <= tokens <= self.tokens[2]

    def shape(self, dims: list[int | str], which: int) -> tuple[int, ...]:
        """The smallest (0), usual (1) or largest (2) shape of a tensor of these dimensions."""
        rows, tokens = self.rows[which], self.tokens[which]
        sizes = {"batch": rows, "seq": tokens, "wanted": rows * tokens}
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in dims)


@dataclass(frozen=True)
class EngineInfo:
    """One compiled graph.

    Args:
        build_seconds: time that the builder took, when it was built (an engine may come from the exporter's cache).
        attention: ``fused`` into one kernel each, ``decomposed`` into products, or ``none``.
        attentions: how many.
        inputs: what to bind, in the engine's own dtypes.
        outputs: what to bind.
        aliases: cache output → cache input; both are to be bound to the same memory.
    """

    build_seconds: float
    attention: str
    attentions: int
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    aliases: dict[str, str] = field(default_factory=dict)
