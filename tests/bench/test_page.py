"""The HTML report: everything inside, charts drawn."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from bench.browser import show
from bench.synthetic_runs import row
from numpy.typing import NDArray
from tide_bench.curve import CurvePoint
from tide_bench.page import write_report
from tide_bench.report import Report
from tide_bench.results import add_tables

POINTS = [
    CurvePoint("full", 24e3, 900, None, 1.0, 5.0),
    CurvePoint("threshold 0.9", 15e3, 700, None, 0.99, 5.1),
    CurvePoint("threshold 0", 6e3, 300, None, 0.7, 9.0),
    CurvePoint("certified", 14e3, 650, None, 0.985, 5.2),
]
COLOURS = ((0, 114, 178), (213, 94, 0), (102, 114, 127))  # bars and the sweep; the certified star; arms without rank


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"mode": "decode", "device": "cpu", "baselines": ("eager", "unsplit"), "new_tokens": 8}
    report = Report("tide_bench", model="<tiny>", **settings, phases={"load": {"eager": 2.0, "genai": 3.0}})
    marked = row("static-skip", 3.0, mark="promises nothing about its text")
    failed = {"arm": "genai", "title": "onnxruntime-genai", "prompt_tokens": 8, "batch": 1, "note": "no wheel"}
    report.rows = [row("exact", 2.5, rank=1), row("full", 0.98, rank=2), marked, failed]
    add_tables(report)
    return write_report(report, POINTS, tmp_path_factory.mktemp("report") / "new")


def test_the_page_needs_nothing_else(page: Path) -> None:
    """The report would be broken when it is mailed."""
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text) and "<tiny>" not in text and "&lt;tiny&gt;" in text


def test_charts_are_drawn(page: Path) -> None:
    """A chart would be an empty frame: speed in blue and grey, the curve with its star in orange."""
    pictures = re.findall(r'data:image/png;base64,([^"]+)"', page.read_text())
    assert len(pictures) == 3  # speed; the curve over layers and over ms; joules were not counted
    shares = []
    for picture in pictures:
        pixels = (matplotlib.image.imread(io.BytesIO(base64.b64decode(picture)))[..., :3] * 255).round().astype(int)
        assert pixels.shape[1] > 800
        shares.append([_share(pixels, colour) for colour in COLOURS])
    assert shares[0][0] > 0.05 and shares[0][2] > 0.02  # bars; the marked arm's is grey
    assert all(share[0] > 1e-3 and share[1] > 1e-4 for share in shares[1:])


def test_charts_lie_beside_the_page_too(page: Path) -> None:
    """A chart could not be put into a talk."""
    assert {p.name for p in page.parent.glob("*.png")} == {"speed_0.png", "curve_layer_passes.png", "curve_ms.png"}


def test_arms_without_rank_have_a_reason(page: Path) -> None:
    """A reader would take a wrong text's speed for a result."""
    text = page.read_text()
    assert "promises nothing about its text" in text and "onnxruntime-genai could not run: no wheel" in text


def test_the_page_shows_where_the_time_went(page: Path) -> None:
    """A user would wait for minutes and not know for what."""
    assert "load 5.0 s: genai 3.0, eager 2.0" in page.read_text()


def test_a_browser_draws_every_chart(page: Path, tmp_path: Path) -> None:
    """The page would be a blank sheet in a real browser, or its charts a broken picture's icon."""
    shown = show(page, tmp_path)
    assert shown.console == []
    assert len(shown.pictures) == 3 and all(own > 800 and width > 400 for own, width in shown.pictures)
    blue, orange, grey = (_share(shown.pixels, colour) for colour in COLOURS)
    assert blue > 5e-3 and grey > 2e-3 and orange > 1e-5


def _share(pixels: NDArray[np.int_], colour: tuple[int, int, int]) -> float:
    """Share of the pixels that have nearly this colour."""
    return float((np.abs(pixels - colour).sum(-1) < 12).mean())
