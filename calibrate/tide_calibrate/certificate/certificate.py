"""Certify exit thresholds: choose them for the placed exits, and describe the guarantee in calibration.json and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tide_runtime.bundle.calibration import CertificateInfo, ExitInfo
from tide_runtime.errors import CalibrationError

from tide_calibrate.capture.reference import ReferenceTokens
from tide_calibrate.certificate.risk import ExitRule, ThresholdFamily, fit_family
from tide_calibrate.certificate.thresholds import ThresholdChoice, choose_thresholds
from tide_calibrate.traces.trace import SplitTrace

METHOD = (
    "Learn then Test (Angelopoulos et al. 2021, arXiv:2110.01052; CALM, Schuster et al. 2022, arXiv:2207.07061): "
    "fixed-sequence testing, Hoeffding–Bentkus p-values"
)
_SIZE = {
    "document": "; n from the scatter between documents (design effect, Student's t)",
    "token": "; n tokens taken for independent",
}


@dataclass(frozen=True)
class CertifiedExits:
    """Exits with the thresholds of policy ``exit``.

    Args:
        exits: shallow first, with an ``exit_threshold`` where one is certified.
        certificate: the guarantee of those thresholds; None when no thresholds are certified.
        refusal: why there is no certificate; empty when there is one.
        family: the threshold family from which they were chosen; None without exits.
    """

    exits: list[ExitInfo]
    certificate: CertificateInfo | None
    refusal: str
    family: ThresholdFamily | None


def without_exits(reason: str) -> CertifiedExits:
    """The result when no exit was placed, with the ``reason``."""
    return CertifiedExits([], None, reason, None)


def certify_exits(
    exits: Sequence[ExitInfo],
    train: SplitTrace,
    threshold: SplitTrace,
    max_disagreement: float,
    confidence: float,
    data_sha256: str,
    date: str,
    reference: ReferenceTokens | None = None,
) -> CertifiedExits:
    """Order thresholds on the ``train`` split, then choose and certify them on the ``threshold`` split.

    Args:
        train: agreement is with the full model: any order that is fixed beforehand is valid, and this one begins with few exits.
        threshold: agreement is with the tokens of ``reference``, where there is one.
        data_sha256: hash over the documents of the threshold split.
        date: date of the certificate, ISO 8601.
    """
    family = fit_family(train, [ExitRule.from_info(info) for info in exits])
    choice = choose_thresholds(threshold, family, max_disagreement, confidence)
    if choice.thresholds is None:
        return CertifiedExits([replace(info, exit_threshold=None) for info in exits], None, choice.reason, family)
    thresholds = dict(zip((rule.checkpoint for rule in choice.exits), choice.thresholds, strict=True))
    certified = [replace(info, exit_threshold=thresholds[info.checkpoint]) for info in exits]
    return CertifiedExits(certified, certify(choice, data_sha256, date, reference), "", family)


def certify(choice: ThresholdChoice, data_sha256: str, date: str, reference: ReferenceTokens | None = None) -> CertificateInfo:
    """Write the certificate of certified thresholds.

    Args:
        data_sha256: hash over the documents of the threshold split.
        date: ISO 8601.
        reference: the model that the choice's trace was compared with; None: the full depth of the traced model.

    Raises CalibrationError when the choice holds no thresholds.
    """
    if choice.thresholds is None:
        raise CalibrationError(f"no thresholds are certified: {choice.reason}")
    return CertificateInfo(
        max_disagreement=choice.max_disagreement,
        confidence=choice.confidence,
        method=METHOD + _SIZE[choice.unit],
        unit=choice.unit,
        tokens=choice.tokens,
        documents=choice.documents,
        measured=choice.measured,
        data_sha256=data_sha256,
        date=date,
        reference=reference.name if reference is not None else "",
        reference_sha256=reference.sha256 if reference is not None else "",
        full_disagreement=choice.full_disagreement,
    )


def meaning(certificate: CertificateInfo) -> str:
    """Explain in words what the certificate guarantees and what it does not."""
    c = certificate
    by_document = c.unit == "document"
    population = "of a document's tokens, on average over documents" if by_document else "of the tokens of text"
    assumption = (
        "Documents are assumed independent, and their effective size is estimated from the variance between them (approximately)"
        if by_document
        else "Tokens are assumed independent, which those of one document are not"
    )
    alone = f", {c.full_disagreement:.2%} without exits" if c.reference else ""
    kernels = ", the rounding of activations in low-bit products" if c.reference else ""
    return (
        f"With {c.confidence:.0%} confidence, the exit policy differs from {c.compared_with} at no more than "
        f"{c.max_disagreement:.2%} {population} like the calibration text's, by the likeliest token after the same text "
        f"(measured: {c.measured:.2%} on {c.tokens:,} tokens in {c.documents:,} documents{alone}). {assumption}. "
        f"It says nothing about text of another kind, a single document{kernels}, how far a generation drifts after its first "
        "changed token, or which of the two tokens is right."
    )
