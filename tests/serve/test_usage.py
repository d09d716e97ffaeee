"""``usage.depth`` of an answer that left layers out."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from runtime.depth.test_certificate_coverage import CERTIFICATE
from runtime.made_up_calibration import calibrate, exit_after
from serve.live import serving


@pytest.mark.parametrize(("temperature", "covered"), [(0, True), (1, False)])
def test_depth_of_policy_exit(bundle: Path, tmp_path: Path, temperature: float, covered: bool) -> None:
    """Breaks: a client reads a certificate that does not hold for its answer, or sees other depths than were run."""
    copy = Path(shutil.copytree(bundle, tmp_path / "tiny-chat"))
    calibrate(copy, [exit_after(1, 0.2), exit_after(3, 0.2)], certificate=CERTIFICATE)
    with serving(copy, policy="exit", max_batch=1) as served:
        body = {
            "model": "tiny-chat", "prompt": "def", "max_tokens": 20, "ignore_eos": True, "temperature": temperature, "seed": 1,
            "depth_policy": "exit", "n": 2,
        }  # fmt: skip
        usage: dict[str, Any] = httpx.post(f"{served.url}/v1/completions", json=body).json()["usage"]
    depth = usage["depth"]
    assert depth["policy"] == "exit" and sum(depth["depths"].values()) == usage["completion_tokens"] == 40
    assert min(map(int, depth["depths"])) < 4 and depth["layers_per_token"] < 4
    assert depth["certificate"] == {"max_disagreement": 0.01, "confidence": 0.95, "covered": covered}
    assert bool(depth["uncovered"]) == (not covered)
