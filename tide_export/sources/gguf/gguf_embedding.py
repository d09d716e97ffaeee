"""How the model of a GGUF file embeds texts: llama.cpp's `pooling_type`."""

from __future__ import annotations

from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.errors import UnsupportedModelError

from tide_export.sources.gguf.gguf_metadata import Metadata

_NONE = 0
_POOLINGS = {1: "mean", 3: "last"}
_REFUSED = {
    2: "it pools by cls, and TIDE compiles mean and last; take an embedding model that pools so, such as Qwen3-Embedding",
    4: "it ranks texts by a classifier, which TIDE does not compile; of a causal language model that answers yes or no, such as "
    "Qwen3-Reranker, export the HuggingFace checkpoint, and compare the two tokens' log-probabilities",
}


def read_pooling(keys: Metadata) -> EmbeddingInfo | None:
    """How the file's model embeds texts; None where it writes text. The format has no key for a prompt or for shorter vectors.

    Vectors are normalised: no key says whether, and llama.cpp's are. Raises UnsupportedModelError for other poolings.
    """
    pooling = keys.take("pooling_type", _NONE)
    if pooling == _NONE:
        return None
    if pooling not in _POOLINGS:
        why = _REFUSED.get(pooling, "no such pooling is known; convert the model again, or export its HuggingFace checkpoint")
        raise UnsupportedModelError(f"{keys.file} has {keys.architecture}.pooling_type = {pooling}: {why}")
    return EmbeddingInfo(_POOLINGS[pooling], normalized=True)
