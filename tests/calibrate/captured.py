"""In-memory captures computed directly from a model's forward pass, for tests of heads and routers."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tide_calibrate.capture.store import Capture
from transformers import PreTrainedModel

from tide_export.model.boundaries import decoder_layers


@torch.no_grad()
def capture_of(
    model: PreTrainedModel, tokens: np.ndarray, boundaries: Sequence[int], lengths: np.ndarray, split: np.ndarray, top_k: int = 16
) -> Capture:
    """Capture the model's states and largest logits for ``tokens`` [N, T]; every window is a document of its own."""
    layers = decoder_layers(model)
    seen: dict[int, torch.Tensor] = {}

    def keep(boundary: int) -> Callable[..., object]:
        return lambda _m, _i, output: seen.__setitem__(boundary, output[0] if isinstance(output, tuple) else output)

    hooks = [layers[boundary - 1].register_forward_hook(keep(boundary)) for boundary in boundaries]
    hidden: dict[int, list] = {boundary: [] for boundary in boundaries}
    top_ids, top_logits, logsumexp = [], [], []
    for part in torch.from_numpy(tokens).long().split(8):
        logits = model(input_ids=part, use_cache=False).logits.float()
        top = logits.topk(top_k)
        top_ids.append(top.indices.int().numpy())
        top_logits.append(top.values.numpy())
        logsumexp.append(logits.logsumexp(-1).numpy())
        for boundary in boundaries:
            hidden[boundary].append(seen[boundary].half().numpy())
    for hook in hooks:
        hook.remove()
    return Capture(
        tokens=tokens.astype(np.int32),
        lengths=lengths.astype(np.int32),
        document=np.arange(len(tokens), dtype=np.int32),
        split=split.astype(np.int8),
        hidden={boundary: np.concatenate(parts) for boundary, parts in hidden.items()},
        hidden_dtype="float16",
        top_ids=np.concatenate(top_ids),
        top_logits=np.concatenate(top_logits),
        logsumexp=np.concatenate(logsumexp),
        num_layers=len(layers),
    )
