"""The sampled vocabulary: the same logits as among all tokens, the right tokens, and training that carries over to all."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from calibrate.captured import capture_of
from export.architectures import VOCAB, tiny_model
from tide_calibrate.capture.batches import read_batch
from tide_calibrate.capture.store import Capture
from tide_calibrate.exit_heads import make_head
from tide_calibrate.exit_heads.sampled_vocabulary import SampledVocabulary, narrowed
from tide_calibrate.exit_heads.train import HeadTraining, train_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.routers import MaxProbability
from tide_calibrate.routers.train import router_examples
from tide_calibrate.traces.record import trace_split

TOKENS, WINDOWS = 8, 40
QUICK = HeadTraining(steps=24, windows_per_step=4, held_out_windows=8, check_every=8)


def _capture(model: FrozenModel, top_k: int, windows: int = WINDOWS) -> Capture:
    """Windows of eight tokens, the second half of them in the test split."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (windows, TOKENS))
    split = np.repeat([0, 2], windows // 2)
    return capture_of(model.model, ids, (1, 2, 3, 4), np.full(windows, TOKENS), split, top_k)


@pytest.fixture(scope="module")
def captured(llama: FrozenModel) -> Capture:
    return _capture(llama, top_k=4)  # so that batches add few tokens


def test_threads_choose_tokens_apart(llama: FrozenModel) -> None:
    """Heads of several kinds are trained in threads on one model; one's tokens must not be another's."""
    states = torch.randn((1, 64, 64))
    choices = [torch.arange(start, start + 9 + start % 7) for start in range(16)]
    with torch.inference_mode():
        whole = llama.lm_head(states)
    with ThreadPoolExecutor(4) as pool:

        def logits(ids: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return llama.lm_head(states, ids)

        for ids, found in zip(choices * 20, pool.map(logits, choices * 20), strict=True):
            torch.testing.assert_close(found, whole[..., ids], rtol=1e-5, atol=1e-5)


def test_a_model_that_needs_all_logits_is_not_sampled(captured: Capture) -> None:
    """Code behind the LM head may index tokens; it must get all logits rather than fail or pick others."""
    model = tiny_model("llama")

    class Penalised(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + torch.linspace(0, 1, VOCAB)
            return output

    model.__class__ = Penalised
    frozen = FrozenModel(model)
    assert SampledVocabulary.of(captured, frozen, size=16) is None
    assert SampledVocabulary.of(captured, FrozenModel(tiny_model("llama"))) is None  # with few tokens there is none to leave out
    batch = read_batch(captured, [0, 1], (2,))
    assert narrowed(batch, None) == (batch, None)


def test_the_common_tokens_are_the_likeliest_of_the_train_split(llama: FrozenModel, captured: Capture) -> None:
    """Counting padding, or held-out text, would spend the sample on tokens that training never sees."""
    lengths = np.full(WINDOWS, TOKENS, np.int32)
    lengths[::2] = 3
    top_ids = captured.top_ids.copy()
    top_ids[::2, 3:, 0] = 5  # padding
    top_ids[captured.split == 2, :, 0] = 6  # another split
    vocabulary = SampledVocabulary.of(Capture(**{**vars(captured), "lengths": lengths, "top_ids": top_ids}), llama, size=10)
    assert vocabulary is not None
    seen = np.concatenate([captured.top_ids[w, : lengths[w], 0] for w in np.flatnonzero(captured.split == 0)])
    counts = np.bincount(seen, minlength=VOCAB)
    assert vocabulary.common.tolist() == sorted(np.argsort(-counts, kind="stable")[:10].tolist())


def test_a_narrowed_batch_asks_for_the_same_tokens(captured: Capture) -> None:
    """Wrong numbers would train heads towards other tokens."""
    batch = read_batch(captured, [0, 1], (2,))
    vocabulary = SampledVocabulary(torch.tensor([1, 50, 90]), VOCAB, random=7)
    numbered, sample = narrowed(batch, vocabulary, torch.tensor([11]))
    assert sample is not None and len(sample.ids) == sample.listed + 7
    listed, drawn = set(sample.ids[: sample.listed].tolist()), set(sample.ids[sample.listed :].tolist())
    assert listed == {1, 50, 90, 11} | set(batch.top_ids.flatten().tolist()) and not listed & drawn
    assert torch.equal(sample.ids[numbered.top_ids], batch.top_ids)
    assert sample.ids[sample.places(torch.tensor([11, 90]))].tolist() == [11, 90]
    fewer, small = narrowed(batch, vocabulary, max_choices=1)
    assert small is not None and torch.equal(small.ids[fewer.top_ids], batch.top_ids[..., :1])
    again = narrowed(batch, vocabulary, max_choices=1)[1]
    assert again is not None and torch.equal(again.ids, small.ids)


def test_random_tokens_stand_for_the_rest() -> None:
    """A head could otherwise put its probability on tokens that no batch has, and would choose them once all are scored."""
    logits = torch.randn((4, 3000), generator=torch.Generator().manual_seed(0))
    sample = SampledVocabulary(torch.arange(40), 3000, random=1000).sample(torch.tensor([2999]))
    estimate, listed = sample.logsumexp(logits[:, sample.ids]), logits[:, sample.ids[: sample.listed]].logsumexp(1)
    exact = logits.logsumexp(1)
    torch.testing.assert_close(estimate, exact, atol=0.15, rtol=0)
    assert ((exact - listed) > 1).all()


@pytest.mark.parametrize("kind", ["linear", "tail:1"])
def test_heads_trained_on_few_tokens_are_better_on_all(kind: str, llama: FrozenModel) -> None:
    """The head that is exported chooses among all tokens."""
    captured = _capture(llama, top_k=16, windows=80)
    vocabulary = SampledVocabulary.of(captured, llama, size=24)
    before = train_head(make_head("identity", llama, 2), captured, QUICK)[1][0]
    head, history = train_head(make_head(kind, llama, 2), captured, QUICK, vocabulary=vocabulary)
    assert min(entry.divergence for entry in history) < 0.97 * history[0].divergence
    after = train_head(head, captured, QUICK)[1][0]
    assert after.divergence < before.divergence


def test_a_sampled_trace_agrees_wherever_the_whole_one_does(llama: FrozenModel, captured: Capture) -> None:
    """The full model's token and the text's next one belong to every batch, so that agreement and likelihood are defined."""
    few = SampledVocabulary(torch.tensor([3]), VOCAB, random=8)
    heads = {(2, "identity"): make_head("identity", llama, 2)}
    routers = {(2, "identity"): [MaxProbability()]}
    whole, sampled = (trace_split(captured, "test", llama.lm_head, heads, routers, vocabulary=v) for v in (None, few))
    one, other = whole.exits[2, "identity"], sampled.exits[2, "identity"]
    assert (other.agrees | ~one.agrees).all()
    ends = np.isnan(one.nll)
    assert np.array_equal(ends, np.isnan(other.nll)) and ends.sum() == WINDOWS // 2
    np.testing.assert_array_equal(whole.full_nll, sampled.full_nll)
    everything = SampledVocabulary(torch.arange(VOCAB), VOCAB)  # differs only by what it leaves out: nothing
    same = trace_split(captured, "test", llama.lm_head, heads, routers, vocabulary=everything).exits[2, "identity"]
    assert np.array_equal(one.agrees, same.agrees)
    np.testing.assert_allclose(one.nll, same.nll, rtol=1e-5)
    np.testing.assert_allclose(one.scores["max_probability"], same.scores["max_probability"], rtol=1e-5)
    labels = [router_examples(heads[2, "identity"], captured, np.arange(6), v).right for v in (None, everything)]
    assert torch.equal(*labels)
