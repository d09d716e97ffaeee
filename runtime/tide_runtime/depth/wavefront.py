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
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext, LoopContext, LoopStep
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.bundle.manifest import LOOP, Manifest
from tide_runtime.costs.cost_model import Graph, Launch, StepTable
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

_SOURCE = "loop"  # of drafts, in `DepthStats`


class Choice(NamedTuple):
    """What a token chooses finally, after ``loop`` loops of it: its successor's ``logits`` [V] and their argmax."""

    loop: int
    logits: NDArray[np.floating]
    likeliest: int


class Guessed(NamedTuple):
    """A draft on its way: of which ``source``, after how many loops of the token before it, and how likely a copy is right."""

    source: str
    loop: int
    chance: float = 0.0


@dataclass
class WavefrontSequence(SpeculativeSequence):
    """A sequence whose frontier counts loops.

    Args:
        settled: share of the late tokens whose final guess came after each loop, the latest counting most.
        guessed: the drafts, in their order.
        held: the text's place → what the draft before it chooses there: output, once that draft is.
        refills: how often its row was computed anew when the frontier was set.
    """

    settled: list[float] = field(kw_only=True)
    guessed: list[Guessed] = field(default_factory=list)
    held: dict[int, Choice] = field(default_factory=dict)
    refills: int = 0

    def guess_next(self, place: int, token: int, loop: int) -> bool:
        """``loop`` loops of the token before the text's ``place`` choose ``token`` there. Returns whether another was guessed, so
        that what stands from there on starts anew. A copy that is more often right than the loop stays."""
        known = self.num_tokens_with_drafts
        if place < known:
            if self.tokens[place] == token:
                return False
            likelier = self.guessed[place - self.sequence.num_tokens].chance > sum(self.settled[:loop])
            if likelier and place not in self.held:
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
        for late in [late for late in self.held if late > place]:
            del self.held[late]
        self.frontier.roll_back(place)

    def undecided(self, begin: int, end: int) -> int:
        """The first of the tokens at places ``begin`` … ``end - 1`` that has chosen nothing finally; ``end``: all have."""
        for place in range(max(begin, self.sequence.num_tokens - 1), end):
            if place + 1 not in self.held:
                return place
        return end


class WavefrontDepth:
    """Runs rows of all loops at once; see the module.

    Args:
        costs: what launches of a loop take on this machine, by tokens of each sequence; None: a guess.
    """

    name, can_resume, runs_every_layer = "exact", True, True
    uses_draft_head, loops_as_rows = False, True

    def __init__(self, manifest: Manifest, options: DepthOptions, costs: CostTable | None = None) -> None:
        self.loops, self.num_layers, self.tuning = manifest.model.loops, manifest.model.num_layers, options.tuning
        self._hidden_size = manifest.model.hidden_size
        limit = (options.draft_limit or self.tuning.text_draft_limit) if options.draft == "all" else 0
        self.text: list[Drafter] = []
        if limit:
            copies: list[Drafter] = [TextDrafter(limit), SuccessorDrafter(limit, self.tuning.successor_entries)]
            self.text = [*copies, GrammarDrafter(limit)]
        self.most_drafts = limit + self.loops
        self.lookahead = self.most_drafts + self.loops  # loops guess on until the first of the drafts is final
        self.stopping_loops: Collection[int] = {self.loops}  # after which a token's choice may be final
        self.most_waiting = self.lookahead  # in front of one loop
        self._costs = StepTable.of(costs, bool(manifest.weights))
        self.launch_ms = cache(self._launch_ms)  # each step asks for a few sizes

    def check_params(self, params: GenerationParams) -> None:
        refuse_depth_budget(self.name, params)

    def device_plan(self, pads_sequences: bool) -> str:
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
        state, cached = cast("WavefrontSequence | None", sequence.policy_state), sequence.num_cached_tokens
        if state is None:
            like = context.step(sequence.batch_index, [1]).hidden[0]
            frontier = Frontier(self.loops, self._hidden_size, self.most_waiting, like, cached)
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
                state.copy(self.least_chance(len(states)), self.most_drafts)

    def least_chance(self, size: int) -> float:
        """The chance from which on a copied token pays in one of ``size`` sequences: a row in the launch of each loop costs what
        a right token saves, a launch of one sequence."""
        few, many = self.loops, 3 * self.loops
        launch, longer = (self.launch_ms(size, tokens) for tokens in (few, many))
        return (longer - launch) / launch * self.loops / (many - few)

    def _advance(self, context: LoopContext, states: Sequence[WavefrontSequence], after: int) -> list[list[int]]:
        """One launch: each token that waits runs its next loop. Returns the tokens that are final."""
        loops = self.loops
        base = states[0].sequence.batch_index * loops
        span = (states[-1].sequence.batch_index + 1) * loops - base
        counts, slots, wanted = [0] * span, [0] * span, [0] * span
        for state in states:
            own = slice(row := state.sequence.batch_index * loops - base, row + loops)
            counts[own], wanted[own] = self._due(state, after)
            slots[own] = state.frontier.done
        step = context.loop_step(base, counts, wanted)
        self._fill(step, states, counts, slots, base)
        step.place(slots)
        step.run(LOOP)
        starts, heads = ([0, *accumulate(of)] for of in (counts, wanted))
        tokens = step.token[: heads[-1]].tolist()
        scores = self._score(context, step, [end - few for end, few in zip(starts[1:], wanted, strict=True)], wanted)
        found = []
        for state in states:
            row = state.sequence.batch_index * loops - base
            for loop in reversed(range(loops)):  # the earliest tokens of the text stand at the deepest loop
                if loop + 1 < loops and counts[row + loop]:
                    at = starts[row + loop]
                    state.frontier.arrive(loop, loop + 1, step.after_loop[at : at + counts[row + loop]])
                else:
                    state.frontier.pass_through(loop, loop + 1, counts[row + loop])
            new, wrong = list[int](), False
            for loop in reversed(range(loops)):
                at, place = heads[row + loop], slots[row + loop] + counts[row + loop] - wanted[row + loop]
                for n in range(wanted[row + loop]):
                    choice = Choice(loop + 1, step.logits[at + n], tokens[at + n])
                    wrong = self._settle(state, place + n + 1, choice, scores[at + n] if scores else 1.0, new, after)
                    if wrong:
                        break
                if wrong:
                    break
            state.confirm(len(new))
            found.append(new)
        return found

    def _due(self, state: WavefrontSequence, after: int) -> tuple[list[int], list[int]]:
        """Of each loop the tokens that run it now, all that wait or none, and of how many of the last the logits are read."""
        counts, wanted = list[int](), list[int]()
        for loop, done in enumerate(state.frontier.done):
            end = done + self._waiting(state, loop)
            first = state.undecided(done, end) if loop else done
            arriving = counts[-1] if counts else 0
            if first == end and end - done + arriving <= self.most_waiting:
                first = end = done
            reads = loop + 1 in self.stopping_loops or loop + 1 >= after
            counts.append(end - done)
            wanted.append(end - first if reads else 0)
        return counts, wanted

    def _score(self, context: LoopContext, step: LoopStep, begins: Sequence[int], counts: Sequence[int]) -> list[float]:
        """What routers say of the states of ``counts[i]`` tokens of row i, from the step's token ``begins[i]`` on; none."""
        return []

    @staticmethod
    def _waiting(state: WavefrontSequence, loop: int) -> int:
        return state.frontier.waiting(loop) if loop else state.num_tokens_with_drafts - state.frontier.done[0]

    def _fill(
        self, step: LoopStep, states: Sequence[WavefrontSequence], counts: Sequence[int], slots: Sequence[int], base: int
    ) -> None:
        """The tokens and states that the launch begins with."""
        begin = 0
        for state in states:
            row = state.sequence.batch_index * self.loops - base
            for loop in range(self.loops):
                count, end = counts[row + loop], begin + counts[row + loop]
                step.first_loop[begin:end] = loop == 0
                if loop == 0:
                    step.input_ids[begin:end] = state.tokens[slots[row] : slots[row] + count]
                else:
                    step.before_loop[begin:end] = state.frontier.states[loop][:count]
                begin = end

    def _settle(self, state: WavefrontSequence, place: int, choice: Choice, score: float, new: list[int], after: int) -> bool:
        """The token before the text's ``place`` has run ``choice.loop`` loops; what it chooses finally is appended to ``new``.
        Returns whether what was drafted from ``place`` on is wrong, or behind the text's end."""
        next_place = state.sequence.num_tokens + len(new)
        if place < next_place or place in state.held:  # it ran along with others
            return False
        final = self._is_final(state, place, choice, score)
        if not final or place > next_place:
            if final:
                state.held[place] = choice._replace(logits=np.array(choice.logits))
            return (final or choice.loop >= after) and self._guess(state, place, choice)
        wrong = self._choose(state, place, choice, new, after)
        while not wrong and (known := state.held.pop(place := place + 1, None)) is not None:
            wrong = self._choose(state, place, known, new, after)
        return wrong

    def _is_final(self, state: WavefrontSequence, place: int, choice: Choice, score: float) -> bool:
        return choice.loop == self.loops

    @staticmethod
    def _guess(state: WavefrontSequence, place: int, choice: Choice) -> bool:
        try:
            return state.guess_next(place, state.sequence.pick(choice.logits, choice.likeliest, place), choice.loop)
        except (NumericsError, GrammarError):  # no guess; the final choice's error ends the sequence
            return False

    def _choose(self, state: WavefrontSequence, place: int, choice: Choice, new: list[int], after: int) -> bool:
        """Append what is chosen at ``place`` to ``new``. Returns as `_settle` does."""
        sequence = state.sequence
        token = sequence.choose(choice.logits, choice.likeliest, place)
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
        return self._costs.price([Launch(Graph(layers=1), size, size * tokens)])

    def starts_after(self, states: Sequence[WavefrontSequence]) -> int:
        """After how many loops of a token the next one starts: for the most expected tokens per ms of the batch.

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
