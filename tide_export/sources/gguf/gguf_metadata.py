"""The keys of a GGUF file: each is taken by what applies it, or has no effect on the model, or ends the export with its name.

Keys: docs/gguf.md of https://github.com/ggml-org/ggml and `LLM_KV_NAMES` in llama.cpp's src/llama-arch.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from tide_runtime.errors import ModelFilesError, UnsupportedModelError

REQUIRED = object()

# Keys without effect on logits, and why.
_NO_EFFECT = {
    r"general\.(name|author|version|organization|finetune|basename|description|quantized_by|size_label|license|url|doi|uuid"
    r"|repo_url|tags|languages|parameter_count)": "describe the model",
    r"general\.(license|source|base_model|dataset)\..*": "describe the model and where it comes from",
    r"general\.(file_type|alignment)": "how the file is laid out: the reader follows the tensors' own types and offsets",
    r"general\.sampling\..*": "advice on sampling: `generation_config` takes what a bundle can hold",
    r"(quantize|imatrix|mradermacher)\..*": "how the file was quantised",
    r"split\.(no|count|tensors\.count)": "a part of a file is refused before",
    r"tokenizer\.ggml\.(model|pre|tokens|token_type|token_type_count|scores|merges|added_tokens|precompiled_charsmap"
    r"|remove_extra_whitespaces|add_(bos|eos|sep)_token|add_space_prefix"
    r"|(bos|eos|eot|eom|unknown|seperator|separator|padding|mask|cls|prefix|suffix|middle|fim_(pre|suf|mid|pad|rep|sep))_token_id"
    r"|suppress_tokens|normalizer\.(lowercase|strip_accents))": "the tokenizer's, or `generation_config` takes them",
    r"tokenizer\.(huggingface\.json|rwkv\.world|chat_templates?(\..*)?)": "the tokenizer's",
    r"\w+\.rope\.scaling\.finetuned": "says that the weights were trained with the scaling",
    r"[\w-]+\.rope\.scaling\.original_context_length": "YaRN takes it; other scalings have none",
}  # fmt: skip
# Keys of the architecture whose effect is nil at these values; others change the model in a way that it has no place for.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "attention.output_scale": (0, 1),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "n_deepstack_layers": (0,),
    "attention.shared_kv_layers": (0,),
    "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth",),  # rows of query and key as the architecture llama has them
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    # llama.cpp drops other values of these in most architectures, so what they mean for a file is open.
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
}


class Metadata:
    """``values``: every key of the file. A key that is taken counts as applied."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file, self._values = file, values
        self._taken: set[str] = {"general.architecture"}
        self.architecture = str(values.get("general.architecture") or "")
        if not self.architecture:
            raise ModelFilesError(f"{file} names no architecture (general.architecture); convert the model again")

    def full(self, key: str) -> Any:
        """The value of a whole name, such as tokenizer.ggml.tokens; None if there is none. Does not count as taken."""
        return self._values.get(key)

    def starting_with(self, *prefixes: str) -> dict[str, Any]:
        """The values of all keys with one of ``prefixes``, by whole name. Does not count as taken."""
        return {name: value for name, value in self._values.items() if name.startswith(prefixes)}

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of the architecture's ``key``, such as block_count. Raises ModelFilesError if a required one is missing."""
        name = f"{self.architecture}.{key}"
        self._taken.add(name)
        if name in self._values:
            return self._values[name]
        if default is REQUIRED:
            raise ModelFilesError(f"{self.file} has no key {name}, and nothing else gives it; convert the model again")
        return default

    def take_number(self, key: str, default: Any = REQUIRED, zeros: bool = False) -> Any:
        """`take` of a number, or of a list that has the same number for each layer. ``zeros``: or none for some layers."""
        value = self.take(key, default)
        if not isinstance(value, list):
            return value
        found = set(value) - {0} if zeros else set(value)
        if len(found) > 1 or not value:
            raise self.refused(key, "differs between the layers, and the model's config has one number")
        return found.pop() if found else 0

    def take_each(self, key: str, count: int, default: Any = REQUIRED) -> list[Any]:
        """`take` of a list with a value for each of ``count`` layers; one value is that of each."""
        value = self.take(key, default)
        each = value if isinstance(value, list) else [value] * count
        if len(each) != count:
            raise self.refused(key, f"does not have one value for each of {count} layers")
        return each

    def take_all(self, prefix: str) -> None:
        """Count all keys of the architecture that begin with ``prefix`` as taken: the model has nothing that they act on."""
        self._taken |= {name for name in self._values if name.startswith(f"{self.architecture}.{prefix}")}

    def refused(self, key: str, why: str) -> UnsupportedModelError:
        name = key if key in self._values else f"{self.architecture}.{key}"
        value = str(self._values.get(name))
        shown = value if len(value) <= 80 else f"{value[:80]}…"
        return UnsupportedModelError(
            f"{self.file} has {name} = {shown}, and this {why}: the bundle would be another model; "
            "export the HuggingFace checkpoint that the file was made from"
        )

    def check_all_taken(self) -> None:
        """Raise UnsupportedModelError for a key that was not applied and may have an effect."""
        for name, value in self._values.items():
            own = name.removeprefix(f"{self.architecture}.")
            neutral: Collection[Any] = _NEUTRAL.get(own, ())
            if name in self._taken or value in neutral or any(re.fullmatch(pattern, name) for pattern in _NO_EFFECT):
                continue
            why = f"is only without effect at {' or '.join(map(str, neutral))}" if neutral else "is a key that nothing applies"
            raise self.refused(name, why)
