"""The events of a streamed completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing

from tide_runtime import Chunk, Generation
from tide_runtime.sampler import TokenLogprob

from tide_serve.answers import AnswerHead, finish_reason
from tide_serve.choice_events import ChoiceEvents
from tide_serve.echo import Echo
from tide_serve.event_stream import quoted
from tide_serve.logprobs import completion_logprobs
from tide_serve.running import Running
from tide_serve.service import Service
from tide_serve.stream_options import StreamOptions
from tide_serve.token_texts import TextOffsets


class CompletionStream(ChoiceEvents):
    """Each choice has events with text, and a last one with its finish_reason.

    ``echo``: sent before each choice.
    """

    def __init__(
        self, service: Service, head: AnswerHead, options: StreamOptions, top_logprobs: int | None, echo: Echo | None
    ) -> None:
        super().__init__(service, head, "text_completion", options, top_logprobs)
        self._echo = echo
        self._offsets: dict[int, TextOffsets] = {}

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

    def _echoed(self, choice: int) -> str:
        assert self._echo is not None
        prompt, logprobs = self._echo.prompt(choice), "null"
        if self._top is not None:
            unscored, scored = self._echo.logprobs(choice)
            places = self._offsets_of(choice).of_prompt(prompt.ids, prompt.text)
            logprobs = quoted(completion_logprobs(scored, self._top, self._service.token_texts, places, unscored))
        return self._event(choice, prompt.text, logprobs)

    def _of_choice(self, choice: int, chunks: Sequence[Chunk]) -> str:
        text, last = "".join([chunk.text for chunk in chunks]), chunks[-1].generation
        events, depths = "", self._depths(chunks)
        if text or depths or self._top is not None:
            entries = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
            events = self._event(choice, text, self._logprobs(choice, entries), depths=depths)
        if last is not None:
            events += self._event(choice, "", reason=quoted(finish_reason(last.finish_reason)))
        return events

    def _event(self, choice: int, text: str, logprobs: str = "null", reason: str = "null", depths: str = "") -> str:
        fields = f'{choice}, "text": {quoted(text)}, "logprobs": {logprobs}, "finish_reason": {reason}{depths}'
        return f"{self._before}{fields}{self._behind}"

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> str:
        if self._top is None:
            return "null"
        places = self._offsets_of(choice).of([entry.token for entry in entries])
        return quoted(completion_logprobs(entries, self._top, self._service.token_texts, places))

    def _offsets_of(self, choice: int) -> TextOffsets:
        if choice not in self._offsets:
            self._offsets[choice] = TextOffsets(self._service.token_texts, self._service.engine.tokenizer)
        return self._offsets[choice]
