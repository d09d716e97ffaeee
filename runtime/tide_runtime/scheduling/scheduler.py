"""The scheduler: which requests run, what each step does for them, and which blocks of KV memory they hold.

It computes nothing and touches no cache: `Scheduler.step` returns a plan, the engine loop carries it out. As in Orca (Yu et al.
2022) requests join and leave between steps; as in Sarathi-Serve (Agrawal et al. 2024) prompts run in chunks beside the decodes,
so that a long prompt does not stall them. A request that needs a block when none is left takes those of the prefix cache, then
those of the request that ranks last, which is preempted and computed again later (vLLM, Kwon et al. 2023).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count

from tide_runtime.backends.kv_caches import blocks_of
from tide_runtime.depth.policy import PromptChunk
from tide_runtime.errors import ParamsError, QueueFullError
from tide_runtime.scheduling.prefix_cache import Copies, PrefixCache
from tide_runtime.scheduling.prefix_disk import PrefixDisk
from tide_runtime.scheduling.prefix_tree import PrefixTree
from tide_runtime.sequence import TokenSequence


@dataclass(eq=False)
class Request:
    """A sequence that wants to be generated.

    Args:
        priority: requests of a higher one are served first.
        deadline: time (of `time.monotonic`) at which it ends, finished or not.
        number: order of arrival, set by `Scheduler.add`.
        blocks: blocks of KV memory that its row holds.
        unread: the disk may have more of its prefix than its row has.
    """

    sequence: TokenSequence
    priority: int = 0
    deadline: float = math.inf
    number: int = -1
    blocks: int = 0
    unread: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Lower ranks are served first and preempted last."""
        return -self.priority, self.number


@dataclass
class StepPlan:
    """What one step does, to be carried out in the order of the fields.

    Args:
        expired: requests whose deadline has passed; they hold nothing any more.
        left_rows: rows that expired and preempted requests had.
        moves: (source row, target row, tokens) copies that close gaps between rows.
        released_rows: rows whose memory is given back.
        loads: copies out of the prefix cache.
        released_blocks: blocks that the prefix cache gave up.
        released_slots: snapshots that it gave up.
        decoding: requests that decode, by rising rows.
        prompts: requests and how many of their tokens are prefilled.
        recalls: requests to be given to `Scheduler.recall`; their prefill goes on when that has read what it can.
    """

    expired: list[Request] = field(default_factory=list)
    left_rows: list[int] = field(default_factory=list)
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    released_rows: list[int] = field(default_factory=list)
    loads: list[Copies] = field(default_factory=list)
    released_blocks: list[int] = field(default_factory=list)
    released_slots: list[int] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, int]] = field(default_factory=list)
    recalls: list[Request] = field(default_factory=list)

    @property
    def chunks(self) -> list[PromptChunk]:
        return [PromptChunk(request.sequence, tokens) for request, tokens in self.prompts]

    @property
    def requests(self) -> Iterator[Request]:
        """All that take part, in the order in which a policy returns their tokens."""
        yield from self.decoding
        yield from (request for request, _ in self.prompts)


@dataclass(frozen=True)
class SchedulerOptions:
    """What a scheduler plans with.

    Args:
        max_batch: requests that run at once, each in a row of its own.
        blocks: blocks of KV memory in all, for rows and the prefix cache together.
        prefix_blocks: those that the prefix cache takes at most; None: all.
        row_blocks: those that the states of a running request take, however long its text is.
        slots: most tokens of a row.
        lookahead: most tokens that a step puts into the cache of a request that decodes.
        prompt_tokens: by the number of requests that decode, how many prompt tokens a step may prefill beside them.
        max_logits: most prompt tokens of a step whose logits are read. Texts to score have many, each as long as the vocabulary.
        can_preempt: whether a request may be computed again. Otherwise it starts only when all it may need is free.
        max_queue: requests that may wait.
        consecutive_rows: running requests must have the first rows, without gaps.
        prompts_first: no request decodes while a prompt can run. Benchmarks tell prompts and decodes apart by that.
    """

    max_batch: int
    blocks: int
    slots: int
    prefix_blocks: int | None = None
    row_blocks: int = 0
    lookahead: int = 1
    prompt_tokens: Callable[[int], int] = lambda decoding: 512
    max_logits: float = math.inf
    can_preempt: bool = True
    max_queue: float = math.inf
    consecutive_rows: bool = False
    prompts_first: bool = False


class Scheduler:
    """Plans step after step for all requests of an engine.

    Args:
        tree, disk: of its `PrefixCache`.

    Raises ParamsError when ``blocks`` do not hold one sequence of full length.
    """

    def __init__(self, options: SchedulerOptions, tree: PrefixTree | None = None, disk: PrefixDisk | None = None) -> None:
        least = blocks_of(options.slots) + options.row_blocks
        if options.blocks < least:
            raise ParamsError(
                f"the KV memory holds {options.blocks} blocks, one sequence of {options.slots} tokens needs {least}"
            )
        self.options = options
        self.cache = PrefixCache(tree, disk, options.blocks, options.slots, options.prefix_blocks)
        self.running: list[Request] = []
        self.preemptions = self.rotary_restarts = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []  # a heap; requests that left it early are skipped
        self._queued: set[Request] = set()
        self._timed: set[Request] = set()
        self._logits_left = options.max_logits  # of the step that is planned
        self.rows = options.max_batch
        self._free_rows = list(range(self.rows))
        # Blocks of free rows: they keep their memory until others need it, because new pages take time (2 us each, measured).
        self._idle: dict[int, int] = {}
        self._numbers = count()

    @property
    def waiting(self) -> int:
        """Requests that have no row, preempted ones included."""
        return len(self._queued)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._queued)

    @property
    def blocks_in_rows(self) -> int:
        return sum(request.blocks for request in self.running)

    @property
    def free_blocks(self) -> int:
        """Those of free rows included."""
        return self.cache.free + sum(self._idle.values())

    def add(self, request: Request, forced: bool = False) -> None:
        """Queue ``request``. Raises QueueFullError when as many wait as may, unless ``forced``."""
        if not forced and self.waiting >= self.options.max_queue:
            raise QueueFullError(
                f"{self.waiting} requests wait already, at most {self.options.max_queue} may; send it again later"
            )
        request.number = next(self._numbers)
        self._enqueue(request)
        if request.deadline < math.inf:
            self._timed.add(request)

    def remove(self, request: Request) -> int | None:
        """Forget a request that is finished, failed or aborted. Returns the row that it had."""
        self._timed.discard(request)
        self._queued.discard(request)
        return self._take_row(request) if request in self.running else None

    def use_fewer_rows(self) -> list[int]:
        """Run fewer requests at once from now on, one less than run now, all of which are computed again. Returns their rows.

        For memory that turns out short in a step. Empty, and nothing done, where one request runs or none may be computed again.
        """
        if len(self.running) < 2 or not self.options.can_preempt:
            return []
        plan = StepPlan()
        self.rows = len(self.running) - 1
        for request in [*self.running]:
            self._preempt(request, plan)
        self._free_rows = list(range(self.rows))
        self.cache.free += sum(self._idle.pop(row) for row in [*self._idle] if row >= self.rows)
        return plan.left_rows

    def requests(self) -> list[Request]:
        """All requests, running or waiting."""
        return [*self.running, *self._queued]

    def step(self, now: float = 0.0, unlocked: Callable[[], AbstractContextManager[None]] = nullcontext) -> StepPlan:
        """Plan the next step at time ``now``, admitting and preempting requests as it takes.

        ``unlocked``: a context in which the disk is searched; other threads may `add` requests and read totals meanwhile.
        """
        plan = StepPlan()
        self._expire(now, plan)
        if self.options.consecutive_rows:
            self._close_gaps(plan)
        budget = self._extend(plan)
        self._admit(budget, plan, unlocked)
        if self.options.prompts_first and plan.prompts:
            plan.decoding.clear()
        plan.decoding.sort(key=lambda request: request.sequence.batch_index)
        plan.released_blocks, plan.released_slots = self.cache.released()
        return plan

    def recall(self, request: Request) -> None:
        """Read what the disk has of a request's prefix into its row, if it still has one."""
        if request.sequence.batch_index >= 0:
            request.unread = self.cache.recall(request.sequence, any(other.sequence.prefilled for other in self.running))
            request.sequence.prefilled = request.sequence.num_cached_tokens == request.sequence.prefill_end

    # --- plans

    def _expire(self, now: float, plan: StepPlan) -> None:
        for request in [request for request in self._timed if request.deadline <= now]:
            row = self.remove(request)
            plan.expired.append(request)
            plan.left_rows += [row] if row is not None else []

    def _close_gaps(self, plan: StepPlan) -> None:
        """Move the last rows into the gaps that finished requests left."""
        by_row = {request.sequence.batch_index: request for request in self.running}
        for gap in range(len(by_row)):
            if gap not in by_row:
                last = max(by_row)
                request = by_row.pop(last)
                plan.moves.append((last, gap, request.sequence.num_cached_tokens))
                by_row[gap], request.sequence.batch_index = request, gap
                self.cache.free -= max(0, request.blocks - self._idle.get(gap, 0))
                self._idle[last], request.blocks = request.blocks, max(request.blocks, self._idle.pop(gap, 0))
        self._free_rows = [row for row in range(self.rows) if row not in by_row]
        self._release_idle(0, plan)  # the memory of the rows that were left, if need be

    def _extend(self, plan: StepPlan) -> int:
        """Plan the running requests, the first in rank first. Returns the prompt tokens that are left for others."""
        for request in self.running:
            if request.sequence.is_long_text and not request.sequence.is_long:
                self._restart(request, plan)
        budget = self.options.prompt_tokens(sum(request.sequence.prefilled for request in self.running))
        self._logits_left = self.options.max_logits
        for request in sorted(self.running, key=lambda request: request.rank):
            if request not in self.running:  # preempted for one before it
                continue
            sequence = request.sequence
            if sequence.prefilled:
                if self._make_room(request, sequence.num_tokens + self.options.lookahead, plan):
                    plan.decoding.append(request)
            elif request.unread:
                plan.recalls.append(request)
            elif budget > 0 and self._logits_left > 0:
                tokens = self._chunk(request, budget)
                if self._make_room(request, sequence.num_cached_tokens + tokens, plan):
                    budget -= self._prefill(request, tokens, plan)
        return budget

    def _admit(self, budget: int, plan: StepPlan, unlocked: Callable[[], AbstractContextManager[None]]) -> None:
        """Start waiting requests in the order of their ranks, until one does not fit."""
        while budget > 0 and self._logits_left > 0 and self._free_rows and (request := self._next()) is not None:
            sequence = request.sequence
            needed = sequence.num_tokens + self.options.lookahead if self.options.can_preempt else len(sequence.tokens)
            if self._blocks_for(sequence, needed) > self.free_blocks + self.cache.blocks:
                return
            self._queued.discard(request)
            heapq.heappop(self._waiting)
            self.running.append(request)
            sequence.batch_index = heapq.heappop(self._free_rows)
            request.blocks = self._idle.pop(sequence.batch_index, 0)
            sequence.is_long = sequence.is_long_text
            self._load_prefix(sequence, plan)
            with unlocked():
                request.unread = self.cache.is_on_disk(sequence)
            tokens = 0 if request.unread else self._chunk(request, budget)
            kept = sequence.num_cached_tokens + tokens if self.options.can_preempt else needed
            self._reserve(request, needed if request.unread else max(kept, 1), plan)
            if request.unread:
                plan.recalls.append(request)
            elif tokens:
                budget -= self._prefill(request, tokens, plan)
            else:  # the prefix cache held all of a preempted request
                sequence.prefilled = True

    def _restart(self, request: Request, plan: StepPlan) -> None:
        """Compute a text that has outgrown the short rotary factors again, in its row."""
        sequence = request.sequence
        sequence.num_cached_tokens = 0
        sequence.is_long = True
        self._load_prefix(sequence, plan)
        sequence.prefilled = sequence.num_cached_tokens == sequence.prefill_end
        sequence.history.rotary_restarts += 1
        self.rotary_restarts += 1

    def _chunk(self, request: Request, budget: int) -> int:
        """The next tokens to prefill: at most ``budget``, up to the next snapshot, and as many with logits as the step may still
        have."""
        sequence = request.sequence
        end = next((point for point in sequence.snapshot_points if point > sequence.num_cached_tokens), sequence.prefill_end)
        tokens = min(budget, end - sequence.num_cached_tokens)
        return int(tokens - max(0, PromptChunk(sequence, tokens).num_logits - self._logits_left))

    def _prefill(self, request: Request, tokens: int, plan: StepPlan) -> int:
        plan.prompts.append((request, tokens))
        self._logits_left -= PromptChunk(request.sequence, tokens).num_logits
        return tokens

    def _load_prefix(self, sequence: TokenSequence, plan: StepPlan) -> None:
        if (copies := self.cache.load(sequence)) is not None:
            plan.loads.append(copies)

    # --- queue and memory

    def _next(self) -> Request | None:
        while self._waiting and self._waiting[0][1] not in self._queued:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _enqueue(self, request: Request) -> None:
        self._queued.add(request)
        heapq.heappush(self._waiting, (request.rank, request))

    def _take_row(self, request: Request) -> int:
        """Free the row of a running request."""
        sequence = request.sequence
        row = request.sequence.batch_index
        self.running.remove(request)
        self._idle[row] = request.blocks
        request.blocks, sequence.batch_index = 0, -1
        heapq.heappush(self._free_rows, row)
        return row

    def _make_room(self, request: Request, tokens: int, plan: StepPlan) -> bool:
        """Give a running request's row room for ``tokens``; False when it had to be preempted itself."""
        while not self._reserve(request, tokens, plan):
            last = max(self.running, key=lambda other: other.rank)
            self._preempt(last, plan)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        sequence = request.sequence
        plan.left_rows.append(self._take_row(request))
        sequence.num_cached_tokens = 0
        sequence.prefilled = False
        sequence.history.preemptions += 1
        self.preemptions += 1
        self._enqueue(request)

    def _reserve(self, request: Request, tokens: int, plan: StepPlan) -> bool:
        missing = self._blocks_for(request.sequence, tokens) - request.blocks
        self._release_idle(missing, plan)
        if not self.cache.make_room(missing):
            return False
        if missing > 0:
            request.blocks += missing
            self.cache.free -= missing
        return True

    def _release_idle(self, needed: int, plan: StepPlan) -> None:
        """Give the memory of free rows back until ``needed`` blocks are free."""
        while self.cache.free < needed and self._idle:
            row, blocks = self._idle.popitem()
            plan.released_rows.append(row)
            self.cache.free += blocks

    def _blocks_for(self, sequence: TokenSequence, tokens: int) -> int:
        return self.options.row_blocks + blocks_of(min(tokens, len(sequence.tokens), self.options.slots))
