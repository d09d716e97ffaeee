"""Whole models in the shapes of Llama-3.2-1B and Llama-3.1-8B, through the public engine; their weights are drawn on the GPU.

    python -m benchmarks.gpu.shapes --prepare build/shapes/1b.tgz build/shapes/8b-int4.tgz      # anywhere; 2 MB each
    python -m benchmarks.gpu.shapes build/shapes/8b.tgz --batch 1,8,32 --context 128,3000 --json 8b.json      # on the GPU

What is exported is a checkpoint of holes, so files of zeros travel as nothing. Random weights say nothing of texts, but for one
thing: ``exact`` has to give those of ``full``. A prompt that repeats itself shows what drafts save.
"""

from __future__ import annotations

import gc
import json
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from tide_bench.report import Report

if TYPE_CHECKING:
    from tide_runtime import Engine

_MAX_SEQ_LEN = 4096
_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16", "vocab_size": 128256}
_LLAMA |= {"max_position_embeddings": 131072, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "num_attention_heads": 32}
_LLAMA |= {"num_key_value_heads": 8, "hidden_act": "silu"}
SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": True},
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    mlp = config["intermediate_size"]
    width = config["head_dim"]
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        shapes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (queries, hidden)}
        shapes |= {"self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)}
        shapes |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.{name}.weight", shape


def write_holes(shape: str, folder: Path) -> None:
    """A checkpoint whose weights are a hole of its file."""
    config = _LLAMA | SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, sizes in _tensors(config):
        begin = end
        end = end + 2 * int(np.prod(sizes))
        header[name] = {"dtype": "F16", "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def prepare(archive: Path) -> None:
    """Export the graphs of the model that the file is named for: one of `SHAPES`, and after a dash the form of its weights."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    model = archive.name.removesuffix(".tgz")
    shape, _, weights = model.partition("-")
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        write_holes(shape, Path(folder))
        command = [sys.executable, "-m", "tide_export.cli", folder, "--out", f"{folder}/bundle", "--tokenizer", "none"]
        command += ["--dtype", "fp16", "--weights", weights or "source", "--target", "torch", "--no-verify"]
        subprocess.run([*command, "--max-seq-len", str(_MAX_SEQ_LEN)], check=True)
        with tarfile.open(archive, "w:gz") as packed:
            packed.add(f"{folder}/bundle", model)


def draw_weights() -> None:
    """Have target torch draw a graph's matrices on the GPU in place of reading them, each by its name."""
    import torch
    from tide_runtime.backends.torch import backend
    from tide_runtime.backends.torch.graph_file import GraphFile, Weight, read_graph

    class Drawn(Weight):
        def on_host(self) -> torch.Tensor:
            random = torch.Generator("cuda").manual_seed(zlib.crc32(repr(self.key).encode()))
            if self.dtype == torch.uint8:
                return torch.randint(0, 256, self.shape, dtype=torch.uint8, device="cuda", generator=random)
            drawn = torch.randn(self.shape, dtype=torch.float16, device="cuda", generator=random).to(self.dtype)
            role = self.key[0]  # type: ignore[index]
            return 1 + drawn / 20 if role == "gain" else drawn.abs() / 250 if role == "scale" else drawn / 50

    def read(path: Path) -> GraphFile:
        graph = read_graph(path)
        roles = {name: "matrix" for name, weight in graph.weights.items() if weight.data.size > 2**20 and "rope" not in name}
        for node in graph.nodes:
            if "Norm" in node.op:
                roles[node.inputs[2 if "Skip" in node.op else 1]] = "gain"
            if node.op.endswith(("MatMulNBits", "GatherBlockQuantized")):
                roles[node.inputs[2]] = "scale"
        for name, role in roles.items():
            owner = "" if "embed" in name or "head" in name else path.name  # these two are one tensor of a tied model
            weight = graph.weights[name]
            graph.weights[name] = Drawn((role, owner, name), weight.dtype, weight.shape, weight.data)
        return replace(graph)

    backend.read_graph = read  # type: ignore[attr-defined]


def ms_per_token(engine: Engine, batch: int, context: int, repeats: bool, temperature: float) -> tuple[float, float, list[Any]]:
    """Milliseconds a token of decoding, milliseconds until 8 tokens of each prompt are there, and the texts."""
    from tide_runtime import GenerationParams

    random = np.random.default_rng(0)
    prompts = [random.integers(3, 100_000, context) for _ in range(batch)]
    if repeats:  # a text of 16 tokens, over and over
        prompts = [np.resize(prompt[:16], context) for prompt in prompts]
    few = 8
    many = 72
    times = {8: list[float](), 72: list[float]()}
    texts: list[Any] = []
    for _ in range(4):  # the first round compiles and captures
        for count in (few, many):
            params = GenerationParams(max_new_tokens=count, ignore_eos=True, temperature=temperature, seed=0)
            begun = perf_counter()
            texts = [row.token_ids for row in engine.generate([prompt.tolist() for prompt in prompts], params)]
            times[count].append(1e3 * (perf_counter() - begun))
    first, whole = (median(times[count][1:]) for count in (few, many))
    return (whole - first) / (many - few), first, texts


def measure(archive: Path, policies: Sequence[str], batches: Sequence[int], contexts: Sequence[int], report: Report) -> None:
    import torch
    from tide_runtime import Engine, EngineOptions

    name = archive.name.removesuffix(".tgz")
    cells = list[list[str]]()
    texts = dict[Any, Any]()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        for policy in policies:
            begun = perf_counter()
            options = EngineOptions(
                target="torch", device="cuda", policy=policy, max_batch=max(batches), verify=False, prefix_cache=False
            )
            engine = Engine.load(f"{folder}/{name}", options)
            loaded = perf_counter() - begun
            for context in contexts:
                for batch in batches:
                    for kind, repeats, temperature in (("new", False, 0.0), ("copied", True, 0.0), ("sampled", False, 0.8)):
                        ms, first, made = ms_per_token(engine, batch, context, repeats, temperature)
                        key = f"{name}_{policy}_b{batch}_c{context}_{kind}".replace("-", "_")
                        same = made == texts.setdefault((batch, context, kind), made)
                        report.rows.append({"row": key, "ms": ms, "first_ms": first, "loaded_s": loaded, "same_as_first": same})
                        report.add(f"{key}_ms", ms)
                        row = [policy, str(batch), str(context), kind, f"{ms:.3f}", f"{first:.1f}", "yes" if same else "NO"]
                        cells.append(row)
                        print(name, *row, flush=True)
            drive = str(engine.drive)
            print(f"{name} {policy}: {drive}; loaded in {loaded:.1f} s", flush=True)
            engine.close()
            del engine
            gc.collect()
            torch.cuda.empty_cache()
    headings = ["policy", "batch", "context", "text", "ms a token", "ms to 8 tokens", "texts of the first policy"]
    report.table(f"{name}: random weights on {torch.cuda.get_device_name(0)}", headings, cells)


def main(
    archives: Annotated[list[Path], typer.Argument(help="What prepare makes, or has made: 1b.tgz, 8b.tgz, 8b-int4.tgz.")],
    make: Annotated[bool, typer.Option("--prepare", help="Export their graphs to these files; needs no GPU.")] = False,
    policy: Annotated[str, typer.Option(help="Policies; the first one's texts are what the others should give.")] = "full,exact",
    batch: Annotated[str, typer.Option(help="Sequences at once, separated by commas.")] = "1,8",
    context: Annotated[str, typer.Option(help="Tokens of each prompt, separated by commas.")] = "128",
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Time whole models of random weights on a GPU."""
    if make:
        for archive in archives:
            prepare(archive)
        return
    draw_weights()
    report = Report("gpu_shapes", policy=policy, batch=batch, context=context)
    for archive in archives:
        measure(
            archive, policy.split(","), [int(one) for one in batch.split(",")], [int(one) for one in context.split(",")], report
        )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
