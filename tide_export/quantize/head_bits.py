"""Whether the head of a model with int4 layers is in 4 bits too, which the model's perplexity on a fixed text decides.

The head of a small model is a fifth of its weights and, in 8 bits, a third of what a token reads. In 4 bits it costs perplexity:
on SmolLM2-135M, whose head is its embedding, 6 to 10%, and more with a zero point for each block. The text is the Python language
reference, `pydoc_data.topics`: every Python carries it, so an export needs no network and no choice of the user. It is English
prose and code; a model that is made for other text may lose more there than is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from platform import python_version
from pydoc_data.topics import topics

import torch
from tide_runtime.bundle.manifest import HeadInfo
from torch import nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tide_export.quantize.layerwise import layer_by_layer
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.parameters import ParameterSource
from tide_export.sources.source_tokenizer import prompt_prefix
from tide_export.weights.quantized_weight import symmetric_int4

TOKENS = 1024  # tokens that are scored, in windows of at most half of them; some seconds for SmolLM2
MIN_SHARE = 0.1  # share of the model's parameters; a smaller head would save less than a tenth of a token's time
MAX_LOSS = 0.01  # relative increase of the perplexity


def with_head(loaded: LoadedModel, wanted: str, note: Callable[[str], None]) -> LoadedModel:
    """``loaded``, whose head is in 8 bits, with it in as many as are ``wanted``: ``auto``, ``4`` or ``8``.

    An embedding that shares the head's weight keeps its 8 bits: look-ups read a row of it.
    """
    head = loaded.model.get_output_embeddings()
    name = next((n for n, module in loaded.model.named_modules() if module is head), None)
    weight = loaded.quantized.get(f"{name}.weight")
    if wanted == "8" or weight is None or weight.bits != 8:
        return loaded
    too_small = head.weight.numel() < MIN_SHARE * loaded.model.num_parameters()
    if wanted == "auto" and (too_small or loaded.tokenizer is None):
        return loaded
    source = loaded.parameters
    in_four = symmetric_int4(source.value(f"{name}.weight").float().numpy(), weight.block_size)
    changed = replace(loaded, quantized={**loaded.quantized, f"{name}.weight": in_four}, text=f"{loaded.text}, 4-bit head")
    rounded = nn.Parameter(torch.from_numpy(in_four.dequantized()).to(head.weight.dtype), requires_grad=False)
    if wanted == "4":
        head.weight = rounded
        return replace(changed, head=HeadInfo(4))
    assert loaded.tokenizer is not None
    ids = documentation(loaded.tokenizer)
    if len(ids) < TOKENS:
        note(f"head in 8 bits: the tokenizer makes {len(ids)} tokens of a text of {sum(map(len, topics.values())):,} characters")
        return loaded
    window = min(TOKENS // 2, loaded.positions or TOKENS)
    prefix = prompt_prefix(loaded.tokenizer)
    windows = torch.tensor([[*prefix, *ids[first : first + window]][:window] for first in range(0, TOKENS - window + 1, window)])
    bias = source.value(f"{name}.bias") if head.bias is not None else None
    eight, four = perplexities(loaded.model, source, windows, rounded, bias)
    text = f"{TOKENS} tokens of pydoc_data.topics, Python {python_version()}"
    chosen = 4 if four <= eight * (1 + MAX_LOSS) else 8  # 8 where one is NaN
    note(f"head in {chosen} bits: perplexity {four:.3f} with 4, {eight:.3f} with 8, on {text}")
    if chosen == 4:
        head.weight = rounded
    return replace(changed if chosen == 4 else loaded, head=HeadInfo(chosen, four, eight, text))


def documentation(tokenizer: FastTokenizer) -> list[int]:
    """The ids of the Python language reference."""
    return tokenizer("\n\n".join(topics[topic] for topic in sorted(topics)), add_special_tokens=False).input_ids


def perplexities(
    model: PreTrainedModel, source: ParameterSource, windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[float, float]:
    """Perplexities of ``windows`` [B, T], without the first token of each, with the model's head and
    with one of ``weight``, in one pass.

    ``source``: the values of fake parameters.
    """

    def both(head: nn.Module, args: tuple[torch.Tensor, ...], logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([logits, nn.functional.linear(args[0], weight, bias)])  # the model may scale and cap them

    hook = model.get_output_embeddings().register_forward_hook(both)
    try:
        with torch.no_grad(), layer_by_layer(model, source):
            own, other = model(input_ids=windows, use_cache=False).logits.split(len(windows))
    finally:
        hook.remove()
    return perplexity(own, windows), perplexity(other, windows)


def perplexity(logits: torch.Tensor, windows: torch.Tensor) -> float:
    """The perplexity of ``windows`` [B, T] after the first token of each, from the logits [B, T, V]."""
    losses = [nn.functional.cross_entropy(one[:-1].float(), ids[1:]) for one, ids in zip(logits, windows, strict=True)]
    return math.exp(float(torch.stack(losses).mean()))
