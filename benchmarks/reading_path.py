"""Files and lines of the project that one request executes: what a reader has to open to follow a token.

    python -m benchmarks.reading_path
    PYTHONPATH=OLD/runtime:OLD/bench python benchmarks/reading_path.py     # the code of another checkout

A warm engine streams the answer to each of a few prompts alone on the processor (batch 1); a trace notes the project's files
(packages ``tide_*``) with a function that runs between the request's admission and its finished generation: prefill, every
decode step, detokenization, the request's figures. Loading and the first call, which binds shapes and reads cost tables, are
outside. ``lines`` counts whole files, comments included.

``step_files_*`` and ``step_lines_*`` leave out prefill and the request's end: the decode steps alone, from the second token to
the one before the last. `exact` must evaluate exits, verify their drafts, and find drafts by prompt lookup within the requests.

Only the public API is used, so that the script also measures earlier versions. d17e495 has 13 files and 1,699 lines for `full`,
25 files and 3,019 lines for `exact`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tide_bench.report import Report
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams
from tide_runtime.depth_tuning import DepthTuning

BUNDLE = Path(__file__).parents[1] / "tests/release_bundles/d17e495/gemma2_window_softcap"
POLICIES = ("full", "exact")
PROMPTS = ([27, 22, 10, 5, 31], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3])  # the second one repeats: prompt lookup finds drafts
TOKENS = 24


class ExecutedFiles:
    """Source files of the packages ``tide_*`` with a function that was called while recording."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}  # by name, from the package on
        self._records = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls of all threads that `trace` has seen start, and of this one."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function."""
        if not self._records:
            return
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if event == "call" and package.startswith("tide_"):
            path = Path(frame.f_code.co_filename)
            if path.is_file():  # generated methods, as those of dataclasses, have no file
                self.paths[package + str(path).rpartition(f"/{package}")[2]] = path

    def lines(self) -> dict[str, int]:
        """File, from its package on → its length in lines."""
        return {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in sorted(self.paths.items())}


@contextmanager
def trace(*recorders: ExecutedFiles) -> Iterator[None]:
    """Let ``recorders`` see the calls of this thread, and of threads that start from now on."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        for recorder in recorders:
            recorder.note(frame, event, argument)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def executed_files(
    bundle: Path, policy: str, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[ExecutedFiles, ExecutedFiles]:
    """The files that whole requests execute, and those of their decode steps.

    Raises ValueError where `exact` used only one of its two drafters.
    """
    request, steps = ExecutedFiles(), ExecutedFiles()
    drafted: set[str] = set()
    params = GenerationParams(max_new_tokens=tokens, ignore_eos=True)
    same_again = DepthOptions(tuning=DepthTuning(pool_tokens=0))  # earlier outputs would draft for the recorded requests
    options = EngineOptions(policy=policy, depth=same_again, verify=False, device="cpu")
    with trace(request, steps), Engine.load(bundle, options) as engine:
        for prompt in prompts:
            for _ in engine.stream(prompt, params):
                pass
        for prompt in prompts:
            stream = engine.stream(prompt, params)
            with request.recording():
                *_, last = stream
            assert last.generation is not None
            drafted |= {name for name, count in last.generation.stats.drafted.items() if count}
            stream = engine.stream(prompt, params)
            next(stream)
            with steps.recording():
                for _ in range(tokens - 2):
                    next(stream)
            for _ in stream:
                pass
    if policy == "exact" and drafted != {"router", "ngram"}:
        raise ValueError(f"policy exact drafted with {sorted(drafted)}, expected ngram and router; give another bundle")
    return request, steps


def main(
    bundle: Annotated[Path, typer.Option(help="A bundle with exits and a tokenizer, for processors.")] = BUNDLE,
    tokens: Annotated[int, typer.Option(min=3, help="Greedy tokens of each prompt.")] = TOKENS,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Count the files and lines behind a token of each policy."""
    report = Report("reading_path", bundle=bundle.name, tokens=tokens)
    console = Console()
    for policy in POLICIES:
        request, steps = executed_files(bundle, policy, PROMPTS, tokens)
        decoding = steps.lines()
        table = Table("file", "lines", "in decode steps", title=policy)
        for file, lines in request.lines().items():
            table.add_row(file, str(lines), "yes" if file in decoding else "")
            report.rows.append({"policy": policy, "file": file, "lines": lines, "decode_step": file in decoding})
        console.print(table)
        for prefix, files in (("", request.lines()), ("step_", decoding)):
            report.add(f"{prefix}files_{policy}", len(files))
            report.add(f"{prefix}lines_{policy}", sum(files.values()))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
