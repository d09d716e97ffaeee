"""calibration.json: the exits and thresholds of a calibration, with the model, data and tools that it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tide_runtime.bundle.calibration import CalibrationInfo, CertificateInfo, CostTable, DraftHeadInfo, ExitInfo, StepCost
from tide_runtime.errors import CalibrationError

from tide_export.config import weights_title

CALIBRATION_NAME = "calibration.json"
EXITS_NAME = "exits.safetensors"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class HeadAgreement:
    """Agreement of one kind of exit head at the candidate checkpoints.

    Args:
        head: ``identity``, ``linear`` or ``tail:k``.
        checkpoints: layers run before the exit, increasing.
        text: share of agreeing tokens on the test text, one per checkpoint.
        continuations: the same on the model's greedy continuations; empty if there were none.
    """

    head: str
    checkpoints: list[int]
    text: list[float]
    continuations: list[float]


@dataclass(frozen=True)
class DataInfo:
    """The text of a calibration.

    Args:
        source: file, directory or data set, as given.
        seed: of the assignment of documents to splits.
        documents, tokens: split name → count.
        sha256: split name → hash over its documents.
    """

    source: str
    seed: int
    documents: dict[str, int]
    tokens: dict[str, int]
    sha256: dict[str, str]


@dataclass(frozen=True)
class CalibrationFile:
    """The content of calibration.json.

    Args:
        model: the directory's name or hub id, for display.
        model_fingerprint: SHA-256 over the model's weights (tide_export.load.fingerprint).
        num_layers: L.
        calibration: the part that the runtime reads.
        refusal: why there is no certificate; empty if there is one.
        data: the text of the calibration.
        heads: agreement of every trained head at every candidate.
        config: the options of the run (CalibrationConfig as JSON).
        tools: package → version.
        date: ISO 8601; the only field in which two equal runs differ.
        code: file → SHA-256 of the code that came with the model and ran.
        draft_head_left_out: why the draft head that was trained is not kept, with its speeds; empty: it is, or there was none.
    """

    model: str
    model_fingerprint: str
    num_layers: int
    calibration: CalibrationInfo
    refusal: str
    data: DataInfo
    heads: list[HeadAgreement]
    config: dict[str, Any]
    tools: dict[str, str]
    date: str
    code: dict[str, str] = field(default_factory=dict)
    draft_head_left_out: str = ""

    def write(self, directory: Path) -> None:
        text = json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}, indent=1, ensure_ascii=False, allow_nan=False)
        (directory / CALIBRATION_NAME).write_text(text + "\n", encoding="utf-8")

    @property
    def weights(self) -> str:
        """The weights' form, as `LoadedModel.weights`."""
        return weights_title(self.config.get("weights", "source"), self.config.get("quantizer", ""))

    def check_code(self, code: Mapping[str, str], name: str) -> None:
        """Raise CalibrationError unless the model called ``name`` was loaded by the ``code`` that it was calibrated with."""
        if changed := sorted(file for file in {*code, *self.code} if code.get(file) != self.code.get(file)):
            raise CalibrationError(
                f"{name} comes with other code than at its calibration ({', '.join(changed)} changed): read it, and calibrate "
                "the model again"
            )

    def check_model(self, fingerprint: str, name: str, weights: str = "source") -> None:
        """Raise CalibrationError unless the model called ``name``, with this ``fingerprint``, is the calibrated one.

        ``weights``: their form, as `LoadedModel.weights`, for the message.
        """
        if fingerprint != self.model_fingerprint:
            form, _, quantizer = weights.partition(" ")
            options = "" if weights == "source" else f" --weights {form}" + (f" --quantizer {quantizer}" if quantizer else "")
            raise CalibrationError(
                f"the calibration was made for {self.model} (weights {self.model_fingerprint[:12]}…, {self.weights}), not for "
                f"{name} (weights {fingerprint[:12]}…, {weights}): exits trained for other weights guess at random; "
                f"calibrate this model with tide-calibrate {name}{options} --data …"
            )


def read_calibration(directory: str | Path) -> CalibrationFile:
    """The calibration that tide-calibrate wrote to ``directory``. Raises CalibrationError if it is missing or broken."""
    path = Path(directory) / CALIBRATION_NAME
    if not path.is_file():
        raise CalibrationError(f"{directory} holds no {CALIBRATION_NAME}; make one with tide-calibrate MODEL --data DATA --out")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        _check_schema(raw, path)
        read = _file(raw)
        _check_order(read.calibration, read.num_layers)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    except KeyError as error:
        raise CalibrationError(f"{path} is not a calibration: {error} is missing; calibrate the model again") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CalibrationError(f"{path} is not a calibration: {error}; calibrate the model again") from error
    if read.calibration.has_weights and not (Path(directory) / EXITS_NAME).is_file():
        raise CalibrationError(f"{directory} lacks {EXITS_NAME}, the trained weights; copy the whole folder or calibrate again")
    return read


def _check_schema(raw: Mapping[str, Any], path: Path) -> None:
    if raw["schema"] != SCHEMA_VERSION:
        raise CalibrationError(
            f"{path} has schema {raw['schema']}, this version reads schema {SCHEMA_VERSION}; "
            "calibrate the model again, or upgrade tide-llm if the file is newer"
        )


def _file(raw: Mapping[str, Any]) -> CalibrationFile:
    fields = {name: value for name, value in raw.items() if name != "schema"}
    return CalibrationFile(
        **fields
        | {
            "calibration": _calibration(raw["calibration"]),
            "data": DataInfo(**raw["data"]),
            "heads": [HeadAgreement(**line) for line in raw["heads"]],
        }
    )


def _calibration(raw: Mapping[str, Any]) -> CalibrationInfo:
    costs = raw["costs"]
    certificate = raw["certificate"]
    draft = raw.get("draft_head")
    return CalibrationInfo(
        **dict(raw)
        | {
            "exits": [ExitInfo(**info) for info in raw["exits"]],
            "certificate": None if certificate is None else CertificateInfo(**certificate),
            "draft_head": None if draft is None else DraftHeadInfo(**draft),
            "costs": None if costs is None else CostTable(**costs | {"steps": [StepCost(**s) for s in costs["steps"]]}),
        }
    )


def _check_order(calibration: CalibrationInfo, num_layers: int) -> None:
    """Raise ValueError unless the exits lie inside the model, shallow first."""
    edges = [0, *(info.checkpoint for info in calibration.exits), num_layers]
    if any(shallow >= deep for shallow, deep in pairwise(edges)):
        raise ValueError(f"the exits lie after layers {edges[1:-1]}, expected rising numbers from 1 to {num_layers - 1}")
