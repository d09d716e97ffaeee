"""What variant `layerskip` (Elhoushi et al. 2024, arXiv 2404.16710) adds to a step.

Layer dropout: a sequence skips layer l of L with p_l = p_max · (2^(l/(L-1)) - 1), rising from 0 to p_max.
Early-exit loss: each step also runs the shared head after two layers, one drawn from the shallow half, one from the
deep half of the exits, and adds `exit_weight` of each loss.
"""

import torch
from torch import Tensor


def dropout_probabilities(layers: int, peak: float) -> Tensor:
    """Probability `[L]` that a sequence skips each layer."""
    depth = torch.arange(layers) / max(layers - 1, 1)
    return peak * (2.0**depth - 1)


def keep_mask(layers: int, batch: int, peak: float, generator: torch.Generator) -> Tensor:
    """Draw 1 for layers that run, 0 for skipped ones, `[L, B, 1, 1]`."""
    skipped = torch.rand(layers, batch, generator=generator) < dropout_probabilities(layers, peak)[:, None]
    return (~skipped).float()[..., None, None]


def draw_exits(layers: int, generator: torch.Generator) -> list[int]:
    """Two depths (numbers of layers run, from L/6 to L-1) after which the shared head runs: a shallow and a deep one."""
    first, middle = max(layers // 6, 1), max(layers // 2, 1)
    bounds = [(first, middle), (middle, layers)]
    drawn = [int(torch.randint(low, high, (1,), generator=generator)) for low, high in bounds if low < high]
    return sorted(set(drawn))
