"""What `pip install 'tide-llm[…]'` brings, and what a command says without it."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest
from tide_runtime import __version__
from tide_runtime.cli.errors import MODULES, installable, run_app

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
COMES_WITH_TYPER = "pydantic"
NEEDS = {f"tide-{extra}": extra for extra in ("export", "calibrate", "serve", "bench")} | {"tide-lm-eval": "eval"}
ARGUMENTS = {
    "tide-export": ["model", "--out", "out"],
    "tide-calibrate": ["model", "--data", "texts", "--out", "out"],
    "tide-serve": ["bundle", "--port", "0"],
    "tide-bench": ["bundle"],
    "tide-lm-eval": ["--model", "tide"],
}
# Prints, for each command and its arguments, the exit code, what was printed, and the folder's files.
WITHOUT_EXTRAS = """
import contextlib, importlib, io, json, os, sys
absent, calls = json.load(sys.stdin)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
results = []
for place, arguments in calls:
    module, function = place.split(":")
    sys.argv = arguments
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = getattr(importlib.import_module(module), function)()
        except SystemExit as end:
            code = end.code
    results.append((code, out.getvalue(), os.listdir()))
print(json.dumps(results))
"""


def _run(absent: set[str], calls: list[tuple[str, ...]], folder: Path) -> list[tuple[int, str, list[str]]]:
    places = [(PROJECT["scripts"][command], [command, *arguments]) for command, *arguments in calls]
    given, command = json.dumps([sorted(absent), places]), [sys.executable, "-c", WITHOUT_EXTRAS]
    done = subprocess.run(command, input=given, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_commands_without_their_extra(tmp_path: Path) -> None:
    """After `pip install tide-llm` a command ends in a traceback, which does not say what to install; or it shows no help."""
    absent = frozenset().union(*MODULES.values()) - {COMES_WITH_TYPER}
    calls = [(command, *ARGUMENTS[command]) for command in NEEDS]
    helps = [(command, option) for command in PROJECT["scripts"] for option in ("--help", "-h", "--version")]
    results = _run(absent, calls + helps, tmp_path)
    for (command, *_), (code, text, files) in zip(calls, results, strict=False):
        assert (code, files) == (2, []) and text.startswith(f"error: {command} needs "), text
        assert re.search(rf"which is not installed: pip install .*\[{NEEDS[command]}\]'$", text.rstrip())
    for (command, option), (code, text, _) in zip(helps, results[len(calls) :], strict=True):
        wanted = f"tide-llm {__version__}\n" if option == "--version" else f"Usage: {command} "
        assert not code and wanted in text


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///a%20b/tide", "dir_info": {}}, "pip install '/a b/tide[export]'"),
        ({"url": "file:///tide", "dir_info": {"editable": True}}, "pip install -e '/tide[export]'"),
        (
            {"url": "file:///w/tide_llm-1-py3-none-any.whl", "archive_info": {}},
            "pip install '/w/tide_llm-1-py3-none-any.whl[export]'",
        ),
        ({"url": "https://example.org/tide.git", "vcs_info": {}}, "pip install 'tide-llm[export]'"),
        (None, "pip install 'tide-llm[export]'"),
    ],
)
def test_a_message_names_what_pip_can_install(
    origin: dict[str, object] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: the command that an error gives fails, as no index has the package that was installed from a clone."""
    said = Mock(read_text=lambda name: None if origin is None else json.dumps(origin))
    monkeypatch.setattr("tide_runtime.cli.errors.distribution", lambda name: said)
    assert installable("x: pip install 'tide-llm[export]'; y") == f"x: {command}; y"


def test_one_package_is_missing(tmp_path: Path) -> None:
    """An environment that lost one package of an extra: the user does not learn which."""
    ((code, text, files),) = _run({"torch"}, [("tide-export", *ARGUMENTS["tide-export"])], tmp_path)
    assert (code, files) == (2, []) and "tide-export needs torch, which" in text


def _derived(name: str) -> ModuleNotFoundError:
    """As transformers raises it."""
    error = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    error.__cause__ = ModuleNotFoundError(f"No module named {name!r}", name=name)
    return error


@pytest.mark.parametrize("error", [_derived("safetensors.torch"), PackageNotFoundError("onnx-ir")], ids=["derived", "metadata"])
def test_forms_of_a_missing_module(error: ModuleNotFoundError, capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries pass on a missing module in forms of their own, which would be tracebacks."""
    with pytest.raises(SystemExit) as end:
        run_app(lambda: _raise(error), command="tide-export", extra="export")
    assert end.value.code == 2 and re.search(r"needs (safetensors|onnx_ir), which .*\[export\]", capsys.readouterr().err)


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("x", name="tide_export.nowhere"), _derived("einops"), ImportError("torch")]
)
def test_faults_of_another_kind_stay_errors(error: ImportError) -> None:
    """A mistake in TIDE, or a package that no extra brings, would be called a missing extra: installing it mends nothing."""
    with pytest.raises(ImportError) as raised:
        run_app(lambda: _raise(error), command="tide-export", extra="export")
    assert raised.value is error


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("extra", MODULES)
def test_the_modules_of_an_extra_are_those_it_installs(extra: str) -> None:
    """A package that is added to an extra, and missing where a command needs it, would be a traceback again."""
    for requirement in EXTRAS[extra]:
        name, other = re.match(r"([\w-]+)(?:\[(\w+)\])?", requirement).groups()
        brought = MODULES[other] if name == PROJECT["name"] else {name.replace("-", "_")}
        assert brought <= MODULES[extra], f"{requirement} is not in tide_runtime.cli.errors"


def test_extras_that_are_named_exist() -> None:
    """Breaks: pip only warns about an extra that does not exist, installs nothing, and the user ends where the message was."""
    folders = ("bench", "calibrate", "deploy", "docs", "examples", "plugins", "runtime", "tide_export")
    files = [
        ROOT / "README.md",
        *(file for folder in folders for kind in ("*.py", "*.md") for file in (ROOT / folder).rglob(kind)),
    ]
    groups = [group for file in files for group in re.findall(r"(?:tide-llm|'\.)\[([\w,]+)\]", file.read_text(encoding="utf-8"))]
    named = {extra for group in groups for extra in group.split(",")}
    assert len(named) > 5 and named <= set(EXTRAS)


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda page: page.name)
def test_pages_install_from_the_clone(page: Path) -> None:
    """Breaks: a reader copies `pip install 'tide-llm[serve]'`, which PyPI does not have."""
    assert "install 'tide-llm" not in page.read_text(encoding="utf-8")


def test_the_extra_cuda_installs_every_library_of_the_provider() -> None:
    """Guards against `pip install 'tide-llm[cuda]'` that runs only where torch or a system CUDA brings the libraries."""
    installed = [requirement.split(">")[0] for requirement in [*EXTRAS["cuda"], *EXTRAS["kernels"]]]
    libraries = {"nvidia-cuda-runtime", "nvidia-cublas", "nvidia-curand", "nvidia-cudnn-cu13"}
    assert libraries <= set(installed)
