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


@pytest.mark.parametrize("name", CHARTS)
def test_every_chart_has_ink(drawn: Path, name: str) -> None:
    """An empty canvas is a valid PNG too, so coloured lines, bars or points must cover part of it."""
    image = matplotlib.image.imread(io.BytesIO((drawn / REPORT_NAME / f"{name}.png").read_bytes()))[..., :3]
    coloured = np.ptp(image, axis=-1) > 0.2  # neither white nor grey
    assert image.shape[1] > 1000
    assert coloured.mean() > 0.002


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


@pytest.fixture(scope="module")
def page(drawn: Path) -> tuple[str, _Page]:
    text = (drawn / REPORT_NAME / "index.html").read_text()
    parser = _Page()
    parser.feed(text)
    return text, parser


def test_the_page_is_self_contained(page: tuple[str, _Page]) -> None:
    """The page must open offline, for example from an e-mail."""
    text, parser = page
    assert parser.references
    assert all(reference.startswith("data:") for reference in parser.references)
    assert not re.search(r"https?:|@import|url\(", text)
    assert "script" not in parser.tags


def test_every_image_has_alternative_text_with_figures(page: tuple[str, _Page]) -> None:
    """Without it, screen readers cannot present the charts."""
    images = page[1].images
    assert len(images) == len(CHARTS)
    assert all(re.search(r"\d", image["alt"] or "") for image in images)


def test_external_names_are_escaped(page: tuple[str, _Page]) -> None:
    """A model or machine named <script> must not become markup."""
    assert "tiny &amp; &lt;mighty&gt;" in page[0]
    assert "<mighty>" not in page[0]
    assert "a &lt;machine&gt;" in page[0]


def test_the_summary_comes_before_the_charts(page: tuple[str, _Page]) -> None:
    text, _ = page
    first_image = text.index("<img")
    for figure in ("1.31", "1.22", "600 tokens", "after layer", "tail:1"):
        assert figure in text[:first_image]


def test_drawing_again_gives_the_same_bytes(drawn: Path, tmp_path: Path) -> None:
    """A report under version control must change only when the calibration changes."""
    first = {path.name: path.read_bytes() for path in (drawn / REPORT_NAME).iterdir()}
    for name in set(first) - {DATA_NAME}:
        (drawn / REPORT_NAME / name).unlink()
    redraw(drawn)
    assert {path.name: path.read_bytes() for path in (drawn / REPORT_NAME).iterdir()} == first


def test_saved_data_is_read_back_equal(drawn: Path) -> None:
    """Otherwise a redrawn report would show other figures than the first one."""
    assert read_data(drawn / REPORT_NAME) == _data(synthetic_exits())


def test_a_calibration_without_exits_has_a_report_too(tmp_path: Path) -> None:
    """When no exits are placed, the charts show the reason."""
    redraw(_calibration(tmp_path / "calib", []))
    assert {path.stem for path in (tmp_path / "calib" / REPORT_NAME).glob("*.png")} == set(CHARTS)
    text = (tmp_path / "calib" / REPORT_NAME / "index.html").read_text()
    assert "Chosen exits" not in text


@pytest.mark.parametrize(("name", "content"), [(DATA_NAME, "{}"), (DATA_NAME, "no"), (CALIBRATION_NAME, "[1]")])
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    directory = _calibration(tmp_path / "calib", synthetic_exits())
    (directory / (REPORT_NAME if name == DATA_NAME else "") / name).write_text(content)
    with pytest.raises(CalibrationError, match=rf"{re.escape(name)} is not .*calibrate.* again"):
        redraw(directory)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="nowhere holds no calibration"):
        redraw(tmp_path / "nowhere")


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
    trace, exits = synthetic_trace(), synthetic_exits()
    shares = exit_histogram(trace, exits, "exit", "text").shares
    first = (trace.exits[2, "identity"].scores["max_probability"] >= 0.95).mean()
    assert shares[0] == pytest.approx(first, abs=1e-6)
    assert sum(shares) == pytest.approx(1, abs=1e-5)


def test_an_uncertified_exit_is_never_taken() -> None:
    exits = [ExitInfo(2, "identity", "max_probability", exact_threshold=0.0)]
    assert exit_histogram(synthetic_trace(), exits, "exit", "text").shares == [0, 1]


def test_the_curve_ends_at_the_full_model() -> None:
    """With the safest thresholds nothing stops: layers, agreement and perplexity are the model's own."""
    trace, exits = synthetic_trace(), [ExitInfo(2, "identity", "max_probability", 0.5, 0.95)]
    curve = cost_curve(trace, exits, fit_family(synthetic_trace(2), [(2, "identity", "max_probability")]))
    safest, boldest = curve.sweep[0], curve.sweep[-1]
    assert (safest.layers, safest.agreement, safest.perplexity) == (LAYERS, 1, curve.full.perplexity)
    assert boldest.layers < safest.layers
    assert boldest.agreement < 1
    assert curve.full.perplexity == pytest.approx(float(np.exp(np.nanmean(trace.full_nll))), rel=1e-5)


def test_static_skip_is_the_exit_for_every_token() -> None:
    trace = synthetic_trace()
    [point, *_] = cost_curve(trace, [], None).static
    assert point.name.startswith("layer 2, ")
    head = point.name.removeprefix("layer 2, ")
    assert point.agreement == pytest.approx(trace.exits[2, head].agrees.mean(), abs=1e-6)
    assert point.agreement == max(round(trace.exits[2, h].agrees.mean(), 6) for h in ("identity", "tail:1"))


def test_a_calibrated_router_lies_on_the_diagonal() -> None:
    """Scores of entropy are not probabilities, so they must not be drawn."""
    lines = reliability(synthetic_trace(tokens=6000), [(4, "identity")])
    assert {line.router for line in lines} == {"mlp", "max_probability"}
    assert all(line.calibration_error < 0.05 for line in lines)
