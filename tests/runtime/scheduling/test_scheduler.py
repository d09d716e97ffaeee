"""The scheduler alone: no model, no caches; a step is carried out by counting tokens."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.errors import ParamsError, QueueFullError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sampler import Sampler
from tide_runtime.scheduling.prefix_tree import PrefixTree
from tide_runtime.scheduling.scheduler import Request, Scheduler, SchedulerOptions, StepPlan
from tide_runtime.sequence import TokenSequence

SLOTS = 4 * BLOCK_TOKENS


def request(prompt: int, new: int = 8, priority: int = 0, deadline: float = math.inf, first: int = 0, **params: Any) -> Request:
    """A request with ``prompt`` tokens, counted from ``first``, that wants ``new`` ones."""
    tokens = np.zeros(min(prompt + new, SLOTS + 1), np.int64)
    tokens[:prompt] = first + np.arange(prompt)
    made = GenerationParams(max_new_tokens=new, **params)
    sequence = TokenSequence(tokens, prompt, prompt, made, frozenset(), Sampler(made, 9))
    return Request(sequence, priority, deadline)


def make(rows: int = 4, blocks: int = 100, chunk: int = 1000, cached: bool = False, **options: Any) -> Scheduler:
    made = SchedulerOptions(rows, blocks, SLOTS, prompt_tokens=lambda decoding: chunk, **options)
    return Scheduler(made, PrefixTree() if cached else None)


def carry_out(scheduler: Scheduler, plan: StepPlan) -> None:
    """What a policy does to the sequences of ``plan``; those that are finished leave."""
    for chunk in plan.chunks:
        sequence, wanted, is_last = chunk.sequence, chunk.num_logits, chunk.is_last
        sequence.num_cached_tokens += chunk.tokens
        sequence.prefilled = is_last
        if wanted:
            sequence.append(7)
    for one in plan.decoding:
        one.sequence.num_cached_tokens += 1
        one.sequence.append(7)
    for one in plan.requests:
        scheduler.cache.save(one.sequence, one.sequence.num_cached_tokens)
        if one.sequence.finish_reason is not None:
            scheduler.remove(one)


def step(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    plan = scheduler.step(now)
    carry_out(scheduler, plan)
    return plan


def started(plan: StepPlan) -> list[Request]:
    return [one for one, _ in plan.prompts]


# --- Order


def test_the_first_to_come_starts_first_and_a_higher_priority_before_it() -> None:
    """Breaks: requests that are overtaken by later ones, or a priority that counts for nothing."""
    scheduler = make(rows=1)
    requests = [request(3, new=1, priority=priority) for priority in (0, 0, 2, 1, 2)]
    for one in requests:
        scheduler.add(one)
    assert [started(step(scheduler))[0] for _ in requests] == [requests[i] for i in (2, 4, 3, 0, 1)]


def test_a_waiting_request_is_not_overtaken_by_a_smaller_one() -> None:
    """Breaks: a long prompt that starves while short ones that come later find room."""
    scheduler = make(rows=3, blocks=5)
    running, long, small = request(3 * BLOCK_TOKENS), request(3 * BLOCK_TOKENS), request(1)
    for one in (running, long, small):
        scheduler.add(one)
    assert started(step(scheduler)) == [running]
    assert started(step(scheduler)) == []
    scheduler.remove(running)
    assert started(step(scheduler)) == [long, small]


def test_a_full_queue_refuses() -> None:
    """Breaks: a queue without bound; a call of `generate` with more prompts than the queue holds; requests that run count."""
    scheduler = make(rows=1, max_queue=2)
    scheduler.add(request(3))
    step(scheduler)
    scheduler.add(request(3))
    scheduler.add(request(3))
    with pytest.raises(QueueFullError, match="2 requests wait already, at most 2 may; send it again later"):
        scheduler.add(request(3))
    scheduler.add(request(3), forced=True)
    assert (scheduler.waiting, len(scheduler.running)) == (3, 1)


def test_requests_end_at_their_deadline_wherever_they_are() -> None:
    """Breaks: a deadline that is seen only in the queue, or only while running; memory that expired requests keep."""
    scheduler = make(rows=1)
    running, waiting, patient = request(3, deadline=5.0), request(3, deadline=4.0), request(3)
    for one in (running, waiting, patient):
        scheduler.add(one)
    assert step(scheduler, 3.9).expired == []
    assert (step(scheduler, 4.0).expired, scheduler.waiting) == ([waiting], 1)
    plan = step(scheduler, 5.0)
    assert (plan.expired, plan.left_rows, plan.decoding, started(plan)) == ([running], [0], [], [patient])
    assert (running.blocks, running.sequence.batch_index, scheduler.requests()) == (0, -1, [patient])
    assert step(scheduler, 99.0).expired == []


# --- Chunks


def test_prompts_share_the_budget_of_a_step() -> None:
    """Breaks: a long prompt that stalls the decodes of others, or a budget that only the first prompt may use."""
    scheduler = make(chunk=10)
    requests = [request(4), request(20), request(3)]
    for one in requests:
        scheduler.add(one)
    assert step(scheduler).prompts == [(requests[0], 4), (requests[1], 6)]
    plan = step(scheduler)
    assert (plan.decoding, plan.prompts) == ([requests[0]], [(requests[1], 10)])
    assert step(scheduler).prompts == [(requests[1], 4), (requests[2], 3)]
    assert set(step(scheduler).decoding) == set(requests)


def test_the_budget_is_asked_for_what_decodes() -> None:
    """Breaks: a budget for another number of decodes than the step has."""
    asked: list[int] = []
    options = SchedulerOptions(4, 100, SLOTS, prompt_tokens=lambda decoding: asked.append(decoding) or 2)  # type: ignore[func-returns-value]
    scheduler = Scheduler(options)
    for length in (1, 1, 9):
        scheduler.add(request(length))
    for _ in range(3):
        step(scheduler)
    assert asked == [0, 2, 2]


def test_prompts_first_lets_nothing_decode_beside_prompts() -> None:
    """Breaks: benchmarks that time prompts and decodes apart."""
    scheduler = make(chunk=4, prompts_first=True)
    for length in (2, 8):
        scheduler.add(request(length))
    assert [bool(step(scheduler).decoding) for _ in range(4)] == [False, False, False, True]


# --- Memory


def test_one_full_sequence_must_fit() -> None:
    """Breaks: a budget with which a request would preempt itself for ever."""
    with pytest.raises(ParamsError, match="holds 3 blocks, one sequence of 64 tokens needs 4"):
        make(blocks=3)


def test_admission_waits_for_memory() -> None:
    """Breaks: a request that starts although its prompt does not fit, and throws others out."""
    scheduler = make(blocks=4)
    requests = [request(BLOCK_TOKENS - 1, new=1) for _ in range(5)]
    for one in requests:
        scheduler.add(one)
    assert len(started(step(scheduler))) == 4
    assert (started(step(scheduler)), scheduler.preemptions) == ([requests[4]], 0)


def test_what_cannot_be_preempted_starts_with_all_it_may_need() -> None:
    """Breaks: policies whose texts change when they are computed again; they would fail in the middle."""
    scheduler = make(blocks=7, can_preempt=False)
    first, second = request(2, new=3 * BLOCK_TOKENS), request(2, new=3 * BLOCK_TOKENS)
    scheduler.add(first)
    scheduler.add(second)
    assert (started(step(scheduler)), first.blocks) == ([first], 4)
    while first.sequence.finish_reason is None:
        assert step(scheduler).decoding == [first]
    assert started(step(scheduler)) == [second]
    assert scheduler.preemptions == 0


@pytest.mark.parametrize("priorities", [(0, 0, 0), (0, 2, 1), (1, 0, 2)])
def test_the_last_in_rank_is_preempted_and_keeps_its_rank(priorities: tuple[int, ...]) -> None:
    """Breaks: an old or important request that is computed again for a new one; one that comes back behind the whole queue."""
    scheduler = make(rows=3, blocks=4)
    requests = [request(BLOCK_TOKENS - 1, new=40, priority=priority) for priority in priorities]
    for one in requests:
        scheduler.add(one)
    ranked = sorted(requests, key=lambda one: one.rank)
    last, numbers = ranked[-1], [one.number for one in requests]
    while not scheduler.preemptions:
        row = last.sequence.batch_index
        plan = step(scheduler)
    assert plan.left_rows == [row], "the row's states are still those of the preempted one"
    assert [one.sequence.history.preemptions for one in ranked] == [0, 0, 1]
    assert last.sequence.num_tokens > last.sequence.prompt_tokens, "it should have said something"
    assert (last.sequence.num_cached_tokens, last.sequence.prefilled, last.sequence.batch_index, last.blocks) == (0, False, -1, 0)
    later = request(1, new=1, priority=last.priority)
    scheduler.add(later)
    back: list[Request] = []
    while later not in back:
        back += started(step(scheduler))
    assert last in back and [one.number for one in requests] == numbers
    for _ in range(500):
        step(scheduler)
    assert all(one.sequence.finish_reason == "length" for one in requests) and not scheduler.has_work


def test_prefix_blocks_go_before_anybody_is_preempted() -> None:
    """Breaks: a running request that is computed again so that a cache of finished texts may stay."""
    scheduler = make(rows=2, blocks=6, cached=True)
    old = request(3 * BLOCK_TOKENS, new=1)
    scheduler.add(old)
    step(scheduler)
    assert (scheduler.cache.blocks, scheduler.free_blocks) == (3, 3)
    requests = [request(BLOCK_TOKENS + 1, new=24, first=100 * n, use_prefix_cache=False) for n in (1, 2)]
    for one in requests:
        scheduler.add(one)
    released: list[int] = []
    while scheduler.has_work:
        released += step(scheduler).released_blocks
    assert (len(released), scheduler.preemptions) == (3, 0)
    assert (scheduler.cache.blocks, scheduler.free_blocks) == (0, 6)


def test_the_prefix_that_was_used_least_recently_goes_first() -> None:
    """Breaks: a prefix in use that makes room while another one waits for its next use, or more prefixes that go than must."""
    scheduler = make(rows=1, blocks=8, cached=True)
    for first in (0, 100, 0):
        scheduler.add(request(2 * BLOCK_TOKENS + 1, new=1, first=first))
        step(scheduler)
    scheduler.add(request(SLOTS - 2, new=2, first=200, use_prefix_cache=False))
    plan = step(scheduler)
    tree = scheduler.cache.tree
    assert tree is not None and len(plan.released_blocks) == 1
    assert [len(tree.match(first + np.arange(2 * BLOCK_TOKENS), (None, False))) for first in (0, 100)] == [2, 1]


def test_free_rows_give_their_memory_first() -> None:
    """Breaks: prefixes that are dropped while unused rows hold memory."""
    scheduler = make(rows=2, blocks=6, cached=True)
    scheduler.add(request(2 * BLOCK_TOKENS, new=1))
    step(scheduler)  # two blocks in the tree
    short, growing = (request(20, new=new, first=100, use_prefix_cache=False) for new in (2, 40))
    scheduler.add(short)
    scheduler.add(growing)
    plans = [step(scheduler) for _ in range(40)]
    assert [row for plan in plans for row in plan.released_rows] == [0]
    assert not any(plan.released_blocks for plan in plans) and scheduler.cache.blocks == 2 and not scheduler.has_work


def test_short_memory_of_a_device_runs_fewer_requests() -> None:
    """The partly filled row would keep its keys, its blocks would be lost, or requests would change their order."""
    scheduler, fixed = make(rows=3), make(rows=3, can_preempt=False)
    requests = [request(3, new=9) for _ in range(3)]
    for one in requests:
        scheduler.add(one)
        fixed.add(request(3))
    step(fixed)
    step(scheduler)
    assert scheduler.use_fewer_rows() == [0, 1, 2] and fixed.use_fewer_rows() == []
    assert (scheduler.running, scheduler.waiting, scheduler.cache.free, scheduler.free_blocks) == ([], 3, 98, 100)
    assert started(step(scheduler)) == requests[:2] and [one.sequence.batch_index for one in requests] == [0, 1, -1]
    while len(scheduler.running) != 1:
        step(scheduler)
    assert scheduler.use_fewer_rows() == []
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.free_blocks == 100 and all(one.sequence.finish_reason == "length" for one in requests)


def test_salts_and_opting_out_share_nothing() -> None:
    """Breaks: tenants that see each other's prompts in their times, and requests that do not want to be kept."""
    scheduler = make(cached=True)
    for salt, uses, hits in [(None, True, 0), ("a", True, 0), ("b", True, 0), ("a", False, 0), ("a", True, 1), (None, True, 1)]:
        scheduler.add(request(20, new=1, cache_salt=salt, use_prefix_cache=uses))
        held = scheduler.cache.blocks
        assert len(step(scheduler).loads) == hits
        assert scheduler.cache.blocks == held + 2 * (uses and not hits)


# --- Rows


def test_gaps_are_closed_by_moves_that_come_before_releases() -> None:
    """Breaks: backends without packed steps, whose rows must be consecutive; a row that is given back before it is copied."""
    assert list(StepPlan.__dataclass_fields__)[:7] == [
        "expired", "left_rows", "moves", "released_rows", "loads", "released_blocks", "released_slots",
    ]  # fmt: skip
    scheduler = make(rows=4, blocks=8, consecutive_rows=True)
    requests = [request(2, new=new) for new in (40, 2, 40, 4)]
    for one in requests:
        scheduler.add(one)
    plans = [step(scheduler) for _ in range(2)]
    assert [one.sequence.batch_index for one in requests] == [0, -1, 2, 3]
    cached = requests[3].sequence.num_cached_tokens
    plans.append(step(scheduler))
    assert plans[2].moves == [(3, 1, cached)]
    assert [one.sequence.batch_index for one in plans[2].decoding] == [0, 1, 2]
    step(scheduler)  # the moved one ends
    plan = scheduler.step()
    assert plan.moves == [(2, 1, requests[2].sequence.num_cached_tokens)]


# --- Everything at once


@settings(max_examples=120, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_memory_is_counted_whatever_happens(seed: int) -> None:
    """Breaks: blocks that are lost, used twice or promised beyond the budget; rows that two requests share; a request that never
    ends. Arrivals, priorities, deadlines, removals, prefixes, chunks, lookahead and rows are random."""
    random = np.random.default_rng(seed)
    rows, blocks, cached = int(random.integers(1, 5)), int(random.integers(4, 10)), random.random() < 0.6
    chunk, lookahead, gaps = int(random.integers(1, 40)), int(random.integers(1, 6)), random.random() < 0.7
    scheduler = make(rows, blocks, chunk, cached, lookahead=lookahead, consecutive_rows=not gaps)
    waiting = [
        request(
            int(random.integers(1, SLOTS + 1)),
            int(random.integers(1, 50)),
            int(random.integers(3)),
            deadline=float(random.integers(1, 90)) if random.random() < 0.3 else math.inf,
            first=int(random.choice([0, 0, 1000])),
        )
        for _ in range(random.integers(1, 12))
    ]
    ended: list[Request] = []
    held: dict[int, int] = {}  # blocks of each row, as a backend allocates them
    for now in range(4000):
        while waiting and random.random() < 0.4:
            scheduler.add(waiting.pop())
        plan = scheduler.step(now)
        for source, target, _ in plan.moves:
            assert source > target and source in held
        for row in plan.released_rows:
            del held[row]
        for one in scheduler.running:
            row = one.sequence.batch_index
            held[row] = max(held.get(row, 0), one.blocks)
            assert one.blocks * BLOCK_TOKENS >= min(one.sequence.num_cached_tokens, SLOTS)
        assert sum(held.values()) + scheduler.cache.blocks <= blocks, "more memory than the budget"
        assert scheduler.free_blocks + scheduler.blocks_in_rows + scheduler.cache.blocks == blocks
        assert sum(tokens for _, tokens in plan.prompts) <= chunk
        assert all(tokens > 0 for _, tokens in plan.prompts)
        used = [one.sequence.batch_index for one in scheduler.running]
        assert len(set(used)) == len(used) and all(0 <= row < rows for row in used)
        assert [one.sequence.batch_index for one in plan.decoding] == sorted(one.sequence.batch_index for one in plan.decoding)
        for one in plan.decoding:
            room = min(one.sequence.num_tokens - 1 + lookahead, len(one.sequence.tokens), SLOTS)
            assert one.blocks * BLOCK_TOKENS >= room, "no room for what the step writes"
        ended += plan.expired
        takers = [*plan.requests]
        carry_out(scheduler, plan)
        ended += [one for one in takers if one.sequence.finish_reason is not None]
        if scheduler.requests() and random.random() < 0.02:
            gone = scheduler.requests()[0]
            scheduler.remove(gone)
            ended.append(gone)
        if not waiting and not scheduler.has_work:
            break
    assert not waiting and not scheduler.has_work
    assert len(set(ended)) == len(ended)
    assert scheduler.free_blocks + scheduler.cache.blocks == blocks
    if scheduler.cache.tree is not None:
        kept = scheduler.cache.tree.evict(blocks)
        assert len({*scheduler.cache._free_ids, *kept}) == blocks == len(scheduler.cache._free_ids) + len(kept)
