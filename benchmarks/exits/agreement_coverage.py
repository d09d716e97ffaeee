"""How good a router's order is: let tokens exit in order of their score, and see how many of them the exit gets right."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def area_under_agreement(scores: NDArray[np.floating], agrees: NDArray[np.bool_]) -> float:
    """Mean, over all coverages 1/n … 1, of the share of exited tokens that agree; tokens of one score exit together.

    1 - AURC of selective classification (Geifman & El-Yaniv 2017). A router that knows nothing gets the exit's mean agreement.
    """
    covered, right = _curve(scores, agrees)
    steps = np.diff(covered, prepend=0)
    return float((steps * right / covered).sum() / covered[-1])


def share_exiting(scores: NDArray[np.floating], agrees: NDArray[np.bool_], disagreement: float) -> float:
    """The largest share of tokens that may exit by one threshold while at most ``disagreement`` of *all* tokens are wrong.

    The same rate as the certificate's: tokens that do not exit run to the end and are right.
    """
    covered, right = _curve(scores, agrees)
    allowed = covered[covered - right <= disagreement * len(agrees)]
    return float(allowed[-1] / len(agrees)) if len(allowed) else 0.0


def _curve(scores: NDArray[np.floating], agrees: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Exited tokens and those of them that agree, at every threshold that some token has as its score."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    return last + 1, np.cumsum(agrees[order])[last].astype(np.int64)
