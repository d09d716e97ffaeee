"""`Engine.score`: log-probabilities of a given text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tide_runtime import Engine
from tide_runtime.errors import PromptError
from transformers import LlamaForCausalLM

TEXT = [3, 17, 4, 100, 42, 9, 9, 250]


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_scores_are_the_eager_models(load: Callable[..., Engine], hf_model: LlamaForCausalLM, policy: str) -> None:
    """Guards against scores that are off by one place, or of the draft instead of the text."""
    with torch.no_grad():
        logprobs = torch.log_softmax(hf_model(torch.tensor([TEXT])).logits[0].double(), -1).numpy()
    with load(policy=policy) as engine:
        score = engine.score(TEXT, prompt_tokens=2)
    places = np.arange(1, len(TEXT) - 1)
    assert score.logprobs == pytest.approx(logprobs[places, TEXT[2:]].tolist(), abs=1e-3)
    assert score.likeliest == logprobs[places].argmax(-1).tolist()


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_texts_that_run_together_get_the_scores_that_each_gets_alone(load: Callable[..., Engine], policy: str) -> None:
    """Guards against scores that go to another text of the call, or depend on its company."""
    texts = [(TEXT, 2), (TEXT[::-1], 1), (TEXT[:5], 4)]
    with load(policy=policy) as engine:
        together = engine.score_many(texts)
        alone = [engine.score(*text) for text in texts]
    assert [score.likeliest for score in together] == [score.likeliest for score in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("prompt_tokens", [0, len(TEXT)])
def test_a_text_without_a_token_to_score_is_refused(load: Callable[..., Engine], prompt_tokens: int) -> None:
    with load() as engine, pytest.raises(PromptError, match="leave at least one token to score"):
        engine.score(TEXT, prompt_tokens)


def test_a_submitted_score_is_the_same_with_the_likeliest_tokens(load: Callable[..., Engine]) -> None:
    """The server's ``echo`` with log-probabilities must equal the in-process score."""
    with load() as engine:
        score = engine.submit_score(TEXT, 2, top=3).result()
        wanted = engine.score(TEXT, 2)
    assert score.logprobs == wanted.logprobs and wanted.top == []
    assert [top[0][0] for top in score.top] == score.likeliest and all(len(top) == 3 for top in score.top)
    for token, logprob, top in zip(TEXT[2:], score.logprobs, score.top, strict=True):
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
