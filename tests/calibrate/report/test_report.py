"""The report: non-empty charts, a self-contained page, reproducible bytes, and the data behind the charts."""

import io
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from calibrate.synthetic_calibration import LAYERS, synthetic_exits, synthetic_file, synthetic_trace
from tide_calibrate.certificate.risk import fit_family
from tide_calibrate.report.curve import cost_curve
from tide_calibrate.report.data import DATA_NAME, ReportData, collect, read_data
from tide_calibrate.report.draw import REPORT_NAME, redraw
from tide_calibrate.report.histogram import exit_histogram, stops, thresholds_of
from tide_calibrate.report.reliability import reliability
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.errors import CalibrationError

from tide_export.calibration.calibration_file import CALIBRATION_NAME, EXITS_NAME

CHARTS = ("agreement", "curve", "histogram", "reliability")


def _data(exits: list[ExitInfo]) -> ReportData:
    rules = [(info.checkpoint, info.head, info.router, info.mlp_threshold) for info in exits]
    family = fit_family(synthetic_trace(2), rules, members=64) if exits else None
    return collect(synthetic_trace(), synthetic_trace(1), exits, family)


def _calibration(directory: Path, exits: list[ExitInfo]) -> Path:
    report = directory / REPORT_NAME
    report.mkdir(parents=True)
    synthetic_file(exits).write(directory)
    (directory / EXITS_NAME).touch()
    _data(exits).write(report)
    return directory


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration with a drawn report."""
    directory = _calibration(tmp_path_factory.mktemp("calibration") / "calib", synthetic_exits())
    assert redraw(directory) == directory / REPORT_NAME / "index.html"
    return directory


def test_every_chart_has_ink(drawn: Path) -> None:
    """An empty canvas is a valid PNG too, so coloured lines, bars or points must cover part of it."""
    for name in CHARTS:
        image = matplotlib.image.imread(io.BytesIO((drawn / REPORT_NAME / f"{name}.png").read_bytes()))[..., :3]
        coloured = np.ptp(image, axis=-1) > 0.2  # neither white nor grey
        assert image.shape[1] > 1000 and coloured.mean() > 0.002, name


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.references, self.tags = list[dict](), list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


def test_the_page_opens_offline_and_is_described(drawn: Path) -> None:
    """It may be read from an e-mail, and by a screen reader; a model or machine named <script> must not become markup."""
    text, page = (drawn / REPORT_NAME / "index.html").read_text(), _Page()
    page.feed(text)
    assert page.references and all(reference.startswith("data:") for reference in page.references)
    assert not re.search(r"https?:|@import|url\(", text) and "script" not in page.tags
    assert len(page.images) == len(CHARTS) and all(re.search(r"\d", image["alt"] or "") for image in page.images)
    assert "tiny &amp; &lt;mighty&gt;" in text and "<mighty>" not in text and "a &lt;machine&gt;" in text
    summary = text[: text.index("<img")]
    for figure in ("1.31", "1.22", "600 tokens", "after layer", "tail:1", "predictions from step costs, not measured"):
        assert figure in summary


def test_drawing_again_gives_the_same_bytes(drawn: Path, tmp_path: Path) -> None:
    """A report under version control must change only when the calibration changes."""
    first = {path.name: path.read_bytes() for path in (drawn / REPORT_NAME).iterdir()}
    for name in set(first) - {DATA_NAME}:
        (drawn / REPORT_NAME / name).unlink()
    redraw(drawn)
    assert {path.name: path.read_bytes() for path in (drawn / REPORT_NAME).iterdir()} == first
    assert read_data(drawn / REPORT_NAME) == _data(synthetic_exits())


def test_a_calibration_without_exits_has_a_report_too(tmp_path: Path) -> None:
    """When no exits are placed, the charts show the reason."""
    redraw(_calibration(tmp_path / "calib", []))
    assert {path.stem for path in (tmp_path / "calib" / REPORT_NAME).glob("*.png")} == set(CHARTS)
    text = (tmp_path / "calib" / REPORT_NAME / "index.html").read_text()
    assert "Chosen exits" not in text


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="nowhere holds no calibration"):
        redraw(tmp_path / "nowhere")
    for number, (name, content) in enumerate([(DATA_NAME, "{}"), (DATA_NAME, "no"), (CALIBRATION_NAME, "[1]")]):
        directory = _calibration(tmp_path / str(number), synthetic_exits())
        (directory / (REPORT_NAME if name == DATA_NAME else "") / name).write_text(content)
        with pytest.raises(CalibrationError, match=rf"{re.escape(name)} is not .*calibrate.* again"):
            redraw(directory)


# --- Data of the charts


def test_layers_include_heads_evaluated_without_a_stop() -> None:
    """A tail that runs for a token that does not stop is a cost; omitting it would favour routers that evaluate the head."""
    trace = synthetic_trace()
    exits = [ExitInfo(4, "tail:1", "max_probability", exact_threshold=0.5)]
    layers = stops(trace, exits, thresholds_of(exits, "exact")).layers
    stopped = trace.exits[4, "tail:1"].scores["max_probability"] >= 0.5
    assert 0 < stopped.sum() < stopped.size
    np.testing.assert_array_equal(layers, np.where(stopped, 4 + 1, LAYERS + 1))


def test_a_token_stops_at_the_first_confident_exit() -> None:
    """And never at one whose threshold is not certified."""
    trace, exits = synthetic_trace(), synthetic_exits()
    shares = exit_histogram(trace, exits, "exit", "text").shares
    first = (trace.exits[2, "identity"].scores["max_probability"] >= 0.95).mean()
    assert shares[0] == pytest.approx(first, abs=1e-6) and sum(shares) == pytest.approx(1, abs=1e-5)
    uncertified = [ExitInfo(2, "identity", "max_probability", exact_threshold=0.0)]
    assert exit_histogram(trace, uncertified, "exit", "text").shares == [0, 1]


def test_the_curve_ends_at_the_full_model() -> None:
    """With the safest thresholds nothing stops: layers, agreement and perplexity are the model's own."""
    trace, exits = synthetic_trace(), [ExitInfo(2, "identity", "max_probability", 0.5, 0.95)]
    curve = cost_curve(trace, exits, fit_family(synthetic_trace(2), [(2, "identity", "max_probability")]))
    safest, boldest = curve.sweep[0], curve.sweep[-1]
    assert (safest.layers, safest.agreement, safest.perplexity) == (LAYERS, 1, curve.full.perplexity)
    assert boldest.layers < safest.layers
    assert boldest.agreement < 1
    assert curve.full.perplexity == pytest.approx(float(np.exp(np.nanmean(trace.full_nll))), rel=1e-5)
    static = curve.static[0]  # every token stops there, at the head that agrees most often
    assert static.name.startswith("layer 2, ")
    assert static.agreement == max(round(trace.exits[2, head].agrees.mean(), 6) for head in ("identity", "tail:1"))


def test_a_calibrated_router_lies_on_the_diagonal() -> None:
    """Scores of entropy are not probabilities, so they must not be drawn."""
    lines = reliability(synthetic_trace(tokens=6000), [(4, "identity")])
    assert {line.router for line in lines} == {"mlp", "max_probability"}
    assert all(line.calibration_error < 0.05 for line in lines)
