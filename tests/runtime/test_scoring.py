"""`Engine.score`: log-probabilities of a given text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
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
    assert score.argmax == logprobs[places].argmax(-1).tolist()


@pytest.mark.parametrize("policy", ["full", "exact"])
def test_texts_that_run_together_get_the_scores_that_each_gets_alone(load: Callable[..., Engine], policy: str) -> None:
    """Guards against scores that go to another text of the call, or depend on its company."""
    texts = [(TEXT, 2), (TEXT[::-1], 1), (TEXT[:5], 4)]
    with load(policy=policy) as engine:
        together = engine.score_many(texts)
        alone = [engine.score(*text) for text in texts]
    assert [score.argmax for score in together] == [score.argmax for score in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("policy", ["full", "exact"])
@pytest.mark.parametrize("chunk", [3, 512])
def test_prompt_passes_give_the_bits_of_decode_steps(load: Callable[..., Engine], policy: str, chunk: int) -> None:
    """An evaluation would change with the way it is computed; with the prefix cache, which has the texts' beginnings the second
    time; or at a chunk's end."""
    texts = [(TEXT, 2), (TEXT * 4, 1), ([5, 6] * 20, 33), ([5, 6] * 20 + [7], 40)]
    with load(policy=policy, prefill_chunk=chunk, max_batch=2) as engine:
        if engine.row_padding is None:
            pytest.skip("this machine's kernels round otherwise where tokens share a launch")
        decoded = engine.score_many(texts, decode=True)
        launches = sum(engine.backend.launches.values())
        passes = [engine.score_many(texts), engine.score_many(texts)]
        used = (sum(engine.backend.launches.values()) - launches) / 2
    for scores in passes:
        for one, other in zip(scores, decoded, strict=True):
            assert (one.argmax, one.logprobs) == (other.argmax, other.logprobs)
    assert chunk == 3 or used < launches / 2


def test_an_exit_policy_is_scored_as_it_decodes(exits_bundle: Path) -> None:
    """Log-probabilities of prompt passes would be the model's own, not those of the depths where the policy stops."""
    with Engine.load(exits_bundle, EngineOptions(policy="exit", threads=ThreadOptions(1))) as engine:
        score = engine.score(TEXT * 4, 2)
        assert engine.backend.launches["head"] > 0 and score.layers > 0


def test_without_the_same_bits_a_text_is_decoded(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors that round otherwise where tokens share a launch, scores would not be those of the text's generation."""
    with load(policy="full") as engine:
        monkeypatch.setattr(engine.backend, "row_padding", None)
        assert engine.score(TEXT, 2).layers > 0


def test_few_logits_are_kept_at_a_time(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a long text take gigabytes where the vocabulary is large."""
    texts = [(TEXT * 4, 1)] * 3
    with Engine.load(bundle, EngineOptions(policy="full", threads=ThreadOptions(1))) as engine:
        wanted, sizes = engine.score_many(texts), list[int]()
        monkeypatch.setattr("tide_runtime.engine._LOGITS_BYTES", 4 * 5 * engine.manifest.model.vocab_size)
        observer = SimpleNamespace(launched=lambda graph, rows, tokens, longest, seconds: sizes.append(tokens))
        with engine.with_options(replace(engine.options, max_batch=3), observer) as small:
            found = small.score_many(texts)
            assert sizes and max(sizes) <= 5
            generated = small.generate([TEXT, TEXT * 3], GenerationParams(max_new_tokens=3, ignore_eos=True))
    assert [score.logprobs for score in found] == [score.logprobs for score in wanted]
    assert max(sizes) > 5 and all(len(one.token_ids) == 3 for one in generated)


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
    assert [top[0][0] for top in score.top] == score.argmax and all(len(top) == 3 for top in score.top)
    for token, logprob, top in zip(TEXT[2:], score.logprobs, score.top, strict=True):
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
