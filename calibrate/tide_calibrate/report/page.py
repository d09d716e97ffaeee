"""The report as one self-contained HTML page that can be opened offline."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

from tide_calibrate.report.terminal import certificate_line, draft_head_line, exit_rows, predicted_line, recommendation_line
from tide_calibrate.traces.trace import agreement_rows
from tide_export.calibration.calibration_file import CalibrationFile

PAGE_NAME = "index.html"


@dataclass(frozen=True)
class Chart:
    """One chart of the page.

    Args:
        name: stem of its PNG file, and its anchor on the page.
        title, caption: what the chart shows and how to read it.
        alt: the content in words (alternative text).
        png: bytes of the image.
    """

    name: str
    title: str
    caption: str
    alt: str
    png: bytes

    @property
    def base64(self) -> str:
        return base64.b64encode(self.png).decode("ascii")


def render_page(file: CalibrationFile, charts: Sequence[Chart]) -> str:
    """Render the page as HTML; external text (names, paths) is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tide_calibrate.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html.j2").render(
        file=file,
        verdict=[recommendation_line(file), certificate_line(file)],
        facts=_facts(file),
        exits=exit_rows(file),
        agreement=agreement_rows(file.heads),
        charts=charts,
    )


def _facts(file: CalibrationFile) -> list[tuple[str, str]]:
    calibration, data = file.calibration, file.data
    splits = ", ".join(f"{name} {data.documents[name]:,} documents, {data.tokens[name]:,} tokens" for name in data.documents)
    facts = [("Predicted speedup", predicted_line(calibration)), ("Data", f"{data.source}: {splits}")]
    if calibration.draft_head is not None:
        facts.append(("Draft head", draft_head_line(calibration.draft_head).removeprefix("Draft head: ")))
    if file.draft_head_left_out:
        facts.append(("Draft head", file.draft_head_left_out))
    if calibration.certificate is not None:
        facts.append(("Threshold split", f"SHA-256 {calibration.certificate.data_sha256}"))
    if calibration.costs is not None:
        facts.append(("Costs measured on", f"{calibration.costs.machine}, target {calibration.costs.target}"))
    return [*facts, ("Options", ", ".join(f"{name} {value}" for name, value in file.config.items()))]
