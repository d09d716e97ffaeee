"""Chosen exits with the thresholds of policy ``exit``, and the certificate of those, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tide_runtime.calibration import CertificateInfo, ExitInfo

from tide_calibrate.certificate import certify
from tide_calibrate.threshold_family import ThresholdFamily, fit_family
from tide_calibrate.thresholds import choose_thresholds
from tide_calibrate.traces import SplitTrace


@dataclass(frozen=True)
class CertifiedExits:
    """What policy ``exit`` may do.

    Args:
        exits: shallow first, with an ``exit_threshold`` where one is certified.
        certificate: of those thresholds; None when nothing holds the promise.
        refusal: why there is no certificate; empty when there is one.
        family: the thresholds from which they were chosen; None without exits.
    """

    exits: list[ExitInfo]
    certificate: CertificateInfo | None
    refusal: str
    family: ThresholdFamily | None


def without_exits(reason: str) -> CertifiedExits:
    """Where no exit is worth having, for that ``reason``."""
    return CertifiedExits([], None, reason, None)


def certify_exits(
    exits: Sequence[ExitInfo],
    train: SplitTrace,
    threshold: SplitTrace,
    max_disagreement: float,
    confidence: float,
    data_sha256: str,
    date: str,
) -> CertifiedExits:
    """Order thresholds on the ``train`` split, choose and certify them on the ``threshold`` split.

    Args:
        data_sha256: hash over the documents of the threshold split.
        date: of the certificate, ISO 8601.
    """
    rules = [(info.checkpoint, info.head, info.router, info.mlp_threshold) for info in exits]
    family = fit_family(train, rules)
    choice = choose_thresholds(threshold, family, max_disagreement, confidence)
    if choice.thresholds is None:
        return CertifiedExits([replace(info, exit_threshold=None) for info in exits], None, choice.reason, family)
    thresholds = dict(zip((rule.checkpoint for rule in choice.exits), choice.thresholds, strict=True))
    certified = [replace(info, exit_threshold=thresholds[info.checkpoint]) for info in exits]
    return CertifiedExits(certified, certify(choice, data_sha256, date), "", family)
