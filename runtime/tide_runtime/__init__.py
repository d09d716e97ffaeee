"""Runs compiled bundles: prompt to tokens. Needs numpy, onnxruntime, tokenizers and jinja2; never torch or transformers.

from tide_runtime import Engine, GenerationParams
with Engine.load("engine/") as engine:
    print(engine.generate("def add(a, b):", GenerationParams(max_new_tokens=32))[0].text)
"""

__version__ = "0.1.0"  # first: the commands read it while this package is being imported

from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.depth.options import DepthOptions
from tide_runtime.engine import Engine
from tide_runtime.engine_options import EngineOptions
from tide_runtime.errors import (
    AdapterError,
    BundleError,
    CacheFullError,
    CalibrationError,
    DataError,
    DeviceMemoryError,
    EngineClosedError,
    GrammarError,
    IncompleteBundleError,
    MissingExtraError,
    ModelFilesError,
    NumericsError,
    OutputError,
    ParamsError,
    PromptError,
    QueueFullError,
    TargetError,
    TideError,
    UnsupportedModelError,
    VerificationError,
)
from tide_runtime.generation_params import GenerationParams
from tide_runtime.metrics import EngineStats
from tide_runtime.outputs import Chunk, Generation, RequestStats
from tide_runtime.scheduling.handle import GenerationHandle
from tide_runtime.scoring import Score
from tide_runtime.text.grammar import Grammar
from tide_runtime.text.thoughts import ThoughtMarks, Thoughts, ThoughtSplitter

__all__ = [
    "AdapterError",
    "BundleError",
    "CacheFullError",
    "CalibrationError",
    "Chunk",
    "DataError",
    "DepthOptions",
    "DeviceMemoryError",
    "Engine",
    "EngineClosedError",
    "EngineOptions",
    "EngineStats",
    "Generation",
    "GenerationHandle",
    "GenerationParams",
    "Grammar",
    "GrammarError",
    "IncompleteBundleError",
    "MissingExtraError",
    "ModelFilesError",
    "NumericsError",
    "OutputError",
    "ParamsError",
    "PromptError",
    "QueueFullError",
    "RequestStats",
    "Score",
    "TargetError",
    "ThoughtMarks",
    "ThoughtSplitter",
    "Thoughts",
    "ThreadOptions",
    "TideError",
    "UnsupportedModelError",
    "VerificationError",
    "__version__",
]
