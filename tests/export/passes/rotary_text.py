"""Rotary position embedding as HuggingFace models trace to, in ONNX's text format, and the same in NumPy in float64."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rotary:
    """A head of ``dim`` channels, of which the first ``width`` are rotated.

    Args:
        interleaved: pairs are neighbours (GPT-J, Cohere), not the two halves (Llama).
        twisted: angles of the two channels of a pair differ, which no fused kernel knows.
    """

    dim: int = 16
    width: int = 16
    interleaved: bool = False
    twisted: bool = False

    @property
    def frequencies(self) -> np.ndarray:
        """One for each channel that is rotated, [width]."""
        pairs = 10.0 ** -np.arange(self.width // 2)
        every = np.repeat(pairs, 2) if self.interleaved else np.tile(pairs, 2)
        return every + 0.5 * np.arange(self.width) if self.twisted else every

    @property
    def declared(self) -> str:
        """Constants of the nodes below, and ``frequencies``."""
        numbers = {"first": 0, "second": 1, "third": 2, "half": self.width // 2, "width": self.width, "end": 1 << 30, "last": -1}
        constants = ", ".join(f"int64[1] at_{name} = {{{number}}}" for name, number in numbers.items())
        return f"{constants}, float[{self.width}] frequencies, int64[4] same = {{0, 0, 0, {self.width}}}"

    def tables(self, name: str = "") -> str:
        """Nodes that make ``cos`` and ``sin`` [B, 1, S, width] of ``position_ids`` [B, S]."""
        return f"""
            places{name} = Cast<to = 1>(position_ids)
            columns{name} = Unsqueeze(places{name}, at_third)
            angles{name} = Mul(columns{name}, frequencies)
            cosines{name} = Cos(angles{name})
            sines{name} = Sin(angles{name})
            cos{name} = Unsqueeze(cosines{name}, at_second)
            sin{name} = Unsqueeze(sines{name}, at_second)"""

    def rotate(self, x: str, table: str = "") -> str:
        """Nodes that make ``{x}_rotated`` of ``x`` [B, N, S, dim]."""
        if self.width == self.dim:
            return self._rotate_all(x, f"{x}_rotated", table)
        return f"""
            {x}_head = Slice({x}, at_first, at_width, at_last)
            {x}_rest = Slice({x}, at_width, at_end, at_last)
            {self._rotate_all(f"{x}_head", f"{x}_turned", table)}
            {x}_rotated = Concat<axis = -1>({x}_turned, {x}_rest)"""

    def _rotate_all(self, x: str, result: str, table: str) -> str:
        swap = self._swap_neighbours(x) if self.interleaved else self._swap_halves(x)
        return f"""{swap}
            {x}_straight = Mul({x}, cos{table})
            {x}_across = Mul({x}_swapped, sin{table})
            {result} = Add({x}_straight, {x}_across)"""

    def _swap_halves(self, x: str) -> str:
        return f"""
            {x}_1 = Slice({x}, at_first, at_half, at_last)
            {x}_2 = Slice({x}, at_half, at_end, at_last)
            {x}_negated = Neg({x}_2)
            {x}_swapped = Concat<axis = -1>({x}_negated, {x}_1)"""

    def _swap_neighbours(self, x: str) -> str:
        return f"""
            {x}_even = Slice({x}, at_first, at_end, at_last, at_third)
            {x}_odd = Slice({x}, at_second, at_end, at_last, at_third)
            {x}_negated = Neg({x}_odd)
            {x}_wide_odd = Unsqueeze({x}_negated, at_last)
            {x}_wide_even = Unsqueeze({x}_even, at_last)
            {x}_pairs = Concat<axis = -1>({x}_wide_odd, {x}_wide_even)
            {x}_swapped = Reshape({x}_pairs, same)"""

    def rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """``x`` [B, N, S, dim] at ``positions`` [B, S]: each pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
        half = self.width // 2
        halves, neighbours = (slice(half), slice(half, self.width)), (slice(0, self.width, 2), slice(1, self.width, 2))
        first, second = neighbours if self.interleaved else halves
        angles = positions[:, None, :, None] * self.frequencies[first]
        result = x.astype(np.float64)
        a, b = result[..., first].copy(), result[..., second].copy()
        result[..., first] = a * np.cos(angles) - b * np.sin(angles)
        result[..., second] = b * np.cos(angles) + a * np.sin(angles)
        return result
