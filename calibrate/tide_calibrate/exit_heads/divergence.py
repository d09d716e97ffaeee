"""How far an early guess is from the full model's distribution, of which only the K largest logits were kept."""

from __future__ import annotations

from torch import Tensor

_LEAST_MASS = 1e-6


def top_k_divergence(logits: Tensor, top_ids: Tensor, top_logits: Tensor, logsumexp: Tensor) -> Tensor:
    """KL(full || early) in nats over K + 1 outcomes: the K tokens kept, and "any other token".

    Merging outcomes can only lower a divergence, so this bounds the true one from below; it is 0 when both agree.

    Args:
        logits: [n, V] of the early guess.
        top_ids, top_logits: [n, K] of the full model.
        logsumexp: [n] of all V logits of the full model.

    Returns:
        [n].
    """
    full = top_logits - logsumexp[:, None]
    early = logits.gather(1, top_ids) - logits.logsumexp(1, keepdim=True)
    kept = (full.exp() * (full - early)).sum(1)
    full_rest, early_rest = _rest(full), _rest(early)
    return kept + full_rest * (full_rest.log() - early_rest.log())


def _rest(log_probabilities: Tensor) -> Tensor:
    return (1 - log_probabilities.exp().sum(1)).clamp(min=_LEAST_MASS)
