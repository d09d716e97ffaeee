"""Find the matrices whose rounding changes the model's output most, so that they can be given more bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SENSITIVE_SHARE = 1 / 8  # share of the weights that keeps more bits
WINDOW = 128  # tokens; each window is one sample of the gradient


def divergences(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], changes: Mapping[str, Tensor], tokens: Tensor
) -> dict[str, float]:
    """Name → KL divergence of the model's output, in nats per token, when the change is added to that module's matrix alone.

    To second order this is half the mean square of the derivative along the change of the log-probability of tokens drawn from
    the model's own distribution (its Fisher information: Martens 2020, arXiv 1412.1193, section 5).

    Args:
        modules: linear layers.
        changes: of their matrices [N, K].
        tokens: [B, T] ids of a text.
    """
    generator = torch.Generator().manual_seed(0)
    steps = {name: torch.zeros((), requires_grad=True) for name in modules}  # the derivative is taken by these, at 0
    squares = dict.fromkeys(modules, 0.0)

    def add_change(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + steps[name] * nn.functional.linear(inputs[0].detach(), changes[name])

        return hook

    with ExitStack() as stack, torch.enable_grad():
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(add_change(name)).remove)
        for window in tokens.flatten().split(min(WINDOW, tokens.shape[1])):
            logprobs = model(input_ids=window[None], use_cache=False).logits[0].float().log_softmax(-1)
            drawn = torch.multinomial(logprobs.detach().exp(), 1, generator=generator)
            slopes = torch.autograd.grad(logprobs.gather(1, drawn).sum(), list(steps.values()), materialize_grads=True)
            for name, slope in zip(steps, slopes, strict=True):
                squares[name] += float(slope) ** 2
    return {name: square / (2 * tokens.numel()) for name, square in squares.items()}


def most_sensitive(costs: Mapping[str, float], sizes: Mapping[str, int], share: float = SENSITIVE_SHARE) -> set[str]:
    """The names with the highest cost per weight, together at most ``share`` of all weights in ``sizes``."""
    left = share * sum(sizes.values())
    chosen = set()
    for name in sorted(costs, key=lambda name: costs[name] / sizes[name], reverse=True):
        if sizes[name] <= left:
            chosen.add(name)
            left -= sizes[name]
    return chosen
