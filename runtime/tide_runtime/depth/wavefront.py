"""``exact`` for looped models, loops as rows: tokens at different loops share a launch, as they use the same weights.

Each loop's output goes through the model's head and is a guess of the next token. The guessed token starts its first loop in
the launch in which the token before it runs a later one. Where a deeper loop guesses otherwise, what stands after it starts anew.
The last loop's token is the model's own, so the output is `full`'s, greedy or sampled: a guess is drawn with the noise of its
position (`Sampler`), as the last loop's token is. With right first guesses a token takes one launch of R rows instead of R
launches.

Copies from texts, and what a grammar forces, go on where the guesses on their way agree with them: several tokens then start
their first loop at once.

Which loop's choice is final is a method, so that tokens may stop earlier (see `exit_wavefront`). The loops behind it then wait
until an undecided token runs them, which takes along all that waits before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext, LoopContext
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import LOOP, Manifest
from tide_runtime.costs.cost_model import StepTable
from tide_runtime.depth.frontier import Frontier
from tide_runtime.depth.full import finish_chunks, run_full
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import PromptChunk, refuse_depth_budget
from tide_runtime.depth.speculation.drafter import Drafter
from tide_runtime.depth.speculation.grammar import GrammarDrafter, allowed
from tide_runtime.depth.speculation.record import NO_GUESS, SpeculativeSequence, TrackRecord
from tide_runtime.depth.speculation.successors import SuccessorDrafter
from tide_runtime.depth.speculation.text import TextDrafter
from tide_runtime.errors import GrammarError, NumericsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence

_SOURCE = "loop"  # name of these drafts' source in `DepthStats`


class Row(NamedTuple):
    """Tokens that run a loop: of the sequence at batch index b in the row with the ``number`` b · R + loop.

    Args:
        slot: the cache slot of the first one.
        inputs: what the loop begins with: ids [S] of the first loop's tokens, else states [S, H].
        num_logits: of how many of the last the logits are read.
    """

    number: int
    slot: int
    inputs: NDArray[np.generic]
    num_logits: int


class Ran(NamedTuple):
    """``states`` [S, H] of a row's tokens after the loop, ``logits`` [N, V] of the last ones and their argmaxes, until the next
    launch."""

    states: NDArray[np.generic]
    logits: NDArray[np.floating]
    tokens: list[int]


class Choice(NamedTuple):
    """What a token chooses finally, after ``loop`` loops of it: its successor's ``logits`` [V] and their argmax."""

    loop: int
    logits: NDArray[np.floating]
    argmax: int


class Guessed(NamedTuple):
    """A draft token that is not final yet.

    Args:
        source: what drafted it.
        loop: loops of the token before it that predicted it; 0: it was copied.
        chance: probability that the copy is accepted.
    """

    source: str
    loop: int
    chance: float = 0.0


@dataclass
class WavefrontSequence(SpeculativeSequence):
    """A sequence whose frontier counts loops.

    Args:
        settled: share of the late tokens whose final guess came after each loop, the latest counting most.
        guessed: the drafts, in their order.
        final_choices: position → the final choice there, which becomes output once all positions before it are final.
        refills: how often its row was computed anew when the frontier was set.
    """

    settled: list[float] = field(kw_only=True)
    guessed: list[Guessed] = field(default_factory=list)
    final_choices: dict[int, Choice] = field(default_factory=dict)
    refills: int = 0

    def guess_next(self, place: int, token: int, loop: int) -> bool:
        """``loop`` loops of the token before the text's ``place`` choose ``token`` there. Returns whether another was guessed, so
        that what stands from there on starts anew. A copy that is more often right than the loop stays."""
        known = self.num_tokens_with_drafts
        if place < known:
            if self.tokens[place] == token:
                return False
            likelier = self.guessed[place - self.sequence.num_tokens].chance > sum(self.settled[:loop])
            if likelier and place not in self.final_choices:
                return False
        elif self.room < 1:
            return False
        self.cut(place)
        self.add(token, Guessed(_SOURCE, loop))
        return place < known

    def add(self, token: int, guessed: Guessed) -> None:
        self.tokens[self.num_tokens_with_drafts] = token
        self.guessed.append(guessed)
        self.num_drafts += 1

    def copy(self, least: float, most: int) -> None:
        """Let the best copy go on behind the drafts on their way, if it begins with them, while its tokens are right with a
        chance of ``least``; ``most``: drafts in all."""
        copied, chances = self.record.best(self.guess, self.successor_guess)
        known = self.num_drafts
        if list(copied.tokens[:known]) != self.tokens[self.sequence.num_tokens : self.num_tokens_with_drafts].tolist():
            return
        given = before = chances[known - 1] if known else 1.0
        for token, chance in zip(copied.tokens[known:], chances[known:], strict=False):
            if chance < least * given or self.room < 1 or self.num_drafts >= most:
                return
            self.add(token, Guessed(copied.source, 0, chance / before))
            before = chance

    def confirm(self, count: int) -> None:
        """``count`` tokens become output: drafts that were right, and perhaps one that was none."""
        self.num_drafts = max(0, self.num_drafts - count)
        del self.guessed[:count]

    def learn(self, loop: int, after: int, rate: float) -> None:
        """A final guess came after ``loop`` loops, or sooner where nothing was guessed before ``after`` loops."""
        share = rate / sum(self.settled[:after]) if loop == after else 0.0
        self.settled = [(1 - rate + share * (n < after)) * old for n, old in enumerate(self.settled)]
        if loop != after:
            self.settled[loop - 1] += rate

    def cut(self, place: int) -> None:
        """Forget the drafts from ``place`` on."""
        self.num_drafts = place - self.sequence.num_tokens
        del self.guessed[self.num_drafts :]
        for late in [late for late in self.final_choices if late > place]:
            del self.final_choices[late]
        self.frontier.roll_back(place)

    def undecided(self, begin: int, end: int) -> int:
        """The first of the tokens at places ``begin`` … ``end - 1`` that has chosen nothing finally; ``end``: all have."""
        for place in range(max(begin, self.sequence.num_tokens - 1), end):
            if place + 1 not in self.final_choices:
                return place
        return end


class WavefrontDepth:
    """Runs rows of all loops at once; see the module.

    Args:
        costs: what launches of a loop take on this machine, by tokens of each sequence; None: a guess.
    """

    name = "exact"
    can_resume = True
    runs_every_layer = True
    uses_draft_head, loops_as_rows = False, True

    def __init__(self, manifest: Manifest, options: DepthOptions, costs: CostTable | None = None) -> None:
        self.loops = manifest.model.loops
        self.num_layers = manifest.model.num_layers
        self.tuning = options.tuning
        self._hidden_width = manifest.hidden_width
        limit = (options.draft_limit or self.tuning.text_draft_limit) if options.draft == "all" else 0
        self.text: list[Drafter] = []
        if limit:
            copies: list[Drafter] = [TextDrafter(limit), SuccessorDrafter(limit, self.tuning.successor_entries)]
            self.text = [*copies, GrammarDrafter(limit)]
        self.max_drafts = limit + self.loops
        self.lookahead = self.max_drafts + self.loops  # loops guess on until the first of the drafts is final
        self.stopping_loops: Collection[int] = {self.loops}  # after which a token's choice may be final
        self.max_waiting = self.lookahead  # in front of one loop
        self._costs = StepTable.of(costs, bool(manifest.weights))
        self.launch_ms = cache(self._launch_ms)  # each step asks for a few sizes

    def check_params(self, params: GenerationParams) -> None:
        refuse_depth_budget(self.name, params)

    def device_plan(self) -> str:
        return f"policy {self.name} decides on the host"

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        return sequence.num_cached_tokens

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        first = finish_chunks(prompts, run_full(context, [], prompts)[1])
        states = [self._state(context, sequence) for sequence in decoding]
        if not states:
            return first
        after = self.starts_after(states)
        self._copy(context, states)
        tokens = self._advance(cast(LoopContext, context), states, after)
        for state, new in zip(states, tokens, strict=True):
            if new:
                state.record.observe(state.guess, new)
                state.record.observe(state.successor_guess, new)
                if state.successors is not None:
                    state.successors.learn(state.tokens, state.sequence.num_tokens, new)
        return tokens + first

    def _state(self, context: ExecutionContext, sequence: TokenSequence) -> WavefrontSequence:
        state = cast("WavefrontSequence | None", sequence.policy_state)
        cached = sequence.num_cached_tokens
        if state is None:
            like = context.step(sequence.batch_index, [1]).hidden[0]
            frontier = Frontier(self.loops, self._hidden_width, self.max_waiting, like, cached)
            first = self.tuning.settled_after_first_loop
            settled = [first, *[(1 - first) / (self.loops - 1)] * (self.loops - 1)]
            state = self._start(sequence, frontier, settled)
            sequence.policy_state = state
        if state.refills != sequence.history.refills:
            state.refills = sequence.history.refills
            state.cut(sequence.num_tokens)
            state.frontier.reset(cached)
        return state

    def _start(self, sequence: TokenSequence, frontier: Frontier, settled: list[float]) -> WavefrontSequence:
        return WavefrontSequence(sequence, frontier, settled=settled, record=TrackRecord(self.tuning))

    def _copy(self, context: ExecutionContext, states: Sequence[WavefrontSequence]) -> None:
        """Put copies from texts behind what is on its way, where they are right often enough for the rows that they take."""
        for state in states:
            state.guess = state.successor_guess = NO_GUESS
        for drafter in self.text:
            drafter.draft(context, states)
        for state in states:
            if state.guess.tokens or state.successor_guess.tokens:
                state.guess, state.successor_guess = (allowed(state, one) for one in (state.guess, state.successor_guess))
                state.copy(self.min_chance(len(states)), self.max_drafts)

    def min_chance(self, size: int) -> float:
        """The chance from which on a copied token pays in one of ``size`` sequences: a row in the launch of each loop costs what
        a right token saves, a launch of one sequence."""
        few = self.loops
        many = 3 * self.loops
        launch, longer = (self.launch_ms(size, tokens) for tokens in (few, many))
        return (longer - launch) / launch * self.loops / (many - few)

    def _advance(self, context: LoopContext, states: Sequence[WavefrontSequence], after: int) -> list[list[int]]:
        """One launch: each token that waits runs its next loop. Returns the tokens that are final."""
        due = [self._due(state, after) for state in states]
        rows = [row for of_state in due for row in of_state]
        ran = self.launch(context, rows)
        scores = self._score(context, rows, ran)
        found = list[list[int]]()
        end = 0
        for state, own in zip(states, due, strict=True):
            begin = end
            end = end + len(own)
            found.append(self._take(state, own, ran[begin:end], scores[begin:end], after))
        return found

    def launch(self, context: LoopContext, rows: Sequence[Row]) -> list[Ran]:
        """Run the ``rows``, which rise, together, or each alone where the padding of a shared launch would overrun one."""
        first = rows[0].number
        span = rows[-1].number - rows[0].number + 1
        counts = [0] * span
        slots = [0] * span
        num_logits = [0] * span
        for number, slot, given, logits in rows:
            counts[number - first], slots[number - first], num_logits[number - first] = len(given), slot, logits
        if len(rows) > 1 and not context.loops_fit(counts, slots):
            return [
                Ran(states.copy(), logits.copy(), tokens)
                for row in rows
                for states, logits, tokens in self.launch(context, [row])
            ]
        step = context.loop_step(first, counts, num_logits)
        begin = 0
        for row in rows:
            end = begin + len(row.inputs)
            starts = row.number % self.loops == 0
            step.first_loop[begin:end] = starts
            (step.input_ids if starts else step.before_loop)[begin:end] = row.inputs
            begin = end
        step.place(slots)
        step.run(LOOP)
        tokens = step.token[: sum(num_logits)].tolist()
        ran = list[Ran]()
        begin = 0
        at = 0
        for row in rows:
            end, stop = begin + len(row.inputs), at + row.num_logits
            ran.append(Ran(step.after_loop[begin:end], step.logits[at:stop], tokens[at:stop]))
            begin, at = end, stop
        return ran

    def _due(self, state: WavefrontSequence, after: int) -> list[Row]:
        """The tokens that run now: of each loop all that wait, or none where all of them have chosen."""
        rows = list[Row]()
        base = state.sequence.batch_index * self.loops
        frontier = state.frontier
        arriving = 0
        for loop, done in enumerate(frontier.done):
            end = frontier.done[loop - 1] if loop else state.num_tokens_with_drafts
            first = state.undecided(done, end) if loop else done
            if first == end and end - done + arriving <= self.max_waiting:
                arriving = 0
                continue
            arriving = end - done
            given = frontier.states[loop][:arriving] if loop else state.tokens[done:end]
            reads = loop + 1 in self.stopping_loops or loop + 1 >= after
            rows.append(Row(base + loop, done, given, end - first if reads else 0))
        return rows

    def _score(self, context: LoopContext, rows: Sequence[Row], ran: Sequence[Ran]) -> list[list[float]]:
        """What routers say of each row's wanted tokens; 1 where there is none."""
        return [[1.0] * row.num_logits for row in rows]

    def _take(
        self, state: WavefrontSequence, rows: Sequence[Row], ran: Sequence[Ran], scores: Sequence[Sequence[float]], after: int
    ) -> list[int]:
        """Let a sequence's tokens arrive where its ``rows`` have taken them. Returns those that are final."""
        frontier = state.frontier
        new = list[int]()
        ways = [*zip(rows, ran, scores, strict=True)][::-1]  # the earliest tokens of the text stand at the deepest loop
        for row, after_loop, _ in ways:
            loop = row.number % self.loops
            if loop + 1 < self.loops:
                frontier.arrive(loop, loop + 1, after_loop.states)
            else:
                frontier.pass_through(loop, loop + 1, len(row.inputs))
        wrong = False
        for row, (_, logits, tokens), judged in ways:
            loop, place = row.number % self.loops, row.slot + len(row.inputs) - row.num_logits
            for n in range(row.num_logits):
                choice = Choice(loop + 1, logits[n], tokens[n])
                wrong = wrong or self._settle(state, place + n + 1, choice, judged[n], new, after)
        state.confirm(len(new))
        return new

    def _settle(self, state: WavefrontSequence, place: int, choice: Choice, score: float, new: list[int], after: int) -> bool:
        """The token before the text's ``place`` has run ``choice.loop`` loops; what it chooses finally is appended to ``new``.
        Returns whether what was drafted from ``place`` on is wrong, or behind the text's end."""
        next_place = state.sequence.num_tokens + len(new)
        if place < next_place or place in state.final_choices:  # it ran along with others
            return False
        final = self._is_final(state, place, choice, score)
        if not final or place > next_place:
            if final:
                state.final_choices[place] = choice._replace(logits=np.array(choice.logits))
            return (final or choice.loop >= after) and self._guess(state, place, choice)
        wrong = self._choose(state, place, choice, new, after)
        while not wrong and (known := state.final_choices.pop(place := place + 1, None)) is not None:
            wrong = self._choose(state, place, known, new, after)
        return wrong

    def _is_final(self, state: WavefrontSequence, place: int, choice: Choice, score: float) -> bool:
        return choice.loop == self.loops

    @staticmethod
    def _guess(state: WavefrontSequence, place: int, choice: Choice) -> bool:
        try:
            return state.guess_next(place, state.sequence.pick(choice.logits, choice.argmax, place), choice.loop)
        except (NumericsError, GrammarError):  # no guess; the final choice's error ends the sequence
            return False

    def _choose(self, state: WavefrontSequence, place: int, choice: Choice, new: list[int], after: int) -> bool:
        """Append what is chosen at ``place`` to ``new``. Returns as `_settle` does."""
        sequence = state.sequence
        token = sequence.choose(choice.logits, choice.argmax, place)
        drafted = len(new) < state.num_drafts
        right = drafted and int(state.tokens[place]) == token
        guessed = state.guessed[len(new)] if drafted else None
        if guessed is not None and guessed.loop:
            state.learn(guessed.loop if right else choice.loop, after, self.tuning.settled_rate)
        self._record(state, choice, guessed, right)
        if not right:
            state.cut(place)
        new.append(token)
        sequence.num_cached_tokens += 1
        return not right or (token in sequence.eos and not sequence.params.ignore_eos)

    def _record(self, state: WavefrontSequence, choice: Choice, guessed: Guessed | None, right: bool) -> None:
        """Count a token of the output, and the draft that stood in its place."""
        depth = state.sequence.depth
        if guessed is None:
            depth.record_full_step(self.num_layers)
            return
        depth.record([guessed.source], [guessed.loop * self.num_layers // self.loops], int(right), self.num_layers)
        if right:
            del depth.token_depths[-1]  # `record` counts a token behind the accepted ones, of which there is none

    def _launch_ms(self, size: int, tokens: int) -> float:
        """What a launch of a loop takes for ``tokens`` tokens of each of ``size`` sequences."""
        cost = self._costs.step(size, size * tokens)
        return cost.launch_ms + cost.layer_ms

    def starts_after(self, states: Sequence[WavefrontSequence]) -> int:
        """Number of a token's loops after which the next token starts: that with the most expected tokens per ms of the batch.

        A token takes as many launches as loops until its final guess, and at least that many; the more of them are on their way,
        the more rows a launch has.
        """
        size = len(states)

        def price(after: int) -> float:
            launches, rows = self._launches_and_rows(states, after)
            return launches * self.launch_ms(size, math.ceil(rows))

        return min(range(1, self.loops + 1), key=price)

    def _launches_and_rows(self, states: Sequence[WavefrontSequence], after: int) -> tuple[float, float]:
        """Launches that a token takes where the next one starts ``after`` loops, and rows of a sequence in each."""
        settled = [sum(shares) / len(states) for shares in zip(*(state.settled for state in states), strict=True)]
        return sum(share * max(loop, after) for loop, share in enumerate(settled, 1)), self.loops / after
