"""What a demo model is worth: its held-out loss, and how often early exits agree with it on its own text."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tide_export.model.looped_models import OuroForCausalLM

from .model import StackedLlama


def held_out_windows(tokens: np.ndarray, length: int, limit: int) -> Tensor:
    """Windows `[W, length + 1]` that tile a stream, spread evenly over it when it has more than `limit` tokens."""
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(f"{len(tokens)} held-out tokens are fewer than one window of {length}")
    chosen = np.unique(np.linspace(0, count - 1, min(count, max(limit // length, 1))).astype(int))
    return torch.from_numpy(np.stack([tokens[i * length : (i + 1) * length + 1] for i in chosen]).astype(np.int64))


@torch.no_grad()
def held_out_loss(
    model: StackedLlama, tokens: np.ndarray, length: int, limit: int, depths: Sequence[int]
) -> tuple[dict[int, float], int]:
    """Mean loss of the head after each of `depths` layers, in nats per token over at most `limit` tokens of a stream, and their
    number.

    The stream is read in windows of `length` tokens, each without the context before it.
    """
    windows = held_out_windows(tokens, length, limit)
    batch = min(16, len(windows))
    whole = windows[: len(windows) // batch * batch].to(model.embedding.device)
    losses = [model.losses(part, depths) for part in whole.split(batch)]
    return {depth: float(np.mean([of[depth].item() for of in losses])) for depth in depths}, len(whole) * length


def prompts_from(tokens: np.ndarray, count: int, length: int) -> Tensor:
    """Prompts `[count, length]` evenly spread over a held-out stream."""
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompts: Tensor, new_tokens: int) -> Tensor:
    """Greedy continuation: `[B, P]` to `[B, P + new_tokens]`, with a KV cache, past any end of text."""
    tokens = prompts
    cache = None
    for _ in range(new_tokens):
        fresh = tokens if cache is None else tokens[:, -1:]
        output = model(fresh, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens = torch.cat([tokens, output.logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


@torch.no_grad()
def exit_agreement(model: LlamaForCausalLM, tokens: Tensor, new_tokens: int, depths: Sequence[int]) -> dict[int, float]:
    """Share of the last `new_tokens` positions of `tokens` `[B, T]` at which an early exit chooses as the full model.

    The exit is the final norm and LM head put straight after `depth` layers, in a looped model at the end of a loop. Raises
    ValueError for a depth outside 1…L-1, or inside a loop.
    """
    states = exit_states(model, tokens[:, :-1], depths)
    chosen, *early = (model.lm_head(state[:, -new_tokens:]).argmax(-1) for state in states)
    return {depth: round((guess == chosen).float().mean().item(), 4) for depth, guess in zip(depths, early, strict=True)}


def exit_states(model: LlamaForCausalLM, ids: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """What the head reads, `[B, S, H]`: of the full model, then after each of `depths` layers. Raises ValueError as above."""
    layers = model.config.num_hidden_layers
    if isinstance(model, OuroForCausalLM):
        ends = [layers * loop for loop in range(1, model.config.loops)]
        if not set(depths) <= set(ends):
            raise ValueError(f"exit depths must lie in {ends}, got {list(depths)}")
        states = model.model(ids).loop_states
        return [states[-1], *(states[depth // layers - 1] for depth in depths)]
    if any(not 1 <= depth < layers for depth in depths):
        raise ValueError(f"exit depths must lie in 1…{layers - 1}, got {list(depths)}")
    output = model.model(ids, output_hidden_states=True)
    return [output.last_hidden_state, *(model.model.norm(output.hidden_states[depth]) for depth in depths)]


def repeated_share(tokens: Tensor, new_tokens: int, gram: int = 4) -> float:
    """Share of the last `new_tokens` of each row that complete a `gram` of tokens already seen in that row.

    Greedy text of small models loops, and loops are easy to draft: read agreement on it together with this.
    """
    repeated = 0
    for row in tokens.tolist():
        grams = [tuple(row[end - gram : end]) for end in range(gram, len(row) + 1)]
        fresh = len(grams) - new_tokens
        repeated += sum(grams[i] in set(grams[:i]) for i in range(fresh, len(grams)))
    return round(repeated / (len(tokens) * new_tokens), 4)
