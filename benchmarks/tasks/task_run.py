"""Run tasks on engines, timed against policy `full` in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import perf_counter

from tide_runtime import Engine, Generation, GenerationParams

from benchmarks.tasks.task_set import Task, TaskKind

TIMED_S = 0.5  # of `full`, at least, in all rounds of a task: short replies take several
MOST_ROUNDS, DOUBTFUL_ROUNDS = 5, 3  # of a task, and of one whose speedup is near 1
DOUBTFUL_SPEEDUP = 1.1

_salts = count()


@dataclass(frozen=True)
class Conversation:
    """The replies of one run of a task, a generation for each turn."""

    replies: tuple[Generation, ...]

    @property
    def token_ids(self) -> list[int]:
        return [token for reply in self.replies for token in reply.token_ids]

    @property
    def texts(self) -> list[str]:
        return [reply.text or "" for reply in self.replies]

    @property
    def decode_s(self) -> float:
        """Seconds behind the first token of every reply."""
        return sum(reply.stats.decode_time for reply in self.replies)

    @property
    def decoded_tokens(self) -> int:
        return sum(reply.stats.new_tokens - 1 for reply in self.replies)


@dataclass
class PairedTask:
    """A task under `full` and under another policy, measured in turn.

    Args:
        full, other: seconds of decoding in each round.
    """

    kind: str
    id: str
    full: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    full_run: Conversation | None = None
    other_run: Conversation | None = None

    @property
    def speedup(self) -> float:
        """Median over the rounds of `full`'s decode time over the other's."""
        return median(full / other for full, other in zip(self.full, self.other, strict=True))

    @property
    def needs_a_round(self) -> bool:
        """Whether timing is not sure enough yet: the reply is short, or the speedup near 1, where a few percent matter."""
        rounds = len(self.full)
        if rounds >= MOST_ROUNDS:
            return False
        return sum(self.full) < TIMED_S or (self.speedup < DOUBTFUL_SPEEDUP and rounds < DOUBTFUL_ROUNDS)


def converse(engine: Engine, kind: TaskKind, task: Task) -> Conversation:
    """The model's replies to all turns of ``task``, greedy. Later runs find its prompts in the prefix cache."""
    params = GenerationParams(max_new_tokens=kind.max_new_tokens, cache_salt=task.id)
    messages = [{"role": "system", "content": kind.system}] if kind.system is not None else []
    replies = []
    for turn in task.turns:
        messages.append({"role": "user", "content": turn})
        (reply,) = engine.generate([engine.chat_prompt(messages)], params)
        messages.append({"role": "assistant", "content": reply.text or ""})
        replies.append(reply)
    return Conversation(tuple(replies))


def run_paired(full: Engine, other: Engine, kind: TaskKind, task: Task) -> PairedTask:
    """Measure one task. Replies without a second token count as equally fast."""
    paired = PairedTask(kind.kind, task.id)
    while not paired.full or paired.needs_a_round:
        for engine in (full, other) if len(paired.full) % 2 else (other, full):  # an order of its own in each round
            run = converse(engine, kind, task)
            if engine is full:
                paired.full_run = run
                paired.full.append(run.decode_s)
            else:
                paired.other_run = run
                paired.other.append(run.decode_s)
        if not paired.full_run or not paired.full_run.decoded_tokens:
            paired.full, paired.other = [1.0], [1.0]
            break
    return paired


@dataclass(frozen=True)
class PairedBatch:
    """Tasks of several kinds in one batch: seconds of decoding under `full` and another policy, and how many tokens differ."""

    ids: tuple[str, ...]
    full_s: float
    other_s: float
    differing_tokens: int

    @property
    def speedup(self) -> float:
        return self.full_s / self.other_s


def mixed_groups(kinds: Sequence[TaskKind], size: int) -> list[list[tuple[TaskKind, Task]]]:
    """Groups of ``size`` tasks, as different as there are kinds; the last group may be smaller, and is left out."""
    mixed = [(kind, kind.tasks[i]) for i in range(max(len(k.tasks) for k in kinds)) for kind in kinds if i < len(kind.tasks)]
    return [mixed[begin : begin + size] for begin in range(0, len(mixed) - size + 1, size)]


def run_batch(full: Engine, other: Engine, group: Sequence[tuple[TaskKind, Task]], rounds: int = 2) -> PairedBatch:
    """The first turns of ``group``, submitted together; the median over ``rounds`` of the time behind the last first token."""
    seconds: dict[Engine, list[float]] = {full: [], other: []}
    tokens: dict[Engine, list[list[int]]] = {}
    for number in range(rounds):
        for engine in (full, other) if number % 2 else (other, full):
            taken, done = _generate_together(engine, group)
            seconds[engine].append(taken)
            tokens[engine] = [list(one.token_ids) for one in done]
    different = sum(differing_tokens(a, b) for a, b in zip(tokens[full], tokens[other], strict=True))
    return PairedBatch(tuple(task.id for _, task in group), median(seconds[full]), median(seconds[other]), different)


def _generate_together(engine: Engine, group: Sequence[tuple[TaskKind, Task]]) -> tuple[float, list[Generation]]:
    salt, prompts = f"batch {next(_salts)}", []
    for kind, task in group:
        messages = [{"role": "system", "content": kind.system}] if kind.system is not None else []
        prompts.append(engine.chat_prompt([*messages, {"role": "user", "content": task.turns[0]}]))
    limits = [kind.max_new_tokens for kind, _ in group]
    start = perf_counter()
    handles = [
        engine.submit(prompt, GenerationParams(max_new_tokens=limit, cache_salt=salt), streamed=False)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    done = [handle.result() for handle in handles]
    seconds = perf_counter() - start
    return seconds - max(one.stats.time_to_first_token for one in done), done


def differing_tokens(own: Sequence[int], reference: Sequence[int]) -> int:
    """Places with other tokens; a place that only one of two texts has counts."""
    return sum(a != b for a, b in zip(own, reference, strict=False)) + abs(len(own) - len(reference))
