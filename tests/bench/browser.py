"""A page in a headless browser: what it drew, how large its pictures came out, and what it complained about."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from numpy.typing import NDArray

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_WINDOW = (1200, 4000)
# Chromium prints the page as it is after its load event.
_PROBE = """<script>addEventListener("load", () => document.body.dataset.pictures = JSON.stringify(
[...document.images].map(image => [image.naturalWidth, image.getBoundingClientRect().width])))</script>"""


@dataclass(frozen=True)
class Shown:
    """``pixels``: the window, [H, W, 3], 0 to 255; ``pictures``: own width and width on the page; ``console``: its lines."""

    pixels: NDArray[np.int_]
    pictures: list[tuple[float, float]]
    console: list[str]


def show(page: Path, folder: Path) -> Shown:
    """Open a copy of ``page`` that measures its pictures. Skips the test when there is no browser."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no headless browser is installed; apt-get install chromium-headless-shell")
    copy, picture = folder / "probed.html", folder / "window.png"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{_PROBE}</body>"), encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--screenshot={picture}", f"--window-size={_WINDOW[0]},{_WINDOW[1]}", copy.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    measured = re.search(r'data-pictures="([^"]*)"', done.stdout)
    assert measured is not None, done.stderr
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Shown(pixels, [tuple(sizes) for sizes in json.loads(html.unescape(measured[1]))], console)
