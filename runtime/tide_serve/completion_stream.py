"""The events of a streamed completion; written once for each token of every client, as in `tide_serve.chat_stream`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing

from tide_runtime import Chunk, Generation
from tide_runtime.sampler import TokenLogprob

from tide_serve.answers import AnswerHead, finish_reason
from tide_serve.echo import Echo
from tide_serve.event_stream import DONE, event, quoted
from tide_serve.logprobs import completion_logprobs
from tide_serve.running import Indexed, Running
from tide_serve.service import Service
from tide_serve.stream_options import StreamOptions
from tide_serve.token_texts import TextOffsets
from tide_serve.usage import usage_of


class CompletionStream:
    """Writes the chunks of a request as events: text as it comes, and a last event of each choice with its finish_reason.

    Args:
        top_logprobs: None: no log-probabilities.
        echo: sent before each choice.
    """

    def __init__(
        self, service: Service, head: AnswerHead, options: StreamOptions, top_logprobs: int | None, echo: Echo | None
    ) -> None:
        self._service, self._options, self._top, self._echo = service, options, top_logprobs, echo
        self._offsets: dict[int, TextOffsets] = {}
        self._document = {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        self._before = f'data: {quoted(self._document)[:-1]}, "choices": [{{"index": '
        self._behind = '}], "usage": null}\n\n' if options.include_usage else "}]}\n\n"

    async def events(self, running: Running, num_prompts: int, n: int, prompt_tokens: int) -> AsyncGenerator[str]:
        """Events of all choices, those that are there together in one string."""
        num_choices, finished = num_prompts * n, dict[int, Generation]()
        with closing(running):  # which runs while the echo is sent
            if self._echo is not None:
                yield "".join(self._echoed(choice) for choice in range(num_choices))
            async with aclosing(running.chunks()) as chunks:
                async for arrived in chunks:
                    if events := self._of_batch(arrived):
                        yield events
                    finished |= {choice: chunk.generation for choice, chunk in arrived if chunk.generation is not None}
        if not finished:  # only the prompts were asked for
            yield "".join(self._event(choice, "", reason='"length"') for choice in range(num_choices))
        yield self._ending([finished[choice] for choice in sorted(finished)], n, prompt_tokens)

    def _ending(self, generations: Sequence[Generation], n: int, prompt_tokens: int) -> str:
        if not self._options.include_usage:
            return DONE
        usage = usage_of(self._service.engine, generations, n, prompt_tokens)
        return event({**self._document, "choices": [], "usage": usage}) + DONE

    def _echoed(self, choice: int) -> str:
        assert self._echo is not None
        first, scored = self._echo.logprobs(choice)
        return self._event(choice, self._echo.text(choice), self._logprobs(choice, scored, first))

    def _of_batch(self, arrived: Sequence[Indexed]) -> str:
        if len(arrived) == 1 or self._options.include_depth:  # a token whose depth is asked for has an event of its own
            return "".join([self._of_choice(choice, [chunk]) for choice, chunk in arrived])
        chunks: dict[int, list[Chunk]] = {}
        for choice, chunk in arrived:
            chunks.setdefault(choice, []).append(chunk)
        return "".join(self._of_choice(choice, of_choice) for choice, of_choice in chunks.items())

    def _of_choice(self, choice: int, chunks: Sequence[Chunk]) -> str:
        text, last, events, depths = "".join([chunk.text for chunk in chunks]), chunks[-1].generation, "", ""
        if self._options.include_depth:
            depths = f', "depths": {[chunk.depth for chunk in chunks if chunk.depth is not None]}'
        if text or depths or self._top is not None:
            entries = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
            events = self._event(choice, text, self._logprobs(choice, entries), depths=depths)
        if last is not None:
            events += self._event(choice, "", reason=quoted(finish_reason(last.finish_reason)))
        return events

    def _event(self, choice: int, text: str, logprobs: str = "null", reason: str = "null", depths: str = "") -> str:
        fields = f'{choice}, "text": {quoted(text)}, "logprobs": {logprobs}, "finish_reason": {reason}{depths}'
        return f"{self._before}{fields}{self._behind}"

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob], unscored: Sequence[int] = ()) -> str:
        if self._top is None:
            return "null"
        texts = self._service.token_texts
        offsets = self._offsets.setdefault(choice, TextOffsets(texts))
        return quoted(completion_logprobs(entries, self._top, texts, offsets, unscored))
