"""``tide-serve`` as a shell meets it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cli_in_process import Run, cli_runner
from serve.http.processes import ROOT
from tide_serve import cli

KEY = "sk-0123456789abcdef"
LOADING = 77  # exit code where the engine would be loaded
EMPTY = "EMPTY"  # stands for a file without a key


@pytest.fixture
def tide_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command, which ends with LOADING instead of loading a bundle."""

    def load(*_: object) -> None:
        raise SystemExit(LOADING)

    monkeypatch.setattr(cli, "load_engine", load)
    monkeypatch.delenv("TIDE_API_KEYS", raising=False)
    return cli_runner("tide-serve", cli.main, monkeypatch, capsys, columns=200)


def test_help_teaches(tide_serve: Run) -> None:
    """Breaks: a user does not find out how to start a server, or how to make it safe."""
    done = tide_serve("--help")
    assert done.code == 0
    for word in ("tide-serve engine/", "curl", "--api-key-file", "TIDE_API_KEYS", "--tls-certificate", "/metrics", "2097152"):
        assert word in done.out


def test_help_does_not_wait_for_the_web_framework() -> None:
    """Breaks: --help takes seconds."""
    code = "import sys, tide_serve.cli; print(sorted({'fastapi', 'uvicorn', 'openai', 'ray'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key-file", "/nowhere/keys"], "cannot be read"),
        (["--api-key-file", EMPTY], "has no API key"),
        (["--api-key", "a b"], "printable ASCII"),
        (["--tls-certificate", EMPTY], "give both"),
        (["--tls-certificate", EMPTY, "--tls-key", EMPTY], "both in PEM"),
        (["--kv-memory", "lots"], "such as 4G"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--request-timeout", "0"], "seconds > 0"),
        (["--host", "192.0.2.1"], "cannot listen"),
        (["--allowed-host", "https://example.org"], "without scheme and port"),
    ],
)
def test_wrong_arguments_are_refused_before_the_engine_is_loaded(
    tide_serve: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """Breaks: a user waits for the model to load, and then gets a traceback."""
    (tmp_path / EMPTY).write_text("# no key\n\n")
    done = tide_serve("engine", "--port", 0, *[tmp_path / EMPTY if part == EMPTY else part for part in arguments])
    assert (done.code, done.out) == (2, "")
    assert message in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a model or a folder of bundles"),
        (["engine", "--model", "a=engine"], "give either a model or a folder of bundles"),
        (["--model", "engine"], "NAME=DIR"),
        (["--model", "a=engine", "--model-name", "b"], "--model-name is for a single model"),
        (["--model", "a=engine", "--weights", "int4"], "add --export"),
        (["--model", "a=engine", "--max-seq-len", "8192"], "--max-seq-len is for models that are exported; add --export"),
        (["--model", "a=engine", "--max-seq-len", "8192", "--export"], "none of these is; leave it out"),
        (["engine", "--max-seq-len", "8192"], "engine is a bundle, which has its length"),
        (["--model", "a=engine", "--idle-unload", "0"], "seconds > 0"),
        (["--model", "a=/nowhere/engine"], "model a: there is no /nowhere/engine"),
    ],
)
def test_options_of_several_models_are_refused_where_they_mean_nothing(
    tide_serve: Run, arguments: list[str], message: str
) -> None:
    """Breaks: an option is ignored, or a mistyped one is found when the first request comes."""
    done = tide_serve(*arguments, "--port", 0)
    assert (done.code, done.out) == (2, "") and message in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("models", [["x.gguf"], ["--model", "a=x.gguf", "--export"]])
def test_models_are_exported_with_the_context_that_is_asked_for(
    tide_serve: Run, monkeypatch: pytest.MonkeyPatch, models: list[str]
) -> None:
    """Breaks: `tide-serve FILE.gguf --max-seq-len N` refuses every prompt of more than 4,096 tokens."""
    asked: list[object] = []

    def bundle_of(model: str, weights: str | None, max_seq_len: int | None, **_: object) -> Path:
        asked.append((model, weights, max_seq_len))
        raise SystemExit(LOADING)

    monkeypatch.setattr(cli, "bundle_of", bundle_of)
    done = tide_serve(*models, "--max-seq-len", 8192, "--weights", "int4", "--port", 0)
    assert (done.code, asked) == (LOADING, [("x.gguf", "int4", 8192)]), done.err


def test_variable_without_a_key_is_refused(tide_serve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a secret that a deployment failed to fill in opens the server to everybody."""
    monkeypatch.setenv("TIDE_API_KEYS", " , ")
    done = tide_serve("engine", "--port", 0)
    assert done.code == 2 and "TIDE_API_KEYS has no API key" in done.err


@pytest.mark.parametrize("count", ["2", "none"])
def test_wrong_sockets_handed_over_are_refused(tide_serve: Run, monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    """Breaks: a unit of systemd with two addresses is served on one of them, or on the default port."""
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", count)
    done = tide_serve("engine")
    assert done.code == 2 and "hand over one TCP socket" in done.err


def test_port_that_is_taken_is_named_before_the_engine_is_loaded(tide_serve: Run) -> None:
    """Breaks: a second server loads a model for nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = tide_serve("engine", "--port", other.getsockname()[1])
    assert done.code == 2 and "choose another --host or --port" in done.err


@pytest.mark.parametrize(
    ("arguments", "warnings"),
    [
        ([], []),
        (["--api-key", KEY], ["list of processes"]),
        (["--host", "0.0.0.0"], ["every client that reaches", "unencrypted"]),
        (["--host", "0.0.0.0", "--api-key", "short"], ["list of processes", "can be guessed", "unencrypted"]),
        (["--log-text"], ["written into the log"]),
    ],
)
def test_warnings_name_what_is_not_safe(tide_serve: Run, arguments: list[str], warnings: list[str]) -> None:
    """Breaks: an operator opens a server to a network without noticing, or gets used to warnings that mean nothing."""
    done = tide_serve("engine", "--port", 0, *arguments)
    assert done.code == LOADING
    lines = done.err.splitlines()
    assert len(lines) == len(warnings)
    for line, part in zip(lines, warnings, strict=True):
        assert line.startswith("warning: ") and part in line and KEY not in line


def test_keys_come_from_file_and_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: keys that an operator has written down do not work."""
    (tmp_path / "keys").write_text(f"# first user\n{KEY}-1  # a comment\n\n  {KEY}-2\n")
    monkeypatch.setenv("TIDE_API_KEYS", f"{KEY}-3, {KEY}-1")
    assert cli.api_keys(tmp_path / "keys", ()) == (f"{KEY}-1", f"{KEY}-2", f"{KEY}-3")


@pytest.mark.parametrize(("text", "number"), [("4G", 4 * 2**30), ("512MiB", 512 * 2**20), ("1000", 1000), ("2kb", 2048)])
def test_memory_has_units(text: str, number: int) -> None:
    """Breaks: 4G is refused, or taken for 4 bytes."""
    assert cli._bytes("kv_memory", text) == number
