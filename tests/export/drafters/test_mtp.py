"""MTP layers of public families: read in full and computed right, or refused with the names that do not fit."""

from pathlib import Path

import pytest
import torch
from export.architectures import LAYERS, VOCAB, random_model
from export.drafters.reference import EPSILON, HEADS, HIDDEN, INNER, KV_HEADS, THETA, WIDTH, mtp_guess, mtp_tensors, norm
from safetensors.torch import load_file, save_file
from tide_runtime.bundle.manifest import KVInfo
from tide_runtime.errors import ModelFilesError
from torch import Tensor
from transformers import Glm4MoeConfig, PreTrainedConfig, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

from tide_export.drafters.guesses import chain
from tide_export.drafters.mtp import load_mtp
from tide_export.load import load_model
from tide_export.model.mimo import MiMoConfig
from tide_export.sources.loaded_model import LoadedModel

TOKENS, GUESSES = 10, 3
MIMO = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=WIDTH,
    rms_norm_eps=EPSILON,
    rope_theta=THETA,
    max_position_embeddings=128,
    num_nextn_predict_layers=1,
)
_SMALL = {name: value for name, value in MIMO.items() if name not in ("num_hidden_layers", "num_nextn_predict_layers")}
QWEN = dict(
    **_SMALL,
    num_hidden_layers=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention"],
    mtp_num_hidden_layers=1,
)
GLM = dict(
    **_SMALL,
    num_hidden_layers=2,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)


def _saved(config: PreTrainedConfig, extra: dict[str, Tensor], folder: Path) -> Path:
    """A random model with more tensors in its file."""
    model = random_model(config)
    torch.nn.init.uniform_(model.get_decoder().norm.weight, 0.5, 1.5)
    model.save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors", {"format": "pt"})
    return folder


def _load(folder: Path) -> LoadedModel:
    return load_model(str(folder), "fp32", tokenizer="none")


@torch.no_grad()
def test_every_form_of_a_mimo_layer(tmp_path: Path) -> None:
    """The state goes first in MiMo's product; each form gives and chains the states that its name says."""
    tensors = mtp_tensors()
    loaded = _load(_saved(MiMoConfig(**MIMO), tensors, tmp_path))
    found = load_mtp(loaded)
    drafter, model = found.drafter, loaded.model
    assert drafter.kv == KVInfo(KV_HEADS, WIDTH, WIDTH)
    assert (drafter.taps, drafter.width, drafter.shares_embedding) == ((LAYERS,), HIDDEN, True)
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (1, TOKENS), generator=random)
    final = torch.randn((1, TOKENS, HIDDEN), generator=random)
    embedded = model.model.embed_tokens.weight[ids[0]]
    seen = set()
    for form in found.forms:
        form.apply(drafter)
        made = list(chain(drafter, final, ids, GUESSES))
        given = norm(final[0], model.model.norm.weight) if form.settings["gives_normed"] else final[0]
        place = TOKENS - GUESSES - 1
        before = given[: place + 1]
        for ahead in range(GUESSES):
            logits, normed = mtp_guess(tensors, model.lm_head.weight, embedded[1 : place + ahead + 2], before)
            torch.testing.assert_close(made[ahead][0][0, place], logits[-1], rtol=1e-4, atol=1e-4)
            chained = normed[-1:] if form.settings["chains_normed"] else made[ahead][1][0, place : place + 1]
            torch.testing.assert_close(made[ahead][1][0, place : place + 1], chained, rtol=1e-4, atol=1e-4)
            before = torch.cat([before, chained])
        seen.add(round(float(made[1][0].sum()), 3))
    assert len(seen) == 4, "two forms compute the same"


@torch.no_grad()
def test_qwens_names_and_gated_attention(tmp_path: Path) -> None:
    """Qwen3.5 keeps its layer under mtp.*, and its config counts it under a name of its own."""
    config = Qwen3_5TextConfig(**QWEN)
    block = random_model(config, seed=1).model.layers[1].state_dict()
    tensors = {f"mtp.layers.0.{name}": tensor for name, tensor in block.items()}
    tensors["mtp.fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN)
    names = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    tensors |= {f"{name}.weight": torch.rand(HIDDEN) for name in names}
    drafter = load_mtp(_load(_saved(config, tensors, tmp_path))).drafter
    layer = drafter.mtp.layers[0]
    for name, part in (("mtp.fc", layer.eh_proj), ("mtp.norm", drafter.own_norm), ("mtp.pre_fc_norm_hidden", layer.hnorm)):
        assert torch.equal(part.weight, tensors[f"{name}.weight"]), name
    assert all(torch.equal(tensor, block[name]) for name, tensor in layer.mtp_block.state_dict().items())
    logits, _ = drafter(torch.randn(1, 3, HIDDEN), torch.randn(1, 3, HIDDEN), torch.arange(3)[None])
    assert logits.shape == (1, 3, VOCAB)


@torch.no_grad()
def test_glms_layer_equals_that_of_transformers(tmp_path: Path) -> None:
    """Its tensors lie behind the last layer's, and its experts one by one; copies of embedding and head lie beside them."""
    config = Glm4MoeConfig(**GLM)
    reference = MtpModel(random_model(config), 1)
    for name, parameter in reference.layers.named_parameters():
        parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.2)
    model = random_model(config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in reference.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name == "mlp.experts.gate_up_proj":
            for number, one in enumerate(tensor):
                gate, up = one.chunk(2)
                tensors |= {f"mlp.experts.{number}.{part}_proj.weight": t.clone() for part, t in (("gate", gate), ("up", up))}
        elif name == "mlp.experts.down_proj":
            tensors |= {f"mlp.experts.{number}.down_proj.weight": one.clone() for number, one in enumerate(tensor)}
        else:
            tensors[name] = tensor.clone()
    tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.clone()
    loaded = _load(_saved(config, {f"model.layers.2.{name}": tensor for name, tensor in tensors.items()}, tmp_path))
    drafter = load_mtp(loaded).drafter
    embedded, before, positions = torch.randn(1, 4, HIDDEN), torch.randn(1, 4, HIDDEN), torch.arange(4)[None]
    reference.tie_with_main_model(loaded.model)
    expected = reference.forward_layer(0, before, positions, None, inputs_embeds=embedded)
    logits, state = drafter(embedded, before, positions)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, loaded.model.lm_head(expected), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = _saved(MiMoConfig(**MIMO), {}, tmp_path_factory.mktemp("mimo"))
    return folder, load_file(folder / "model.safetensors")


BROKEN = {
    "no layer": (lambda tensors: tensors.clear(), "brings no MTP layer"),
    "missing": (lambda tensors: tensors.pop("model.mtp_layers.0.input_proj.weight"), r"lacks layers\.0\.eh_proj\.weight"),
    "unknown": (
        lambda tensors: tensors.update({"model.mtp_layers.0.gate.weight": torch.ones(3)}),
        r"unknown layers\.0\.mtp_block\.gate",
    ),
    "two layers": (lambda tensors: tensors.update({"model.mtp_layers.1.input_proj.weight": torch.ones(3)}), "2 MTP layers"),
    "shape": (lambda tensors: tensors.update({"model.mtp_layers.0.input_proj.weight": torch.ones(64, 64)}), r"\[64, 64\]"),
    "another embedding": (
        lambda tensors: tensors.update({"model.mtp_layers.0.embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}),
        r"mtp_layers\.0\.embed_tokens\.weight and model\.embed_tokens\.weight with different values",
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_what_cannot_be_read_in_full_is_refused_by_name(case: str, mimo: tuple[Path, dict[str, Tensor]]) -> None:
    """A part that is left out or random costs hits, and no text shows it."""
    (folder, own), (change, message) = mimo, BROKEN[case]
    tensors = mtp_tensors()
    change(tensors)
    save_file(own | tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFilesError, match=message):
        load_mtp(_load(folder))
