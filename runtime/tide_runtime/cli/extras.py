"""Which extra of ``tide-llm`` brings a module that a command lacks."""

from __future__ import annotations

from tide_runtime.errors import MissingExtraError

# The modules of the packages that pyproject.toml lists, and of those that come with them where TIDE imports them itself.
_EXPORT = frozenset(
    "accelerate gguf huggingface_hub ml_dtypes onnx onnx_ir onnxscript psutil safetensors torch tqdm transformers".split()
)
_CALIBRATE = _EXPORT | {"matplotlib"}
_GRAMMAR = frozenset({"llguidance"})
MODULES = {
    "export": _EXPORT,
    "calibrate": _CALIBRATE,
    "bench": _CALIBRATE | {"onnxruntime_genai", "sacrebleu", "xllamacpp"},
    "eval": frozenset({"lm_eval", "tqdm"}),
    "grammar": _GRAMMAR,
    "serve": _GRAMMAR | {"fastapi", "httptools", "openai", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop"},
}


def missing_extra(error: ModuleNotFoundError, command: str, extra: str) -> MissingExtraError | None:
    """What to tell the user of ``command``; None where ``extra`` does not bring the module, which is then a fault of another kind."""
    name = (error.name or "").partition(".")[0].replace("-", "_")  # `importlib.metadata` gives a distribution's name
    if name not in MODULES.get(extra, ()):
        return None
    return MissingExtraError(f"{command} needs {name}, which is not installed: pip install 'tide-llm[{extra}]'")
