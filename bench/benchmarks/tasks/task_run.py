"""Run tasks on engines, timed against policy `full` and other engines in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import perf_counter

from tide_bench.arms.process import ArmProcess
from tide_runtime import Engine, Generation, GenerationParams

from benchmarks.tasks.task_set import Task, TaskKind

_salts = count()


@dataclass(frozen=True)
class Conversation:
    """The replies of one run of a task, a generation for each turn, and the token ids of each turn's prompt."""

    replies: tuple[Generation, ...]
    prompts: tuple[Sequence[int], ...]

    @property
    def token_ids(self) -> list[int]:
        return [token for reply in self.replies for token in reply.token_ids]

    @property
    def decode_s(self) -> float:
        """Seconds behind the first token of every reply."""
        return sum(reply.stats.decode_time for reply in self.replies)

    @property
    def decoded_tokens(self) -> int:
        return sum(reply.stats.new_tokens - 1 for reply in self.replies)


@dataclass
class PairedTask:
    """A task under `full` and under another policy, and by a peer, measured in turn.

    Args:
        full, other, peer: seconds of decoding in each round; no peer: no seconds.
    """

    kind: str
    id: str
    full: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    full_run: Conversation | None = None
    other_run: Conversation | None = None

    @property
    def speedup(self) -> float:
        """Median over the rounds of `full`'s decode time over the other's."""
        return _ratio(self.full, self.other)

    @property
    def over_peer(self) -> float | None:
        """Median over the rounds of the peer's decode time over the other policy's."""
        return _ratio(self.peer, self.other) if self.peer else None


def _ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    return median(a / b for a, b in zip(slower, faster, strict=True))


def converse(engine: Engine, kind: TaskKind, task: Task, salt: str) -> Conversation:
    """The model's replies to all turns of ``task``, greedy. What ``engine`` answered under ``salt`` may draft for them."""
    params = GenerationParams(max_new_tokens=kind.max_new_tokens, cache_salt=salt)
    messages = [{"role": "system", "content": kind.system}] if kind.system is not None else []
    replies, prompts = [], []
    for turn in task.turns:
        messages.append({"role": "user", "content": turn})
        prompts.append(engine.chat_prompt(messages))
        (reply,) = engine.generate(prompts[-1:], params)
        messages.append({"role": "assistant", "content": reply.text or ""})
        replies.append(reply)
    return Conversation(tuple(replies), tuple(prompts))


def run_round(
    paired: PairedTask, engines: tuple[Engine, Engine], peer: ArmProcess | None, kind: TaskKind, task: Task, salt: str
) -> None:
    """One more round of a task: `full`, the other engine, then the peer on the same prompts for as many tokens. Replies without a
    second token count as equally fast."""
    full, other = engines
    paired.full_run, paired.other_run = converse(full, kind, task, salt), converse(other, kind, task, salt)
    decoded = paired.full_run.decoded_tokens
    paired.full.append(paired.full_run.decode_s if decoded else 1.0)
    paired.other.append(paired.other_run.decode_s if decoded else 1.0)
    if peer is not None:
        paired.peer.append(peer_seconds(peer, paired.other_run) if decoded else 1.0)


def peer_seconds(peer: ArmProcess, known: Conversation) -> float:
    """Seconds behind the first token of every reply, when the peer's replies to the same prompts have as many tokens as those of
    ``known``. Raises ArmError where it fails."""
    seconds = 0.0
    for prompt, reply in zip(known.prompts, known.replies, strict=True):
        if (count := len(reply.token_ids)) > 1:
            seconds += peer.generate([list(prompt)], count).decode_s
    return seconds


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
    salt = f"batch {next(_salts)}"
    prompts = []
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
