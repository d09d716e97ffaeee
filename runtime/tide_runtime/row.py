"""One sequence being generated: its tokens, where it stands in the cache, and when it is finished."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.device_rows import DeviceRow
from tide_runtime.depth_stats import DepthStats
from tide_runtime.draft_control import DraftControl
from tide_runtime.frontier import Frontier
from tide_runtime.params import GenerationParams
from tide_runtime.sampling import Sampler, TokenLogprob
from tide_runtime.text import TextStream
from tide_runtime.trial import Trial

FinishReason = Literal["eos", "stop", "length", "cache_full", "cancelled"]


@dataclass
class Row:
    """``tokens`` holds prompt and output; the first ``length`` of them are in the KV cache of slot ``slot``.

    Behind ``end`` stand ``drafted`` tokens that are not output yet. ``layers_run``: decoder layers launched in the decode
    steps this row took part in. ``frontier`` and ``control`` are set by policies that skip layers; in plain steps, where nothing
    waits, the frontier stays where it was until somebody drafts or asks an exit.
    """

    index: int
    tokens: NDArray[np.int64]  # [prompt + max_new_tokens], filled up to ``end``
    last_token: int
    end: int
    prompt_tokens: int
    params: GenerationParams
    eos: frozenset[int]
    sampler: Sampler
    text: TextStream | None
    cache_slots: int
    width: int = 1  # rows that run at once in its call
    awaited: bool = False  # whether others wait for a place
    slot: int = -1
    length: int = 0
    drafted: int = 0
    frontier: Frontier = field(init=False)
    control: DraftControl = field(init=False)
    held: int = 0  # steps that policy exit has kept the last token waiting for company
    streak: int = 0  # early exits since the last deep token
    trial: Trial = field(default_factory=Trial)  # of asking exits, policy exit
    plain_until: float = 0  # of policy exit: the length up to which its steps are those of `full`
    depth: DepthStats = field(default_factory=DepthStats)
    layers_run: int = 0
    ran_full: bool = False  # the policy left it to `full`, as skipping layers would not have paid
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    submitted: float = field(default_factory=perf_counter)
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def known(self) -> int:
        """Tokens that can be run: prompt, output and drafts."""
        return self.end + self.drafted

    @property
    def new_tokens(self) -> NDArray[np.int64]:
        return self.tokens[self.prompt_tokens : self.end]

    def choose(self, logits: NDArray[np.floating], likeliest: int, seen: int | None = None) -> int:
        """The next token from ``logits`` [V]; ``likeliest`` is their argmax as the head computed it.

        ``seen``: how many of ``tokens`` stand before it, when that includes drafts.
        """
        token = self.pick(logits, likeliest, seen)
        self.note_logprobs(logits, token)
        return token

    def pick(self, logits: NDArray[np.floating], likeliest: int, seen: int | None = None) -> int:
        """`choose` without noting log-probabilities: for tokens that may yet be refused."""
        params, seen = self.params, self.end if seen is None else seen
        if params.takes_likeliest:
            return likeliest if is_finite(logits, likeliest) else self.sampler.sample(np.asarray(logits), self.tokens[:seen])
        return self.sampler.sample(np.asarray(logits, np.float32), self.tokens[:seen])

    def note_logprobs(self, logits: NDArray[np.floating], token: int) -> None:
        """Keep the log-probability of output ``token``, when the caller asked for them."""
        if self.params.logprobs:
            self.logprobs.append(self.sampler.logprobs(np.asarray(logits, np.float32), token, self.params.logprobs))

    def append(self, token: int) -> str:
        """Take ``token`` as output; returns the text that may be shown now and sets ``finish_reason`` at an end."""
        self.tokens[self.end] = self.last_token = token
        self.end += 1
        if not self.first_token:
            self.first_token = perf_counter()
        shown = ""
        if token in self.eos and not self.params.ignore_eos:
            self.finish_reason = "eos"
        elif self.text is not None:
            shown = self.text.push(token)
            if self.text.stop_hit is not None:
                self.finish_reason = "stop"
        if self.finish_reason is None:
            if self.end - self.prompt_tokens >= self.params.max_new_tokens:
                self.finish_reason = "length"
            elif self.end > self.cache_slots:
                self.finish_reason = "cache_full"
        if self.finish_reason is not None:
            shown = self._close(shown)
        self.pieces.append(shown)
        return shown

    def cancel(self) -> None:
        """End it here: nobody listens any more."""
        self.finish_reason = "cancelled"
        self.pieces.append(self._close(""))

    def _close(self, shown: str) -> str:
        self.finished = perf_counter()
        # Drafts accepted behind the end are not output.
        del self.logprobs[len(self.new_tokens) :], self.depth.token_depths[len(self.new_tokens) - 1 :]
        return shown if self.text is None else shown + self.text.flush()


def note_exit_time(rows: Iterable[Row], began: float) -> None:
    """A step of ``rows`` that began at ``began`` has done with exits and drafts."""
    spent = perf_counter() - began
    for row in rows:
        row.depth.exit_time += spent


def is_finite(logits: NDArray[np.floating] | DeviceRow, likeliest: int) -> bool:
    """A NaN wins every argmax, so one look at the winner finds it. Graphs whose logits stay on a device have looked themselves:
    ``likeliest`` is -1 then."""
    return likeliest >= 0 and (isinstance(logits, DeviceRow) or math.isfinite(logits.item(likeliest)))
