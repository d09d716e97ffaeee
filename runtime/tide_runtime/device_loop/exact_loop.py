"""Loop on the device that verifies drafts copied from each sequence's text: a launch runs several passes without the host.

    while a sequence is running, has room, and turns are left:
        text_drafts                       drafts of every sequence, S = 1, 2, 4, 8 or 16 tokens of each for the next pass
        all segments over [B, S]          whose head gives the model's token after each
        choose_token                      the token that a sampled request draws there; its noise depends on the position alone
        text_accept                       drafts that the model chooses too, and one token of its own

The tokens are those of `full` where a token's logits do not depend on what shares its launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tide_runtime.backends.device.control_flow import Launch, Node, Run, Switch, While
from tide_runtime.backends.device.device_step import DeviceContext
from tide_runtime.backends.step_arrays import MAX_PADDED_TOKENS, PADDED_TOKENS
from tide_runtime.depth.policy import TextDrafts
from tide_runtime.device_loop.loop_kernels import LoopKernels
from tide_runtime.device_loop.loop_state import LoopState
from tide_runtime.device_loop.padded_steps import PaddedSteps, choice_of, runs_of
from tide_runtime.device_loop.text_state import RING_ENTRY, TextState
from tide_runtime.device_loop.token_ring import NO_TOKEN
from tide_runtime.sequence import TokenSequence

MAX_LAUNCH_TOKENS = 128  # tokens that one launch generates for a sequence at most
_INPUTS = ("input_ids", "position_ids", "write_index", "seqlens_k")


class ExactLoop:
    """The loop over batch indices 0 … ``batch_size`` - 1 of ``context``, for the slots that its caches have when it is made.

    The first launch runs every graph of the loop, so that a capture after it meets no lazy initialization.

    Args:
        turns: most passes of a launch.
        samples: sequences need not be greedy.
    """

    def __init__(
        self, context: DeviceContext, batch_size: int, kernels: LoopKernels, turns: int, drafts: TextDrafts, samples: bool = False
    ) -> None:
        device = context.backend.device
        sizes = [n for n in PADDED_TOKENS if n == 1 or self._fits(context, batch_size, n)]
        self.context = context
        self.batch_size = batch_size
        self._is_warm = False
        self.state = LoopState(device, batch_size, turns, ring_entry=RING_ENTRY)
        self.texts = TextState(device, batch_size, context.caches.limit, drafts, len(sizes))
        self._steps = PaddedSteps(context, batch_size, sizes, _INPUTS, context.buffers, all_logits=True)
        self._segments = [segment.name for segment in context.backend.manifest.segments]
        propose = kernels.text_drafts(self.state, self.texts, self._steps.inputs, context.caches.slots)
        chosen = self._steps.widest.address("token")  # [B, S] int64 in every step
        accept = kernels.text_accept(self.state, self.texts, chosen)
        last = self._segments[-1]
        choices = [[choice_of(kernels, self.state, step, last)] if samples else [] for step in self._steps.steps]
        bodies = tuple((*runs_of(step, self._segments), *choice) for step, choice in zip(self._steps.steps, choices, strict=True))
        turn = (Run("text_drafts", propose), Switch(self.texts.choice, bodies), Run("text_accept", accept))
        self.program: tuple[Node, ...] = (While(self.state.proceed, turn),)

    @staticmethod
    def _fits(context: DeviceContext, batch_size: int, tokens: int) -> bool:
        return batch_size * tokens <= MAX_PADDED_TOKENS and context.backend.takes(batch_size, tokens)

    def launch(self, run: Launch, sequences: Sequence[TokenSequence], eos: Iterable[int]) -> list[list[int]]:
        """Launch the program for ``sequences``, at the first batch indices, which end at ids of ``eos``.

        Returns the new tokens of each.
        """
        cached = [sequence.num_cached_tokens for sequence in sequences]
        self.context.backend.device.use()
        if not self._is_warm:
            self._steps.warm_up(self._segments, [*cached, *[0] * (self.batch_size - len(cached))])
        slots = self.context.caches.slots
        self.texts.send(sequences, [min(slots, count + MAX_LAUNCH_TOKENS) for count in cached])
        turns = self.state.launch(run, sequences, eos, self.state.turns)
        for name in self._segments:
            self.context.count(name, len(turns))
        self._is_warm = True
        return [self._take(row, sequence, turns) for row, sequence in enumerate(sequences)]

    def _take(self, row: int, sequence: TokenSequence, turns: Sequence[Sequence[int]]) -> list[int]:
        """The sequence's tokens in the ``turns`` of the ring, whose drafts are noted."""
        found = list[int]()
        layers = self.context.backend.manifest.model.num_layers
        for verified, *values in (turn[row * RING_ENTRY : (row + 1) * RING_ENTRY] for turn in turns):
            if tokens := [token for token in values if token != NO_TOKEN]:
                sequence.depth.record(["ngram"] * verified, [0] * verified, len(tokens) - 1, layers)
                found += tokens
        self.texts.take(row, sequence, len(found))
        return found
