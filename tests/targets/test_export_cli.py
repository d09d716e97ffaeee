"""Target options of the ``tide-export`` command: the table, engine options, exit code 3."""

from pathlib import Path

import pytest
from cli_in_process import Run, cli_runner
from export.architectures import ARCHITECTURES
from tide_runtime.bundle.manifest import Manifest, read_manifest
from tide_runtime.targets.gpu_probe import PresentGpu
from tiny_tokenizer import write_byte_tokenizer
from transformers import AutoModelForCausalLM

from tide_export import cli

V100 = PresentGpu("Tesla V100", 70)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: every export traces it."""
    config = ARCHITECTURES["llama"]()
    config.num_hidden_layers = 1
    folder = tmp_path_factory.mktemp("llama") / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    return cli_runner("tide-export", cli.main, monkeypatch, capsys, columns=400)


def targets(out: Path, *names: str) -> list[str]:
    """Arguments of a fast export to ``out``."""
    named = [word for name in names for word in ("--target", name)]
    return ["--out", str(out), "--checkpoints", "none", "--no-verify", *named]


def profiles(manifest: Manifest) -> dict[str, list[int]]:
    return {profile.name: profile.rows for profile in manifest.targets["trt-sm_70"].profiles}


@pytest.mark.parametrize(
    "gpu, reason",
    [(None, "trt-sm_70 is built on a GPU of compute capability 7.0"), (V100, "TensorRT reports a scale is not positive")],
    ids=["refused", "fails"],
)
def test_some_targets_are_exit_code_3(gpu, reason, machine, run, model, tmp_path):
    """A script would ship a bundle without the target it asked for, or throw away the others although they are whole."""
    recording, out = machine(gpu, "10.4.0"), tmp_path / "engine"
    recording.errors["building"] = "a scale is not positive"
    done = run(model, *targets(out, "trt-sm_70", "cpu"))
    assert done.code == 3, done.err
    assert f"error: {out} was written with cpu, but without trt-sm_70" in done.err and reason in done.err
    assert list(read_manifest(out).targets) == ["cpu"] and not list(out.rglob("*.engine"))


def test_all_targets_are_exit_code_0(machine, run, model, tmp_path):
    """A script would take a whole bundle for half of one, or engines would refuse as many rows as were asked for."""
    machine(V100, "10.4.0")
    done = run(model, *targets(tmp_path / "engine", "trt-sm_70", "cpu"), "--max-batch", 3)
    assert done.code == 0, done.err
    manifest = read_manifest(tmp_path / "engine")
    assert list(manifest.targets) == ["trt-sm_70", "cpu"]
    assert profiles(manifest) == {"decode": [1, 1, 3], "prefill": [1, 1, 3]}


def test_force_rebuild(machine, run, model, tmp_path):
    """After a driver's update, engines that the cache has could not be made anew; or all would be, in every export."""
    recording = machine(V100, "10.4.0")
    built = []
    for number, options in enumerate(([], [], ["--force-rebuild"])):
        done = run(model, *targets(tmp_path / str(number), "trt-sm_70"), *options)
        assert done.code == 0, done.err
        built.append([name for name, _ in recording.builds])
        recording.builds.clear()
    assert built == [["segment_0", "head"], [], ["segment_0", "head"]]
