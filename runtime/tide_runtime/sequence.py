"""One sequence being generated: its tokens, its row of the KV cache, what became of its request, and when it ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import GrammarError, NumericsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sampler import Sampler, TokenLogprob
from tide_runtime.text.grammar import GrammarState
from tide_runtime.text.thought_state import ThoughtState
from tide_runtime.text.tokenizer import TextStream

FinishReason = Literal["eos", "stop", "length", "cache_full", "cancelled", "deadline"]


@dataclass
class DepthStats:
    """What depth policies did for one sequence.

    Args:
        layers_run: decoder layers launched in the decode steps that the sequence took part in.
        ran_full: the policy left it to ``full``, as skipping layers would not have paid.
        drafted, accepted: drafts proposed and those that the model confirmed, by drafter (`Draft.source`).
        deep_passes: runs to the last layer.
        exit_time: seconds of steps in which exits were evaluated or drafts placed, up to where the remaining layers began.
        forced: tokens that stopped early only to keep a depth budget.
        token_depths: of each output token after the first, the layers run before it was final (or first proposed, for
            accepted drafts): 0 for text drafts, L for those that the whole model produced.
    """

    layers_run: int = 0
    ran_full: bool = False
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    deep_passes: int = 0
    exit_time: float = 0.0
    forced: int = 0
    token_depths: list[int] = field(default_factory=list)

    def record(self, sources: Sequence[str], depths: Sequence[int], accepted: int, last: int) -> None:
        """A verification pass over drafts from ``sources`` at ``depths``: the first ``accepted`` held, and it gave one token
        more."""
        for source in sources:  # Counter.update takes several times as long
            self.drafted[source] += 1
        for source in sources[:accepted]:
            self.accepted[source] += 1
        self.token_depths += depths[:accepted]
        self.record_full_step(last)

    def record_full_step(self, last: int) -> None:
        """A full pass that gave one token."""
        self.deep_passes += 1
        self.token_depths.append(last)


@dataclass
class RequestHistory:
    """What became of a request.

    Args:
        prefix_tokens: prompt tokens whose keys and values came from the prefix cache.
        preemptions: how often its row was given to others.
        rotary_restarts: how often its text outgrew the short rotary factors and was computed again.
        peak_batch: most sequences of a step in which it decoded.
        submitted, first_step, first_token, latest_token, finished: times of `perf_counter`; 0: not yet.
    """

    prefix_tokens: int = 0
    preemptions: int = 0
    rotary_restarts: int = 0
    peak_batch: int = 1
    submitted: float = field(default_factory=perf_counter)
    first_step: float = 0.0
    first_token: float = 0.0
    latest_token: float = 0.0
    finished: float = 0.0

    @property
    def refills(self) -> int:
        """How often its tokens were computed again."""
        return self.preemptions + self.rotary_restarts


@dataclass
class TokenSequence:
    """A prompt and its output.

    Args:
        tokens: [prompt + max_new_tokens, or fewer where the KV cache ends], filled up to ``num_tokens``.
        grammar: which tokens may come next; None: all.
        thoughts: which tokens were thoughts; it is the ``grammar`` where there is one, or a budget.
        batch_index: its row of the KV cache; -1 while it has none.
        num_cached_tokens: the first ones, which its row holds.
        snapshot_points: lengths at which its prefill stops so that a snapshot can be taken, rising.
        prefilled: its row holds all that decoding needs; a preempted sequence is prefilled again.
        adapter: number of its adapter, see `OnnxRuntimeContext.adapters`; 0: none; None: the engine has none.
        adapter_digest: of its adapter's files; empty without one.
        long_rotary_from: the manifest's.
        is_long: its row is computed with the long rotary factors.
        policy_state: the depth policy's state of the sequence; each policy has a type for it.
        error: why no token can be chosen from its logits; it ends then, and the others go on.
    """

    tokens: NDArray[np.int64]
    num_tokens: int
    prompt_tokens: int
    params: GenerationParams
    eos: frozenset[int]
    sampler: Sampler
    text: TextStream | None = None
    grammar: GrammarState | ThoughtState | None = None
    thoughts: ThoughtState | None = None
    batch_index: int = -1
    num_cached_tokens: int = 0
    snapshot_points: Sequence[int] = ()
    prefilled: bool = False
    adapter: int | None = None
    adapter_digest: str = ""
    long_rotary_from: int | None = None
    is_long: bool = False
    policy_state: Any = None
    depth: DepthStats = field(default_factory=DepthStats)
    history: RequestHistory = field(default_factory=RequestHistory)
    finish_reason: FinishReason | None = None
    error: NumericsError | GrammarError | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def last_token(self) -> int:
        return int(self.tokens[self.num_tokens - 1])

    @property
    def new_tokens(self) -> NDArray[np.int64]:
        return self.tokens[self.prompt_tokens : self.num_tokens]

    @property
    def salt(self) -> Hashable:
        """What sequences that share keys and values, and drafts, have in common beside their tokens."""
        return (self.params.cache_salt, self.adapter_digest) if self.adapter_digest else self.params.cache_salt

    @property
    def prefill_end(self) -> int:
        """Number of tokens to prefill: the prompt's, or after a preemption all but the last one, which is decoded."""
        return self.prompt_tokens if self.num_tokens == self.prompt_tokens else self.num_tokens - 1

    @property
    def logits_from(self) -> int:
        """The first token whose logits a prefill reads: the prompt's last one, and none of a sequence that is prefilled again."""
        return self.prompt_tokens - 1 if self.num_tokens == self.prompt_tokens else self.prefill_end

    @property
    def is_long_text(self) -> bool:
        """Whether its text so far takes the long rotary factors."""
        return self.long_rotary_from is not None and self.num_tokens > self.long_rotary_from

    @property
    def position_offset(self) -> int:
        """What the positions of its tokens exceed their places in the text by, see `Manifest.long_rotary_from`."""
        return self.long_rotary_from if self.is_long and self.long_rotary_from is not None else 0

    @property
    def last_end(self) -> int:
        """The most tokens that it has before it ends, or before its row is computed again."""
        if self.long_rotary_from is None or self.is_long:
            return len(self.tokens)
        return min(len(self.tokens), self.long_rotary_from + 1)

    def latest_depth(self, num_layers: int) -> int:
        """Layers run before the latest token was final: ``num_layers`` for the first one, and under policies that count none."""
        depths = self.depth.token_depths
        after_first = self.num_tokens - self.prompt_tokens - 1
        return depths[after_first - 1] if 0 < after_first <= len(depths) else num_layers

    def choose(self, logits: NDArray[np.floating], argmax: int, seen: int | None = None, drawn: int = -1) -> int:
        """The next token from ``logits`` [V]; ``argmax`` is their argmax as the head computed it.

        Args:
            seen: how many of ``tokens`` stand before it, when that includes drafts.
            drawn: what a device has drawn with the sequence's sampler; -1: nothing.
        """
        try:
            drawable = drawn >= 0 and not (self.params.greedy or self.params.changes_logits)
            token = drawn if drawable else self.pick(logits, argmax, seen)
            self.note_logprobs(logits, token)
        except (NumericsError, GrammarError) as error:
            self.error = self.error or error
            return self.last_token  # it is not appended, see `error`
        return token

    def pick(self, logits: NDArray[np.floating], argmax: int, seen: int | None = None) -> int:
        """`choose` without noting log-probabilities: for tokens that may yet be refused."""
        params = self.params
        seen = self.num_tokens if seen is None else seen
        if params.takes_likeliest:
            return argmax if is_finite(logits, argmax) else self.sampler.sample(logits, self.tokens[:seen])
        allowed = self.grammar.allowed(self.tokens[self.num_tokens : seen].tolist()) if self.grammar is not None else None
        return self.sampler.sample(logits, self.tokens[:seen], allowed)

    def note_logprobs(self, logits: NDArray[np.floating], token: int) -> None:
        """Keep the log-probability of output ``token``, when the caller asked for them."""
        if self.params.logprobs:
            self.logprobs.append(self.sampler.logprobs(np.asarray(logits, np.float32), token, self.params.logprobs))

    def append(self, token: int) -> str:
        """Append ``token`` to the output; returns the text that may be shown now and sets ``finish_reason`` at an end."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        history = self.history
        history.latest_token = perf_counter()
        history.first_token = history.first_token or history.latest_token
        shown = ""
        if token in self.eos and not self.params.ignore_eos:
            self.finish_reason = "eos"
        elif self.text is not None:
            shown = self.text.push(token)
            if self.text.stop_hit is not None:
                self.finish_reason = "stop"
        follows = self.grammar if self.grammar is not None else self.thoughts
        if follows is not None and self.finish_reason is None:
            follows.take(token)
            if follows.complete:
                self.finish_reason = "stop"
        if self.finish_reason is None:
            if self.num_tokens - self.prompt_tokens >= self.params.max_new_tokens:
                self.finish_reason = "length"
            elif self.num_tokens == len(self.tokens):
                self.finish_reason = "cache_full"
        if self.finish_reason is not None:
            shown = self._close(shown)
        self.pieces.append(shown)
        return shown

    def end(self, reason: FinishReason) -> None:
        """End the sequence here, before its text is complete."""
        self.finish_reason = reason
        self.pieces.append(self._close(""))

    def _close(self, shown: str) -> str:
        self.history.finished = perf_counter()
        self.history.first_token = self.history.first_token or self.history.finished
        # Drafts accepted after the end are not output.
        del self.logprobs[len(self.new_tokens) :], self.depth.token_depths[max(0, len(self.new_tokens) - 1) :]
        return shown if self.text is None else shown + self.text.flush()


def note_depth_time(sequences: Iterable[TokenSequence], began: float) -> None:
    """Add the time since ``began``, which a step of ``sequences`` spent on exits and drafts."""
    spent = perf_counter() - began
    for sequence in sequences:
        sequence.depth.exit_time += spent


def is_finite(logits: NDArray[np.floating], argmax: int) -> bool:
    """A NaN wins every argmax, so one look at the winner finds it. Graphs whose logits are no array of the host have looked
    themselves: ``argmax`` is -1 then."""
    return argmax >= 0 and (not isinstance(logits, np.ndarray) or math.isfinite(logits.item(argmax)))
