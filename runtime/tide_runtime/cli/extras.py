"""Which extra of ``tide-llm`` brings a module that a command lacks."""

from __future__ import annotations

from collections.abc import Iterator

from tide_runtime.errors import MissingExtraError

# The modules of the packages that pyproject.toml lists, and of those that come with them where TIDE imports them itself.
_EXPORT = frozenset(
    {"accelerate", "gguf", "ml_dtypes", "onnx", "onnx_ir", "onnxscript", "psutil", "safetensors", "torch", "transformers"}
)
_CALIBRATE = _EXPORT | {"matplotlib"}
_GRAMMAR = frozenset({"llguidance"})
MODULES = {
    "export": _EXPORT,
    "calibrate": _CALIBRATE,
    "bench": _CALIBRATE | {"onnxruntime_genai", "sacrebleu", "xllamacpp"},
    "eval": frozenset({"lm_eval"}),
    "grammar": _GRAMMAR,
    "serve": _GRAMMAR | {"fastapi", "httptools", "openai", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop"},
}


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
