"""TIDE's own arm: policy ``full`` on a bundle of four segments, every layer run for every token."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.backends.threads import ThreadOptions

from benchmarks.arms import Timing
from benchmarks.build_cache import cached_folder, files_digest
from benchmarks.in_process import run_in_process

_ROOT = Path(__file__).resolve().parents[1]


def export_key(identity: str) -> str:
    """Changes when the weights, the exporter, its tools or the bundle's schema do."""
    schema = _ROOT / "runtime" / "tide_runtime" / "manifest.py"
    exporter = files_digest([*sorted((_ROOT / "tide_export").rglob("*.py")), schema])
    tools = [f"{name} {version(name)}" for name in ("torch", "transformers", "onnxscript", "onnx-ir")]
    return "\n".join([identity, exporter, *tools])


def export_bundle(weights: Path, identity: str, folder: Path, checkpoints: str = "auto") -> Path:
    """The bundle of the model in ``weights``, cut at ``checkpoints``, exported again when `export_key` has changed."""
    key = export_key(identity) + ("" if checkpoints == "auto" else f"\ncut at {checkpoints}")
    return cached_folder(folder, key, lambda f: run_in_process(_export, str(weights), f / "bundle", checkpoints)) / "bundle"


def _export(weights: str, out: Path, checkpoints: str) -> None:
    from tide_export import export
    from tide_export.config import ExportConfig

    export(weights, out, ExportConfig(verify=False, checkpoints=checkpoints))


class TideArm:
    """One shared thread pool, as `tide-run` has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engine = load_engine(folder)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        return timed_generate(self._engine, prompts, new_tokens)

    def loop_overhead(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Share of a generation's wall time spent outside ONNX Runtime: our Python."""
        engine, spent = load_engine(self._folder), Stopwatch()
        backend = cast(Any, engine.backend)
        load, sessions = backend._load, backend.sessions
        backend._load = lambda name: _TimedSession(load(name), spent)  # of what is loaded when first needed
        sessions.update({name: _TimedSession(session, spent) for name, session in sessions.items()})
        timed_generate(engine, prompts, new_tokens)  # binds buffers, which later calls reuse
        spent.seconds, start = 0.0, perf_counter()
        timed_generate(engine, prompts, new_tokens)
        return 1 - spent.seconds / (perf_counter() - start)


class Stopwatch:
    """Seconds gathered over many calls."""

    def __init__(self) -> None:
        self.seconds = 0.0


class _TimedSession:
    """An inference session that notes the time spent in ``run_with_iobinding``."""

    def __init__(self, session: Any, spent: Stopwatch) -> None:
        self._session, self._spent = session, spent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, *args: Any) -> None:
        start = perf_counter()
        self._session.run_with_iobinding(*args)
        self._spent.seconds += perf_counter() - start


def load_engine(folder: Path) -> Engine:
    return Engine.load(folder, EngineOptions(threads=ThreadOptions(shared=True), verify=False))


def timed_generate(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Timing:
    start = perf_counter()
    rows = engine.generate(prompts, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True))
    wall = perf_counter() - start
    # Rows are prefilled one after the other and then decode together: from the last row's first token on.
    decode = min(row.stats.decode_time for row in rows)
    return Timing([list(row.token_ids) for row in rows], wall - decode, decode)
