"""Which form of attention decodes a batch fastest: how long one token of each of 8 sequences takes in every form the bundle has.

    python -m benchmarks.attention_forms        # two minutes; random weights, models made on the way

GroupQueryAttention is timed with rows of equal lengths and, by each of its kernels, with rows of different ones (``ragged``: the
form with head sinks, see tide_export.passes.attention_ragged); plain products with the latter. The forms take turns, each on
caches of its own. Which of them a step takes tide_runtime.backends.attention decides; this is the evidence.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arms.tide import load_second
from tide_bench.in_process import run_in_process
from tide_bench.report import Report
from tide_runtime.backends.onnxruntime import cpu
from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend, OnnxRuntimeContext
from tide_runtime.bundle.manifest import UNCUT

ROWS = 8
SLOTS = (128, 224, 448, 928)  # of caches that are filled to nine tenths
SPREAD = (0.95, 1.05, 0.9, 1.0, 0.97, 1.03, 1.04, 0.98)  # of sequences' lengths, about their mean
# Query heads, KV heads, dtype; 3 heads are the demo's, which do not divide by two threads.
MODELS = ((8, 8, "fp32"), (3, 1, "fp32"), (8, 2, "fp32"), (8, 1, "fp32"), (8, 2, "fp16"))

COMPARED = ("uneven", "ragged", "plain")  # with sequences of equal lengths

console = Console(width=max(110, Console().width))


@dataclass(frozen=True)
class Form:
    """``plain``: whether products are preferred; ``ragged``: whether the form with head sinks may be used."""

    plain: bool
    ragged: bool
    even: bool = False  # sequences of equal lengths


FORMS = {
    "even": Form(plain=False, ragged=False, even=True),
    "uneven": Form(plain=False, ragged=False),
    "ragged": Form(plain=False, ragged=True),
    "plain": Form(plain=True, ragged=False),
}


def make_bundle(heads: int, kv_heads: int, dtype: str, folder: Path) -> None:
    """A Llama of 8 layers with random weights, heads of 64. For a process of its own, as it brings torch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tide_export import export
    from tide_export.config import ExportConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64 * heads,
        intermediate_size=128 * heads,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        vocab_size=2048,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    export(str(folder / "model"), folder / "bundle", ExportConfig(verify=False, checkpoints="2", dtype=dtype))


@contextmanager
def forced(backend: OnnxRuntimeBackend, form: Form) -> Iterator[None]:
    ragged = backend.ragged if form.ragged else frozenset[str]()
    with (
        patch.object(cpu, "prefers_batched", lambda *_: form.plain),
        patch.object(backend, "ragged", ragged),
    ):
        yield


def decode_once(context: OnnxRuntimeContext, lengths: Sequence[int]) -> float:
    """Seconds of one decode step."""
    ones = [1] * len(lengths)
    step = context.step(0, ones, ones)
    step.input_ids[:] = 5
    step.place(lengths)
    begin = time.perf_counter()
    step.run(UNCUT)
    return time.perf_counter() - begin


def measure(backend: OnnxRuntimeBackend, slots: int, rounds: int) -> dict[str, float]:
    """Median ms of a step by form; a form that the bundle lacks is left out."""
    mean = 0.9 * slots
    uneven = [min(slots - 1, round(mean * share)) for share in SPREAD]
    lengths = {name: [round(mean)] * ROWS if form.even else uneven for name, form in FORMS.items()}
    wanted = {name: form for name, form in FORMS.items() if backend.ragged or not form.ragged}
    own, times = {name: backend.context(ROWS) for name in wanted}, {name: list[float]() for name in wanted}
    for turn in range(rounds + 1):
        for name, form in wanted.items():
            own[name].reserve(slots)
            with forced(backend, form):
                taken = [decode_once(own[name], lengths[name]) for _ in range(4)]
            times[name] += taken[1:] if turn else []  # the first one after another form finds cold caches
    return {name: 1e3 * median(values) for name, values in times.items()}


def run_models(rounds: int, show: Callable[[str], Any]) -> Iterator[dict[str, Any]]:
    for heads, kv_heads, dtype in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            show(f"export: {heads} query heads, {kv_heads} KV heads, {dtype}")
            run_in_process(make_bundle, heads, kv_heads, dtype, Path(folder))
            backend = load_second(Path(folder) / "bundle").backend
            assert isinstance(backend, OnnxRuntimeBackend)
            for slots in SLOTS:
                show(f"{heads} query heads, {kv_heads} KV heads, {dtype}: {slots} slots")
                times = measure(backend, slots, rounds)
                yield {"heads": heads, "kv_heads": kv_heads, "dtype": dtype, "slots": slots, "ms": times}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each form.")] = 20,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Time the forms of attention on this machine's CPU."""
    report = Report("attention_forms", rounds=rounds, rows=ROWS)
    table = Table("heads / KV heads", "slots", "ms, equal lengths", "different, same kernel", "ragged form", "plain products")
    with console.status("") as status:
        for row in run_models(rounds, status.update):
            report.rows.append(row)
            ms, group = row["ms"], row["heads"] // row["kv_heads"]
            ratios = {name: ms[name] / ms["even"] for name in COMPARED if name in ms}
            cells = [f"{ratios[name]:.2f}" if name in ratios else "" for name in COMPARED]
            table.add_row(f"{row['heads']} / {row['kv_heads']}, {row['dtype']}", str(row["slots"]), f"{ms['even']:.2f}", *cells)
            for name, ratio in ratios.items():
                report.add(f"{name}_over_even_{group}_{row['dtype']}_{row['slots']}", ratio)
    console.print(table)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
