"""/v1/completions through OpenAI's own client."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from serve.live import Served
from serve.sse import parsed, raw_events
from tide_runtime import GenerationParams

PROMPT = "def add"


def expected(served: Served, prompt: str | list[int] = PROMPT, **params: Any) -> str:
    [generation] = served.engine.generate(prompt, GenerationParams(**{"max_new_tokens": 8, **params}))
    assert generation.text is not None
    return generation.text


def texts(client: openai.OpenAI, model: str, prompt: Any = PROMPT, **fields: Any) -> list[str]:
    made = client.completions.create(model=model, prompt=prompt, **{"max_tokens": 8, **fields})
    assert [choice.index for choice in made.choices] == [*range(len(made.choices))]
    return [choice.text for choice in made.choices]


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "lists of ids"])
def test_prompts_of_every_kind(client: openai.OpenAI, served: Served, model: str, kind: str) -> None:
    """Breaks: a kind of prompt is read as another one, such as token ids as a batch."""
    prompts = [PROMPT, "The sky"]
    ids = [served.engine.tokenizer.encode(prompt) for prompt in prompts]  # type: ignore[union-attr]
    sent: Any = {"text": prompts[0], "texts": prompts, "ids": ids[0], "lists of ids": ids}[kind]
    wanted = [expected(served, prompt) for prompt in prompts]
    assert texts(client, model, sent) == (wanted if kind.endswith("s") and kind != "ids" else wanted[:1])


def test_the_limit_is_16_tokens_where_none_is_given(client: openai.OpenAI, model: str) -> None:
    """Breaks: a client of the old API, which leaves max_tokens out, waits for a whole context."""
    made = client.completions.create(model=model, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert made.usage is not None and made.usage.completion_tokens == 16


def test_choices_follow_their_prompts(client: openai.OpenAI, model: str) -> None:
    """Breaks: choice i*n + j is not choice j of prompt i, so texts are given to other prompts."""
    sampled: dict[str, Any] = {"temperature": 1.5, "seed": 3}
    together = texts(client, model, [PROMPT, "The sky"], n=2, **sampled)
    alone = [text for prompt in (PROMPT, "The sky") for text in texts(client, model, prompt, n=2, **sampled)]
    assert together == alone and len(set(together)) == 4


def test_stop_seed_and_penalties(client: openai.OpenAI, served: Served, model: str) -> None:
    """Breaks: the fields that this endpoint shares with chat are dropped here."""
    assert texts(client, model, temperature=1.5, seed=9) == [expected(served, temperature=1.5, seed=9)]
    assert texts(client, model, frequency_penalty=2.0) == [expected(served, frequency_penalty=2.0)]
    whole = expected(served)
    assert texts(client, model, stop=whole[3:6]) == [whole[: whole.index(whole[3:6])]]


def test_logprobs_of_the_output(client: openai.OpenAI, served: Served, model: str) -> None:
    """Breaks: token texts do not join to the text, or offsets point elsewhere."""
    [choice] = client.completions.create(model=model, prompt=PROMPT, max_tokens=6, logprobs=2, logit_bias={"2": -100}).choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    [generation] = served.engine.generate(PROMPT, GenerationParams(max_new_tokens=6, logprobs=2, logit_bias=((2, -100.0),)))
    assert choice.logprobs.token_logprobs == [entry.logprob for entry in generation.logprobs]
    assert tokens is not None and offsets is not None and choice.logprobs.top_logprobs is not None
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    for entry, top in zip(generation.logprobs, choice.logprobs.top_logprobs, strict=True):
        assert {*top.values()} == {entry.logprob, *(value for _, value in entry.top)}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_is_the_answer(http: httpx.Client, client: openai.OpenAI, model: str, echo: bool, logprobs: int | None) -> None:
    """Breaks: a stream lacks text, log-probabilities or the echo that the whole answer has."""
    fields: dict[str, Any] = {
        "model": model, "prompt": [PROMPT, "The sky"], "max_tokens": 8, "n": 2, "temperature": 1.5, "seed": 2,
        "echo": echo, "logprobs": logprobs,
    }  # fmt: skip
    *events, usage = parsed(raw_events(http, "/v1/completions", {**fields, "stream_options": {"include_usage": True}}))
    whole = client.completions.create(**fields)
    assert usage["usage"]["total_tokens"] == whole.usage.total_tokens and usage["choices"] == []
    for choice in whole.choices:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice.index]
        assert "".join(part["text"] for part in parts) == choice.text
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice.finish_reason
        lists = [part["logprobs"] for part in parts if part["logprobs"]]
        if logprobs is not None:
            assert choice.logprobs is not None
            for name, values in choice.logprobs.model_dump().items():
                assert [value for each in lists for value in each[name]] == values, name
    for event in events:  # of which OpenAI's type lacks the null before the first token
        if "[null" not in json.dumps(event):
            ended = [{**part, "finish_reason": "stop"} for part in event["choices"]]  # null, until a choice has ended
            Completion.model_validate({**event, "choices": ended}, strict=True)
