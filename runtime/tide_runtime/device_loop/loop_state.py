"""Device state of a decode loop's sequences: progress, end conditions and generated tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tide_runtime.backends.device.arena import Arena, Layout, TransferBlock, layout_bytes
from tide_runtime.backends.device.control_flow import Condition, Launch
from tide_runtime.backends.device.device import Device
from tide_runtime.device_loop.token_ring import TokenRing
from tide_runtime.sampler import Sampler
from tide_runtime.sampling_filters import TINY
from tide_runtime.sequence import TokenSequence

MAX_EOS = 8  # eos ids per sequence; a request with more is decoded by the host
RUNNING, IDLE = 0, 1  # values of ``finished``, see csrc/take_tokens.cuh
_NO_ID = -1  # padding of ``eos``


class LoopState:
    """State of ``batch_size`` sequences with ``exits`` early exits, numbered from 1. ``ring_entry``: ring values of a sequence
    and turn.

    ``pointers``: device addresses by name, and ``tensors``: their shapes and types. The host sends these before a
    launch; kernels update them:

        length [B] int64       cached tokens, which is the position of the next one
        last_token [B] int64   the newest token, not cached yet
        limit [B] int64        most tokens of prompt and output
        finished [B] uint8     0 while the sequence is running
        eos [8] int64          ids that end a sequence, padded with -1
        turns_left scalar int32
        waiting [exits, B] int32   pending tokens at each exit, which skipped the layers after it
        temperature, tail, min_p [B] float32, top_k [B] int32, key [B, 2] uint64
                               how tokens are drawn, see csrc/choose_token_params.h

    Set in every turn on the device: chosen [B] int64, emitted [B] int32, running scalar int32, deeper and wanted [exits] int32
    (whether the layers after an exit, and its head, run), choice [exits] int32 (these layers run for 2^choice tokens a sequence),
    exits [B] uint8: number of the exit that the token took, or 0; ring and counts: see `TokenRing`.
    """

    def __init__(self, device: Device, batch_size: int, turns: int, exits: int = 0, ring_entry: int = 1) -> None:
        self.device = device
        self.batch_size = batch_size
        self.turns = turns
        self.exits = exits
        sent: Layout = {
            "length": ((batch_size,), np.int64),
            "last_token": ((batch_size,), np.int64),
            "limit": ((batch_size,), np.int64),
            "eos": ((MAX_EOS,), np.int64),
            "turns_left": ((1,), np.int32),
            "waiting": ((exits, batch_size), np.int32),
            "key": ((batch_size, 2), np.uint64),
            **{name: ((batch_size,), np.float32) for name in ("temperature", "tail", "min_p")},
            "top_k": ((batch_size,), np.int32),
            "finished": ((batch_size,), np.uint8),
        }
        state: Layout = {
            "chosen": ((batch_size,), np.int64),
            "emitted": ((batch_size,), np.int32),
            "running": ((1,), np.int32),
            "proceed": ((1,), np.int32),
            "deeper": ((exits,), np.int32),
            "wanted": ((exits,), np.int32),
            "choice": ((exits,), np.int32),
            "exits": ((batch_size,), np.uint8),
        }
        self._block = TransferBlock(device, sent)
        self._arena = Arena(device, layout_bytes(state))
        self.ring = TokenRing(device, 2 * turns, batch_size * ring_entry, exits)
        rings: Layout = {
            "ring": (self.ring.entries.shape, np.int64),
            "counts": (self.ring.counts.shape, np.int64),
        }
        self.tensors = sent | state | rings
        self.pointers = self._block.pointers | self._arena.pointers | dict(zip(rings, self.ring.pointers, strict=True))
        self.proceed = Condition(self.pointers["proceed"], default=1)
        flag = np.dtype(np.int32).itemsize
        self.deeper, self.heads, self.choices = (
            [Condition(self.pointers[name] + flag * i, default=0) for i in range(exits)]
            for name in ("deeper", "wanted", "choice")
        )

    def launch(self, run: Launch, sequences: Sequence[TokenSequence], eos: Iterable[int], turns: int) -> list[list[int]]:
        """Run a loop's program for ``sequences``, at the first batch indices, which end at ids of ``eos``. Returns the ring's
        values of each of up to ``turns``."""
        cached = [sequence.num_cached_tokens for sequence in sequences]
        tokens = [sequence.last_token for sequence in sequences]
        limits = [len(sequence.tokens) for sequence in sequences]
        self.send(cached, tokens, limits, eos, [sequence.sampler for sequence in sequences])
        run(turns)
        self.ring.fetch()
        self.device.synchronize()
        return self.ring.take()

    def send(
        self,
        num_cached_tokens: Sequence[int],
        tokens: Sequence[int],
        limits: Sequence[int],
        eos: Iterable[int],
        samplers: Sequence[Sampler] = (),
    ) -> None:
        """Initialize the sequences at the first batch indices; the others are idle."""
        self._block.wait_until_writable()
        host = self._block.host
        count = len(num_cached_tokens)
        for name, values in (("length", num_cached_tokens), ("last_token", tokens), ("limit", limits)):
            host[name][:] = 0
            host[name][:count] = values
        host["finished"][:], host["finished"][:count] = IDLE, RUNNING
        host["waiting"][:] = 0
        ids = sorted(eos)
        host["eos"][:] = [*ids, *[_NO_ID] * (MAX_EOS - len(ids))]
        host["turns_left"][0] = self.turns
        for row, sampler in enumerate(samplers):
            params = sampler.params
            host["temperature"][row] = 0 if params.greedy else max(params.temperature, TINY)
            host["top_k"][row], host["key"][row] = min(params.top_k, sampler.vocab_size), sampler.key
            host["tail"][row], host["min_p"][row] = 1 - params.top_p, params.min_p
        self._block.send()
