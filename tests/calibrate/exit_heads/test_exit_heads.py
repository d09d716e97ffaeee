"""Exit heads on tiny random models: output of untrained heads, training, reproducibility, and errors."""

from collections.abc import Callable
from threading import Thread

import numpy as np
import pytest
import torch
from calibrate.captured import capture_of
from export.architectures import VOCAB, tiny_model
from tide_calibrate.capture.batches import divide_train_windows, read_batch
from tide_calibrate.capture.store import Capture
from tide_calibrate.exit_heads import ExitHead, Translator, make_head, parse_kind
from tide_calibrate.exit_heads.tail import draft_mask
from tide_calibrate.exit_heads.train import HeadTraining, top_k_divergence, train_head
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.model.tail import ModelTail
from tide_runtime.errors import CalibrationError, DataError, ParamsError, UnsupportedModelError

from tide_export.model.boundaries import decoder_layers

TOKENS = 8  # no longer than the sliding windows of the tiny models
QUICK = HeadTraining(steps=24, windows_per_step=4, held_out_windows=8, check_every=8)


def _capture(model: FrozenModel, boundaries: tuple[int, ...], windows: int = 40, tokens: int = TOKENS) -> Capture:
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB, (windows, tokens))
    return capture_of(model.model, ids, boundaries, np.full(windows, tokens), np.zeros(windows))


@pytest.fixture(scope="module")
def captured(llama: FrozenModel) -> Capture:
    return _capture(llama, (1, 2, 3, 4))


def _exact_states(model: FrozenModel) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Compute the float32 states [2, T, H] at every boundary, and the model's logits."""
    seen: dict[int, torch.Tensor] = {}

    def keep(boundary: int) -> Callable[..., object]:
        return lambda _m, _i, output: seen.__setitem__(boundary, output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(decoder_layers(model.model), start=1)]
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model.model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return seen, logits


FAMILIES = ["llama", "gemma2", "gemma3", "gpt2", "cohere", "granite", "opt", "falcon", "stablelm", "mixtral", "phi"]


def _translator(head: ExitHead) -> Translator:
    assert head.translator is not None
    return head.translator


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_reproduce_the_model_given_its_own_state(name: str) -> None:
    """A head that omits a soft-cap, logit scale, bias, norm, position or mask would be wrong for a whole family, among
    all tokens or a sample of them."""
    model, ids = FrozenModel(tiny_model(name)), torch.tensor([0, 3, 4, 77, VOCAB - 1])
    states, logits = _exact_states(model)
    close = {"rtol": 1e-5, "atol": 1e-5 * float(logits.abs().max())}
    assert model.lm_head.samples_vocabulary
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(states[4]), logits, **close)
        torch.testing.assert_close(model.lm_head(states[4], ids), logits[..., ids], **close)
        for kind, checkpoint in (("tail:1", 3), ("tail:2", 2)):
            torch.testing.assert_close(make_head(kind, model, checkpoint).logits(states), logits, **close)
        for kind in ("identity", "linear", "tail:1", "tail:2"):
            head = make_head(kind, model, 2)
            torch.testing.assert_close(head.logits(states, ids), head.logits(states)[..., ids], **close)


def test_a_tail_attends_to_true_keys_and_its_own_draft_key(llama: FrozenModel) -> None:
    """If training used other keys than the runtime's cache holds, agreement would be lower at run time than calibrated.

    The reference runs the tail for one draft at a time, over the true states at all earlier positions.
    """
    states, _ = _exact_states(llama)
    head = make_head("tail:2", llama, 1)
    _translator(head).up.data.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    tail = llama.tail(2)
    with torch.no_grad():
        drafts = head.translated(states)
        one_by_one = []
        for p in range(TOKENS):
            sequence = torch.cat([states[2][:, :p], drafts[:, p : p + 1]], dim=1)
            one_by_one.append(tail(sequence)[:, -1])
        assert torch.allclose(head.logits(states), torch.stack(one_by_one, dim=1), atol=1e-4)
    seen = draft_mask(3, torch.float32)[0, 0] == 0  # no draft sees its own true key, which has the full model's result
    assert seen.int().tolist() == [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]


def test_a_package_may_train_its_head_by_a_loss_of_its_own(llama: FrozenModel, captured: Capture) -> None:
    """A researcher's loss would be ignored."""
    usual, head = make_head("linear", llama, 2), make_head("linear", llama, 2)
    _translator(head).loss = lambda *given: 2 * top_k_divergence(*given)  # type: ignore[assignment]
    histories = [train_head(one, captured, QUICK)[1] for one in (usual, head)]
    assert histories[1][0].divergence == pytest.approx(2 * histories[0][0].divergence)


@pytest.mark.parametrize("kind", ["linear", "tail:1"])
def test_training_lowers_the_divergence_leaves_the_model_alone_and_is_reproducible(
    kind: str, llama: FrozenModel, captured: Capture
) -> None:
    """Training must improve the head, keep its best weights, and leave the captured model unchanged."""
    before = {name: value.clone() for name, value in llama.model.state_dict().items()}
    states = read_batch(captured, [0, 1], (2,)).states
    with torch.no_grad():  # training starts from the identity, so that a trained head is no worse
        assert torch.equal(make_head("linear", llama, 2).logits(states), make_head("identity", llama, 2).logits(states))
    head, history = train_head(make_head(kind, llama, 2), captured, QUICK)
    assert min(entry.divergence for entry in history) < 0.97 * history[0].divergence
    assert all(torch.equal(value, before[name]) for name, value in llama.model.state_dict().items())
    again = train_head(head, captured, QUICK)[1]
    assert again[0].divergence == min(entry.divergence for entry in history), "the best weights were not kept"
    first, second = (train_head(make_head(kind, llama, 1), captured, QUICK)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.trained(), second.trained(), strict=True)), "a seed is a calibration's"
    assert not torch.equal(_translator(first).down, _translator(make_head(kind, llama, 1, seed=1)).down)


def test_padding_does_not_reach_the_loss(llama: FrozenModel) -> None:
    """Short windows are padded; values beyond their length must not influence training."""
    clean = _capture(llama, (2, 4))
    lengths = np.full(len(clean.tokens), TOKENS, np.int32)
    lengths[::2] = 5
    dirty_states = {c: states.copy() for c, states in clean.hidden.items()}
    dirty_ids = clean.top_ids.copy()
    dirty_ids[::2, 5:] = 0
    for states in dirty_states.values():
        states[::2, 5:] = 100.0
    trained = []
    for hidden, top_ids in ((clean.hidden, clean.top_ids), (dirty_states, dirty_ids)):
        capture = Capture(**{**vars(clean), "lengths": lengths, "hidden": hidden, "top_ids": top_ids})
        trained.append(_translator(train_head(make_head("linear", llama, 2), capture, QUICK)[0]).up)
    assert torch.equal(*trained)


def test_the_divergence_is_the_kl_over_top_k_tokens_and_the_rest() -> None:
    """Without the bucket for other tokens, a head could lower its loss by moving probability to tokens outside the top K."""
    torch.manual_seed(0)
    full, early = torch.randn(5, 40) * 2, torch.randn(5, 40) * 2
    top = full.topk(6)
    p, q = full.softmax(-1), early.softmax(-1)
    p = torch.cat([p.gather(1, top.indices), 1 - p.gather(1, top.indices).sum(1, keepdim=True)], 1)
    q = torch.cat([q.gather(1, top.indices), 1 - q.gather(1, top.indices).sum(1, keepdim=True)], 1)
    expected = (p * (p.log() - q.log())).sum(1)
    got = top_k_divergence(early, top.indices, top.values, full.logsumexp(1))
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.allclose(top_k_divergence(full, top.indices, top.values, full.logsumexp(1)), torch.zeros(5), atol=1e-5)


def test_unknown_heads_and_places_are_refused(llama: FrozenModel, captured: Capture) -> None:
    """A mistyped --heads must not train another head; the last layer is no checkpoint, and no layer may run twice."""
    for kind in ("", "lineal", "tail", "tail:", "tail:0", "tail:x", "tail:-1", "linear:1", "identity:", "block:1"):
        with pytest.raises(ParamsError, match="known are identity, linear"):
            parse_kind(kind)
    for kind, checkpoint, words in (
        *(("identity", 0, "1 … 3"), ("identity", 4, "1 … 3")),
        *(("tail:2", 3, "at most 2"), ("tail:4", 1, "needs more than 4 layers")),
    ):
        with pytest.raises(ParamsError, match=words):
            make_head(kind, llama, checkpoint)
    with pytest.raises(ParamsError, match="rank"):
        Translator(64, rank=129)
    with pytest.raises(CalibrationError, match="no states after 3 layers"):
        train_head(make_head("tail:1", llama, 2), _capture(llama, (2, 4)), QUICK)
    broken = {c: np.full_like(states, np.nan) for c, states in captured.hidden.items()}
    with pytest.raises(CalibrationError, match="NaN"):
        train_head(make_head("linear", llama, 2), Capture(**{**vars(captured), "hidden": broken}), QUICK)
    mistral = FrozenModel(tiny_model("mistral"))
    states = read_batch(_capture(mistral, (2, 3), windows=4, tokens=12), [0], (2, 3)).states
    with pytest.raises(ParamsError, match="sliding attention window of 8"):  # the tail's mask has no window
        make_head("tail:1", mistral, 2).logits(states)


def test_a_model_with_cross_layer_inputs_is_refused() -> None:
    """If later layers read more than the hidden state from earlier ones, skipping layers would silently give wrong logits."""
    model = tiny_model("llama")
    layers = decoder_layers(model)
    first: dict[str, torch.Tensor] = {}
    layers[0].register_forward_hook(lambda _m, _i, output: first.__setitem__("state", output))
    layers[3].register_forward_hook(lambda _m, _i, output: output + first.pop("state", 0))
    with pytest.raises(UnsupportedModelError, match="besides the hidden state"):
        ModelTail(model, 3)


def test_parts_of_the_train_split_are_disjoint_and_complete(captured: Capture) -> None:
    """A router calibrated on the text its head was trained on, or on windows of the same documents, would be overconfident."""
    parts = divide_train_windows(captured)
    assigned = np.concatenate([parts.head, parts.head_held_out, parts.router, parts.router_held_out])
    assert sorted(assigned) == list(range(40))
    assert len(parts.head) == 22 and len(parts.router) == 10
    documents = np.repeat(np.arange(20), 2).astype(np.int32)
    parts = divide_train_windows(Capture(**{**vars(captured), "document": documents}))
    owners = [set(documents[windows]) for windows in vars(parts).values()]
    assert all(owners) and sum(map(len, owners)) == 20
    with pytest.raises(DataError, match="at least 4"):
        divide_train_windows(Capture(**{**vars(captured), "split": np.ones(40, np.int8)}))


def test_tails_that_are_made_at_once_see_their_own_layers(llama: FrozenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads train in several threads: a tail would count the layers that another one runs, or return its states."""
    model, original = llama.model, type(llama.model).forward

    def beside_another(self: torch.nn.Module, *arguments: object, **options: object) -> object:
        if self is model:  # and not the copy that the tail runs
            other = Thread(target=original, args=(self, *arguments), kwargs=options)
            other.start()
            other.join()
        return original(self, *arguments, **options)

    monkeypatch.setattr(type(model), "forward", beside_another)
    assert ModelTail(model, 3).num_layers == llama.num_layers
