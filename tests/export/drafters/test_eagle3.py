"""EAGLE-3 heads as their tools write them: read in full and computed right, or refused with the names that do not fit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export.architectures import LAYERS, VOCAB, random_model, tiny_model
from export.drafters.reference import HIDDEN, KV_HEADS, SIZES, WIDTH, Eagle3
from safetensors.torch import load_file, save_file
from tide_runtime.bundle.manifest import KVInfo
from tide_runtime.errors import ModelFilesError
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache

from tide_export.drafters.eagle3 import load_eagle3
from tide_export.drafters.guesses import chain
from tide_export.sources.loaded_model import LoadedModel

TOKENS, GUESSES = 12, 3
TAPS = [1, 2, 3]
HEADS = {
    "EAGLE": (Eagle3(draft_vocab=40), {}),
    "no d2t": (Eagle3(), {}),
    "speculators": (
        Eagle3(norm_before_residual=True, draft_vocab=40, own_embedding=True),
        {"layer": "layers.0.", "transformer_layer_config": {"model_type": "llama", "vocab_size": VOCAB, **SIZES}},
    ),
    "vLLM": (Eagle3(fc_norm=True, norm_output=True), {"prefix": "model.", "fc_norm": True, "norm_output": True}),
    "gpt-oss": (Eagle3(norm_before_fc=True, biases=True), {"norm_before_fc": True}),
    "norms without a setting": (Eagle3(norm_before_fc=True), {}),
    "Qwen3": (Eagle3(head_norms=True), {"model_type": "qwen3", "layer_types": ["full_attention"] * 4}),
}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return LoadedModel(tiny_model("llama"), None, "tiny")


@torch.no_grad()
@pytest.mark.parametrize("case", list(HEADS))
def test_a_head_of_every_form_computes_what_its_formulas_say(case: str, target: LoadedModel, tmp_path: Path) -> None:
    """A head that is read in another form loses most of its hits, and nothing else shows it."""
    head, options = HEADS[case]
    found = load_eagle3(str(head.write(tmp_path, eagle_aux_hidden_state_layer_ids=TAPS, **options)), target)
    found.forms[0].apply(found.drafter)
    drafter = found.drafter
    assert drafter.taps == (1, 2, 3)
    assert drafter.kv == KVInfo(KV_HEADS, WIDTH, WIDTH)
    assert drafter.shares_embedding == (not head.own_embedding)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=random)
    tapped = torch.randn((2, TOKENS, 3 * HIDDEN), generator=random)
    table = head.tensors.get("embed_tokens.weight", target.model.get_input_embeddings().weight)
    made = list(chain(drafter, tapped, ids, GUESSES))
    for text in range(2):
        fused, embedded = head.fuse(tapped[text]), table[ids[text]]
        for place in range(TOKENS - GUESSES):
            before = fused[: place + 1]
            for ahead in range(GUESSES):
                logits, states = head.guess(embedded[1 : place + ahead + 2], before)
                torch.testing.assert_close(made[ahead][0][text, place], logits[-1], rtol=1e-4, atol=1e-4)
                before = torch.cat([before, states[-1:]])
    expected = torch.arange(head.draft_vocab) + head.tensors.get("d2t", torch.zeros(head.draft_vocab, dtype=torch.int64))
    assert torch.equal(drafter.vocabulary, expected)


@torch.no_grad()
def test_a_cached_step_equals_the_whole_text(target: LoadedModel, tmp_path: Path) -> None:
    """The runtime gives a step's new pairs to the head, whose cache holds those before."""
    drafter = load_eagle3(str(Eagle3().write(tmp_path, eagle_aux_hidden_state_layer_ids=TAPS)), target).drafter
    embedded, before = torch.randn(2, 1, 6, HIDDEN).unbind()
    positions = torch.arange(6)[None]
    whole, _ = drafter(embedded, before, positions)
    cache = DynamicCache()
    drafter(embedded[:, :4], before[:, :4], positions[:, :4], cache)
    last, _ = drafter(embedded[:, 4:], before[:, 4:], positions[:, 4:], cache)
    torch.testing.assert_close(last, whole[:, 4:], rtol=1e-5, atol=1e-5)


def test_open_questions_of_a_config_become_forms(target: LoadedModel, tmp_path: Path) -> None:
    """Two tools number taps differently, and two take different residuals where the config says nothing."""
    folder = Eagle3().write(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": TAPS})
    assert [form.taps for form in load_eagle3(str(folder), target).forms] == [(1, 2, 3), (2, 3, 4)]
    config = json.loads((folder / "config.json").read_text())
    del config["norm_before_residual"], config["eagle_config"]
    (folder / "config.json").write_text(json.dumps(config))
    deep = LoadedModel(random_model(LlamaConfig(**{**target.model.config.to_dict(), "num_hidden_layers": 8})), None, "deep")
    forms = load_eagle3(str(folder), deep).forms
    assert [(form.taps, form.settings["norm_before_residual"]) for form in forms] == [((2, 4, 5), False), ((2, 4, 5), True)]


def test_a_head_without_fc_reads_the_final_state(target: LoadedModel, tmp_path: Path) -> None:
    head = Eagle3()
    del head.tensors["fc.weight"]
    folder = head.write(tmp_path, eagle_config={"use_aux_hidden_state": False})
    found = load_eagle3(str(folder), target)
    state = torch.randn(1, 3, HIDDEN)
    for form, expected in zip(found.forms, (target.model.model.norm(state), state), strict=True):
        form.apply(found.drafter)
        assert found.drafter.taps == (LAYERS,)
        assert torch.equal(found.drafter.fuse(state), expected)


def _without(name: str) -> Callable[[dict, dict], None]:
    return lambda tensors, config: tensors.pop(name)


BROKEN: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "missing tensor": (_without("midlayer.mlp.up_proj.weight"), r"lacks midlayer\.mlp\.up_proj\.weight"),
    "unknown tensor": (
        lambda tensors, _: tensors.update({"midlayer.gate.weight": torch.ones(3)}),
        r"unknown midlayer\.gate\.weight",
    ),
    "no layer": (_without("midlayer.hidden_norm.weight"), "holds no EAGLE-3 head"),
    "shape": (
        lambda tensors, _: tensors.update({"norm.weight": torch.ones(3)}),
        r"norm\.weight has shape \[3\], expected \[64\]",
    ),
    "integers": (lambda tensors, _: tensors.update({"norm.weight": torch.ones(64, dtype=torch.int8)}), "norm.weight holds I8"),
    "hidden size": (lambda tensors, _: tensors.update({"fc.weight": torch.ones(64, 96)}), "96 channels.*hidden size of 64"),
    "vocabulary": (lambda _, config: config.update(vocab_size=256), "vocabulary has 256 tokens, and that of tiny 128"),
    "no d2t": (_without("d2t"), "among 40 of 128 tokens, and d2t.*missing"),
    "tokens that do not exist": (lambda tensors, _: tensors["d2t"].add_(100), "not a rising list of tokens below 128"),
    "a mask of other tokens": (lambda tensors, _: tensors["t2d"].logical_not_(), "that t2d marks"),
    "two layers": (lambda _, config: config.update(num_hidden_layers=2), "2 layers; TIDE runs drafters of one"),
    "other layers": (lambda _, config: config.update(model_type="deepseek_v3"), "'deepseek_v3'; TIDE reads"),
    "taps": (lambda _, config: config.update(eagle_aux_hidden_state_layer_ids=[2, 8, 13]), r"\[2, 8, 13\].*up to 4"),
    "norm without its tensor": (lambda _, config: config.update(fc_norm=True), r"lacks fc_norm\.0\.weight"),
    "tensor against the config": (
        lambda tensors, config: (tensors.update({"input_norm.weight": torch.ones(192)}), config.update(norm_before_fc=False)),
        r"unknown input_norm\.weight",
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_what_cannot_be_read_in_full_is_refused_by_name(case: str, target: LoadedModel, tmp_path: Path) -> None:
    """A part that is left out or guessed costs hits, and no text shows it."""
    change, message = BROKEN[case]
    folder = Eagle3(draft_vocab=40).write(tmp_path, eagle_aux_hidden_state_layer_ids=TAPS)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFilesError, match=message):
        load_eagle3(str(folder), target)
