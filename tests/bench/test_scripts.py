"""The scripts of bench/benchmarks: each says what it takes, and ends with its results in a file."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
from benchmarks.gpu import kit

SCRIPTS = (
    *("agent_session", "architectures", "certainty", "certificate", "export_scale", "gpu.shapes", "integer_products"),
    *("lm_eval_policies", "looped", "quantised_fidelity", "restart", "same_text.__main__"),
    *("serve_hostile", "serve_load", "target_identity", "tasks.__main__"),
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_takes_a_file_for_its_figures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A published figure could not be measured again: the script does not start, or keeps nothing."""
    if name == "lm_eval_policies" and find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed: pip install 'tide-llm[eval]'")
    import typer

    module = import_module(f"benchmarks.{name}")
    with patch.object(sys, "argv", [name, "--help"]), pytest.raises(SystemExit) as ended:
        typer.run(module.main)
    assert ended.value.code == 0 and "--json" in capsys.readouterr().out


def test_the_gpu_kit_runs_its_commands_and_reports_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that hangs would take the minutes of a lent GPU, or one that fails would look like one that passed."""
    stages = [kit.Stage(name, (kit.PYTHON, "-c", code), 20) for name, code in (("fine", "print(1)"), ("bad", "1 / 0"))]
    stages.append(kit.Stage("slow", (kit.PYTHON, "-c", "import time; time.sleep(60)"), 0.5))
    monkeypatch.setattr(kit, "WORK", str(tmp_path))
    rows = list(kit.rows_of(stages, 100, dry=False))
    assert [row["state"] for row in rows] == ["passed", "failed", "stopped"]
    assert "ZeroDivisionError" in rows[1]["output"][-1]
    assert kit.chosen("demo_fp16,kernels")[0].name == "kernels"
