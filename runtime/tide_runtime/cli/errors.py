"""Error handling of every command: one message on stderr and an exit code instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from rich.console import Console

from tide_runtime.errors import MissingExtraError, TideError

INTERRUPTED = 130  # the exit code that shells report for SIGINT
# The modules of the packages that pyproject.toml lists, and of those that come with them where TIDE imports them itself.
_EXPORT = frozenset({"gguf", "ml_dtypes", "onnx", "onnx_ir", "onnxscript", "psutil", "safetensors", "torch", "transformers"})
_CALIBRATE = _EXPORT | {"matplotlib"}
_GRAMMAR = frozenset({"llguidance"})
MODULES = {
    "export": _EXPORT,
    "calibrate": _CALIBRATE,
    "bench": _CALIBRATE | {"accelerate", "onnxruntime_genai", "sacrebleu", "xllamacpp"},
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
        _stderr().print(interrupted)
        sys.exit(INTERRUPTED)
    except SystemExit as end:  # typer turns KeyboardInterrupt into this exit code
        if end.code == INTERRUPTED:
            _stderr().print(interrupted)
        raise


def report(error: TideError) -> None:
    """Print the class and the message of ``error`` on stderr."""
    console = _stderr()
    console.print("error: ", style="red", end="")
    console.print(f"{type(error).__name__}: {error}")


def _stderr() -> Console:
    # Messages quote paths and prompts, in which [brackets] are text instead of rich markup.
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
