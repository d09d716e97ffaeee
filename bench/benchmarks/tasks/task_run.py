"""Run tasks on engines, timed against policy `full` and other engines in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tide_bench.arms.process import ArmProcess
from tide_runtime import Engine, Generation, GenerationParams

from benchmarks.tasks.task_set import Task, TaskKind


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
    """A task under `full` and under another policy, and by peers, measured in turn.

    Args:
        full, other: seconds of decoding in each round.
        peers: peer → the same; of all that ran.
    """

    kind: str
    task: Task
    full: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    peers: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    full_run: Conversation | None = None
    other_run: Conversation | None = None

    @property
    def speedup(self) -> float:
        """Median over the rounds of `full`'s decode time over the other's."""
        return _ratio(self.full, self.other)

    @property
    def over_peers(self) -> dict[str, float]:
        """Peer → median over the rounds of its decode time over the other policy's."""
        return {name: _ratio(seconds, self.other) for name, seconds in self.peers.items()}

    @property
    def solved(self) -> bool | None:
        assert self.other_run is not None
        return self.task.solved_by(self.other_run.replies[-1].text or "")


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
    paired: PairedTask, engines: tuple[Engine, Engine], peers: Mapping[str, ArmProcess], kind: TaskKind, salt: str
) -> None:
    """One more round of a task: `full`, the other engine, then each peer on the same prompts for as many tokens.

    Replies without a second token count as equally fast.
    """
    full, other = engines
    paired.full_run, paired.other_run = converse(full, kind, paired.task, salt), converse(other, kind, paired.task, salt)
    decoded = paired.full_run.decoded_tokens
    paired.full.append(paired.full_run.decode_s if decoded else 1.0)
    paired.other.append(paired.other_run.decode_s if decoded else 1.0)
    for name, peer in peers.items():
        paired.peers[name].append(peer_seconds(peer, paired.other_run) if decoded else 1.0)


def peer_seconds(peer: ArmProcess, known: Conversation) -> float:
    """Seconds behind the first token of every reply, when the peer's replies to the same prompts have as many tokens as those of
    ``known``. Raises ArmError where it fails."""
    seconds = 0.0
    for prompt, reply in zip(known.prompts, known.replies, strict=True):
        if (count := len(reply.token_ids)) > 1:
            seconds += peer.generate([list(prompt)], count).decode_s
    return seconds


def differing_tokens(own: Sequence[int], reference: Sequence[int]) -> int:
    """Places with other tokens; a place that only one of two texts has counts."""
    return sum(a != b for a, b in zip(own, reference, strict=False)) + abs(len(own) - len(reference))
