"""Which matrices get more bits: the estimate against measured divergences, and the choice by it."""

import pytest
import torch
from export.architectures import VOCAB, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from tide_export.load import quantized
from tide_export.quantize.sensitivity import divergences, most_sensitive
from tide_export.sources.loaded_model import LoadedModel

NAMES = ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj", "model.layers.3.mlp.gate_proj")


def random_tokens() -> Tensor:
    return torch.randint(VOCAB, (128, 32), generator=torch.Generator().manual_seed(2))


def logprobs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits.double().log_softmax(-1)


@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_is_the_measured_divergence(name: str) -> None:
    """8 bits would go to matrices that do not need them, while the bundle loses as much as before."""
    model, tokens = tiny_model("llama"), random_tokens()
    modules = {name: model.get_submodule(name) for name in NAMES}
    generator = torch.Generator().manual_seed(3)
    changes = {n: 0.05 * m.weight.std() * torch.randn(m.weight.shape, generator=generator) for n, m in modules.items()}
    estimated = divergences(model, modules, changes, tokens)
    before = logprobs(model, tokens)
    with torch.no_grad():
        modules[name].weight += changes[name]
    after = logprobs(model, tokens)
    measured = float((before.exp() * (before - after)).sum(-1).mean())
    assert estimated[name] == pytest.approx(measured, rel=0.4)  # 128 samples: a standard error of an eighth


def test_costs_are_weighed_by_size_and_the_share_is_kept() -> None:
    """A large matrix would take the whole share where several small ones gain more."""
    costs = {"large": 4.0, "small": 1.0, "dense": 2.0, "useless": 0.0}
    sizes = {"large": 800, "small": 100, "dense": 50, "useless": 50}
    assert most_sensitive(costs, sizes, 0.15) == {"dense", "small"}
    assert most_sensitive(costs, sizes, 0.1) == {"dense", "useless"}  # small does not fit
    assert most_sensitive(costs, sizes, 0.04) == set()


def test_mixed_bits() -> None:
    """The head would be counted among the layers, or the matrices in 8 bits be rounded to 4 all the same."""
    tokens = random_tokens()
    loaded = quantized(LoadedModel(tiny_model("llama"), None, "llama"), "int4", "gptq_mixed", tokens=tokens)
    inner = {name: weight for name, weight in loaded.quantized.items() if ".layers." in name}
    sizes = {bits: sum(w.values.size for w in inner.values() if w.bits == bits) for bits in (4, 8)}
    assert 0 < sizes[8] <= (sizes[4] + sizes[8]) / 8 and len(inner) == 4 * 7
    for name, weight in inner.items():
        parameter = loaded.model.get_parameter(name)
        assert torch.equal(parameter, torch.from_numpy(weight.dequantized()))
        assert weight.origin == ("int8 rtn" if weight.bits == 8 else "int4 gptq")
