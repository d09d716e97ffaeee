"""Read an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) from a folder as SpecForge, EAGLE or speculators write it.

    fused  = fc · norm([state at tap 1; state at tap 2; state at tap 3])                  once for each accepted token
    x      = [input_layernorm(embedding of token t + 1); hidden_norm(fused)]              q, k and v are products with x
    y      = fused + attention(x);   y = y + mlp(post_attention_layernorm(y))
    logits = lm_head · norm(y)       over ``draft_vocab_size`` tokens, of which number i is token i + d2t[i]

The next guess reads y in place of ``fused``. Variants: ``norm_before_fc`` (one norm over all taps, `input_norm`) or ``fc_norm``
(one for each tap); ``norm_before_residual`` (hidden_norm(fused) + attention); ``norm_output`` (EAGLE-3.1, arXiv:2605.09992: the
next guess reads norm(y)). Heads without ``fc`` read the final state. Most configs leave out what is the default of the tool that
wrote them, and two tools number taps differently: see `_forms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tide_runtime.errors import ModelFilesError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from tide_export.drafters.base import Drafter, Form, LoadedDrafter, observed_kv
from tide_export.drafters.folder import DrafterFolder, fill, some
from tide_export.sources.loaded_model import LoadedModel

_PARTS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "llama": (LlamaAttention, LlamaMLP),
    "qwen3": (Qwen3Attention, Qwen3MLP),
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_UNUSED = ("t2d",)  # a mask of the tokens that the head knows, which d2t tells too


@dataclass(frozen=True)
class Eagle3Settings:
    """What config.json says of a head; None: it does not say.

    Args:
        layer: of its decoder layer.
        taps: the numbers of the taps, as written.
        fused: whether it has ``fc``.
    """

    layer: PreTrainedConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] | None
    fused: bool
    norm_before_residual: bool | None
    norm_before_fc: bool | None
    fc_norm: bool | None
    norm_output: bool


class Eagle3Drafter(Drafter):
    """See the file. ``taps``, ``norm_before_residual`` and ``reads_normed_state`` are what its forms set.

    Args:
        stored: names of the head's tensors, which say what it has of fc_norm, input_norm and biases.
        embedding: the model's; None: the head has its own.
        final_norm: the model's, for a head without ``fc``.
    """

    def __init__(
        self,
        settings: Eagle3Settings,
        taps: tuple[int, ...],
        vocabulary: Tensor,
        stored: Sequence[str],
        embedding: nn.Module | None,
        final_norm: nn.Module | None,
        dtype: torch.dtype,
    ) -> None:
        config = settings.layer
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__("eagle3", taps, hidden, vocabulary, config, shares_embedding=embedding is not None)
        self.norm_before_residual = bool(settings.norm_before_residual)
        self.norm_output = settings.norm_output
        self.reads_normed_state = False
        wide = len(taps) * settings.target_hidden_size
        own_norm = settings.norm_before_fc if settings.norm_before_fc is not None else "input_norm.weight" in stored
        own_norms = settings.fc_norm if settings.fc_norm is not None else "fc_norm.0.weight" in stored
        self.input_norm = LlamaRMSNorm(wide, eps) if own_norm else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(settings.target_hidden_size, eps) for _ in taps) if own_norms else None
        self.fc = nn.Linear(wide, hidden, bias="fc.bias" in stored) if settings.fused else None
        self.midlayer = _Eagle3Layer(config, stored)
        self.norm = LlamaRMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, settings.draft_vocab_size, bias=False)
        self.embed_tokens = embedding if embedding is not None else nn.Embedding(config.vocab_size, hidden)
        self.to(dtype)
        self.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies stay in fp32
        self._final_norm = [final_norm]  # in a list, so that it is no module of the head's own

    def fuse(self, tapped: Tensor) -> Tensor:
        if self.fc is None:
            return self._final_norm[0](tapped) if self.reads_normed_state else tapped  # type: ignore[misc]
        if self.input_norm is not None:
            tapped = self.input_norm(tapped)
        if self.fc_norm is not None:
            parts = tapped.chunk(len(self.taps), -1)
            tapped = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(tapped)

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        embedded: Tensor,
        before: Tensor,
        position_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        mask = self.causal_mask(embedded, position_ids, past_key_values, attention_mask)
        rotary = self.rotary_emb(embedded, position_ids)
        state = self.midlayer(embedded, before, self.norm_before_residual, rotary, mask, past_key_values)
        normed = self.norm(state)
        return self.lm_head(normed), normed if self.norm_output else state


class _Eagle3Layer(nn.Module):
    """A Llama or Qwen3 layer whose q, k and v read [embedding; state]."""

    def __init__(self, config: PreTrainedConfig, stored: Sequence[str]) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        attention, mlp = _PARTS[config.model_type]
        self.input_layernorm, self.hidden_norm = LlamaRMSNorm(hidden, eps), LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)
        self.self_attn = attention(config, 0)
        for name in _PROJECTIONS:
            rows = getattr(self.self_attn, name).out_features
            biased = config.attention_bias or f"midlayer.self_attn.{name}.bias" in stored
            setattr(self.self_attn, name, nn.Linear(2 * hidden, rows, bias=biased))
        self.mlp = mlp(config)

    def forward(
        self,
        embedded: Tensor,
        before: Tensor,
        norm_before_residual: bool,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        normed = self.hidden_norm(before)
        joined = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, _ = self.self_attn(hidden_states=joined, position_embeddings=rotary, attention_mask=mask, past_key_values=cache)
        state = (normed if norm_before_residual else before) + attended
        return state + self.mlp(self.post_attention_layernorm(state))


def load_eagle3(source: str, loaded: LoadedModel) -> LoadedDrafter:
    """The head in folder or hub id ``source`` for the model ``loaded``, whose parameters are in memory.

    Raises ModelFilesError if it is no EAGLE-3 head, belongs to another model, or has a part that TIDE does not know.
    """
    folder, settings = check_eagle3(source, loaded)
    vocabulary = _vocabulary(folder, settings, loaded.model.config.get_text_config().vocab_size)
    forms = _forms(settings, folder, loaded.num_layers)
    own_embedding = "embed_tokens.weight" in folder.names or settings.layer.hidden_size != settings.target_hidden_size
    drafter = Eagle3Drafter(
        settings,
        forms[0].taps,
        vocabulary,
        folder.names,
        None if own_embedding else loaded.model.get_input_embeddings(),
        getattr(loaded.model.get_decoder(), "norm", None),
        loaded.model.dtype,
    )
    skipped = {"vocabulary", *(() if own_embedding else ("embed_tokens.weight",))}
    fill(drafter, folder, skipped, ("d2t", *_UNUSED))
    if own_embedding:
        _share_embedding(drafter, loaded)
    drafter.eval().requires_grad_(False)
    drafter.kv = observed_kv(drafter)
    return LoadedDrafter(drafter, forms, source, folder.sha256())


def check_eagle3(source: str, loaded: LoadedModel) -> tuple[DrafterFolder, Eagle3Settings]:
    """What ``source`` holds. Raises ModelFilesError unless that is an EAGLE-3 head for a model like ``loaded``."""
    folder = DrafterFolder.read(source, _tensor_name)
    settings = _settings(folder, loaded.model.config.get_text_config().hidden_size)
    _check_target(folder, settings, loaded)
    return folder, settings


def _tensor_name(name: str) -> str:
    """One name for what the tools call differently."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _settings(folder: DrafterFolder, hidden_size: int) -> Eagle3Settings:
    """Raises ModelFilesError for a folder without an EAGLE-3 head, or with another kind of layer."""
    if "midlayer.hidden_norm.weight" not in folder.names:
        raise ModelFilesError(
            f"{folder.source} holds no EAGLE-3 head: it lacks midlayer.hidden_norm.weight (or layers.0.hidden_norm.weight), and "
            f"has {some(folder.names)}; give the folder of a head that was trained for this model"
        )
    raw = folder.config
    eagle: Mapping[str, Any] = raw.get("eagle_config") or {}
    layer = dict(raw.get("transformer_layer_config") or raw)
    kind = layer.pop("model_type", "llama")
    if kind not in _PARTS:
        raise ModelFilesError(
            f"{folder.source} has a layer of type {kind!r}; TIDE reads EAGLE-3 heads with layers of {' or '.join(_PARTS)}"
        )
    if (layers := layer.get("num_hidden_layers", 1)) != 1:
        raise ModelFilesError(f"{folder.source} has {layers} layers; TIDE runs drafters of one, as most heads have")
    for name in ("architectures", "auto_map", "eagle_config", "speculators_config", "torch_dtype", "dtype"):
        layer.pop(name, None)
    if kind == "qwen3":
        layer["layer_types"] = None  # some tools copy those of the whole model
    try:
        config = AutoConfig.for_model(kind, **layer)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ModelFilesError(f"the config of the head in {folder.source} cannot be read: {error}") from error
    config._attn_implementation = "sdpa"
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    return Eagle3Settings(
        config,
        raw.get("target_hidden_size") or hidden_size,
        raw.get("draft_vocab_size") or config.vocab_size,
        tuple(ids) if ids else None,
        bool(eagle.get("use_aux_hidden_state", True)),
        raw.get("norm_before_residual"),
        raw.get("norm_before_fc"),
        raw.get("fc_norm"),
        bool(raw.get("norm_output")),
    )


def _check_target(folder: DrafterFolder, settings: Eagle3Settings, loaded: LoadedModel) -> None:
    """Raise ModelFilesError unless the head was made for a model of this width and vocabulary."""
    text = loaded.model.config.get_text_config()
    wide = folder.shape("fc.weight")[-1] if settings.fused and "fc.weight" in folder.names else None
    taps = len(settings.taps or (0, 0, 0))
    if settings.target_hidden_size != text.hidden_size or (wide is not None and wide != taps * text.hidden_size):
        found = f"{wide} channels, {taps} states of {wide / taps:g}" if wide is not None else settings.target_hidden_size
        raise ModelFilesError(
            f"the head in {folder.source} was made for another model: it reads {found}, and {loaded.name} has a hidden size of "
            f"{text.hidden_size}{_made_for(folder)}"
        )
    if settings.layer.vocab_size != text.vocab_size:
        raise ModelFilesError(
            f"the head in {folder.source} was made for another model: its vocabulary has {settings.layer.vocab_size} tokens, and "
            f"that of {loaded.name} {text.vocab_size}{_made_for(folder)}"
        )


def _made_for(folder: DrafterFolder) -> str:
    verifier = ((folder.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return f"; its config says that it drafts for {verifier}" if verifier else "; give the head of this model"


def _vocabulary(folder: DrafterFolder, settings: Eagle3Settings, vocab_size: int) -> Tensor:
    """[N] int64: the token of each logit. Raises ModelFilesError where d2t is missing or names tokens that do not exist."""
    count = settings.draft_vocab_size
    if "d2t" not in folder.names and count == vocab_size:
        return torch.arange(count)
    if "d2t" not in folder.names or folder.shape("d2t") != (count,):
        found = f"of shape {list(folder.shape('d2t'))}" if "d2t" in folder.names else "missing"
        raise ModelFilesError(
            f"{folder.source} guesses among {count} of {vocab_size} tokens, and d2t, which says which, is {found}; expected "
            f"[{count}]: download the head again"
        )
    vocabulary = torch.arange(count) + folder.value("d2t").long()
    known = folder.value("t2d").bool() if "t2d" in folder.names else None
    distinct = bool((vocabulary.diff() > 0).all()) and int(vocabulary[0]) >= 0 and int(vocabulary[-1]) < vocab_size
    if not distinct or (known is not None and known.any() and not torch.equal(known.nonzero().flatten(), vocabulary)):
        raise ModelFilesError(
            f"{folder.source} maps its tokens to {int(vocabulary.min())} … {int(vocabulary.max())} by d2t, which is not a rising "
            f"list of tokens below {vocab_size}{' that t2d marks' if known is not None else ''}: download the head again"
        )
    return vocabulary


def _forms(settings: Eagle3Settings, folder: DrafterFolder, num_layers: int) -> tuple[Form, ...]:
    """The ways to read what the config leaves open.

    Numbers of taps mean layers run before the state (vLLM, speculators, gpt-oss) or the layer whose output it is (SGLang, heads
    of NVIDIA and LMSYS); without numbers both tools take the states before layers 2, L/2 and L - 3. A config without
    ``norm_before_residual`` means no (EAGLE, SpecForge) or yes (speculators). A head without ``fc`` reads the final state behind
    the model's norm or before it. Raises ModelFilesError for taps that the model does not have.
    """
    if not settings.fused:
        reads = {"given the state behind the final norm": True, "given the state before the final norm": False}
        return tuple(Form(name, {"reads_normed_state": value}, (num_layers,)) for name, value in reads.items())
    default = (2, num_layers // 2, num_layers - 3)
    taps: dict[str, tuple[int, ...]] = {"taps as in EAGLE-3": default}
    if settings.taps is not None:
        taps = {"taps count layers run before": settings.taps, "taps name layers": tuple(n + 1 for n in settings.taps)}
    taps = {name: numbers for name, numbers in taps.items() if _rising(numbers, num_layers)}
    if not taps:
        raise ModelFilesError(
            f"{folder.source} reads states at {list(settings.taps or default)}, expected rising numbers of layers up to "
            f"{num_layers}, as many as the model has: give the head of this model"
        )
    given = settings.norm_before_residual
    residual = {", norm behind the residual": False, ", norm before the residual": True} if given is None else {"": given}
    return tuple(
        Form(one + other, {"norm_before_residual": before}, numbers)
        for (one, numbers), (other, before) in product(taps.items(), residual.items())
    )


def _rising(taps: tuple[int, ...], num_layers: int) -> bool:
    return all(0 < tap <= num_layers for tap in taps) and list(taps) == sorted(set(taps))


def _share_embedding(drafter: Eagle3Drafter, loaded: LoadedModel) -> None:
    """Take the model's embedding for a copy of it, which would be stored and cached twice."""
    theirs = loaded.model.get_input_embeddings()
    if torch.equal(drafter.embed_tokens.weight, theirs.weight):
        drafter.embed_tokens = theirs
        drafter.shares_embedding = True
