"""What the events of streamed chats and completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tide_runtime import Chunk, Generation

from tide_serve.answers import AnswerHead
from tide_serve.event_stream import DONE, event, quoted
from tide_serve.running import Indexed
from tide_serve.service import Service
from tide_serve.stream_options import StreamOptions
from tide_serve.usage import usage_of


class ChoiceEvents(ABC):
    """Writes the chunks of a request's choices as events.

    This runs once for each token of every client, so an event is put together from strings and not from objects.

    Args:
        kind: the events' ``object``.
        top_logprobs: None: no log-probabilities.
    """

    def __init__(self, service: Service, head: AnswerHead, kind: str, options: StreamOptions, top_logprobs: int | None) -> None:
        self._service, self._options, self._top = service, options, top_logprobs
        self._document = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        # An event is what stands before its choice's index, the choice's fields, and what stands behind them.
        self._before = f'data: {quoted(self._document)[:-1]}, "choices": [{{"index": '
        self._behind = '}], "usage": null}\n\n' if options.include_usage else "}]}\n\n"

    @abstractmethod
    def _of_choice(self, choice: int, chunks: Sequence[Chunk]) -> str:
        """The events of ``chunks``, which follow each other in one choice."""

    def _of_batch(self, arrived: Sequence[Indexed]) -> str:
        """The events of chunks that are there together."""
        if len(arrived) == 1 or self._options.include_depth:  # a token whose depth is asked for has an event of its own
            return "".join([self._of_choice(choice, [chunk]) for choice, chunk in arrived])
        chunks: dict[int, list[Chunk]] = {}
        for choice, chunk in arrived:
            chunks.setdefault(choice, []).append(chunk)
        return "".join(self._of_choice(choice, of_choice) for choice, of_choice in chunks.items())

    def _depths(self, chunks: Sequence[Chunk]) -> str:
        """The field ``depths`` of an event, empty where it is not asked for."""
        if not self._options.include_depth:
            return ""
        return f', "depths": {[chunk.depth for chunk in chunks if chunk.depth is not None]}'

    def _ending(self, generations: Sequence[Generation], n: int, prompt_tokens: int | None = None) -> str:
        """The last events. ``n``, ``prompt_tokens``: see `usage_of`."""
        if not self._options.include_usage:
            return DONE
        usage = usage_of(self._service.engine, generations, n, prompt_tokens)
        return event({**self._document, "choices": [], "usage": usage}) + DONE
