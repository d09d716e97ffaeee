"""Traffic changes nothing in a text: random arrivals, aborts, budgets, chunks and shared prefixes against the recomputed model.

The scheduler and a policy are driven step by step, without threads, over the NumPy backend, whose unused slots hold garbage and
whose blocks forget what they held when they are given back.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from runtime.depth.test_lazy_depth import recomputed, tuned
from runtime.numpy_backend import NumpyBackend, tiny_manifest
from runtime.random_bundles import Case, cases, random_exits
from runtime.simulated_exit import SimulatedExit
from runtime.tiny_generation import Audited, exits_pay, make_row, output
from runtime.tiny_generation import Request as Wanted
from tide_runtime.backends.kv_caches import BLOCK_TOKENS, blocks_of
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.exit_wavefront import ExitWavefront
from tide_runtime.depth.tuning import DepthTuning
from tide_runtime.depth.wavefront import WavefrontDepth
from tide_runtime.scheduling.prefix_tree import PrefixTree
from tide_runtime.scheduling.scheduler import Request, Scheduler, SchedulerOptions
from tide_runtime.scheduling.step import append_tokens, run_step

examples = partial(settings, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass
class Outcome:
    finished: dict[int, Request]
    aborted: dict[int, Request]
    preemptions: int
    prefix_tokens: int
    left_blocks: int


def crowded(case: Case, random: np.random.Generator) -> tuple[Case, int | None]:
    """Often a case whose requests have short prompts and long outputs in more rows than there are blocks of memory for.

    Returns the case, and the blocks beyond those of one sequence; None: leave them to chance.
    """
    if random.random() < 0.6:
        return case, None
    requests = [
        replace(one, prompt=one.prompt[:6], params=replace(one.params, max_new_tokens=int(random.integers(20, 40))))
        for one in case.requests[:6]
    ]
    return replace(case, requests=requests, capacity=5), int(random.integers(2))


def drive(case: Case, policy: Any, requests: list[Wanted], random: np.random.Generator, spare_blocks: int | None) -> Outcome:
    """Run ``requests`` that arrive, leave, meet their deadlines and are aborted at random."""
    packs, caches = random.random() < 0.7 or policy.loops_as_rows, random.random() < 0.7 and policy.can_resume
    backend = NumpyBackend(case.manifest, case.model, packs_steps=packs)
    slots = case.manifest.max_seq_len
    # Enough for one sequence; mostly too little for all of them.
    if spare_blocks is None:
        spare_blocks = int(random.choice([0, 1, 2, case.capacity * blocks_of(slots)]))
    blocks = blocks_of(slots) + spare_blocks
    chunk = int(random.integers(1, 20))
    scheduler = Scheduler(
        SchedulerOptions(
            max_batch=case.capacity,
            blocks=blocks,
            slots=slots,
            lookahead=policy.lookahead,
            prompt_tokens=lambda decoding: chunk,
            can_preempt=policy.can_resume,
            consecutive_rows=not packs,
        ),
        PrefixTree() if caches else None,
    )
    context: Any = backend.context(case.capacity, blocks if caches else 0)
    audited: Any = Audited(policy, case.manifest, case.model)
    # Time is counted in steps.
    deadlines = [float(random.integers(5, 400)) if random.random() < 0.1 else math.inf for _ in requests]
    arriving = [
        Request(make_row(wanted, case.manifest), int(random.integers(3)), deadline)
        for wanted, deadline in zip(requests, deadlines, strict=True)
    ]
    numbers = {request: number for number, request in enumerate(arriving)}
    outcome, waiting = Outcome({}, {}, 0, 0, 0), list(arriving)
    for now in range(5000):
        while waiting and random.random() < 0.6:
            scheduler.add(waiting.pop(0))
        if not scheduler.has_work:
            if not waiting:
                break
            continue
        plan = scheduler.step(now)
        for request in plan.expired:
            request.sequence.end("deadline")
            outcome.aborted[numbers[request]] = request
        assert scheduler.blocks_in_rows + scheduler.cache.blocks <= blocks
        rows = [request.sequence.batch_index for request in scheduler.running]
        assert len(set(rows)) == len(rows) and all(0 <= row < case.capacity for row in rows)
        outcomes = run_step(audited, context, plan)
        left = {*range(case.capacity)} - {*rows}
        assert not any(context.ends.ends[row] for row in left), "a row that was left is still known to the backend"
        for request, tokens in outcomes:
            sequence = request.sequence
            list(append_tokens(sequence, tokens))
            aborts = random.random() < 0.01
            if sequence.finish_reason is None and aborts:
                sequence.end("cancelled")
            if sequence.prefilled or sequence.finish_reason is not None or random.random() < 0.5:
                settled = policy.reusable_tokens(sequence)
                if settled:
                    known, row = case.model.states_of(sequence.tokens[:settled]), sequence.batch_index
                    assert np.allclose(context.keys[:, row, :settled], known.keys), "settled too early"
                saved = scheduler.cache.save(sequence, settled)
                if saved is not None:
                    context.prefix_blocks.save(saved.row, saved.first, saved.ids)
            if sequence.finish_reason is not None:
                (outcome.aborted if aborts else outcome.finished)[numbers[request]] = request
                outcome.prefix_tokens += sequence.history.prefix_tokens
                row = scheduler.remove(request)
                assert row is not None
                context.forget_row(row)
    assert not scheduler.has_work and not waiting
    outcome.preemptions, outcome.left_blocks = scheduler.preemptions, scheduler.blocks_in_rows
    return outcome


def sharing(requests: list[Wanted], random: np.random.Generator, positions: int) -> list[Wanted]:
    """``requests``, some of them with a common beginning, and some twice."""
    shared = tuple(int(t) for t in np.resize(requests[0].prompt, 2 * BLOCK_TOKENS))
    changed = []
    for request in requests:
        prompt = request.prompt
        if random.random() < 0.6:
            prompt = (*shared[: int(random.integers(BLOCK_TOKENS // 2, len(shared) + 1))], *prompt)[: max(1, positions - 2)]
        salt = [None, None, "a"][int(random.integers(3))]
        params = replace(request.params, cache_salt=salt, use_prefix_cache=bool(random.random() < 0.9))
        changed += [Wanted(prompt, params, request.seat)] * int(random.integers(1, 3))
    return changed


@examples(max_examples=45)
@given(cases(sampling=True, positions=(24, 80)), st.integers(0, 2**32 - 1), st.sampled_from(["full", "exact", "loops"]))
def test_full_and_exact_are_the_recomputed_model(case: Case, seed: int, name: str) -> None:
    """Breaks: a text that depends on who came when, on a preemption, on a chunk, or on what another request left in the cache."""
    random = np.random.default_rng(seed)
    case, spare_blocks = crowded(case, random)
    requests = sharing(case.requests, random, case.model.positions)
    case, policy = wavefront(case, random, WavefrontDepth) if name == "loops" else (case, tuned(case, name))
    outcome = drive(case, policy, requests, random, spare_blocks)
    event(f"preemptions {min(outcome.preemptions, 3)}")
    event(f"prefix hits {outcome.prefix_tokens > 0}")
    for number, request in outcome.finished.items():
        assert output(request.sequence) == recomputed(case.model, requests[number])
    for number, request in outcome.aborted.items():
        wanted, _ = recomputed(case.model, requests[number])
        found = request.sequence.new_tokens.tolist()
        assert found == wanted[: len(found)]
    assert len(outcome.finished) + len(outcome.aborted) == len(requests) and outcome.left_blocks == 0


def wavefront(case: Case, random: np.random.Generator, kind: type[WavefrontDepth]) -> tuple[Case, WavefrontDepth]:
    """The case with its layers in loops, at whose ends are exits, and a policy of that ``kind``, which lets tokens start as early
    as chance says."""
    layers = len(case.model.strengths)
    loops = next(count for count in (3, 2, 5) if layers % count == 0)
    ends = range(layers // loops, layers, layers // loops)
    exits = [replace(info, head="identity") for info in random_exits(random, [*ends], layers, tails=False)]
    options = replace(case.options, draft="all", max_exit_streak=0)
    options = replace(options, tuning=DepthTuning(exit_room=case.room))
    case = replace(case, manifest=tiny_manifest(case.model, ends, exits, loops=loops), options=options)
    policy = kind(case.manifest, case.options)
    policy.starts_after = lambda states: int(random.integers(1, loops + 1))  # type: ignore[method-assign]
    return case, policy


@examples(max_examples=45)
@given(cases(sampling=True, positions=(24, 80)), st.integers(0, 2**32 - 1), st.booleans())
def test_exit_says_what_its_exits_say(case: Case, seed: int, rows: bool) -> None:
    """Breaks: an exit that is taken, or not, because of traffic, or because of what was guessed while loops were rows."""
    random = np.random.default_rng(seed)
    case, spare_blocks = crowded(case, random)
    requests = sharing(case.requests, random, case.model.positions)
    if rows:
        case, driven = wavefront(case, random, ExitWavefront)
        policy: Any = exits_pay(ExitDepth(case.manifest, case.options))
    else:
        policy, driven = tuned(case, "exit"), tuned(case, "exit")
    if not driven.can_resume:
        requests = [replace(request, params=replace(request.params, use_prefix_cache=False)) for request in requests]
    outcome = drive(case, driven, requests, random, spare_blocks)
    event(f"preemptions {min(outcome.preemptions, 3)}, rows {rows}")
    for number, request in outcome.finished.items():
        wanted = SimulatedExit(policy, case.manifest, case.model, requests[number])
        assert output(request.sequence) == (wanted.run(), wanted.reason)
        assert request.sequence.depth.token_depths == wanted.depths
    for number, request in outcome.aborted.items():
        found = request.sequence.new_tokens.tolist()
        assert found == SimulatedExit(policy, case.manifest, case.model, requests[number]).run()[: len(found)]
    assert len(outcome.finished) + len(outcome.aborted) == len(requests) and outcome.left_blocks == 0
