"""A coding agent's session, on `tide-serve` and llama.cpp's server in turn: a GGUF file on the CPU, SmolLM2-135M by default.

    python -m benchmarks.agent_session                            # both APIs, on 2 cores
    python -m benchmarks.agent_session --dialects chat            # 3 minutes
    python -m benchmarks.agent_session --model FILE.gguf          # another model
    python -m benchmarks.agent_session --weights source           # TIDE runs the file's own blocks, as llama.cpp does

The agent is a script of 20 turns (see `benchmarks.serving.agent_script`): it has the model call a tool with JSON, sends it a part
of a file of this repository, has it explain the part and write an edit, and has it report as JSON. Each turn sends the whole
history with the model's own answers; what the agent sends next does not depend on them. Both servers get the same turns and
limits of tokens, answer greedily, keep prefixes as they do by default, and hold 8,192 tokens; each session has a server of its
own that has answered one short request. Answers end where the model ends them, so their lengths differ; the table has them.

Dialects: chat (chat completions, calls by JSON schema) and messages (Anthropic's, calls as text). Computed twice: tokens of a
turn's prompt that the server had computed in the turn before and computes again, over all tokens of the session. Results without
a dialect are the worse of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.progress import Progress
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.bundles import export_bundle
from tide_bench.paired_ratio import paired_ratio
from tide_bench.report import Report
from tide_bench.tables import console
from tokenizers import Tokenizer

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import smollm2_file
from benchmarks.models.model_folders import CACHE
from benchmarks.models.peer_files import peer_files
from benchmarks.serving.agent_dialects import DIALECTS, Answer
from benchmarks.serving.agent_script import Session, Turn, session
from benchmarks.serving.http_server import tide_serve

CONTEXT = 8192
ARMS = {"tide": "tide-serve", "llamacpp": "llama.cpp server"}
_NAME = "agent"
_WARM_UP = Turn("Say hello.", 8)
COLUMNS = [
    "API", "server", "session, s", "turn, ms, p50 / longest", "first token, ms, p50 / longest", "tokens of the session",
    "written", "computed twice, %",
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A session's ``answers``, in order."""

    answers: Sequence[Answer]

    @property
    def seconds(self) -> float:
        return sum(answer.seconds for answer in self.answers)

    @property
    def tokens(self) -> int:
        """Tokens of the whole session, the last answer included."""
        return self.answers[-1].prompt_tokens + self.answers[-1].new_tokens

    @property
    def recomputed(self) -> int:
        """Tokens that were computed in the turn before and again. The last one of an answer is not computed with it."""
        turns = zip(self.answers, self.answers[1:], strict=False)
        return sum(max(0, one.prompt_tokens + one.new_tokens - 1 - after.cached_tokens) for one, after in turns)

    @property
    def recomputed_pct(self) -> float:
        return 100 * self.recomputed / self.tokens


@contextmanager
def server(arm: str, bundle: Path, file: Path) -> Iterator[str]:
    """Host and port of a new server of the arm. Raises ArmError when it does not start."""
    if arm == "tide":
        with tide_serve(bundle, name=_NAME) as serving:
            yield serving.address
    else:
        with closing(ArmProcess("llamacpp", file)) as process:
            yield urlsplit(process.call("serve", 1, CONTEXT, keep_prefixes=True)).netloc


def hold(dialect: str, address: str, script: Session) -> Run:
    """The whole session in ``dialect`` with the server at ``address``."""
    conversation = DIALECTS[dialect]
    conversation(address, _NAME, "Be brief.").ask(_WARM_UP)
    agent = conversation(address, _NAME, script.system)
    return Run([agent.ask(turn) for turn in script.turns])


def report_dialect(report: Report, dialect: str, rounds: Sequence[dict[str, Run]]) -> list[list[str]]:
    """Figures of a dialect; the rows of the table."""
    cells = []
    for arm, title in ARMS.items():
        runs = [one[arm] for one in rounds]
        report.rows += [
            {"dialect": dialect, "arm": arm, "round": number, "turns": [asdict(answer) for answer in run.answers]}
            for number, run in enumerate(runs)
        ]
        seconds = median(run.seconds for run in runs)
        recomputed = max(run.recomputed_pct for run in runs)
        turns = [1e3 * answer.seconds for run in runs for answer in run.answers]
        firsts = [1e3 * answer.first_s for run in runs for answer in run.answers]
        suffix = f"{dialect}_{arm}"
        report.add(f"agent_session_s_{suffix}", seconds)
        report.add(f"agent_turn_ms_{suffix}", median(turns))
        report.add(f"agent_first_token_ms_{suffix}", median(firsts))
        report.add(f"agent_recomputed_tokens_pct_{suffix}", recomputed)
        written = sum(answer.new_tokens for answer in runs[0].answers)
        times = f"{median(turns):.0f} / {max(turns):.0f}", f"{median(firsts):.0f} / {max(firsts):.0f}"
        cells.append([DIALECTS[dialect].path, title, f"{seconds:.1f}", *times, str(runs[0].tokens), str(written),
                      f"{recomputed:.1f}"])  # fmt: skip
    ratio = paired_ratio(*([one[arm].seconds for one in rounds] for arm in ("llamacpp", "tide")))
    report.add(f"agent_vs_llamacpp_{dialect}", ratio.median)
    return cells


def main(
    dialects: Annotated[str, typer.Option(help=f"Some of {','.join(DIALECTS)}.")] = ",".join(DIALECTS),
    model: Annotated[Path | None, typer.Option(help="A GGUF file. Default: SmolLM2-135M-Instruct.")] = None,
    weights: Annotated[str, typer.Option(help="Of tide-serve, as tide-export takes them.")] = "w8a8",
    rounds: Annotated[int, typer.Option(min=1, help="Sessions of each server in each dialect.")] = 1,
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Hold the agent's session with both servers in turn."""
    names = chosen_names(dialects, DIALECTS, "dialects")
    files = peer_files(str(model or smollm2_file()), cache)
    report = Report("agent_session", model=files.title, weights=weights, dialects=dialects, rounds=rounds, context=CONTEXT)
    bundle = export_bundle(files.file, files.identity, files.folder / f"agent_{weights}", max_seq_len=CONTEXT, weights=weights)
    script = session(Tokenizer.from_file(str(bundle / "tokenizer" / "tokenizer.json")))
    cells = list[list[str]]()
    try:
        with Progress(console=console()) as progress:
            for dialect in progress.track(names, description="sessions"):
                done = list[dict[str, Run]]()
                for number in range(rounds):
                    one = dict[str, Run]()
                    for arm in Random(f"{dialect} {number}").sample(list(ARMS), len(ARMS)):
                        with server(arm, bundle, files.file) as address:
                            one[arm] = hold(dialect, address, script)
                    done.append(one)
                cells += report_dialect(report, dialect, done)
    except ArmError as error:
        console().print(f"agent_session cannot go on: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    caption = f"{files.title}, {weights} in TIDE, {len(script.turns)} turns with tools, JSON and code edits, greedy."
    report.table("A coding agent's session", COLUMNS, cells, caption)
    report.add("agent_vs_llamacpp", min(report.results[f"agent_vs_llamacpp_{name}"] for name in names))
    report.add("agent_recomputed_tokens_pct", max(report.results[f"agent_recomputed_tokens_pct_{name}_tide"] for name in names))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
