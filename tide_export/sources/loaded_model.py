"""A loaded model: the eager model, its tokenizer, the source of its values, and what its layers keep of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.bundle.manifest import HeadInfo, LayerInfo, RoundingInfo
from transformers import (
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerFast as FastTokenizer

import tide_export.model.looped_models  # registers its classes with transformers
import tide_export.model.mimo  # noqa: F401  # registers its classes with transformers
from tide_export.model.boundaries import decoder_layers
from tide_export.model.probe import probe_layers
from tide_export.sources.parameters import LoadedParameters, ParameterSource
from tide_export.weights.deferred_weight import LowBits


@dataclass(frozen=True)
class LoadedModel:
    """An eager model in eval mode, its tokenizer (None if it has none), and their source.

    Args:
        model: with fake parameters where it is streamed.
        weight_files: the files it was loaded from; empty for a model made in memory.
        quantized: low-bit weights by parameter name; the parameters hold their dequantised values.
        weights: how they were chosen, of `WEIGHTS`, with the quantizer where one ran.
        text: SHA-256 of the tokens on which gptq quantized the weights; empty for other quantizers.
        notes: what could not be kept in low-bit form, in sentences.
        streamed: the values of the fake parameters; None for a model in memory.
        code: file → SHA-256 of the code that came with it and ran; see `remote_code`.
        head: the bits of the head, where they were measured or asked for.
        rounding: measures what rounding the inputs of its integer products costs; None: it has none.
        probed: its `layers`, where they are known.
        embedding: of an embedding model, which has no head: its logits are its final states. None: it writes text.
    """

    model: PreTrainedModel
    tokenizer: FastTokenizer | None
    source: str
    revision: str | None = None
    weight_files: tuple[Path, ...] = ()
    quantized: Mapping[str, LowBits] = field(default_factory=dict)
    weights: str = "source"
    text: str = ""
    notes: tuple[str, ...] = ()
    head: HeadInfo | None = None
    rounding: Callable[[], RoundingInfo] | None = None
    streamed: ParameterSource | None = None
    code: Mapping[str, str] = field(default_factory=dict)
    probed: tuple[LayerInfo, ...] = ()
    embedding: EmbeddingInfo | None = None

    @cached_property
    def layers(self) -> tuple[LayerInfo, ...]:
        """What each layer keeps of a text, in each loop. Raises UnsupportedModelError where TIDE cannot compile one."""
        return self.probed or probe_layers(self.model)

    @property
    def num_layers(self) -> int:
        """Layers that a token runs through: the stored ones, times `loops`."""
        return len(self.layers)

    @property
    def loops(self) -> int:
        """How many times the stored layers run."""
        return self.num_layers // len(decoder_layers(self.model))

    @property
    def positions(self) -> int | None:
        """Positions that the model knows; None: its config has no limit. Decoders of speech models have another name for it."""
        text = self.model.config.get_text_config()
        return getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state of all tokens before."""
        return any(layer.states for layer in self.layers)

    @property
    def target_restriction(self) -> str:
        """What the model has that only some targets can run, for messages; empty: nothing."""
        if self.embedding is not None:
            return "final states, which it outputs in the place of logits"
        if self.is_recurrent:
            return "recurrent layers, which keep states"
        shared = any(layer.kv_source is not None for layer in self.layers)
        return "layers that read the keys and values of others" if shared else ""

    @property
    def parameters(self) -> ParameterSource:
        """The values of all parameters."""
        if self.streamed is not None:
            return self.streamed
        return LoadedParameters(self.model, {name: weight.materialize() for name, weight in self.quantized.items()})

    @property
    def name(self) -> str:
        """The directory's or file's name, or the hub id, for display."""
        return Path(self.source).resolve().name if Path(self.source).exists() else self.source
