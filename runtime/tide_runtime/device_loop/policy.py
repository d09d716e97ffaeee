"""A depth policy whose greedy steps run on the device, several tokens a launch; everything else it leaves to the host.

What needs the host after every token: sampling, penalties, log-probabilities, stop strings, depth budgets.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.device.device_step import DeviceContext
from tide_runtime.backends.device.program import Node
from tide_runtime.depth.policy import LoadedPolicy
from tide_runtime.device_loop.decode_loop import DecodeLoop, LoopExit
from tide_runtime.device_loop.loop_kernels import LoopKernels
from tide_runtime.device_loop.loop_state import MOST_EOS
from tide_runtime.device_loop.token_ring import NO_TOKEN, exit_and_token
from tide_runtime.errors import DeviceMemoryError, TargetError, TideError
from tide_runtime.sequence import TokenSequence

Compile = Callable[[Sequence[Node]], Callable[[], None]]


@dataclass
class Drivers:
    """Who runs a loop's program.

    Args:
        warm: its first launch, from the host: what libraries load and allocate late is there when it is captured.
        compile: later launches; None: ``warm`` runs them all.
        refused: why ``compile`` could not, once it has been tried.
    """

    warm: Compile
    compile: Compile | None
    refused: str | None = None

    def compiled(self, program: Sequence[Node]) -> Callable[[], None]:
        if self.compile is not None:
            try:
                return self.compile(program)
            except TargetError as error:
                self.compile, self.refused = None, announced(error)
        return self.warm(program)


def announced(error: TideError) -> str:
    """The reason, for later; said once here, as a silent fallback looks like a slow GPU."""
    warnings.warn(f"{error}; decoding is driven from the host", RuntimeWarning, stacklevel=4)
    return str(error)


class DrivenDepth:
    """``inner``, with loops of ``turns`` tokens a launch. ``exits``, ``window``: as of `DecodeLoop`."""

    def __init__(
        self,
        inner: LoadedPolicy,
        kernels: LoopKernels,
        turns: int,
        drivers: Drivers,
        exits: Sequence[LoopExit] = (),
        window: int = 1,
    ) -> None:
        self.inner, self.name = inner, inner.name
        self.exits, self.drivers, self._kernels, self._turns, self._window = exits, drivers, kernels, turns, window
        self._without_loops: str | None = None

    @property
    def refused(self) -> str | None:
        """Why the host took over; None: it has not."""
        return self._without_loops or self.drivers.refused

    def prefill(self, context: ExecutionContext, row: TokenSequence) -> int:
        return self.inner.prefill(context, row)

    def decode(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        device_context = cast(DeviceContext, context)
        loop = self._loop(device_context, len(rows)) if self._can(device_context, rows) else None
        if loop is None:
            return self.inner.decode(context, rows)
        turns = loop.launch(rows)
        tokens = [self._take(device_context, row, [turn[i] for turn in turns]) for i, row in enumerate(rows)]
        # No row got any: their logits are no numbers, for which the host has an error.
        return tokens if any(tokens) else self.inner.decode(context, rows)

    def _can(self, context: DeviceContext, rows: Sequence[TokenSequence]) -> bool:
        if not all(_is_plain(row) and _eos(row) == _eos(rows[0]) for row in rows):
            return False
        if not self.exits:
            return True
        last = context.caches.limit - self._turns - self._window  # a window writes all of its slots
        return all(row.num_cached_tokens <= last and self.inner.can_loop(row) for row in rows)

    def _loop(self, context: DeviceContext, rows: int) -> _DrivenLoop | None:
        """For up to the next power of two of rows, so that few graphs are captured.

        None where its kernels cannot be built, then for all sizes, or where there is no memory for it beside these slots.
        """
        size = min(context.capacity, 1 << (rows - 1).bit_length())
        key = (self, size)
        if key not in context.attached and self._without_loops is None:
            try:
                with context.backend.device.lock:
                    loop = DecodeLoop(context, size, self._kernels, self._turns, self.exits, self._window)
            except DeviceMemoryError as error:
                context.attached[key] = None
                announced(error)
            except TideError as error:
                self._without_loops = announced(error)
            else:
                context.attached[key] = _DrivenLoop(loop, self.drivers)
        return context.attached.get(key)

    def _take(self, context: DeviceContext, row: TokenSequence, values: Iterable[int]) -> list[int]:
        """The row's new tokens, from what the ring holds of it."""
        said = [exit_and_token(value) for value in values if value != NO_TOKEN]
        row.num_cached_tokens += len(said)
        if self.exits:
            depths = [context.backend.manifest.model.num_layers, *(exit.depth for exit in self.exits)]
            self.inner.took_tokens(row, [depths[exit] for exit, _ in said])
        return [token for _, token in said]


@dataclass
class _DrivenLoop:
    """A loop, and what runs its program: what was compiled, once a launch has run every graph of it."""

    loop: DecodeLoop
    drivers: Drivers
    run: Callable[[], None] | None = None

    def launch(self, rows: Sequence[TokenSequence]) -> list[list[int]]:
        run = self.run or self.drivers.warm(self.loop.program)
        lengths, tokens = [row.num_cached_tokens for row in rows], [row.last_token for row in rows]
        turns = self.loop.launch(run, lengths, tokens, [len(row.tokens) for row in rows], _eos(rows[0]))
        if self.run is None and self.loop.is_warm:
            self.run = self.drivers.compiled(self.loop.program)
        return turns


def _is_plain(row: TokenSequence) -> bool:
    """Whether the device can choose the row's tokens and see its end."""
    params = row.params
    certain = params.takes_likeliest
    return certain and not params.logprobs and not params.stop and params.depth_budget is None and len(_eos(row)) <= MOST_EOS


def _eos(row: TokenSequence) -> frozenset[int]:
    return frozenset() if row.params.ignore_eos else row.eos
