"""Weights ``auto``, the commands' default: products of integers for processors where they fit the memory, else fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.scheduling.budgets import free_memory
from torch import nn

from tide_export.config import ExportConfig
from tide_export.quantize.quantizers import integer_matrices
from tide_export.sources.loaded_model import LoadedModel
from tide_export.targets import CPU
from tide_export.targets.base import Target
from tide_export.weights.quantized_weight import INTEGER

_FREE_MEMORY_SHARE = 0.5  # share of the free memory; the rest is for keys and values, and for other programs
# Bytes that 4-bit blocks of a file would take in 8 bits. Above, decoding waits for memory: in the shape of Qwen2.5 1.5B (random,
# Q4_0, AVX512-VNNI) blocks give 35 tokens/s and 8 bits 25, with 8 sequences 129 and 120. Qwen2.5 0.5B, 0.6 GB, gives 61 and 70.
_LARGE = 10**9


def chosen_weights(loaded: LoadedModel, config: ExportConfig, targets: Sequence[Target]) -> tuple[str, str]:
    """A value of `ExportConfig.weights`, and the reason as a sentence.

    Products of integers cost least for prompts, drafts and batches of small models, as `benchmarks.integer_products` measures.
    Elsewhere low-bit weights stay as they are, and others get 4 bits.
    """
    low = "source" if loaded.quantized else "int4"
    if config.data is not None:
        return "source", "as exits are calibrated on them; --weights with --data calibrates others"
    if config.dtype != ExportConfig.dtype or any(target is not CPU for target in targets) or loaded.embedding is not None:
        return "source", "as they are stored, which every target runs"
    if (config.quantizer, config.head_bits) != (ExportConfig.quantizer, ExportConfig.head_bits):
        return "int4", "as --quantizer or --head-bits are given"
    products = {id(module.weight) for module in integer_matrices(loaded.model).values()}
    tables = {id(module.weight) for module in loaded.model.modules() if isinstance(module, nn.Embedding)}
    in_products = in_tables = others = 0
    for parameter in loaded.model.parameters():
        if id(parameter) in products:
            in_products += parameter.numel()
        elif id(parameter) in tables:
            in_tables += parameter.numel()
        else:
            others += parameter.numel()
    if others > in_products:
        return low, "as most of them are experts', for which there are no products of integers"
    size = in_products + in_tables + 4 * others
    free = free_memory()
    if size > _FREE_MEMORY_SHARE * free:
        return low, f"as 8 bits a weight would take {size / 1e9:.1f} GB of the {free / 1e9:.1f} GB that are free here"
    if loaded.quantized and size > _LARGE:
        return (
            low,
            f"as decoding would wait for the {size / 1e9:.1f} GB that 8 bits a weight take; prompts are faster with {INTEGER}",
        )
    return INTEGER, f"products of integers, {size / 1e9:.2f} GB; --weights {low} takes less"
