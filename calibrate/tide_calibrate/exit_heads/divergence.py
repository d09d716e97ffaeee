"""KL divergence between an exit's distribution and the full model's, of which only the K largest logits are captured."""

from __future__ import annotations

from torch import Tensor

_MIN_MASS = 1e-6


def top_k_divergence(
    logits: Tensor, top_ids: Tensor, top_logits: Tensor, logsumexp: Tensor, early_logsumexp: Tensor | None = None
) -> Tensor:
    """KL(full || early) in nats over K + 1 outcomes: the K captured tokens, and "any other token".

    Merging outcomes never increases a KL divergence (data processing inequality), so this is a lower bound of the KL over the
    vocabulary; it is 0 when the distributions are equal.

    Args:
        logits: [n, V] of the exit.
        top_ids, top_logits: [n, K] of the full model.
        logsumexp: [n], over all V logits of the full model.
        early_logsumexp: [n], of the exit's; None: over ``logits``.

    Returns:
        [n].
    """
    full = top_logits - logsumexp[:, None]
    early = logits.gather(1, top_ids) - (logits.logsumexp(1) if early_logsumexp is None else early_logsumexp)[:, None]
    top_k = (full.exp() * (full - early)).sum(1)
    full_rest, early_rest = _remaining_mass(full), _remaining_mass(early)
    return top_k + full_rest * (full_rest.log() - early_rest.log())


def _remaining_mass(log_probabilities: Tensor) -> Tensor:
    return (1 - log_probabilities.exp().sum(1)).clamp(min=_MIN_MASS)
