"""What a real capture of target torch holds, and whether its loops give the tokens of eager launches.

    python -m benchmarks.gpu.torch_capture build/demo-torch [build/other …] [--json FILE]

For each bundle with target ``torch``, policy and batch size: tokens of eager launches, of the loop on the device, the nodes that
were captured, why conditional nodes were refused, and ms per token of both. Where the bundle has target ``cpu`` and is fp32, its
tokens too. A check that fails says why and the next one runs; one that hangs ends the process after its limit.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tide_runtime import Engine, EngineOptions, GenerationParams

from benchmarks.gpu.carried_bundle import unpack
from benchmarks.gpu.kit.case import Bench, Figures, KitCase

LIMIT_S = 90  # of one check
TOKENS = 64
PROMPTS = [
    "def binary_search(items, target):\n    ",
    "import json\n\n\ndef read(path):\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "for i in range(10):\n",
    "The quick brown fox jumps over the lazy dog. In ",
    "if __name__ == '__main__':\n",
    "x = [",
    "try:\n    import numpy as np\nexcept ImportError:\n",
]


class Checks:
    """Runs checks one after the other; `say` prints a line of JSON and keeps it for ``file``."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._lines = file, list[str]()

    def say(self, **facts: Any) -> None:
        self._lines.append(json.dumps(facts))
        print(self._lines[-1], flush=True)
        if self._file is not None:
            self._file.write_text("\n".join(self._lines) + "\n")

    def run(self, name: str, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        began = time.perf_counter()
        try:
            facts = check()
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.say(check=name, seconds=round(time.perf_counter() - began, 2), **facts)
        return facts


def machine() -> dict[str, Any]:
    from cuda.core import __version__ as core

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"torch": torch.__version__, "cuda_core": core, "gpu": name}


def generated(engine: Engine, rows: int, tokens: int) -> tuple[list[list[int]], float]:
    """Tokens of ``rows`` prompts at once, and ms per token of a sequence, the prompts included."""
    began = time.perf_counter()
    done = engine.generate(PROMPTS[:rows], GenerationParams(max_new_tokens=tokens, ignore_eos=True))
    return [list(one.token_ids) for one in done], (time.perf_counter() - began) / tokens * 1e3


def loops(engine: Engine, rows: int, tokens: int) -> dict[str, Any]:
    """The loop against eager launches of the same policy and weights."""
    host = engine.drive.loop.plan.host if engine.drive.loop is not None else engine.policy
    with Engine(engine.bundle, replace(engine.options, max_batch=rows), backend=engine.backend, policy=host) as eager:
        generated(eager, rows, 4)
        expected, eager_ms = generated(eager, rows, tokens)
    generated(engine, rows, tokens)  # the loop is captured once all its graphs have run
    generated(engine, rows, tokens)
    found, loop_ms = generated(engine, rows, tokens)
    execution = engine.drive.loop.drivers.execution if engine.drive.loop is not None else None
    return {
        "drive": str(engine.drive),
        "nodes": dict(execution.node_types) if execution is not None else {},
        "refusal": execution.refusal if execution is not None else None,
        "eager_ms": round(eager_ms, 3),
        "loop_ms": round(loop_ms, 3),
        "equal": sum(a == b for a, b in zip(expected, found, strict=True)),
        "of": rows,
        "first_difference": [_first_difference(a, b) for a, b in zip(expected, found, strict=True)],
        "tokens": found,
    }


def _first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def check_bundle(checks: Checks, folder: str, tokens: int) -> None:
    for policy in ("full", "exit", "exact"):
        loaded: list[Engine] = []
        checks.run(f"load {policy}", partial(_load, folder, policy, loaded))
        for rows in (1, 8) if loaded else ():
            facts = checks.run(f"{Path(folder).name} {policy} batch {rows}", partial(loops, loaded[0], rows, tokens))
            manifest = loaded[0].manifest
            if "cpu" in manifest.targets and manifest.dtype == "fp32" and policy == "full" and "tokens" in facts:
                checks.run("against target cpu", partial(_against_cpu, folder, rows, tokens, facts["tokens"]))
        for engine in loaded:
            engine.close()


def _load(folder: str, policy: str, loaded: list[Engine]) -> dict[str, Any]:
    loaded.append(Engine.load(folder, EngineOptions(target="torch", policy=policy, device="cuda", max_batch=8)))
    return {"bundle": folder, "policy": policy, "gpu_mib": torch.cuda.memory_allocated() >> 20}


def _against_cpu(folder: str, rows: int, tokens: int, found: list[list[int]]) -> dict[str, Any]:
    with Engine.load(folder, EngineOptions(target="cpu", policy="full", device="cpu", max_batch=8)) as engine:
        expected, _ = generated(engine, rows, tokens)
    same = [_first_difference(a, b) for a, b in zip(expected, found, strict=True)]
    return {"equal": same.count(None), "of": rows, "first_difference": same}


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    """A case for each bundle of ``argument`` that the kit carries; a process of its own, as a check may hang."""
    for name in argument.split():
        yield KitCase(name, partial(_checked, bench, name), dict)


def _checked(bench: Bench, name: str) -> Figures:
    folder = unpack(bench.carried / name, bench.work / "bundles" / name, bench.device)
    kept = bench.work / f"torch_capture_{name}.log"  # comes back even where a check hangs
    command = [sys.executable, "-m", __spec__.name, str(folder), "--json", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    checks = {facts.pop("check"): facts for facts in map(json.loads, kept.read_text().splitlines())}
    wrong = [name for name, facts in checks.items() if "error" in facts or facts.get("equal") != facts.get("of")]
    if done.returncode or wrong:
        raise RuntimeError(f"{wrong}, exit code {done.returncode}: {json.dumps(checks)}\n{done.stderr}")
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    checks = Checks(arguments.json)
    checks.run("machine", machine)
    for folder in arguments.bundles:
        check_bundle(checks, folder, arguments.tokens)


if __name__ == "__main__":
    main()
