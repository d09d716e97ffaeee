"""What generation returns: whole results, streamed chunks, and the figures of a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tide_runtime.sampler import TokenLogprob
from tide_runtime.sequence import FinishReason, TokenSequence
from tide_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RequestStats:
    """Figures of one request.

    Args:
        time_to_first_token, decode_time: seconds.
        queue_time: seconds of ``time_to_first_token`` before the first step that worked on the request; all of it where none did.
        policy: the one that ran: ``full`` where the engine's would not have paid for as many sequences at once.
        layers_per_token: decoder layers launched per token after the first, counted at the backend.
        drafted, accepted: drafts of policy ``exact`` by drafter (`Draft.source`), and those the model confirmed.
        deep_passes: runs to the last layer.
        exit_time: seconds of ``decode_time`` in which exits were evaluated or drafts made; the rest ran all layers.
        forced: tokens that stopped early only to keep the request's depth budget; no certificate covers them.
        token_depths: of each output token after the first, the layers run before it was final (0: a text draft).
        speedup: decode speed over the uncut model's as the calibration measured it; None where it did not, or in a batch.
        predicted_speedup: what the calibration predicts of it, on average over greedy texts; None where it predicts nothing.
        prefix_tokens: prompt tokens whose keys and values came from the prefix cache.
        preemptions: how often the request gave up its KV memory for others and was computed again.
        rotary_restarts: how often its text outgrew the short rotary factors and was computed again.
        thought_tokens: tokens of thoughts, with their marks.
        uncovered: why the certificate does not cover this output of policy ``exit``; empty: it does.
    """

    prompt_tokens: int
    new_tokens: int
    time_to_first_token: float
    decode_time: float
    layers_per_token: float
    policy: str
    queue_time: float = 0.0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    deep_passes: int = 0
    exit_time: float = 0.0
    forced: int = 0
    token_depths: tuple[int, ...] = ()
    prefix_tokens: int = 0
    preemptions: int = 0
    rotary_restarts: int = 0
    thought_tokens: int = 0
    speedup: float | None = None
    predicted_speedup: float | None = None
    uncovered: tuple[str, ...] = ()

    def depth_of_each(self, num_layers: int) -> tuple[int, ...]:
        """Layers run before each output token was final; the first token comes out of the prompt's full pass."""
        return (num_layers, *(self.token_depths or (num_layers,) * (self.new_tokens - 1)))[: self.new_tokens]

    def depths(self, num_layers: int) -> dict[int, int]:
        """Layers run before a token was final → output tokens."""
        return dict(sorted(Counter(self.depth_of_each(num_layers)).items()))

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time they took."""
        return (self.new_tokens - 1) / self.decode_time if self.decode_time > 0 else 0.0


@dataclass(frozen=True)
class Generation:
    """One finished sequence. ``text`` is None when the bundle has no tokenizer; ``logprobs`` is empty unless asked for.

    ``stop_string``: the one of `GenerationParams.stop` that ended the text; None: something else did.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    stats: RequestStats
    stop_string: str | None = None


@dataclass(frozen=True)
class Chunk:
    """One streamed token. ``text`` may be empty (a character or stop string is incomplete); ``generation`` ends the stream.

    ``token_id`` and ``depth`` are None in the last chunk of a request that was cancelled or met its deadline.

    Args:
        depth: layers run before the token was final, as in `RequestStats.depth_of_each`.
        logprob: of the token, where the caller asked for log-probabilities.
    """

    text: str
    token_id: int | None
    generation: Generation | None = None
    depth: int | None = None
    logprob: TokenLogprob | None = None


def finished(sequence: TokenSequence, policy: str, tokenizer: Tokenizer | None) -> Generation:
    """The result of a finished sequence; its text is decoded here unless it was streamed."""
    assert sequence.finish_reason is not None
    depth, history = sequence.depth, sequence.history
    stats = RequestStats(
        prompt_tokens=sequence.prompt_tokens,
        new_tokens=len(sequence.new_tokens),
        time_to_first_token=history.first_token - history.submitted,
        queue_time=(history.first_step or history.finished) - history.submitted,
        decode_time=history.finished - history.first_token,
        layers_per_token=depth.layers_run / max(1, len(sequence.new_tokens) - 1),
        policy="full" if depth.ran_full else policy,
        drafted=dict(depth.drafted),
        accepted=dict(depth.accepted),
        deep_passes=depth.deep_passes,
        exit_time=depth.exit_time,
        forced=depth.forced,
        prefix_tokens=history.prefix_tokens,
        preemptions=history.preemptions,
        rotary_restarts=history.rotary_restarts,
        token_depths=tuple(depth.token_depths),
        thought_tokens=sequence.thoughts.thought_tokens if sequence.thoughts is not None else 0,
    )
    ids = sequence.new_tokens.tolist()
    if sequence.text is not None:
        text: str | None = "".join(sequence.pieces)
    else:
        text = tokenizer.continuation(ids[:-1] if sequence.finish_reason == "eos" else ids) if tokenizer is not None else None
    stop = sequence.text.stop_hit if sequence.text is not None else None
    return Generation(text, tuple(ids), sequence.finish_reason, tuple(sequence.logprobs), stats, stop)
