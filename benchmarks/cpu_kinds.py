"""Whether texts and logits are the same on processors that this machine is not: ONNX Runtime's kernels under user-mode emulation.

    python -m benchmarks.cpu_kinds        # AVX2, AVX and SSE4 with Debian's package qemu-user

A tiny random Llama is exported in fp32, int8 and int4. On each processor its texts, greedy and sampled, are made in every way of
`benchmarks.same_text.ways`; tokens and log-probabilities have to be those of a single caller under `full`. qemu emulates no AVX512.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

from benchmarks.same_text.ways import Ask, ways

EMULATOR = "qemu-x86_64"
CPUS = {"AVX2": "Haswell", "AVX": "SandyBridge", "SSE4": "Denverton"}  # instruction set → qemu's model
FORMS = {"fp32": {}, "int8": {"weights": "int8"}, "int4": {"weights": "int4"}}  # of the weights → options of `ExportConfig`
VOCABULARY, SLOTS = 128, 80


@dataclass(frozen=True)
class Outcome:
    """One form of the weights on one processor.

    Args:
        padding: (least, multiple) rows of a launch; None: no padding gives the same bits.
        differ: way → texts that are not the reference's.
    """

    form: str
    padding: tuple[int, int] | None
    policy: str
    texts: int
    accepted: int
    prefix_tokens: int
    preemptions: int
    differ: dict[str, int]


def asks() -> list[Ask]:
    """Prompts that repeat, so that copies are drafted, alternately greedy and sampled. A cached prefix has whole blocks of 16 tokens
    and leaves one token or several to compute."""
    parts, lengths = [[7], [5, 6, 7, 8, 90], [100, 3, 77, 12, 41, 66, 9], [8, 8, 60, 8]], [17, 18, 35, 3]
    params = [GenerationParams(max_new_tokens=16, ignore_eos=True, logprobs=1)]
    params.append(GenerationParams(max_new_tokens=16, ignore_eos=True, logprobs=1, temperature=0.7, seed=5))
    return [Ask((part * 40)[:length], params[i % 2]) for i, (part, length) in enumerate(zip(parts, lengths, strict=True))]


def outcome(form: str, bundle: Path) -> Outcome:
    """Make the texts of the bundle on the processor that this process runs on."""
    threads = ThreadOptions(1)
    with Engine.load(bundle, EngineOptions(target="cpu", threads=threads)) as engine:
        padding, policy = engine.backend.row_padding, engine.policy.name
        scarce = 7 * 16 * engine.backend.kv_bytes_per_token
    reference, *others = ways(bundle, asks(), (4,), scarce, threads)
    return Outcome(
        form,
        tuple(padding) if padding is not None else None,
        policy,
        len(reference.texts),
        sum(way.figures["accepted"] for way in others),
        sum(way.figures["prefix_tokens"] for way in others),
        sum(way.figures["preemptions"] for way in others),
        {way.name: way.differs(reference.texts) for way in others},
    )


def export_forms(folder: Path) -> dict[str, Path]:
    """The tiny model in every form: form → bundle."""
    import torch
    from tide_export import export
    from tide_export.config import ExportConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SLOTS,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    for form, options in FORMS.items():
        export(str(folder / "model"), folder / form, ExportConfig(max_seq_len=SLOTS, checkpoints="none", verify=False, **options))
    return {form: folder / form for form in FORMS}


def emulated(cpu: str, bundles: dict[str, Path], cache: Path) -> Iterator[Outcome]:
    """The outcomes of ``bundles`` on qemu's model ``cpu``. Raises RuntimeError with the process' own words when it fails.

    ``cache``: an empty folder for what the runtime keeps of a machine: it knows processors by /proc/cpuinfo, which qemu leaves as
    it is.
    """
    interpreter = os.path.realpath(sys.executable)
    arguments = [argument for form, bundle in bundles.items() for argument in ("--run", f"{form}={bundle}")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TIDE_CACHE_DIR": str(cache)}
    environment["OPENBLAS_NUM_THREADS"] = "1"
    command = [EMULATOR, "-cpu", cpu, interpreter, "-m", "benchmarks.cpu_kinds", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{cpu}: {done.stderr.strip().splitlines()[-1:]}")
    for line in done.stdout.splitlines():
        fields = json.loads(line)
        yield Outcome(**{**fields, "padding": tuple(fields["padding"]) if fields["padding"] else None})


def unavailable() -> str | None:
    """Why processors cannot be emulated here; None: they can."""
    if platform.machine() != "x86_64":
        return f"the machine is {platform.machine()}, and {EMULATOR} runs its own instruction set only with x86-64 libraries"
    return None if shutil.which(EMULATOR) else f"{EMULATOR} is not installed (apt-get install qemu-user)"


def main(
    run: Annotated[list[str] | None, typer.Option(help="FORM=BUNDLE, to make its texts on this processor.", hidden=True)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Compare texts on emulated processors."""
    if run:
        for form, _, bundle in (one.partition("=") for one in run):
            print(json.dumps(asdict(outcome(form, Path(bundle)))), flush=True)
        return
    if (reason := unavailable()) is not None:
        raise typer.BadParameter(reason)
    from tide_bench.report import Report

    report, differ = Report("cpu_kinds"), 0
    with TemporaryDirectory() as folder:
        bundles = export_forms(Path(folder))
        for kind, cpu in CPUS.items():
            for one in emulated(cpu, bundles, Path(folder) / f"cache-{cpu}"):
                report.rows.append({"instructions": kind, "cpu": cpu, **asdict(one)})
                differ += sum(one.differ.values())
                print(f"{kind} {asdict(one)}", flush=True)
    report.add("cpu_kinds", len({row["cpu"] for row in report.rows}))
    report.add("cpu_kinds_differ", differ)
    report.finish(json_file)


if __name__ == "__main__":
    typer.run(main)
