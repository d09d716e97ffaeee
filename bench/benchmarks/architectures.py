"""Every causal architecture of the installed transformers, exported from a tiny random checkpoint and compared with HuggingFace.

    python -m benchmarks.architectures                          # about 10 minutes on 2 cores
    python -m benchmarks.architectures --only llama,qwen3       # some of them
    python -m benchmarks.architectures --weights int8 --json F  # in 8 bits; a second run with the same F goes on where it ended

A model is *same* where the log-probabilities of a random text in one pass, and of tokens that the bundle writes one by one, equal
those of transformers with its own cache; *different* where the export ended well and they do not. It is *refused* with a message
that names the reason, *unclear* where the message has the words of a library or of Python, or is an error that TIDE does not
raise. *not made*: transformers itself makes no model of tiny sizes. In 8 bits the model in transformers has the rounded weights,
and distributions are compared, as products round activations too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Timer
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from tide_bench.report import Report, cores
from tide_runtime.errors import TideError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS, PROMPT, WRITTEN = 40, 12, 12
MAX_LOGPROB = 1e-3  # difference of log-probabilities in fp32
MAX_DIVERGENCE = 0.05  # nats, mean over tokens, where activations are rounded to 8 bits
_ALL = 1 << 20  # tokens whose log-probabilities are reported: the whole vocabulary
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
NOISE = 0.1  # added to every parameter, so that no bias or gate is idle
KINDS = ("same", "different", "refused", "unclear", "not_made")
BATCH, SECONDS = 8, 150  # models of a child process, and seconds for each
_LIBRARY = re.compile(
    r"\w*(Error|Exception)\b|aten[.:]|torch\._|object (has no|is not)|Traceback|unsupported operand|NoneType|<class"
)


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def random_model(name: str) -> PreTrainedModel:
    """A tiny model, every parameter of which is noisy."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.tiny_configs import tiny_config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * NOISE)
    return model


def outcome(name: str, weights: str) -> tuple[str, str]:
    """Kind of `KINDS` and detail."""
    from tide_export.config import ExportConfig
    from tide_export.export import export

    with tempfile.TemporaryDirectory() as folder:
        checkpoint, bundle = f"{folder}/{name}", f"{folder}/bundle"
        try:
            random_model(name).save_pretrained(checkpoint)
        except Exception as error:  # of a library, for sizes that do not go together
            return "not_made", _line(error)
        config = ExportConfig(
            weights="source" if weights == "fp32" else weights, checkpoints="none", targets=("cpu",), tokenizer="none"
        )
        try:
            export(checkpoint, bundle, config)
        except TideError as error:
            return ("unclear" if _is_unclear(error) else "refused"), _line(error).replace(checkpoint, name)
        except Exception as error:
            return "unclear", f"{type(error).__name__}: {_line(error)}"
        return compared(checkpoint, bundle, weights)


def compared(checkpoint: str, bundle: str, weights: str) -> tuple[str, str]:
    import torch
    from tide_runtime import Engine, EngineOptions, GenerationParams

    model = reference(checkpoint, weights)
    ids = np.random.default_rng(0).integers(3, model.config.get_text_config().vocab_size, TOKENS).tolist()
    params = GenerationParams(max_new_tokens=WRITTEN, ignore_eos=True, logprobs=_ALL)
    with Engine.load(bundle, EngineOptions(policy="full")) as engine:
        scored = engine.submit_score(ids, 1, top=_ALL).result()
        written = engine.generate(ids[:PROMPT], params)[0]
    text = [*ids[:PROMPT], *written.token_ids]
    with torch.no_grad():
        passed = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
        stepped = step_by_step(model, text)
    found = [_dense(one, passed.shape[-1]) for one in scored.top], [_dense(one.top, passed.shape[-1]) for one in written.logprobs]
    measure = _largest if weights == "fp32" else _divergence
    in_pass = measure(passed.numpy()[:-1], found[0])
    in_steps = measure(stepped.numpy()[:-1], found[1][1:])
    allowed = MAX_LOGPROB if weights == "fp32" else MAX_DIVERGENCE
    detail = f"in a pass {in_pass:.1e}, token by token {in_steps:.1e}"
    return ("same" if in_pass <= allowed and in_steps <= allowed else "different"), detail


def reference(checkpoint: str, weights: str) -> PreTrainedModel:
    """The checkpoint in transformers; in 8 bits with the values of the rounded weights."""
    import torch
    from transformers import AutoModelForCausalLM

    if weights == "fp32":
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    from tide_export.export import quantize_loaded
    from tide_export.load import load_model
    from tide_export.progress import ExportProgress

    loaded = load_model(checkpoint, "fp32", tokenizer="none")
    return quantize_loaded(loaded, weights, "rtn", ExportProgress(quiet=True)).model


def step_by_step(model: PreTrainedModel, ids: Sequence[int]) -> Any:
    """Log-probabilities [S, V] of tokens behind a prompt, each of which runs by itself with the model's own cache."""
    import torch

    from tide_export.quantize.layerwise import last_logits_step_by_step

    return torch.from_numpy(last_logits_step_by_step(model, ids, len(ids) - PROMPT)).log_softmax(-1)


def _dense(top: Sequence[tuple[int, float]], width: int) -> np.ndarray:
    return np.array([dict(top).get(token, -np.inf) for token in range(width)])


def _largest(wanted: np.ndarray, found: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.stack(found) - wanted).max())  # NaN stays


def _divergence(wanted: np.ndarray, found: Sequence[np.ndarray]) -> float:
    return float((np.exp(wanted) * (wanted - np.stack(found))).sum(-1).mean())


def _is_unclear(error: TideError) -> bool:
    """Whether the message has the words of a library: those of the error behind it, or what looks like them."""
    message = str(error)
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:  # transformers raises an error from itself
        if not isinstance(cause, TideError) and _line(cause) and _line(cause)[:40] in message:
            return True
        causes.append(cause)
    return bool(_LIBRARY.search(message))


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def rows_of(wanted: Sequence[str], weights: str) -> Iterator[dict[str, str]]:
    """A row for each name, from a child process: what crashes or hangs is a row, too, and the next child goes on behind it."""
    left = [*wanted]
    while left:
        command = [sys.executable, "-m", "benchmarks.architectures", "--child", "--only", ",".join(left), "--weights", weights]
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | _ONE_THREAD
        )
        watchdog = Timer(SECONDS * len(left), child.kill)
        watchdog.start()
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                left.pop(0)
                yield json.loads(line)
        watchdog.cancel()
        status = child.wait()
        if left:
            yield {"name": left.pop(0), "kind": "unclear", "detail": f"its process ended with status {status}"}


def _sweep(wanted: Sequence[str], weights: str, workers: int, note: Callable[[dict[str, str]], None]) -> None:
    """Call ``note`` with each row when it is known, in one thread at a time."""
    lock = Lock()

    def run(group: Sequence[str]) -> None:
        for row in rows_of(group, weights):
            with lock:
                note(row)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, [wanted[first : first + BATCH] for first in range(0, len(wanted), BATCH)]))


def main(
    only: Annotated[str, typer.Option(help="Names of model types, separated by commas; default: all.")] = "",
    weights: Annotated[str, typer.Option(help="fp32 or int8.")] = "fp32",
    workers: Annotated[int, typer.Option(help="Child processes at a time; default: one a core.")] = cores(),
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file, and go on from it.")
    ] = None,
) -> None:
    """Export and compare every causal architecture."""
    wanted = only.split(",") if only else names()
    if child:
        for name in wanted:
            kind, detail = outcome(name, weights)
            print(json.dumps({"name": name, "kind": kind, "detail": detail}), flush=True)
        return
    report = Report("architectures", weights=weights)
    if json_file is not None and json_file.exists():
        before = json.loads(json_file.read_text())
        report.rows += before["rows"] if before["settings"]["weights"] == weights else []
    done = {row["name"] for row in report.rows}

    def note(row: dict[str, str]) -> None:
        report.rows.append(row)
        print(f"{len(report.rows)} of {len(wanted)}: {row['name']}: {row['kind']}: {row['detail'][:200]}", flush=True)
        if json_file is not None:
            report.write(json_file)

    _sweep([name for name in wanted if name not in done], weights, workers, note)
    counts = Counter(row["kind"] for row in report.rows)
    order = sorted(report.rows, key=lambda row: (KINDS.index(row["kind"]), row["name"]))
    report.table(
        "Architectures against HuggingFace",
        ["model type", "result", "detail"],
        [[str(row.get(column)) for column in ("name", "kind", "detail")] for row in order],
    )
    for kind in KINDS:
        report.add(f"architectures_{kind}", counts[kind])
    report.finish(json_file)


if __name__ == "__main__":
    typer.run(main)
