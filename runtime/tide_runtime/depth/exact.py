"""``exact``: early exits are drafts, which the deep pass of a later token verifies. The output is `full`'s.

A cycle: while the router is confident, a row's last token is run to a checkpoint only, and the exit head's token is taken
as a draft; then the rest of the layers is run once for all that waits, and the drafts are held against the model's own
logits (self-speculative decoding: LayerSkip, Elhoushi et al. 2024; Kangaroo, Liu et al. 2024). Where the text repeats,
drafts are copied from it instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from time import perf_counter

import numpy as np

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.costs.batch_speedup import ExitGate
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.executor import Executor, Guess
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.requirements import refuse_depth_budget
from tide_runtime.drafting.backoff import BENEFIT_OF_DOUBT, Trial
from tide_runtime.drafting.draft_length import DraftControl, copy_lengths, early_trials, next_reach
from tide_runtime.drafting.rejection_sampler import Draft, verify
from tide_runtime.drafting.row_worth import row_worth
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence, note_exit_time

_DEFAULT_LIMIT, _COPY_LIMIT = 8, 12  # drafts with exits, without a calibration; copies cost no draft, so they go further
_MOST_EXPECTED = 1.3  # gain of exits' drafts at first; a text may be unlike the calibration's, and more would hide it longer


class ExactDepth:
    """Drafts with exits and n-grams, verifies with the rest of the model."""

    name = "exact"

    def __init__(self, manifest: Manifest, prefill_chunk: int, options: DepthOptions) -> None:
        self.executor, self.costs = Executor(manifest), CostModel(manifest)
        self.num_layers = manifest.model.num_layers
        self.full, self.max_wait_steps = FullDepth(manifest, prefill_chunk), options.max_wait_steps
        calibration = manifest.calibration
        wanted = options.draft_limit or (calibration.draft_limit if calibration is not None else 0)
        self.limit = wanted or _DEFAULT_LIMIT
        self.copy_limit = options.draft_limit or _COPY_LIMIT
        self.copies = options.draft in ("ngram", "both")
        self.exits = self.executor.exits if options.draft in ("router", "both") else []
        # [e]: what asking exit e takes, asking the next one instead being 1; the last one has none
        self.asking_share = [
            self.costs.asking(1, e.boundary, e) / self.costs.asking(1, e.boundary, n) for e, n in pairwise(self.exits)
        ]
        self.asking_share.append(0.0)
        predicted = calibration.predicted if calibration is not None else {}
        self.expected = min(_MOST_EXPECTED, predicted.get("exact:router", BENEFIT_OF_DOUBT)) if self.exits else 1.0
        shares = calibration.exit_depths if calibration is not None else {}
        known = {int(layers): share for layers, share in shares.items()}
        unmeasured = calibration is None or calibration.costs is None
        self.gate = ExitGate(self.costs, self.exits, known, False, predicted.get("exact:router"), unknown=unmeasured)

    def check_params(self, params: GenerationParams) -> None:
        refuse_depth_budget(self.name, params)

    def why_on_host(self, pads_sequences: bool) -> str | None:
        return "policy exact decides on the host"

    def for_device_loop(self) -> list[tuple[Exit, float]]:
        raise NotImplementedError

    def prefill(self, context: ExecutionContext, row: TokenSequence) -> int:
        token = self.full.prefill(context, row)
        row.frontier = self.executor.frontier(context, row, room=max(self.limit, self.copy_limit) + 1)
        row.control = DraftControl(self.trial_of(row), early=early_trials(len(self.exits)))
        return token

    def trial_of(self, row: TokenSequence) -> Trial:
        """Of exits, at first. The calibration foretells greedy decoding; of what is drawn at random fewer drafts are right."""
        expected = self.expected if row.params.greedy else min(self.expected, BENEFIT_OF_DOUBT)
        return Trial(expected)

    def decode(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        began = perf_counter()
        drafts = self._copy(rows) if self._guess(rows) else [[] for _ in rows]
        asking = self._asking(rows, drafts)
        if not asking and not any(drafts):
            return self._plain(context, rows)
        for row in rows:
            row.frontier.reset(row.num_cached_tokens)  # plain steps leave it where it was
        asked_ms = self._draft_with_exits(context, rows, asking, drafts)
        note_exit_time(rows, began)
        fresh = [row.num_tokens_with_drafts - row.frontier.done[0] for row in rows]
        waiting = [len(made) + 1 for made in drafts]
        deep = self.executor.advance(context, rows, range(len(rows)), 0, self.executor.depth, waiting)
        tokens = [self._settle(row, made, *verify(row, made, given)) for row, made, given in zip(rows, drafts, deep, strict=True)]
        drawn = [_draws(made, new) for row, made, new in zip(rows, drafts, tokens, strict=True) if not row.params.greedy]
        cost = self._cycle_cost(asked_ms, fresh, waiting, drawn) if asking else 0.0
        for i, row in enumerate(rows):
            if i in asking:
                row.control.reach = next_reach(row.control.reach, len(drafts[i]), len(tokens[i]) - 1)
                row.control.exits.saw(len(tokens[i]), cost)
            else:
                row.control.exits.rest(len(tokens[i]))
        return tokens

    def _may_ask(self, rows: Sequence[TokenSequence]) -> bool:
        return bool(self.exits) and self.gate.opens(rows[0].batch_size, rows[0].params.greedy)

    def _plain(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        """Nobody drafts, as at most tokens of most texts: a step of `full`, with little around it."""
        chosen = self.full.decode(context, rows)
        for row, tokens in zip(rows, chosen, strict=True):
            row.depth.record_plain(self.num_layers)
            if row.control.guess:
                row.control.learn(tokens)
            if self.exits:
                row.control.exits.rest(1)
        return chosen

    def _guess(self, rows: Sequence[TokenSequence]) -> bool:
        """Note how each text may go on by what it said before; whether any may."""
        if not self.copies:
            return False
        for row in rows:
            row.control.guess = row.control.ngram.draft(row.tokens, row.num_tokens, min(self.copy_limit, self._room(row)))
        return any(row.control.guess for row in rows)

    def _copy(self, rows: Sequence[TokenSequence]) -> list[list[Draft]]:
        """Drafts from the guesses, placed behind the rows' ends, where they are likely enough to pay."""
        controls = [row.control for row in rows]
        gain = fmean(control.exits.gain for control in controls) if self._may_ask(rows) else 1.0
        lengths = copy_lengths(controls, self.costs.full, gain, self._worth(rows))
        return [self._place_copy(row, row.control.guess[:n]) if n else [] for row, n in zip(rows, lengths, strict=True)]

    def _worth(self, rows: Sequence[TokenSequence]) -> list[float] | None:
        """What a token is worth in each row; None: the same in all."""
        if len(rows) == 1 or rows[0].others_wait:
            return None
        return row_worth([len(row.tokens) - row.num_tokens for row in rows], self.costs.plain)

    @staticmethod
    def _place_copy(row: TokenSequence, guess: list[int]) -> list[Draft]:
        row.drafted = len(guess)
        row.tokens[row.num_tokens : row.num_tokens + len(guess)] = guess
        return [Draft(token, "ngram", 0) for token in guess]

    def _asking(self, rows: Sequence[TokenSequence], drafts: Sequence[list[Draft]]) -> list[int]:
        """The rows whose exits are to be asked: those without copied drafts whose trial goes on, where most rows are."""
        if not self._may_ask(rows):
            return []
        asking = [i for i, row in enumerate(rows) if not drafts[i] and row.control.exits.asks and self._room(row) > 0]
        return asking if 2 * len(asking) >= len(rows) else []  # a launch costs nearly as much for a few rows as for all

    def _draft_with_exits(
        self, context: ExecutionContext, rows: Sequence[TokenSequence], asking: Sequence[int], drafts: list[list[Draft]]
    ) -> float:
        """Draft with exit heads in the rows at ``asking``; returns the modelled ms that it took."""
        drafting, started, held, spent = list(asking), len(asking), 0, 0.0
        while drafting:
            drafting, cost = self._draft_once(context, rows, drafting, drafts)
            spent += cost
            # Rows that stopped wait for the others only while most go on, and not for long.
            held += len(drafting) < started
            if 2 * len(drafting) < started or held > self.max_wait_steps:
                break
            drafting = [i for i in drafting if self._may_go_on(rows[i], len(drafts[i]))]
        return spent

    def _may_go_on(self, row: TokenSequence, drafted: int) -> bool:
        return drafted < min(self.limit, row.control.reach) and self._room(row) > 0

    def _draft_once(
        self, context: ExecutionContext, rows: Sequence[TokenSequence], drafting: list[int], drafts: list[list[Draft]]
    ) -> tuple[list[int], float]:
        """One more token for each row: to the first exit, and on to the next where it is not sure, or better not asked.

        Returns the rows that were sure of one, and the modelled ms.
        """
        sure: list[int] = []
        unsure, run, priced, spent = drafting, 0, 0, 0.0  # run, priced: boundaries up to which the rest was
        for number, exit in enumerate(self.exits):
            self.executor.advance(context, rows, unsure, run, exit.boundary)
            run, asked = exit.boundary, [i for i in unsure if not rows[i].control.passes_by(number)]
            if not asked:
                continue
            guesses = self.executor.ask(context, rows, asked, exit, [exit.info.exact_threshold] * len(asked))
            spent += self.costs.asking(len(asked), priced, exit, any(guess.logits is not None for guess in guesses))
            priced = run
            for i, guess in zip(asked, guesses, strict=True):
                if guess.score >= exit.info.exact_threshold and guess.logits is not None:
                    drafts[i].append(_draft(rows[i], guess, exit.layers, number))
                    sure.append(i)
                else:
                    rows[i].control.saw(number, 1, 1 + self.asking_share[number])
            unsure = [i for i in unsure if i not in sure]
            if not unsure:
                break
        return sorted(sure), spent

    def _settle(self, row: TokenSequence, drafts: list[Draft], tokens: list[int], accepted: int) -> list[int]:
        """Roll a row back to what was accepted and learn from it."""
        row.drafted = 0
        row.num_cached_tokens = row.num_tokens + accepted
        row.frontier.roll_back(row.num_cached_tokens)
        row.depth.record([d.source for d in drafts], [d.depth for d in drafts], accepted, self.num_layers)
        for i, draft in enumerate(
            drafts[: accepted + 1] if row.control.early else ()
        ):  # nobody knows of those behind a wrong one
            if draft.exit is not None:
                row.control.saw(draft.exit, i < accepted, self.asking_share[draft.exit])
        row.control.learn(tokens)
        return tokens

    def _cycle_cost(self, asked_ms: float, fresh: list[int], waiting: list[int], drawn: list[int]) -> float:
        """Of a cycle, plain decoding of one step being 1: asking exits, then the rest of the layers for all that waits.

        ``fresh``: each row's tokens that no exit was asked about, such as its last draft; ``waiting``: all of its tokens;
        ``drawn``: drafts and tokens of those rows that draw them at random, where plain decoding draws one.
        """
        rows, begin, depth = len(waiting), self.exits[0].boundary, self.executor.depth
        deep = self.costs.step(rows, sum(waiting), max(waiting))
        ms = asked_ms + deep.logits_ms + deep.host_ms + deep.deep_extra_ms
        ms += self.costs.segments(rows, sum(waiting), begin, depth, max(waiting))
        if any(fresh):
            ms += self.costs.segments(rows, sum(fresh), 0, begin, max(fresh))
        plain = self.costs.full(rows, rows, 1)
        return (ms + sum(drawn) * self.costs.draw_ms) / (plain + len(drawn) * self.costs.draw_ms)

    @staticmethod
    def _room(row: TokenSequence) -> int:
        """Drafts that still fit before the output, or the cache, is full: the last token is the model's own."""
        return len(row.tokens) - row.num_tokens_with_drafts - 1


def _draws(drafts: Sequence[Draft], tokens: Sequence[int]) -> int:
    """How often a row drew at random: drafts of exits, but not copies, and the tokens that came of them."""
    return sum(draft.proposal is not None for draft in drafts) + len(tokens)


def _draft(row: TokenSequence, guess: Guess, depth: int, exit: int) -> Draft:
    """Take the exit head's choice as a draft, placed behind the row's known tokens."""
    assert guess.logits is not None
    proposal = None
    if row.params.greedy:
        token = row.pick(guess.logits, guess.token, row.num_tokens_with_drafts)
    else:
        proposal = row.sampler.distribution(np.asarray(guess.logits, np.float32), row.tokens[: row.num_tokens_with_drafts])
        token = row.sampler.draw(proposal)
    row.tokens[row.num_tokens_with_drafts] = token
    row.drafted += 1
    return Draft(token, "router", depth, proposal, exit)
