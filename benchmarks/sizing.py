"""What a server of a model needs and gives, per model size: memory, first token, tokens/s. The table of docs/serving.md.

    python -m benchmarks.sizing                              # about 10 minutes on 2 cores, 6 GB of disk in --folder
    python -m benchmarks.sizing --models smollm2,05b --rounds 1

SmolLM2-135M-Instruct in int4, and random weights of about 4 bits in the shapes of Qwen2.5: what is computed and how long it takes
are a real model's, the text is noise. Each is served by `tide-serve` with its defaults, but for policy `full`, as drafts from a
text of noise are none, and caches of 2,048 tokens. Prompts are random token ids that no cache has; answers have 64 tokens.

Memory is the largest resident set of the server, at 8 callers. Part of it are pages of the weights' file, which the servers of a
host share.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.progress import Progress
from tide_bench.arms.process import ArmError
from tide_bench.load import Request
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.cli.inspect import kv_cache_bytes

from benchmarks.chosen_names import chosen_names
from benchmarks.export_scale import GIB, anonymous_bytes
from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.models.random_gguf import SHAPES, random_model
from benchmarks.serving.http_server import TideServe, tide_serve

MODELS = ("smollm2", *(name for name in SHAPES if name != "7b"))
_SLOTS, _NEW_TOKENS, _CALLERS = 2048, 64, (1, 8)
_PROMPTS = (64, 512)  # tokens; answers follow the shorter one
COLUMNS = [
    "model", "parameters", "memory, GiB", "of it private", "keys and values of 1,000 tokens, MiB",
    *(f"first token of {tokens}, ms" for tokens in _PROMPTS), *(f"tokens/s, {callers} at once" for callers in _CALLERS),
]  # fmt: skip


class Measured(NamedTuple):
    """Medians of rounds. ``first_s``: by `_PROMPTS`; ``tokens_per_s``: by `_CALLERS`, prompts included; ``memory``: bytes."""

    first_s: list[float]
    tokens_per_s: list[float]
    memory: int
    private: int


@contextmanager
def bundle_of(name: str, cache: Path, folder: Path) -> Iterator[Path]:
    """The bundle of one of `MODELS`; one of random weights is made below ``folder`` and deleted at the end."""
    if name == "smollm2":
        yield folder_of("int4", GGUF_MODELS[name], cache / name)
    else:
        with random_model(name, SHAPES[name], folder, _SLOTS) as model:
            yield model.bundle


def measure(server: TideServe, vocabulary: int, rounds: int) -> Measured:
    random = np.random.default_rng(0)

    def answer(tokens: int, new_tokens: int) -> float:
        request = Request(0.0, random.integers(0, vocabulary, tokens).tolist(), new_tokens)
        began = perf_counter()
        if not server.read(request).finished:
            raise ArmError("tide-serve cut an answer off")
        return perf_counter() - began

    def together(callers: int) -> float:
        """Tokens/s of ``callers`` that each read two answers, one after the other."""
        began, count = perf_counter(), 2 * callers
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(lambda _: answer(_PROMPTS[0], _NEW_TOKENS), range(count)))
        return count * _NEW_TOKENS / (perf_counter() - began)

    answer(_PROMPTS[0], _NEW_TOKENS)  # warm-up
    first_s = [median(answer(tokens, 1) for _ in range(rounds)) for tokens in _PROMPTS]
    tokens_per_s = [median(together(callers) for _ in range(rounds)) for callers in _CALLERS]
    return Measured(first_s, tokens_per_s, server.process.memory_info().rss, anonymous_bytes(server.process.pid))


def main(
    models: Annotated[str, typer.Option(help=f"Some of {','.join(MODELS)}.")] = ",".join(MODELS),
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each figure.")] = 3,
    cache: Annotated[Path, typer.Option(help="Where weights and engines are kept between runs.")] = CACHE,
    folder: Annotated[Path, typer.Option(help="Where random models lie until they are measured.")] = Path("build"),
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure servers of models of several sizes."""
    given = chosen_names(models, MODELS, "models")
    names = [name for name in MODELS if name in given]  # SmolLM2 first: the others move the machine's cache into their folder
    report = Report("sizing", models=models, rounds=rounds)
    cells = list[list[str]]()
    try:
        with Progress(console=console()) as progress:
            for name in progress.track(names, description="models"):
                with bundle_of(name, cache, folder) as bundle:
                    manifest = read_manifest(bundle)
                    with tide_serve(bundle, "--policy", "full") as server:
                        found = measure(server, manifest.model.vocab_size, rounds)
                kv = kv_cache_bytes(manifest, 1000)
                report.rows.append({"model": name, "parameters": manifest.model.parameters, "kv_bytes": kv, **found._asdict()})
                report.add(f"memory_gib_{name}", found.memory / GIB)
                for callers, speed in zip(_CALLERS, found.tokens_per_s, strict=True):
                    report.add(f"tokens_per_s_{name}_{callers}", speed)
                title = "SmolLM2-135M" if name == "smollm2" else f"Qwen2.5's shape, {SHAPES[name].kind}, random"
                sizes = f"{manifest.model.parameters / 1e9:.2f}B", f"{found.memory / GIB:.2f}", f"{found.private / GIB:.2f}"
                times = [f"{1e3 * seconds:.0f}" for seconds in found.first_s], [f"{one:.1f}" for one in found.tokens_per_s]
                cells.append([title, *sizes, f"{kv / 2**20:.1f}", *times[0], *times[1]])
    except ArmError as error:
        console().print(f"sizing cannot go on: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    caption = f"`tide-serve`, policy `full`, answers of {_NEW_TOKENS} tokens, medians."
    report.table("What a model size needs and gives", COLUMNS, cells, caption)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
