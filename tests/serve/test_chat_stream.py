"""Streams of /v1/chat/completions, read from the bytes."""

from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from serve.sse import parsed, raw_events

HI = [{"role": "user", "content": "Hi"}]
FIELDS: dict[str, Any] = {"messages": HI, "max_tokens": 12}


def chunks(http: httpx.Client, model: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which OpenAI's own type can read."""
    documents = parsed(raw_events(http, "/v1/chat/completions", {"model": model, **FIELDS, **fields}))
    for document in documents:
        ChatCompletionChunk.model_validate(document, strict=True)
    return documents


def choices(documents: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    by_index: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for document in documents:
        for choice in document["choices"]:
            by_index[choice["index"]].append(choice)
    return by_index


def text(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"].get("content") or "" for event in events)


def test_a_stream_is_role_text_and_reason(http: httpx.Client, client: openai.OpenAI, model: str) -> None:
    """Breaks: clients that wait for the role, for the end, or that add up the text."""
    documents = chunks(http, model)
    [events] = choices(documents).values()
    assert events[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["finish_reason"] is None for event in events[:-1])
    assert events[-1]["finish_reason"] == "length" and events[-1]["delta"] == {}
    assert len({document["id"] for document in documents}) == len({document["created"] for document in documents}) == 1
    assert all("usage" not in document for document in documents)
    whole = client.chat.completions.create(model=model, **FIELDS)
    assert text(events) == whole.choices[0].message.content


def test_usage_comes_last(http: httpx.Client, client: openai.OpenAI, model: str) -> None:
    """Breaks: clients that read the usage of a stream, and those that expect null before it."""
    *documents, last = chunks(http, model, stream_options={"include_usage": True})
    assert all(document["usage"] is None and document["choices"] for document in documents)
    assert last["choices"] == []
    whole = client.chat.completions.create(model=model, **FIELDS).usage
    assert whole is not None and last["usage"]["total_tokens"] == whole.total_tokens
    assert last["usage"]["depth"]["num_layers"] == 4


def test_choices_of_a_stream_are_told_apart(http: httpx.Client, client: openai.OpenAI, model: str) -> None:
    """Breaks: the texts of two choices are mixed, or one of them has no beginning or end."""
    fields = {"n": 3, "seed": 4, "temperature": 1.5}
    events = choices(chunks(http, model, **fields))
    whole = client.chat.completions.create(model=model, **FIELDS, **fields)
    assert {index: text(of_choice) for index, of_choice in events.items()} == {
        choice.index: choice.message.content for choice in whole.choices
    }
    for choice in whole.choices:
        of_choice = events[choice.index]
        assert of_choice[0]["delta"].get("role") == "assistant"
        assert [event["finish_reason"] for event in of_choice[-2:]] == [None, choice.finish_reason]


def test_logprobs_of_a_stream_are_those_of_the_answer(http: httpx.Client, client: openai.OpenAI, model: str) -> None:
    """Breaks: tokens whose text is held back lose their log-probability, or it comes twice."""
    fields = {"logprobs": True, "top_logprobs": 2}
    [events] = choices(chunks(http, model, **fields)).values()
    entries = [entry for event in events if event["logprobs"] for entry in event["logprobs"]["content"]]
    whole = client.chat.completions.create(model=model, **FIELDS, **fields).choices[0].logprobs
    assert whole is not None and entries == whole.model_dump()["content"]


def test_depths_of_a_stream(http: httpx.Client, model: str) -> None:
    """Breaks: the page shows the wrong depth for a token, or one too few."""
    *documents, last = chunks(http, model, stream_options={"include_depth": True, "include_usage": True})
    depths = [depth for events in choices(documents).values() for event in events for depth in event.get("depths", [])]
    assert {str(layers): depths.count(layers) for layers in set(depths)} == last["usage"]["depth"]["depths"]


@pytest.mark.parametrize("stop", [None, "e"])
def test_a_stop_string_never_shows(http: httpx.Client, client: openai.OpenAI, model: str, stop: str | None) -> None:
    """Breaks: text that is held back for a stop string is lost, or the stop string is sent."""
    fields = {"stop": stop, "max_tokens": 30}
    [events] = choices(chunks(http, model, **fields)).values()
    whole = client.chat.completions.create(model=model, **{**FIELDS, **fields}).choices[0]
    assert (text(events), events[-1]["finish_reason"]) == (whole.message.content, whole.finish_reason)
    assert stop is None or whole.finish_reason == "stop"


def test_the_official_client_reads_the_stream(client: openai.OpenAI, model: str) -> None:
    """Breaks: OpenAI's client cannot follow what the bytes say."""
    with client.chat.completions.stream(model=model, **FIELDS) as stream:
        stream.until_done()
    final = stream.current_completion_snapshot
    assert final.choices[0].message.content == client.chat.completions.create(model=model, **FIELDS).choices[0].message.content


def test_text_of_several_bytes_is_whole(http: httpx.Client, model: str) -> None:
    """Breaks: a character that takes several tokens arrives in pieces that are no characters."""
    [events] = choices(chunks(http, model, response_format={"type": "regex", "pattern": "é{3}"})).values()
    assert text(events) == "é" * 3 and events[-1]["finish_reason"] == "stop"
    assert all("�" not in (event["delta"].get("content") or "") for event in events)
