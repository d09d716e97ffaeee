"""Error handling of every command: one message on stderr and an exit code instead of a traceback."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit

from rich.console import Console

from tide_runtime import __version__
from tide_runtime.errors import MissingExtraError, TideError

INTERRUPTED = 130  # the exit code that shells report for SIGINT
# The modules of the packages that pyproject.toml lists, and of those that come with them where TIDE imports them itself.
_EXPORT = frozenset({"gguf", "ml_dtypes", "onnx", "onnx_ir", "onnxscript", "psutil", "safetensors", "torch", "transformers"})
_CALIBRATE = _EXPORT | {"matplotlib"}
_GRAMMAR = frozenset({"llguidance"})
MODULES = {
    "export": _EXPORT,
    "calibrate": _CALIBRATE,
    "bench": _EXPORT | {"accelerate", "onnxruntime_genai", "xllamacpp"},
    "eval": frozenset({"lm_eval"}),
    "grammar": _GRAMMAR,
    "serve": _GRAMMAR
    | {"anthropic", "fastapi", "httptools", "openai", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop"},
}


def run_app(app: Callable[[], object], interrupted: str = "interrupted", *, command: str = "", extra: str = "") -> None:
    """Run ``app``, usually a `typer.Typer`, on the process's arguments and exit.

    A `TideError` becomes one message and its exit code (2), and so does a missing module that ``extra`` brings; Ctrl-C prints
    ``interrupted`` and exits with 130. Typer handles usage errors (2) and a closed pipe (1, no message).

    Args:
        command: its name, where it needs the ``extra`` of ``tide-llm``.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"tide-llm {__version__}")
        sys.exit()
    # Notes of libraries to those who call them; what a user has to know is a RuntimeWarning, or an error.
    warnings.simplefilter("ignore", FutureWarning)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        app()
    except TideError as error:
        report(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = missing_extra(error, command, extra)
        if missing is None:  # a fault of TIDE, or of what it uses
            raise
        report(missing)
        sys.exit(missing.exit_code)
    except KeyboardInterrupt:  # raised while typer was exiting
        stderr().print(interrupted)
        sys.exit(INTERRUPTED)
    except SystemExit as end:  # typer turns KeyboardInterrupt into this exit code
        if end.code == INTERRUPTED:
            stderr().print(interrupted)
        raise


def report(error: TideError) -> None:
    """Print the message of ``error`` on stderr."""
    console = stderr()
    console.print("error: ", style="red", end="")
    console.print(installable(str(error)))


def installable(text: str) -> str:
    """``text`` with the extras that it names as pip finds them: in the folder or file that TIDE was installed from, if in one."""
    try:
        origin = json.loads(distribution("tide-llm").read_text("direct_url.json") or "{}")  # PEP 610
    except (PackageNotFoundError, ValueError):
        return text
    url = urlsplit(origin.get("url", ""))
    if url.scheme != "file":
        return text
    edited = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return text.replace("pip install 'tide-llm[", f"pip install {edited}'{unquote(url.path)}[")


def stderr() -> Console:
    """A console for messages that quote paths and prompts, in which [brackets] are text instead of rich markup."""
    return Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=True)


def missing_extra(error: ModuleNotFoundError, command: str, extra: str) -> MissingExtraError | None:
    """What to tell the user of ``command``; None where ``extra`` does not bring the module: a fault of another kind."""
    name = next((name for name in map(_module, _chain(error)) if name in MODULES.get(extra, ())), None)
    if name is None:
        return None
    return MissingExtraError(f"{command} needs {name}, which is not installed: pip install 'tide-llm[{extra}]'")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """transformers raises an error without a name from the one that has it."""
    while error is not None:
        yield error
        error = error.__cause__


def _module(error: BaseException) -> str:
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    return name.partition(".")[0].replace("-", "_")  # `importlib.metadata` gives a distribution's name
