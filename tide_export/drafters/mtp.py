"""Read the multi-token-prediction (MTP) layer that a checkpoint brings along (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    x      = eh_proj · [enorm(embedding of token t + 1); hnorm(state of token t)]        MiMo: the state first
    y      = one decoder layer of the model's kind, with its own attention, over x
    logits = the model's LM head · post_norm(y)

transformers' `MtpModel` builds the layer from the model's own classes, and its renamings read DeepSeek's, GLM's, Mellum's and,
once its config counts the layers, Qwen's tensors (``mtp.fc``, ``mtp.layers.0.*``). MiMo's are renamed here.

Sources contradict each other on the state that is given, behind the model's final norm (transformers, vLLM) or before it, and on
the one that is chained, behind ``post_norm`` or before it: see `_FORMS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors import safe_open
from tide_runtime.errors import ModelFilesError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from tide_export.drafters.base import Drafter, Form, LoadedDrafter, observed_kv
from tide_export.drafters.folder import digest, some
from tide_export.sources.accounting import drafts, read_headers
from tide_export.sources.loaded_model import LoadedModel

_NUMBER = re.compile(r"(?:^|\.)(?:mtp_)?layers\.(\d+)\.")
_MIMO = re.compile(r"^model\.mtp_layers\.(\d+)\.(\w+)\.")
_MIMO_NAMES = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
}
# Parts of the model of which checkpoints hold a copy beside the layer: ending of the copy's name → that of the model's.
_COPIES = {"shared_head.head.weight": "lm_head.weight", "embed_tokens.weight": "embed_tokens.weight"}
_FORMS = tuple(
    Form(
        f"given the state {'behind' if given else 'before'} the final norm, chained {'behind' if chained else 'before'} its own",
        {"gives_normed": given, "chains_normed": chained},
    )
    for given in (True, False)
    for chained in (True, False)
)


class MtpDrafter(Drafter):
    """See the file. ``gives_normed`` and ``chains_normed`` are what its forms set."""

    def __init__(self, mtp: MtpModel, final_norm: nn.Module, num_layers: int) -> None:
        hidden = mtp.config.hidden_size
        rows = mtp.shared_head.weight.shape[0]
        super().__init__("mtp", (num_layers,), hidden, torch.arange(rows), mtp.config)
        self.mtp, self.final_norm = mtp, final_norm
        layer = mtp.layers[0]
        self.own_norm = layer.post_norm if layer.use_post_norm else getattr(mtp, "shared_post_norm", nn.Identity())
        layer.use_post_norm = False  # it is applied here, where the state before it can be chained
        self.gives_normed = self.chains_normed = True

    def fuse(self, tapped: Tensor) -> Tensor:
        return self.final_norm(tapped) if self.gives_normed else tapped

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.mtp.embed_tokens(input_ids)

    def forward(
        self,
        embedded: Tensor,
        before: Tensor,
        position_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        masks = {"attention_mask": attention_mask}
        if attention_mask is None:
            masks = self.mtp.create_masks_for_mtp_layer(0, embedded, past_key_values, position_ids)
        rotary = None
        if self.mtp.rotary_emb is not None:
            kinds = {"layer_type": self.config.layer_types[0]} if self.mtp.has_per_layer_rope else {}
            rotary = self.mtp.rotary_emb(embedded, position_ids=position_ids, **kinds)
        state = self.mtp.layers[0](
            embedded,
            before,
            position_embeddings=rotary,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **masks,
        )
        normed = self.own_norm(state)
        return self.mtp._project_to_logits(normed), normed if self.chains_normed else state


def load_mtp(loaded: LoadedModel) -> LoadedDrafter:
    """The MTP layer in the files of ``loaded``, whose parameters are in memory.

    Raises ModelFilesError if there is none, or if it has a part that TIDE does not know.
    """
    model = loaded.model
    tensors = mtp_tensors(loaded)
    numbers = {int(found[1]) for name in tensors if (found := _NUMBER.search(name))}
    if len(numbers) != 1:
        raise ModelFilesError(
            f"{loaded.name} has {len(numbers)} MTP layers, each for one further token; TIDE runs drafters of one layer, which "
            "guesses all of them"
        )
    with _counted_layer(model, state_first=any(_MIMO.match(name) for name in tensors)), ExitStack() as contexts:
        for context in MtpModel.get_init_context(model.dtype, False, False, None):
            contexts.enter_context(context)
        try:
            mtp = MtpModel(model, 1)
            final_norm = model.get_decoder().norm
        except (ValueError, AttributeError, StopIteration) as error:
            raise ModelFilesError(f"the MTP layer of {loaded.name} cannot be built: {error}") from error
    _fill(mtp, {_renamed(name): tensor for name, tensor in tensors.items()}, loaded)
    drafter = MtpDrafter(mtp, final_norm, loaded.num_layers)
    drafter.eval().requires_grad_(False)
    drafter.kv = observed_kv(drafter)
    return LoadedDrafter(drafter, _FORMS, loaded.source, digest(tensors))


def mtp_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """The layer's tensors by their names in the files. Raises ModelFilesError if there are none."""
    model = loaded.model
    files = [file for file in loaded.weight_files if file.suffix == ".safetensors"]
    holders = {name: file for file in files for name in read_headers([file])}
    own = {name for name in holders if drafts(name, model, model.config)}
    if not own:
        where = "a GGUF file" if loaded.weight_files and not files else f"its checkpoint, of {len(holders)} tensors"
        raise ModelFilesError(
            f"{loaded.name} brings no MTP layer: {where}, has none of mtp.*, model.mtp_layers.* and layers behind the last one; "
            "leave out --draft-head mtp, or take a checkpoint that was published with one"
        )
    tensors = {name: _value(holders[name], name) for name in sorted(own)}
    for ending, original in _COPIES.items():
        theirs = [name for name in holders if name not in own and name.endswith(original)]
        for name in [name for name in tensors if name.endswith(ending)]:
            if theirs and not torch.equal(tensors[name], _value(holders[theirs[0]], theirs[0])):
                raise ModelFilesError(
                    f"{loaded.name} holds {name} and {theirs[0]} with different values; TIDE's MTP layers use the model's own"
                )
            del tensors[name]
    return tensors


def _value(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def _renamed(name: str) -> str:
    """MiMo's tensor under `MtpModel`'s name; others as they are."""
    if (found := _MIMO.match(name)) is None:
        return name
    part = _MIMO_NAMES.get(found[2])
    place = f"layers.{found[1]}.{part}." if part else f"layers.{found[1]}.mtp_block.{found[2]}."
    return place + name[found.end() :]


@contextmanager
def _counted_layer(model: PreTrainedModel, state_first: bool) -> Iterator[None]:
    """Configs count their MTP layers under many names or not at all; `MtpModel` reads one name, and the layer's types."""
    config: PreTrainedConfig = deepcopy(model.config.get_text_config(decoder=True))
    settings = {"num_mtp_layers": 1}
    if getattr(config, "layer_types", None):
        settings["mtp_layer_types"] = getattr(config, "mtp_layer_types", None) or ["full_attention"]
    if kinds := getattr(config, "mlp_layer_types", None):
        settings["mtp_mlp_layer_types"] = getattr(config, "mtp_mlp_layer_types", None) or kinds[-1:]
    if state_first:
        settings["mtp_hidden_states_first"] = True
    for name, value in settings.items():
        setattr(config, name, value)
    with patch.object(type(model.config), "get_mtp_config", lambda _: PreTrainedConfig.get_mtp_config(config)):
        yield


def _fill(mtp: MtpModel, tensors: dict[str, Tensor], loaded: LoadedModel) -> None:
    """Load the tensors as transformers does. Raises ModelFilesError with the names that do not fit."""
    options = LoadStateDictConfig(weight_mapping=mtp.get_weight_conversions(loaded.model), dtype=loaded.model.dtype)
    report, _ = convert_and_load_state_dict_in_model(model=mtp, state_dict=tensors, load_config=options)
    mtp._adjust_missing_and_unexpected_keys(report)
    mtp.tie_with_main_model(loaded.model)
    problems = [f"it lacks {some(report.missing_keys)}"] * bool(report.missing_keys)
    problems += [f"it has unknown {some(report.unexpected_keys)}"] * bool(report.unexpected_keys)
    problems += [f"{name} has shape {list(found)}, expected {list(shape)}" for name, found, shape in report.mismatched_keys]
    problems += [f"{name} cannot be converted" for name in report.conversion_errors]
    if problems:
        raise ModelFilesError(
            f"the MTP layer of {loaded.name} cannot be read in full: {'; '.join(problems)}; download the model again, or "
            "leave out --draft-head mtp"
        )
