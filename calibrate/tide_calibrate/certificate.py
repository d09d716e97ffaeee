"""The promise that travels with the exit thresholds, and what it means in words."""

from __future__ import annotations

from tide_runtime.calibration import CertificateInfo
from tide_runtime.errors import CalibrationError

from tide_calibrate.thresholds import ThresholdChoice

METHOD = (
    "Learn then Test (Angelopoulos et al. 2021, arXiv:2110.01052; CALM, Schuster et al. 2022, arXiv:2207.07061): "
    "fixed-sequence testing, Hoeffding–Bentkus p-values"
)
_SIZE = {
    "document": "; n from the scatter between documents (design effect, Student's t)",
    "token": "; n tokens taken for independent",
}


def certify(choice: ThresholdChoice, data_sha256: str, date: str) -> CertificateInfo:
    """The certificate of certified thresholds.

    Args:
        data_sha256: hash over the documents of the threshold split.
        date: ISO 8601.

    Raises CalibrationError when the choice holds no thresholds, or none that were tested.
    """
    if choice.thresholds is None:
        raise CalibrationError(f"no thresholds are certified: {choice.reason}")
    if not choice.certified:
        raise CalibrationError("these thresholds were measured, not tested; choose them with choose_thresholds")
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
    )


def meaning(certificate: CertificateInfo) -> str:
    """What the certificate says and what it does not, for people."""
    c = certificate
    by_document = c.unit == "document"
    whose = "of a document's tokens, on average over documents" if by_document else "of the tokens of text"
    assumed = (
        "Documents are taken for independent, and how much they tell is estimated from their scatter: an approximation"
        if by_document
        else "Tokens are taken for independent, which those of one document are not"
    )
    return (
        f"With {c.confidence:.0%} confidence, the exit policy changes at most {c.max_disagreement:.2%} {whose} like the "
        f"calibration text's, against the full model's likeliest token after the same text "
        f"(measured: {c.measured:.2%} on {c.tokens:,} tokens in {c.documents:,} documents). {assumed}. It says nothing about "
        "text of another kind, a single document, how far a generation drifts after its first changed token, or which of the "
        "two tokens is right."
    )
