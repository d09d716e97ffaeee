"""/v1/completions through OpenAI's own client."""

from typing import Any

import openai
import pytest
from serve.live import Served
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
