"""`tide-bench` as a user runs it, on the tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tide_bench.bench_run import _lengths
from tide_bench.config import BenchConfig
from tide_runtime.errors import ParamsError


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tide_bench.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_policies_and_eager_are_compared(bundle: Path, hf_model_directory: Path, tmp_path: Path) -> None:
    """The command would not run end to end, or rank what could not run."""
    out = tmp_path / "out.json"
    done = _run(
        bundle, "--device", "cpu", "--model", hf_model_directory, "--vs", "eager", "--batch", "1,2", "--prompt-tokens", 8,
        "--new-tokens", 6, "--rounds", 3, "--minutes", 0.01, "--json", out, "--cache", tmp_path / "cache",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    rows = {(row["arm"], row["batch"]): row for row in content["rows"]}
    for batch in (1, 2):
        for arm in ("full", "torch-full"):  # a row for each target that runs on the processor
            assert rows[arm, batch]["agreement"] == rows[arm, batch]["as_eager"] == 1 and rows[arm, batch]["vs_eager"] > 0
        assert ("cuda-full", batch) not in rows
        assert rows["eager", batch]["mark"] == rows["full", batch]["mark"] == ""
        assert rows["eager", batch]["peak_mib"] > 50
        assert "calibration" in rows["exit", batch]["note"]  # the tiny bundle has none
        assert "rank" not in rows["exit", batch]
    assert "full_vs_eager_b1" in content["results"]
    assert content["results"]["bench_device_arms"] >= 5 and content["settings"]["targets"] == ["cpu", "torch"]


@pytest.mark.slow
def test_another_model_is_refused_for_the_arms_that_need_it(bundle: Path, tmp_path: Path) -> None:
    """Arms would be compared on another model's weights."""
    out = tmp_path / "out.json"
    done = _run(
        bundle, "--model", tmp_path / "nowhere", "--vs", "eager", "--policy", "full", "--batch", 1, "--mode", "prefill",
        "--prompt-tokens", "8", "--new-tokens", 6, "--rounds", 1, "--json", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["arm"]: row for row in json.loads(out.read_text())["rows"]}
    assert "--model" in rows["eager"]["note"] and rows["full"]["first_token_ms"] > 0


def test_long_prompts_fill_the_cache_and_no_more() -> None:
    """--long would measure short contexts, or end with an error about a full cache after minutes of work."""
    config = BenchConfig(prompt_tokens=(64,), new_tokens=24)
    assert _lengths(config, 1024, long=True) == [64, 512, 1000] and _lengths(config, 1024, long=False) == [64]
    with pytest.raises(ParamsError, match="do not fit into 80 cache slots"):
        _lengths(config, 80, long=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sprint"}, "mode"),
        ({"rivals": ("vllm",)}, "--vs has vllm"),
        ({"batches": (0,)}, "batches"),
        ({"rounds": 0}, "rounds"),
        ({"precision": -1}, "precision"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    """A typo would leave an arm out without a word."""
    with pytest.raises(ParamsError, match=message):
        BenchConfig(**options)  # type: ignore[arg-type]
