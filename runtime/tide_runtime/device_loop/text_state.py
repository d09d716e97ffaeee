"""Texts of an exact loop's sequences on the device, with what copies of them are worth."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from tide_runtime.backends.device.arena import Arena, Layout, TransferBlock, layout_bytes
from tide_runtime.backends.device.control_flow import Condition
from tide_runtime.backends.device.device import Device
from tide_runtime.depth.policy import TextDrafts
from tide_runtime.sequence import TokenSequence

MAX_DRAFTS = 15  # draft tokens per sequence and turn; kMaxDrafts in csrc/text_drafts.h
RING_ENTRY = MAX_DRAFTS + 2  # ring values of a sequence and turn: drafts verified, tokens, then -1


class TextState:
    """``pointers``: device addresses by name, and ``tensors``: their shapes and types, of which kernels update

        text [B, room] int32        prompt and output
        hits, tries [B, C] int32    drafts that were right, and all, by class of matched tokens before them
        guess [B, 15] int32, guessed [B] int32, matched [B] int32    of the turn
        expected [B, N] float32, choice int32    what a pass of 2^i tokens promises, and the turn's i

    and the host sends bound [B] int64 (slots that a launch may fill), prices [N] float32 (of passes of 2^i tokens), least [C]
    int32 and prior [C] float32 (of the classes).

    Args:
        slots: of a row of the caches.
        sizes: N.
    """

    def __init__(self, device: Device, batch_size: int, slots: int, drafts: TextDrafts, sizes: int) -> None:
        self._device = device
        self.batch_size = batch_size
        self.drafts = drafts
        self.sizes = sizes
        self.classes, self.room = len(drafts.usual_rates), (slots + 1 + 3) // 4 * 4  # the last token is not cached
        state: Layout = {
            "text": ((batch_size, self.room), np.int32),
            "hits": ((batch_size, self.classes), np.int32),
            "tries": ((batch_size, self.classes), np.int32),
            "guess": ((batch_size, MAX_DRAFTS), np.int32),
            "guessed": ((batch_size,), np.int32),
            "matched": ((batch_size,), np.int32),
            "expected": ((batch_size, sizes), np.float32),
            "choice": ((1,), np.int32),
        }
        sent: Layout = {
            "bound": ((batch_size,), np.int64),
            "prices": ((sizes,), np.float32),
            "least": ((self.classes,), np.int32),
            "prior": ((self.classes,), np.float32),
        }
        self.tensors = state | sent
        self._arena = Arena(device, layout_bytes(state))
        self._block = TransferBlock(device, sent)
        self.pointers = self._block.pointers | self._arena.pointers
        self.choice = Condition(self.pointers["choice"], default=0)
        self._uploaded: list[tuple[weakref.ref[TokenSequence], int] | None] = [None] * batch_size

    def send(self, sequences: Sequence[TokenSequence], bounds: Sequence[int]) -> None:
        """Bring the texts of the sequences at the first batch indices up to date, and send the rest."""
        for row, sequence in enumerate(sequences):
            self._follow(row, sequence)
        self._block.wait_until_writable()
        host = self._block.host
        host["bound"][: len(bounds)] = bounds
        host["prices"][:] = [self.drafts.pass_ms(self.batch_size, 1 << power) for power in range(self.sizes)]
        host["least"][:] = [least for least, _ in self.drafts.usual_rates]
        host["prior"][:] = [self.drafts.weight * rate for _, rate in self.drafts.usual_rates]
        self._block.send()

    def take(self, row: int, sequence: TokenSequence, count: int) -> None:
        """The device has appended ``count`` tokens to the sequence."""
        self._uploaded[row] = (weakref.ref(sequence), sequence.num_tokens + count)

    def _follow(self, row: int, sequence: TokenSequence) -> None:
        known = self._uploaded[row]
        if known is not None and known[0]() is sequence and known[1] == sequence.num_tokens:
            return
        text = sequence.tokens[: sequence.num_tokens].astype(np.int32)
        self._device.upload_copy(self.pointers["text"] + 4 * row * self.room, text)
        if known is None or known[0]() is not sequence:
            for name in ("hits", "tries"):
                self._device.zero(self.pointers[name] + 4 * row * self.classes, 4 * self.classes)
