"""``exact``: early exits are drafts, which the deep pass of a later token verifies. The output is `full`'s.

A cycle: while the router is confident, a row's last token is run to a checkpoint only, and the exit head's token is taken
as a draft; then the rest of the layers is run once for all that waits, and the drafts are held against the model's own
logits (self-speculative decoding: LayerSkip, Elhoushi et al. 2024; Kangaroo, Liu et al. 2024). Where the text repeats,
drafts are copied from it instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import Slots
from tide_runtime.draft_control import DraftControl, copy_lengths
from tide_runtime.executor import Executor, Guess
from tide_runtime.manifest import Manifest
from tide_runtime.policies.full import FullDepth
from tide_runtime.policies.options import DepthOptions
from tide_runtime.row import Row
from tide_runtime.step_costs import StepCosts
from tide_runtime.trial import BENEFIT_OF_DOUBT, Trial
from tide_runtime.verification import Draft, verify

_DEFAULT_LIMIT, _COPY_LIMIT = 8, 12  # drafts with exits, without a calibration; copies cost no draft, so they go further


class ExactDepth:
    """Drafts with exits and n-grams, verifies with the rest of the model."""

    name = "exact"

    def __init__(self, manifest: Manifest, prefill_chunk: int, options: DepthOptions) -> None:
        self.executor, self.costs = Executor(manifest), StepCosts(manifest)
        self.num_layers = manifest.model.num_layers
        self.full, self.max_wait_steps = FullDepth(manifest, prefill_chunk), options.max_wait_steps
        calibration = manifest.calibration
        wanted = options.draft_limit or (calibration.draft_limit if calibration is not None else 0)
        self.limit = wanted or _DEFAULT_LIMIT
        self.copy_limit = options.draft_limit or _COPY_LIMIT
        self.copies = options.draft in ("ngram", "both")
        self.exits = self.executor.exits if options.draft in ("router", "both") else []
        predicted = calibration.predicted.get("exact", 0.0) if calibration is not None else 0.0
        self.expected = max(BENEFIT_OF_DOUBT, predicted) if self.exits else 1.0

    def prefill(self, slots: Slots, row: Row) -> int:
        token = self.full.prefill(slots, row)
        row.frontier = self.executor.frontier(slots, row, room=max(self.limit, self.copy_limit) + 1)
        row.control = DraftControl(Trial(self.expected))
        return token

    def decode(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        everyone = range(len(rows))
        drafts = self._copy(rows)
        asks = self._draft_with_exits(slots, rows, drafts)
        if not any(drafts) and not any(map(any, asks)):
            return self._plain(slots, rows)
        deep = self.executor.advance(slots, rows, everyone, 0, self.executor.depth, [len(made) + 1 for made in drafts])
        return [
            self._settle(len(rows), row, made, asked, *verify(row, made, logits))
            for row, made, asked, logits in zip(rows, drafts, asks, deep, strict=True)
        ]

    def _plain(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        """Nobody drafts: a step of `full`."""
        chosen = self.full.decode(slots, rows)
        for row, tokens in zip(rows, chosen, strict=True):
            row.frontier.reset(row.length)
            row.depth.record([], [], 0, self.num_layers)
            row.control.learn(tokens)
            row.control.exits.rest(1)
        return chosen

    def _copy(self, rows: Sequence[Row]) -> list[list[Draft]]:
        """Drafts from the text so far, placed behind the rows' ends, where they are likely enough to pay."""
        if not self.copies:
            return [[] for _ in rows]
        for row in rows:
            room = min(self.copy_limit, self._room(row))
            row.control.guess = row.control.ngram.draft(row.tokens, row.end, room)
        lengths = copy_lengths([row.control for row in rows], self.costs.full)
        return [self._place_copy(row, row.control.guess[:length]) for row, length in zip(rows, lengths, strict=True)]

    @staticmethod
    def _place_copy(row: Row, guess: NDArray[np.int64]) -> list[Draft]:
        row.drafted = len(guess)
        row.tokens[row.end : row.end + len(guess)] = guess
        return [Draft(int(token), "ngram", 0) for token in guess]

    def _draft_with_exits(self, slots: Slots, rows: Sequence[Row], drafts: list[list[Draft]]) -> list[list[int]]:
        """Draft with exit heads in every row that has no copied drafts; returns how often each row asked each exit."""
        asks = [[0] * len(self.exits) for _ in rows]
        drafting = [i for i, row in enumerate(rows) if self.exits and not drafts[i] and row.control.exits.resting == 0]
        drafting = [i for i in drafting if self._room(rows[i]) > 0]
        if 2 * len(drafting) < len(rows):
            return asks  # a launch costs nearly as much for a few rows as for all
        started, held = len(drafting), 0
        while drafting:
            drafting = self._draft_once(slots, rows, drafting, drafts, asks)
            # Rows that stopped wait for the others only while most go on, and not for long.
            held += len(drafting) < started
            if 2 * len(drafting) < started or held > self.max_wait_steps:
                break
            drafting = [i for i in drafting if len(drafts[i]) < self.limit and self._room(rows[i]) > 0]
        return asks

    def _draft_once(
        self, slots: Slots, rows: Sequence[Row], drafting: list[int], drafts: list[list[Draft]], asks: list[list[int]]
    ) -> list[int]:
        """One more token for each row: to the first exit, and on to the next where it is not sure. Returns the rows that were."""
        sure: list[int] = []
        unsure, first = drafting, 0
        for number, exit in enumerate(self.exits):
            self.executor.advance(slots, rows, unsure, first, exit.boundary)
            guesses = self.executor.ask(slots, rows, unsure, exit, exit.info.exact_threshold)
            for i, guess in zip(unsure, guesses, strict=True):
                asks[i][number] += 1
                if guess.score >= exit.info.exact_threshold and guess.logits is not None:
                    drafts[i].append(_draft(rows[i], guess, exit.info.checkpoint))
                    sure.append(i)
            unsure, first = [i for i in unsure if i not in sure], exit.boundary
            if not unsure:
                break
        return sorted(sure)

    def _settle(self, rows: int, row: Row, drafts: list[Draft], asks: list[int], tokens: list[int], accepted: int) -> list[int]:
        """Roll a row, of ``rows``, back to what was accepted and learn from it."""
        row.drafted = 0
        row.length = row.end + accepted
        row.frontier.roll_back(row.length)
        row.depth.record([d.source for d in drafts], [d.depth for d in drafts], accepted, self.num_layers)
        row.control.learn(tokens)
        if any(asks):
            cost = self._cycle_cost(rows, asks, len(drafts) + 1)
            row.control.exits.saw(len(tokens), cost / self.costs.full(rows, rows))
        else:
            row.control.exits.rest(len(tokens))
        return tokens

    def _cycle_cost(self, rows: int, asks: list[int], waiting: int) -> float:
        """Asking exits one token at a time, then the rest of the layers for all that waits, as if all rows did the same."""
        tokens, begin = rows * waiting, self.exits[0].boundary
        deep = self.costs.step(rows, tokens)
        rest = self.costs.segments(rows, tokens, begin, self.executor.depth) + deep.logits_ms + deep.host_ms
        unasked = (waiting - asks[0]) * self.costs.segments(rows, rows, 0, begin)  # a last draft, on its way to the first exit
        return self.costs.asking(rows, self.exits, asks) + unasked + rest

    @staticmethod
    def _room(row: Row) -> int:
        """Drafts that still fit before the output, or the cache, is full: the last token is the model's own."""
        return len(row.tokens) - row.known - 1


def _draft(row: Row, guess: Guess, depth: int) -> Draft:
    """Take the exit head's choice as a draft, placed behind the row's known tokens."""
    assert guess.logits is not None
    proposal = None
    if row.params.greedy:
        token = row.pick(guess.logits, guess.token, row.known)
    else:
        proposal = row.sampler.distribution(np.asarray(guess.logits, np.float32), row.tokens[: row.known])
        token = row.sampler.draw(proposal)
    row.tokens[row.known] = token
    row.drafted += 1
    return Draft(token, "router", depth, proposal)
