"""Invalid input ends in a clear error with exit code 2 and leaves no files."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_in_process import cli_runner
from export.architectures import tiny_model
from tide_runtime.errors import (
    ModelFilesError,
    OutputError,
    ParamsError,
    TideError,
    UnsupportedModelError,
    VerificationError,
)
from tiny_tokenizer import write_byte_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    GPTJConfig,
    PreTrainedConfig,
    RwkvConfig,
)

from tide_export import ExportConfig, cli, export
from tide_export.config import checkpoint_layers
from tide_export.load import check_supported
from tide_export.progress import ExportProgress

UNSUPPORTED = {"t5": "encoder-decoder", "bart": "encoder-decoder", "bloom": "ALiBi"}
# Model type → its config and part of the message; only running the model's code reveals these layers.
UNSUPPORTED_ATTENTION: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "rwkv": (
        lambda: RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64),
        "they compute a recurrence or convolution by functions of their own",
    ),
    "gptj": (
        lambda: GPTJConfig(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8),
        r"GPTJAttention\) calls neither transformers' AttentionInterface",
    ),
    "deepseek_v2": (
        lambda: DeepseekV2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, first_k_dense_replace=2, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8,
        ),
        "DeepseekV2RotaryEmbedding computes with complex numbers",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "model"
    tiny_model("llama").save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A private copy of the model directory, to break."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def nothing_left(folder: Path, *expected: str) -> bool:
    return sorted(p.name for p in folder.iterdir()) == sorted(expected)


def _edited(**changes: object) -> Callable[[Path], object]:
    """Other values in config.json."""
    return lambda m: (m / "config.json").write_text(json.dumps(json.loads((m / "config.json").read_text()) | changes))


CONFIG, WEIGHTS = "config.json", "model.safetensors"
BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], type[TideError], str]] = {
    "no config": (lambda m: (m / CONFIG).unlink(), ModelFilesError, "config.json"),
    "no weights": (lambda m: (m / WEIGHTS).unlink(), ModelFilesError, "no weights"),
    "truncated weights": (
        lambda m: (m / WEIGHTS).write_bytes((m / WEIGHTS).read_bytes()[:-1000]),
        ModelFilesError,
        "cannot load",
    ),
    "pickled weights": (lambda m: (m / WEIGHTS).rename(m / "pytorch_model.bin"), ModelFilesError, "save_pretrained"),
    "config is not JSON": (lambda m: (m / CONFIG).write_text("{"), ModelFilesError, "config"),
    "unknown architecture": (_edited(model_type="holographic"), UnsupportedModelError, "holographic"),
    "heads that do not divide": (
        _edited(num_attention_heads=7),
        UnsupportedModelError,
        "multiple of the number of attention heads",
    ),
}


@pytest.mark.parametrize("case", BROKEN_MODELS)
def test_broken_model_directories(case, copy, tmp_path):
    """The user would get a traceback or half a bundle instead of the reason."""
    break_it, error, words = BROKEN_MODELS[case]
    break_it(copy)
    with pytest.raises(error, match=words):
        export(str(copy), tmp_path / "engine")
    assert nothing_left(tmp_path, "model")


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_unsupported_families_are_refused_with_the_reason(model_type):
    """The export would fail deep inside tracing, with a message about graph nodes."""
    with pytest.raises(UnsupportedModelError, match=f"not supported, because.*{UNSUPPORTED[model_type]}"):
        check_supported(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("model_type", UNSUPPORTED_ATTENTION)
def test_unsupported_attention_is_refused_before_the_trace(model_type, tmp_path, monkeypatch):
    """The user would wait minutes for pages of torch.export advice."""
    config, words = UNSUPPORTED_ATTENTION[model_type]
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path / "model")
    monkeypatch.setattr("tide_export.export_run.trace", lambda _: pytest.fail("the model was traced"))
    with pytest.raises(UnsupportedModelError, match=f"not supported, because.*{words}"):
        export(str(tmp_path / "model"), tmp_path / "engine")
    assert nothing_left(tmp_path, "model")


def test_existing_output_is_kept(llama, tmp_path):
    """A second export to the same place would destroy a bundle in use."""
    out = tmp_path / "engine"
    out.mkdir()
    (out / "precious").write_text("data")
    with pytest.raises(OutputError, match="--force"):
        export(str(llama), out)
    with pytest.raises(OutputError, match="not a TIDE bundle"):
        export(str(llama), out, force=True)
    assert (out / "precious").read_text() == "data" and nothing_left(tmp_path, "engine")


def test_force_replaces_a_bundle(llama, tmp_path):
    """--force would leave the old files mixed with the new ones."""
    out = tmp_path / "engine"
    (out / "onnx").mkdir(parents=True)
    for old in ("manifest.json", "onnx/cpu.segment_9.onnx"):
        (out / old).write_text("{}")
    manifest = export(str(llama), out, ExportConfig(verify=False), force=True)
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == sorted(
        [*manifest.files, "manifest.json"]
    )
    assert nothing_left(tmp_path, "engine")


def test_a_disk_without_room(llama, tmp_path, monkeypatch):
    """The export would end after minutes of work, with a disk that is full for others as well."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"weights take at least .* GiB, and the disk .* has 0\.0 GiB free"):
        export(str(llama), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_disk(llama, tmp_path, monkeypatch):
    """A full disk would leave a bundle that looks whole."""

    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tide_export.weights.weight_file.WeightFile._append", no_space)
    with pytest.raises(OutputError, match="disk"):
        export(str(llama), tmp_path / "engine", ExportConfig(verify=False))
    assert nothing_left(tmp_path)


def test_mismatch_refuses_to_finish(llama, tmp_path, monkeypatch):
    """Verification would accept a bundle that differs from the model."""
    from tide_export.verify import verify_bundle as verify

    honest = verify.TextPass.run
    monkeypatch.setattr(verify.TextPass, "run", lambda *arguments: honest(*arguments) + 0.01)
    with pytest.raises(VerificationError, match="differs from the eager model"):
        export(str(llama), tmp_path / "engine", ExportConfig(checkpoints="none"))
    assert nothing_left(tmp_path)


@pytest.mark.slow
def test_interrupted_export_leaves_nothing(llama, tmp_path):
    """Ctrl-C or a terminated job would leave gigabytes of temporary files."""
    command = [sys.executable, "-m", "tide_export.cli", str(llama), "--out", str(tmp_path / "engine")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not any(tmp_path.iterdir()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert any(tmp_path.iterdir()), "the export never started writing"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    # A signal that arrives inside a C library ends Python with the signal itself; a shell reports 130 for both.
    assert process.returncode in (130, -signal.SIGINT) and "no bundle was written" in errors, errors
    assert nothing_left(tmp_path)


def test_a_signal_that_a_library_turns_into_its_own_error_still_interrupts():
    """Python 3.11 reports a signal inside ``__set_name__`` as RuntimeError, and lazy imports pass that on as their own error."""
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(KeyboardInterrupt), ExportProgress(quiet=True).interruptible():
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt as error:
                raise RuntimeError("Error calling __set_name__") from error
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing/model/dir"], "no directory"),
        (["{model}", "--dtype", "int3"], "dtype"),
        (["{model}", "--dtype", "bf16"], "no bf16 kernels"),
        (["{model}", "--target", "abacus"], "choose from"),
        (["{model}", "--checkpoints", "3,2"], "rising"),
        (["{model}", "--checkpoints", "4"], "from 1 to 3"),
        (["{model}", "--checkpoints", "some"], "every:6"),
        (["{model}", "--max-seq-len", "999999"], "positions"),
        (["{model}", "--calibration", "missing/dir"], "holds no calibration.json"),
        (["{model}", "--calibration", "calib", "--data", "texts"], "leave out --data"),
    ],
)
def test_command_line_errors(arguments, words, llama, tmp_path, monkeypatch, capsys):
    """The shell would see success, or the user a traceback."""
    filled = [a.format(model=llama) for a in arguments]
    done = cli_runner("tide-export", cli.main, monkeypatch, capsys, 200)(*filled, "--out", tmp_path / "engine")
    assert done.code == TideError.exit_code
    assert words in " ".join(done.err.split()) and "Traceback" not in done.err
    assert nothing_left(tmp_path)


def test_command_line_ends_with_the_errors_exit_code(tmp_path):
    """The installed command would drop the exit code. (The error is found before torch is imported, which takes seconds.)"""
    command = [sys.executable, "-m", "tide_export.cli", "model", "--dtype", "int3", "--out", str(tmp_path / "engine")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == TideError.exit_code and "dtype" in done.stderr and "Traceback" not in done.stderr


def test_checkpoint_placement():
    """The model would be cut at other layers than requested, or after the last layer, which is no early exit."""
    assert checkpoint_layers("auto", 24) == [6, 12, 18]
    assert checkpoint_layers("auto", 1) == []
    assert checkpoint_layers("every:5", 12) == [5, 10]
    assert checkpoint_layers("every:12", 12) == []
    assert checkpoint_layers("1,11", 12) == [1, 11]
    for spec in ("0", "12", "3,3", "5,4"):
        with pytest.raises(ParamsError, match="from 1 to 11"):
            checkpoint_layers(spec, 12)
