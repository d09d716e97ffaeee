"""Whether texts and logits are the same on processors that this machine is not: ONNX Runtime's kernels for AVX2, AVX, SSE4
and Arm.

Newer instruction sets are hidden (`benchmarks.cpu_mask`); where that cannot be had, qemu emulates (Debian's package qemu-user).
It always emulates Arm (`runtime.arm_python`).

A tiny random Llama is exported in fp32, int8 and int4, and a model of each kind of recurrent layer in fp32. On each processor
their texts, greedy and sampled, are made in several ways (`benchmarks.same_text.ways`); tokens and log-probabilities have to be
those of a single caller under `full`.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import cpu_mask
from benchmarks.same_text.ways import REFERENCE, Ask, Way, outcomes
from runtime.arm_python import ROOT, arm_command
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions

EMULATOR = "qemu-x86_64"
ARM = "NEON"
CPUS = dict(zip(cpu_mask.SETS[1:], ("Haswell", "SandyBridge", "Denverton"), strict=True))  # → qemu's model; it has no AVX512
FORMS = {"fp32": "source", "w8a8": "w8a8", "int8": "int8", "int4": "int4"}  # → --weights of tide-export
RECURRENT = ("lfm2", "qwen3_5", "mamba")  # convolutions, the gated delta rule, a gated scan without attention
SLOTS = 80
WAYS = (REFERENCE, Way("full", 3, cached=True), Way("full", 3, cached=True), Way("auto", 1), Way("auto", 3, scarce=True))


@dataclass(frozen=True)
class Texts:
    """The texts of one form of the weights, or of one recurrent model, on one processor.

    Args:
        padding: `RowPadding` of the launches; None: no padding gives the same bits.
        policy: what `auto` is there.
        differ: way → texts that are not the reference's.
    """

    form: str
    padding: str | None
    policy: str
    accepted: int
    prefix_tokens: int
    preemptions: int
    differ: dict[str, int]


def asks() -> list[Ask]:
    """Prompts that repeat, so that copies are drafted, greedy and sampled. Cached prefixes have blocks of 16 tokens and leave
    one token or several to compute; attention of heads this small has tiles of 32 tokens, of which one prompt leaves one over."""
    parts, lengths = [[7], [5, 6, 7, 8, 90], [100, 3, 77, 12, 41, 66, 9]], [17, 18, 33]
    greedy = GenerationParams(max_new_tokens=10, ignore_eos=True, logprobs=1)
    sampled = GenerationParams(max_new_tokens=10, ignore_eos=True, logprobs=1, temperature=0.7, seed=5)
    prompts = [(part * 40)[:length] for part, length in zip(parts, lengths, strict=True)]
    return [Ask(prompt, params) for prompt, params in zip(prompts, (greedy, sampled, greedy), strict=True)]


def texts_of(form: str, bundle: Path) -> Texts:
    """Make the texts of the bundle on the processor that this process runs on."""
    with Engine.load(bundle, EngineOptions(target="cpu", threads=ThreadOptions(1))) as engine:
        padding, policy = engine.row_padding, engine.policy.name
        reference, *others = outcomes(engine, asks(), WAYS)
    figures = sum((one.figures for one in others), Counter[str]())
    return Texts(
        form,
        str(padding) if padding is not None else None,
        policy,
        figures["accepted"],
        figures["prefix_tokens"],
        figures["preemptions"],
        {one.way.name: one.differs(reference.texts) for one in others},
    )


def export_forms(folder: Path) -> dict[str, Path]:
    """The tiny Llama in every form, and the recurrent models: form or name → bundle."""
    from benchmarks.models.families import family_model

    from tide_export import export
    from tide_export.config import ExportConfig

    _write_tiny_llama(folder / "model")
    for name in RECURRENT:
        family_model(name).save_pretrained(folder / f"{name}.model")
    sources = {form: ("model", weights) for form, weights in FORMS.items()}
    for name, (source, weights) in (sources | {name: (f"{name}.model", "source") for name in RECURRENT}).items():
        options = ExportConfig(max_seq_len=SLOTS, checkpoints="none", verify=False, weights=weights, tokenizer="none")
        export(str(folder / source), folder / name, options)
    return {name: folder / name for name in (*FORMS, *RECURRENT)}


def _write_tiny_llama(folder: Path) -> None:
    """A random Llama of one layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SLOTS,
        initializer_range=0.3,  # text does not fall into a loop at once
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def on_processor(kind: str, bundles: Mapping[str, Path], folder: Path) -> Iterator[Texts]:
    """The texts of ``bundles`` with the instruction sets of ``kind``. Raises RuntimeError with the last line of its errors.

    ``folder``: for what the runtime keeps of a machine, and for what hides its instruction sets.
    """
    arguments = [f"{form}={bundle}" for form, bundle in bundles.items()]
    command = [os.path.realpath(sys.executable), "-m", "runtime.other_processors", *arguments]
    if kind == ARM:
        command, environment = arm_command(command[1:], ROOT / "build" / "arm")
    elif cpu_mask.unavailable() is None:
        environment = cpu_mask.masked_environment(kind, folder)
    else:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TIDE_CACHE_DIR": str(folder / kind)}
        command = [EMULATOR, "-cpu", CPUS[kind], *command]
    if kind != ARM:
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kind}: {done.stderr.strip().splitlines()[-1:]}")
    for line in done.stdout.splitlines():
        yield Texts(**json.loads(line))


def unavailable() -> str | None:
    """Why other processors' kernels cannot be run here; None: they can."""
    if platform.machine() != "x86_64":
        return f"the machine is {platform.machine()}: its libraries have no kernels for x86-64"
    if (reason := cpu_mask.unavailable()) is None or shutil.which(EMULATOR):
        return None
    return f"{reason}, and {EMULATOR} is not installed (apt-get install qemu-user)"


if __name__ == "__main__":
    for form, _, bundle in (one.partition("=") for one in sys.argv[1:]):
        print(json.dumps(asdict(texts_of(form, Path(bundle)))), flush=True)
