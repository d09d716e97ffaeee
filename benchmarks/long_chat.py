"""A long chat with a recurrent model: how many tokens are computed more than once, and what undoing rejected drafts takes.

    python -m benchmarks.long_chat                                # 8 minutes on 2 cores, 3 GB of disk in --folder
    python -m benchmarks.long_chat --shapes lfm2_1b,qwen35_08b    # 16 minutes

The models are random weights in 4 bits in the shapes of real ones: what is computed and how long it takes are theirs, the replies
are noise. Each turn is a question of random tokens and a reply of as many; a server is given the whole chat every time. llama.cpp
reads the same file and is asked to cache prompts. Undo: a step of drafts, half of which are rejected, and bringing the states of
the recurrent layers to what the accepted ones make of them. Figures without a shape in their name are TIDE's worst.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
import typer
from tide_bench.build_cache import run_in_process
from tide_bench.report import Report

from benchmarks.chosen_names import chosen_names
from benchmarks.models.hybrid_gguf import CONTEXT, HYBRID_SHAPES
from benchmarks.models.random_gguf import RandomModel, random_model

_FIRST_ID = 300  # lower ones may be special
_DRAFTS = (4, 8, 16)  # tokens of a step, half of which are accepted
_CACHED, _ROUNDS = 256, 15
COLUMNS = ["shape", "engine", "tokens in the chat", "computed", "recomputed, %"]
COLUMNS += ["first token of turns 2 to 4, ms", "of the last three, ms"]


class Turn(NamedTuple):
    """``computed``: tokens of the prompt that were not taken over. ``first_ms``: until the first token of the reply."""

    reply: list[int]
    computed: int
    first_ms: float


@dataclass(frozen=True)
class Chat:
    """``tokens``: of the whole chat, ``replied`` of them in replies. ``computed``: tokens of prompts that were computed."""

    tokens: int
    replied: int
    computed: int
    first_ms: list[float]

    @property
    def recomputed_pct(self) -> float:
        """Tokens of prompts that were computed before, over all of the chat. A reply's tokens are computed while it is made."""
        return 100 * (self.computed - (self.tokens - self.replied)) / self.tokens

    @property
    def early_ms(self) -> float:
        """Median first token of turns 2 to 4: one turn's time varies by a fifth here."""
        return median(self.first_ms[1:4])

    @property
    def late_ms(self) -> float:
        """Median first token of the last three turns."""
        return median(self.first_ms[-3:])


def hold(answer: Callable[[list[int], int], Turn], turns: int, tokens: int, vocabulary: int) -> Chat:
    """A chat of ``turns`` turns, each a question and a reply of ``tokens // 2`` tokens."""
    random, half = np.random.default_rng(0), tokens // 2
    text, computed, first_ms = list[int](), 0, list[float]()
    for _ in range(turns):
        text += random.integers(_FIRST_ID, vocabulary, half).tolist()
        turn = answer(text, half)
        computed += turn.computed
        first_ms.append(turn.first_ms)
        text = text + turn.reply
    return Chat(len(text), turns * half, computed, first_ms)


def tide_chat(bundle: Path, turns: int, tokens: int, vocabulary: int) -> Chat:
    from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

    options = EngineOptions(threads=ThreadOptions(shared=True), verify=False, max_batch=1)
    with Engine.load(bundle, options, device="cpu") as engine:
        engine.generate([1, 2, 3], GenerationParams(max_new_tokens=2, use_prefix_cache=False))

        def answer(text: list[int], new_tokens: int) -> Turn:
            (made,) = engine.generate(text, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True))
            computed = made.stats.prompt_tokens - made.stats.prefix_tokens
            return Turn(list(made.token_ids), computed, 1e3 * made.stats.time_to_first_token)

        return hold(answer, turns, tokens, vocabulary)


def llamacpp_chat(file: Path, turns: int, tokens: int, vocabulary: int) -> Chat:
    from tide_bench.arms.llamacpp import LlamacppArm

    arm = LlamacppArm(file)
    address = arm.serve(1, turns * tokens + tokens)

    def answer(text: list[int], new_tokens: int) -> Turn:
        body = {"prompt": text, "n_predict": new_tokens, "temperature": 0, "samplers": ["temperature"], "ignore_eos": True}
        data = json_text.dumps({**body, "cache_prompt": True, "return_tokens": True}).encode()
        with urlopen(Request(f"{address}/completion", data, {"Content-Type": "application/json"})) as found:
            row = json_text.load(found)
        return Turn(row["tokens"], row["timings"]["prompt_n"], row["timings"]["prompt_ms"])

    return hold(answer, turns, tokens, vocabulary)


def undo_times(bundle: Path) -> dict[int, tuple[float, float]]:
    """Tokens of a step with drafts → ms of the step, and of undoing half of them: medians."""
    from tide_runtime import Engine, EngineOptions, ThreadOptions

    options = EngineOptions(threads=ThreadOptions(shared=True), verify=False, max_batch=1, policy="full")
    context = Engine.load(bundle, options, device="cpu").backend.context(1)

    def run(count: int, cached: int) -> float:
        began = perf_counter()
        step = context.step(0, [count], [count])
        step.input_ids[:count] = _FIRST_ID
        step.place([cached])
        for graph in context.every_layer:
            step.run(graph)
        return 1e3 * (perf_counter() - began)

    run(_CACHED, 0)
    found: dict[int, tuple[float, float]] = {}
    for count in _DRAFTS:
        steps, undone, cached = list[float](), list[float](), _CACHED
        for _ in range(_ROUNDS):
            steps.append(run(count, cached))
            cached += count // 2
            began = perf_counter()
            context.cut_rows([0], [cached])
            undone.append(1e3 * (perf_counter() - began))
        found[count] = median(steps[2:]), median(undone[2:])
    context.close()
    return found


def _chats(bundle: Path, file: Path, beside: bool, *sizes: int) -> Iterator[tuple[str, Chat]]:
    """One engine a process, so that neither keeps the other's memory."""
    yield "TIDE", run_in_process(tide_chat, bundle, *sizes)
    if beside:
        yield "llama.cpp", run_in_process(llamacpp_chat, file, *sizes)


def measure(report: Report, name: str, model: RandomModel, turns: int, tokens: int, beside: bool) -> list[list[str]]:
    """Both engines in one shape; the rows of the table."""
    cells = []
    for engine, chat in _chats(model.bundle, model.file, beside, turns, tokens, HYBRID_SHAPES[name].vocab):
        suffix = f"{name}" if engine == "TIDE" else f"{name}_llamacpp"
        report.add(f"chat_recomputed_pct_{suffix}", chat.recomputed_pct)
        report.add(f"chat_first_token_late_over_early_{suffix}", chat.late_ms / chat.early_ms)
        row: dict[str, Any] = {"shape": name, "engine": engine, "tokens": chat.tokens, "computed": chat.computed}
        report.rows.append({**row, "first_ms": chat.first_ms})
        figures = f"{chat.recomputed_pct:.1f}", f"{chat.early_ms:.0f}", f"{chat.late_ms:.0f}"
        cells.append([name, engine, str(chat.tokens), str(chat.computed), *figures])
    return cells


def add_undo(report: Report, name: str, bundle: Path) -> list[list[str]]:
    cells = []
    for count, (step_ms, undo_ms) in run_in_process(undo_times, bundle).items():
        report.rows.append({"shape": name, "drafted": count, "step_ms": step_ms, "undo_ms": undo_ms})
        report.add(f"undo_ms_per_rejection_{name}_{count}", undo_ms)
        report.add(f"undo_pct_of_step_{name}_{count}", 100 * undo_ms / step_ms)
        cells.append([name, str(count), f"{step_ms:.1f}", f"{undo_ms:.2f}", f"{100 * undo_ms / step_ms:.1f}"])
    return cells


def main(
    shapes: Annotated[str, typer.Option(help=f"Some of {', '.join(HYBRID_SHAPES)}.")] = "qwen35_08b",
    turns: Annotated[int, typer.Option(min=7, help="Turns of the chat.")] = 20,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a turn, half of them the reply.")] = 300,
    llamacpp: Annotated[bool, typer.Option(help="llama.cpp beside it.")] = True,
    folder: Annotated[Path, typer.Option(help="Where files and bundles lie until it ends.")] = Path("build"),
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Hold a long chat with recurrent models of random weights, and time the undo of rejected drafts."""
    report = Report("long_chat", shapes=shapes, turns=turns, tokens=tokens, weights="random")
    names = chosen_names(shapes, HYBRID_SHAPES, "shapes")
    chats, undone = list[list[str]](), list[list[str]]()
    for name in names:
        with random_model(name, HYBRID_SHAPES[name], folder, min((turns + 1) * tokens, CONTEXT)) as model:
            chats += measure(report, name, model, turns, tokens, llamacpp)
            undone += add_undo(report, name, model.bundle)
    report.table(f"A chat of {turns} turns of {tokens} tokens, random weights in 4 bits", COLUMNS, chats)
    for worst in ("chat_recomputed_pct", "chat_first_token_late_over_early", "undo_pct_of_step"):
        own = [value for key, value in report.results.items() if key.startswith(worst) and not key.endswith("_llamacpp")]
        report.add(worst, max(own))
    columns = ["shape", "tokens of the step", "step, ms", "undo of half, ms", "of the step, %"]
    report.table("Undo of rejected drafts", columns, undone)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
