"""``echo`` of /v1/completions, which evaluation harnesses read log-likelihoods from."""

from typing import Any

import httpx
import pytest
from serve.live import Served


def complete(http: httpx.Client, model: str, **fields: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/completions", json={"model": model, **fields})
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_requests_of_lm_evaluation_harness(served: Served, http: httpx.Client, model: str, max_tokens: int) -> None:
    """Breaks: log-likelihoods over HTTP differ from those in process, or a token counts as likeliest that is not."""
    prompts = [[5, 40, 99, 7, 20], [300, 12, 13]]
    fields = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    choices = complete(http, model, prompt=prompts, **fields)
    for ids, choice in zip(prompts, choices, strict=True):
        score = served.engine.score(ids)
        logprobs = choice["logprobs"]
        values, top = logprobs["token_logprobs"], logprobs["top_logprobs"]
        assert len(values) == len(top) == len(logprobs["tokens"]) == len(ids) + max_tokens
        assert (values[0], top[0]) == (None, None)
        assert values[1 : len(ids)] == pytest.approx(score.logprobs, abs=1e-6)
        likeliest = [value == max(each.values()) for value, each in zip(values[1:], top[1:], strict=True)]
        assert likeliest[: len(ids) - 1] == [a == b for a, b in zip(score.argmax, ids[1:], strict=True)]


def test_a_likely_prompt_is_reported_as_likeliest(served: Served, http: httpx.Client, model: str) -> None:
    """Breaks: accuracy over HTTP is 0, because a token's own value and that among the likeliest differ in the last bit."""
    [generation] = served.engine.generate([5, 40, 99])
    ids = [5, 40, 99, *generation.token_ids[:20]]
    [choice] = complete(http, model, prompt=ids, max_tokens=0, echo=True, logprobs=1)
    values, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    assert [value == max(each.values()) for value, each in zip(values[3:], top[3:], strict=True)] == [True] * 20


def test_the_echo_is_the_prompt(served: Served, http: httpx.Client, model: str) -> None:
    """Breaks: the prompt comes back changed, or offsets count from the end of the prompt."""
    text = "def add(a, b):\n    é"
    [plain] = complete(http, model, prompt=text, max_tokens=4)
    [echoed] = complete(http, model, prompt=text, max_tokens=4, echo=True, logprobs=0)
    assert echoed["text"] == text + plain["text"]
    tokens, offsets = echoed["logprobs"]["tokens"], echoed["logprobs"]["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or echoed["text"][offset:].startswith(token)


def test_special_tokens_of_an_id_prompt_are_echoed(served: Served, http: httpx.Client, model: str) -> None:
    """Breaks: the echo of token ids hides tokens that the client has sent."""
    [choice] = complete(http, model, prompt=[1, 70], max_tokens=0, echo=True)
    assert choice["text"] == "<|im_start|>" + served.engine.tokenizer.decode([70])  # type: ignore[union-attr]
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
