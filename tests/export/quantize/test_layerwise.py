"""Passes with one layer's parameters in memory: the model's own results, whatever its family."""

import copy

import pytest
import torch
from export.architectures import ARCHITECTURES, LAYERS, tiny_model
from tide_runtime.errors import VerificationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from tide_export.model.probe import probe_layers
from tide_export.quantize.kv_scales import kv_scales, rounded_cache
from tide_export.quantize.layerwise import eager_pass, layer_by_layer
from tide_export.sources.parameters import LoadedParameters

TEXTS = [[3, 14, 15, 9, 26, 5, 35, 8, 97, 93], [2, 7, 1, 8, 28]]
CUTS = (0, 2, LAYERS - 1)


def without_storage(model: PreTrainedModel, fake: bool) -> PreTrainedModel:
    """A copy whose parameters, not its buffers, are fake or meta tensors; tied ones stay one."""
    empty = copy.deepcopy(model)
    made: dict[Tensor, torch.nn.Parameter] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.device("meta"):
        for module in empty.modules():
            for key, old in module._parameters.items():
                if old is not None:
                    made.setdefault(old, torch.nn.Parameter(torch.empty(old.shape, dtype=old.dtype), requires_grad=False))
                    module._parameters[key] = made[old]
    return empty


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_family_computes_what_it_does_in_memory(name: str) -> None:
    """Verification would refuse right bundles of a family, or accept what another forward pass computes."""
    model = tiny_model(name)
    expected = eager_pass(model, TEXTS, CUTS)
    alone = model(input_ids=torch.tensor([TEXTS[1]])).logits[0].detach().numpy()
    assert abs(expected.logits[len(TEXTS[0]) :] - alone).max() < 1e-4 * abs(alone).max(), "padding changes a text"
    empty = without_storage(model, fake=name != "llama")
    read: list[str] = []
    with layer_by_layer(empty, LoadedParameters(model), lambda name, value: read.append(name)):
        found = eager_pass(empty, TEXTS, CUTS)
    assert abs(found.logits - expected.logits).max() < 1e-5 * abs(expected.logits).max()
    assert all((found.states[cut] == expected.states[cut]).all() for cut in CUTS)
    assert len(read) == len(set(read)), "a parameter is read twice"


def test_one_layer_is_in_memory_at_a_time() -> None:
    """A 7B model would take 28 GB."""
    model = tiny_model("llama")
    empty, held = without_storage(model, fake=True), list[int]()

    def count(_module: object, _args: object) -> None:
        held.append(sum(type(p) is torch.nn.Parameter for p in empty.parameters()))

    hooks = [layer.register_forward_pre_hook(count) for layer in empty.model.layers]
    with layer_by_layer(empty, LoadedParameters(model)):
        late = [layer.register_forward_pre_hook(count) for layer in empty.model.layers]
        eager_pass(empty, TEXTS, CUTS)
    for hook in (*hooks, *late):
        hook.remove()
    in_layer = len(list(model.model.layers[0].parameters()))
    assert held == [0, in_layer] * LAYERS
    assert not any(type(p) is torch.nn.Parameter for p in empty.parameters())


def test_ranges_of_keys_and_values_need_one_layer_too() -> None:
    """int8 caches would need the whole model in memory, or have other scales."""
    model = tiny_model("gemma2")
    shapes, empty = probe_layers(model), without_storage(model, fake=True)
    expected = kv_scales(model, shapes, 64)
    with layer_by_layer(empty, LoadedParameters(model)):
        found = kv_scales(empty, shapes, 64)
        rounded = eager_pass(empty, TEXTS, CUTS, rounded_cache(found, LAYERS))
    assert found.keys() == expected.keys() == set(range(LAYERS))
    assert all((found[n].key == one.key).all() and (found[n].value == one.value).all() for n, one in expected.items())
    assert abs(rounded.logits - eager_pass(model, TEXTS, CUTS, rounded_cache(expected, LAYERS)).logits).max() < 1e-4


def test_parameters_that_another_part_reads_are_refused() -> None:
    """A head that multiplies with the embedding's table would end in a traceback."""
    model = tiny_model("llama")
    empty = without_storage(model, fake=True)
    table = empty.model.embed_tokens
    empty.lm_head = type("Head", (torch.nn.Module,), {"forward": lambda self, x: torch.nn.functional.linear(x, table.weight)})()
    with layer_by_layer(empty, LoadedParameters(model)), pytest.raises(VerificationError, match="layer by layer"):
        eager_pass(empty, TEXTS, CUTS)
