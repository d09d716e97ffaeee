"""/v1/chat/completions through OpenAI's own client: every field does what it does in the engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serve.live import Served
from serve.sse import parsed, raw_events
from tide_runtime import GenerationParams

HI = [{"role": "user", "content": "Hi"}]


def expected(served: Served, messages: list[dict[str, str]] = HI, **params: object) -> str:
    """The engine's own answer, in process."""
    ids = served.engine.chat_prompt(messages)
    [generation] = served.engine.generate(ids, GenerationParams(**{"max_new_tokens": 8, **params}))  # type: ignore[arg-type]
    assert generation.text is not None
    return generation.text


def answer(client: openai.OpenAI, model: str, messages: object = HI, **fields: object) -> str:
    fields = {"max_tokens": 8, **fields}
    made = client.chat.completions.create(model=model, messages=messages, **fields)  # type: ignore[call-overload]
    return made.choices[0].message.content


def test_answer_is_the_engines(client: openai.OpenAI, served: Served, model: str) -> None:
    """Breaks: the server generates from another prompt than the engine's chat_prompt, or loses text."""
    made = client.chat.completions.create(model=model, messages=HI, max_tokens=8)
    [choice] = made.choices
    assert (choice.message.content, choice.message.role, choice.index) == (expected(served), "assistant", 0)
    assert choice.finish_reason == "length" and made.object == "chat.completion" and made.model == model
    assert made.id.startswith("chatcmpl-") and made.system_fingerprint


def test_an_answer_goes_on_from_a_given_text(http: httpx.Client, served: Served, model: str) -> None:
    """Breaks: a prefilled answer is refused, or the model begins a new turn behind it."""
    assert served.engine.tokenizer is not None
    prompt = served.engine.chat_text(HI) + "The end"
    [generation] = served.engine.generate(served.engine.tokenizer.encode(prompt, add_special_tokens=False))
    body = {"model": model, "messages": [*HI, {"role": "assistant", "content": "The end "}], "max_tokens": 8}
    chat = {**body, "continue_final_message": True, "add_generation_prompt": False}
    texts = [
        http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"],
        http.post("/v1/messages", json=body).json()["content"][0]["text"],
    ]
    assert all(text and generation.text.startswith(text) for text in texts)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "seed": 7}),
        ({"temperature": 1.5, "seed": 7, "top_p": 0.5}, {"temperature": 1.5, "seed": 7, "top_p": 0.5}),
        ({"max_completion_tokens": 3, "max_tokens": None}, {"max_new_tokens": 3}),
        ({"presence_penalty": 2.0, "max_tokens": 24}, {"presence_penalty": 2.0, "max_new_tokens": 24}),
        ({"frequency_penalty": -1.5, "max_tokens": 24}, {"frequency_penalty": -1.5, "max_new_tokens": 24}),
        ({"logit_bias": {"70": 100}}, {"logit_bias": ((70, 100.0),)}),
        ({"extra_body": {"top_k": 3}, "temperature": 2.0, "seed": 1}, {"top_k": 3, "temperature": 2.0, "seed": 1}),
        ({"extra_body": {"top_k": -1}, "temperature": 2.0, "seed": 1}, {"top_k": 0, "temperature": 2.0, "seed": 1}),
        ({"extra_body": {"min_p": 0.3}, "temperature": 2.0, "seed": 1}, {"min_p": 0.3, "temperature": 2.0, "seed": 1}),
        ({"extra_body": {"repetition_penalty": 1.7}}, {"repetition_penalty": 1.7}),
        ({"extra_body": {"ignore_eos": True}, "logit_bias": {"0": 100}}, {"ignore_eos": True, "logit_bias": ((0, 100.0),)}),
        ({"extra_body": {"cache_salt": "me"}}, {"cache_salt": "me"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_does_what_the_engines_parameter_does(
    client: openai.OpenAI, served: Served, model: str, fields: dict[str, object], params: dict[str, object]
) -> None:
    """Breaks: a sampling field is dropped, misnamed or has another scale."""
    assert answer(client, model, **fields) == expected(served, **params)


def test_fields_of_the_table_change_the_answer(client: openai.OpenAI, model: str) -> None:
    """Breaks: the test above compares an answer with itself, because its values change nothing."""
    plain, sampled = answer(client, model, max_tokens=24), answer(client, model, temperature=2.0, seed=1)
    assert answer(client, model, max_tokens=24, presence_penalty=2.0) != plain
    assert answer(client, model, extra_body={"repetition_penalty": 1.7}, max_tokens=24) != plain
    assert answer(client, model, temperature=2.0, seed=1, extra_body={"top_k": 3}) != sampled
    assert answer(client, model, temperature=2.0, seed=2) != sampled


def test_choices_take_consecutive_seeds(client: openai.OpenAI, model: str) -> None:
    """Breaks: all choices are the same text, or a choice cannot be repeated alone."""
    made = client.chat.completions.create(model=model, messages=HI, max_tokens=8, n=3, seed=5, temperature=1.5)
    texts = [choice.message.content for choice in sorted(made.choices, key=lambda choice: choice.index)]
    assert texts == [answer(client, model, seed=seed, temperature=1.5) for seed in (5, 6, 7)]
    assert len(set(texts)) == 3


def test_cached_tokens_are_reported(client: openai.OpenAI, model: str) -> None:
    """Breaks: a client cannot see that its prefix was cached, or sees another tenant's."""
    long = [{"role": "user", "content": "The sky is blue. " * 12}]
    salted = {"max_tokens": 2, "extra_body": {"cache_salt": "cached"}}
    first, again, other = (
        client.chat.completions.create(model=model, messages=long, **fields)  # type: ignore[call-overload]
        for fields in (salted, salted, {"max_tokens": 2, "extra_body": {"cache_salt": "another"}})
    )
    cached = [made.usage.prompt_tokens_details.cached_tokens for made in (first, again, other)]
    assert cached[0] == cached[2] == 0 < cached[1]


def test_a_chat_is_cached_after_a_restart(serve_app: Callable[..., AbstractContextManager[Served]], tmp_path: Path) -> None:
    """Breaks: a server that computes every chat's history again after a restart, and answers that change with it."""
    messages: list[Any] = [{"role": "user", "content": "The sky is blue. " * 12}]
    answers, cached = [], []
    for _ in range(2):
        with serve_app(prefix_dir=tmp_path) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            name = served.engine.manifest.model.name
            made = client.chat.completions.create(model=name, messages=messages, max_tokens=8)
            answers.append(made.choices[0].message.content)
            assert made.usage is not None and made.usage.prompt_tokens_details is not None
            cached.append(made.usage.prompt_tokens_details.cached_tokens)
            prompt = made.usage.prompt_tokens
    assert answers[0] == answers[1]
    assert cached == [0, (prompt - 1) // 16 * 16]


def test_logprobs_are_the_engines(client: openai.OpenAI, served: Served, model: str) -> None:
    """Breaks: a probability belongs to another token, or the alternatives are not the likeliest."""
    made = client.chat.completions.create(model=model, messages=HI, max_tokens=6, logprobs=True, top_logprobs=3)
    ids = served.engine.chat_prompt(HI)
    [generation] = served.engine.generate(ids, GenerationParams(max_new_tokens=6, logprobs=3))
    logprobs = made.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [entry.logprob for entry in generation.logprobs]
    assert [[top.logprob for top in entry.top_logprobs] for entry in logprobs.content] == [
        [value for _, value in entry.top] for entry in generation.logprobs
    ]
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode("utf-8", "replace") == generation.text


def test_an_answer_can_be_sent_back(client: openai.OpenAI, served: Served, model: str) -> None:
    """Breaks: a client that appends the answer's message to its conversation is refused for fields it did not make."""
    made = client.chat.completions.create(model=model, messages=HI, max_tokens=8)
    message = made.choices[0].message
    turns = [*HI, {"role": "assistant", "content": message.content}, *HI]
    for sent in (message, message.model_dump()):
        assert answer(client, model, [*HI, sent, *HI]) == expected(served, turns)  # type: ignore[arg-type]


def test_answers_run_to_the_end_of_the_context(client: openai.OpenAI, served: Served, model: str) -> None:
    """Breaks: without max_tokens an answer is cut short, or asks for more than the cache holds."""
    messages = [{"role": "user", "content": "The sky is blue. " * 80}]
    prompt = len(served.engine.chat_prompt(messages))
    assert 400 < prompt < 512
    made = client.chat.completions.create(model=model, messages=messages, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
    assert made.usage is not None and made.usage.completion_tokens == 512 - prompt + 1
    assert made.choices[0].finish_reason == "length"


def test_a_model_without_thoughts_does_not_think(http: httpx.Client, model: str) -> None:
    """Breaks: agents that ask every model for thoughts get 400."""
    body = {"model": model, "messages": HI, "max_tokens": 4}
    wanted = http.post("/v1/chat/completions", json=body).json()["choices"]
    for fields in (
        {"reasoning": {"max_tokens": 5}},
        {"reasoning": {"enabled": True, "effort": "high"}},
        {"reasoning_effort": "xhigh"},
        {"chat_template_kwargs": {"enable_thinking": True, "shout": True}},
    ):
        assert http.post("/v1/chat/completions", json={**body, **fields}).json()["choices"] == wanted


def test_depths_of_a_stream(http: httpx.Client, model: str) -> None:
    """Breaks: the page shows the wrong depth for a token, or one too few."""
    body = {"model": model, "messages": HI, "max_tokens": 12, "stream_options": {"include_depth": True, "include_usage": True}}
    *events, last = parsed(raw_events(http, "/v1/chat/completions", body))
    depths = [depth for event in events for part in event["choices"] for depth in part.get("depths", [])]
    assert {str(layers): depths.count(layers) for layers in set(depths)} == last["usage"]["depth"]["depths"]
