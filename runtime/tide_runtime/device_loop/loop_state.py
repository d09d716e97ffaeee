"""What a decode loop on the device knows of its batch_size: where each stands, when it ends, what it has said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from tide_runtime.backends.device.arena import Arena, TransferBlock
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.program import Condition
from tide_runtime.device_loop.token_ring import TokenRing

MOST_EOS = 8  # ids that end a row; more are for the host to see
RUNNING, IDLE = 0, 1  # of ``finished``: see csrc/draft_verify.cuh
_NO_ID = -1  # no token


class LoopState:
    """Fixed slots for ``batch_size`` batch_size, which may leave at ``exits`` places, numbered from 1.

    ``pointers``: device addresses by name. The host sends those of ``_SENT`` before a launch, kernels change them after:

        length [B] int64       tokens in the caches = place of the next one
        last_token [B] int64   the one behind them
        limit [B] int64        most tokens of prompt and output
        finished [B] uint8     0 while the row runs
        eos [8] int64          ids that end a row, then -1
        turns_left scalar int32
        waiting [exits, B] int32   tokens that have come to an exit and wait there for the layers behind it

    On the device alone, of one turn: chosen, tokens [B] int64, emitted [B] int32, running scalar int32, deeper [exits] int32,
    exits [B] uint8: number of the exit that the token left at, or 0.
    """

    def __init__(self, device: Device, batch_size: int, turns: int, exits: int = 0) -> None:
        self.device, self.batch_size, self.turns, self.exits = device, batch_size, turns, exits
        sent: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "length": ((batch_size,), np.int64),
            "last_token": ((batch_size,), np.int64),
            "limit": ((batch_size,), np.int64),
            "eos": ((MOST_EOS,), np.int64),
            "turns_left": ((1,), np.int32),
            "waiting": ((exits, batch_size), np.int32),
            "finished": ((batch_size,), np.uint8),
        }
        kept: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "tokens": ((batch_size,), np.int64),
            "chosen": ((batch_size,), np.int64),
            "accepted": ((batch_size,), np.int32),
            "emitted": ((batch_size,), np.int32),
            "draft_count": ((batch_size,), np.int32),
            "running": ((1,), np.int32),
            "proceed": ((1,), np.int32),
            "deeper": ((exits,), np.int32),
            "exits": ((batch_size,), np.uint8),
        }
        self._block = TransferBlock(device, sent)
        self._arena = Arena(device, {name: prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in kept.items()})
        self.pointers = self._block.pointers | self._arena.pointers
        self.ring = TokenRing(device, 2 * turns, batch_size, exits)
        self.proceed = Condition(self.pointers["proceed"], default=1)
        self.deeper = [Condition(self.pointers["deeper"] + np.dtype(np.int32).itemsize * i, default=0) for i in range(exits)]

    def send(self, lengths: Sequence[int], tokens: Sequence[int], limits: Sequence[int], eos: Iterable[int]) -> None:
        """Start the first batch_size where the host has them; the others stay idle."""
        self._block.wait_until_writable()
        host, count = self._block.host, len(lengths)
        for name, values in (("length", lengths), ("last_token", tokens), ("limit", limits)):
            host[name][:] = 0
            host[name][:count] = values
        host["finished"][:], host["finished"][:count] = IDLE, RUNNING
        host["waiting"][:] = 0
        ids = sorted(eos)
        host["eos"][:] = [*ids, *[_NO_ID] * (MOST_EOS - len(ids))]
        host["turns_left"][0] = self.turns
        self._block.send()
