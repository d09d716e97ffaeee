"""Files and lines that a reader has to open to follow one step of the engine, or one chat over HTTP.

    python -m benchmarks.reading_path

A profile function notes every function of the project (packages ``tide_*``) that a real run enters, on the processor, with a
warm engine and one caller. The source lines of each entered function count once, from its first decorator to its last line,
docstring and comments included; what stands around functions, such as imports and the fields of classes, does not.

``full`` and ``exact``: one decode step, from the token that the engine delivers to its caller to the next one that another pass
of the model gave. Of all steps of two requests the one with the most lines counts; of ``exact`` it drafts, verifies and accepts.
``*_request_*``: the whole request in the engine's thread and the caller's, from `Engine.submit` to the result, all its steps
together.

``chat``: a streamed chat completion as `tide-serve` serves it, behind its middlewares. Its files are those of `tide_serve`; of
the runtime it enters those of a request.
"""

from __future__ import annotations

import ast
import json as json_format
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any, Literal
from urllib.request import Request, urlopen

import typer
import uvicorn
from rich.console import Console
from rich.table import Table
from tide_bench.report import Report
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.depth_tuning import DepthTuning
from tide_serve import ServeConfig, make_app
from tide_serve.http.middlewares import guard
from tide_serve.http.server import uvicorn_config

from benchmarks.models.model_folders import CACHE, tiny_chat_bundle

Drafter = Literal["router", "ngram", "none"]
POLICIES = ("full", "exact")
PROMPTS = ([27, 22, 10, 5, 31], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3])  # the second one repeats, so drafts are copied from it
TOKENS = 96  # until the text falls into a loop, which drafts are copied from too
DRAFTERS: tuple[Drafter, ...] = ("router", "ngram")
SURE = DepthTuning(usual_hit_rates=((1, 0.99),))  # copies are drafted whatever a pass takes here
_ENGINE_THREAD = "tide-engine"


class Entered:
    """The functions of the project that were entered, in the engine's thread and in others."""

    def __init__(self) -> None:
        self.engine: set[CodeType] = set()
        self.others: set[CodeType] = set()

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function."""
        if event == "call":
            in_engine = threading.current_thread().name == _ENGINE_THREAD
            (self.engine if in_engine else self.others).add(frame.f_code)

    def clear(self) -> None:
        self.engine, self.others = set(), set()

    def take_engine(self) -> set[CodeType]:
        """What the engine's thread has entered since the last call."""
        taken, self.engine = self.engine, set()
        return taken


class SourceLines:
    """Lines of functions by file; ``codes``: the functions."""

    def __init__(self, codes: set[CodeType]) -> None:
        self.files: dict[str, set[int]] = {}
        for code in codes:
            path = Path(code.co_filename)
            name = _project_name(path)
            if name is not None:
                self.files.setdefault(name, set()).update(_function_lines(path, code))

    @property
    def lines(self) -> int:
        return sum(map(len, self.files.values()))

    def of(self, package: str) -> dict[str, set[int]]:
        return {name: lines for name, lines in self.files.items() if name.startswith(f"{package}/")}


@contextmanager
def profiled(entered: Entered) -> Iterator[None]:
    """Note the calls of this thread, and of threads that start from now on."""
    threading.setprofile(entered.note)
    sys.setprofile(entered.note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def bundle_with_exit(directory: Path) -> Bundle:
    """The bundle in ``directory`` with an exit that takes no training: the shallow state goes to the model's own head, and
    whatever that guesses is drafted."""
    bundle = Bundle.open(directory, verify=False)
    early_exit = ExitInfo(bundle.manifest.checkpoints[0], "identity", "max_probability", 0.0, None)
    return Bundle(bundle.directory, replace(bundle.manifest, calibration=CalibrationInfo([early_exit], 3, "exact")))


def entered_by_steps(
    bundle: Bundle, policy: str, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = TOKENS
) -> tuple[list[SourceLines], SourceLines]:
    """What each decode step enters, and what whole requests enter: of `exact` with each of `DRAFTERS` alone.

    Raises ValueError where one of them drafted nothing.
    """
    steps, requests = list[SourceLines](), set[CodeType]()
    drafters: tuple[Drafter, ...] = DRAFTERS if policy == "exact" else ("none",)
    for draft in drafters:
        options = EngineOptions(policy=policy, depth=DepthOptions(draft=draft, tuning=SURE), verify=False, device="cpu")
        own, codes, drafted = _entered_by_steps(bundle, options, prompts, tokens)
        if draft not in {*drafted, "none"}:
            raise ValueError(f"{draft} drafted nothing; give other prompts")
        steps += own
        requests |= codes
    return steps, SourceLines(requests)


def _entered_by_steps(
    bundle: Bundle, options: EngineOptions, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[list[SourceLines], set[CodeType], set[str]]:
    """What each step enters, what all requests enter, and the drafters that drafted."""
    entered, steps, requests, drafted = Entered(), list[SourceLines](), set[CodeType](), set[str]()
    with profiled(entered), Engine(bundle, options) as engine:
        for number, prompt in enumerate([*prompts, *prompts]):
            # Each request has a salt of its own: neither its prefix nor drafts from earlier outputs are there already.
            params = GenerationParams(max_new_tokens=tokens, ignore_eos=True, cache_salt=str(number))
            gaps = list[set[CodeType]]()
            entered.clear()
            handle = engine.submit(prompt, params)
            handle.listen(lambda chunk, gaps=gaps: gaps.append(entered.take_engine()))  # type: ignore[misc]
            generation = handle.result()
            while engine.stats().running:  # the thread forgets the request behind its result
                time.sleep(0.001)
            if number >= len(prompts):  # the first time shapes are bound, and figures read
                steps += map(SourceLines, _steps(gaps[2:-1]))
                requests.update(*gaps, entered.engine, entered.others)
                drafted |= {name for name, count in generation.stats.drafted.items() if count}
    return steps, requests, drafted


def _steps(gaps: Sequence[set[CodeType]]) -> list[set[CodeType]]:
    """``gaps`` between delivered tokens, those of one step together: it has run the model."""
    steps: list[set[CodeType]] = []
    for gap in gaps:
        if any(code.co_name == "run_with_iobinding" for code in gap):
            steps.append(gap)
        elif steps:
            steps[-1] = steps[-1] | gap
    return steps


def entered_by_chat(directory: Path) -> SourceLines:
    """What a streamed chat enters, from the connection to the answer's end, outside the engine's thread."""
    entered = Entered()
    with profiled(entered), Engine.load(directory, EngineOptions(verify=False, device="cpu")) as engine, _served(engine) as url:
        for _ in range(2):
            entered.clear()
            _chat(url)
    return SourceLines(entered.others)


def _chat(url: str) -> None:
    messages = [{"role": "user", "content": "high tide"}]
    body = {"model": "tiny", "messages": messages, "stream": True, "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/chat/completions", json_format.dumps(body).encode(), headers)
    with urlopen(request) as answer:
        if not answer.read().rstrip().endswith(b"[DONE]"):
            raise ValueError("the chat's stream did not end; see the error above")


@contextmanager
def _served(engine: Engine) -> Iterator[str]:
    config = ServeConfig(model_names=("tiny",))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = make_app(engine, config)
        server = uvicorn.Server(uvicorn_config(guard(app, app.state.service), config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def _project_name(path: Path) -> str | None:
    """The file's name from its package on; None: not the project's."""
    package = next((i for i, part in enumerate(path.parts) if part.startswith("tide_")), None)
    return "/".join(path.parts[package:]) if package is not None and path.is_file() else None


def _function_lines(path: Path, code: CodeType) -> Iterator[int]:
    """All lines of the function whose code starts where ``code`` does; of a lambda or comprehension those that it runs."""
    end = _function_ends(path).get((code.co_firstlineno, code.co_name))
    if end is not None:
        yield from range(code.co_firstlineno, end + 1)
    else:
        yield from (line for _, _, line in code.co_lines() if line)


@cache
def _function_ends(path: Path) -> dict[tuple[int, str], int]:
    """First line, with decorators, and name → last line of every function in the file."""
    ends = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            ends[first, node.name] = node.end_lineno or node.lineno
    return ends


def main(
    cache: Annotated[Path, typer.Option(help="Folder in which the tiny bundle is kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Count the functions' lines, and their files, that one decode step of each policy and one chat over HTTP enter.

    The lines of each entered function of the packages tide_* count once, docstrings included; code outside functions does not
    count. A step: from one delivered token to the next that another pass of the model gave; the longest one of two requests.
    A request: everything from Engine.submit to the result. A chat: the files of tide_serve, middlewares included.
    """
    report, console, directory = Report("reading_path"), Console(), tiny_chat_bundle(cache)
    for policy in POLICIES:
        steps, request = entered_by_steps(bundle_with_exit(directory), policy)
        step = max(steps, key=lambda step: step.lines)
        _show(console, report, policy, step, request)
        for name, counted in ((policy, step), (f"{policy}_request", request)):
            report.add(f"{name}_files", len(counted.files))
            report.add(f"{name}_lines", counted.lines)
    chat = entered_by_chat(directory)
    _show(console, report, "chat", chat, chat)
    report.add("chat_files", len(chat.of("tide_serve")))
    report.add("chat_lines", sum(map(len, chat.of("tide_serve").values())))
    report.finish(json)


def _show(console: Console, report: Report, walk: str, step: SourceLines, request: SourceLines) -> None:
    table = Table("file", "lines in the step", "in the request", title=walk)
    for file, lines in sorted(request.files.items()):
        table.add_row(file, str(len(step.files.get(file, ()))), str(len(lines)))
        report.rows.append({"walk": walk, "file": file, "lines": len(step.files.get(file, ())), "request_lines": len(lines)})
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
