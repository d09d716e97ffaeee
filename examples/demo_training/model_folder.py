"""A demo model on disk: a complete Hugging Face folder with its record (`training.json`) and its model card."""

import datetime
import json
import math
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from tide_export.model.looped_models import OuroConfig

from .looped import StackedOuro
from .model import StackedLlama

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
VARIANT_TEXT = {
    "stock": "trained plainly: every layer always runs, one loss at the end",
    "layerskip": "trained for early exit the LayerSkip way (Elhoushi et al. 2024): layer dropout rising with depth, "
    "and an early-exit loss through the shared head",
    "looped": "of Ouro's architecture (Zhu et al. 2025): the layers run in {loops} loops, each with a loss of its own, and a "
    "gate after each loop predicts whether the next one would help",
}


def load_config(folder: Path) -> LlamaConfig:
    """The configuration of a model folder; ValueError if a file that a demo model needs is missing."""
    for name in ("config.json", *TOKENIZER_FILES):
        if not (folder / name).exists():
            raise ValueError(f"{folder} has no {name}; expected a Hugging Face folder of a demo model")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{folder} holds a {config.model_type} model; a demo model is a llama or ouro one")
    return config


def stacked(config: LlamaConfig, compute: torch.dtype, compiled: bool) -> StackedLlama:
    """An empty model for training or held-out loss."""
    if isinstance(config, OuroConfig):
        return StackedOuro(config, compute, compiled)
    return StackedLlama(config, compute, compiled)


def load_stacked(folder: Path, compute: torch.dtype, compiled: bool) -> StackedLlama:
    """The model of a folder, for training or held-out loss."""
    model = stacked(load_config(folder), compute, compiled)
    model.load_hf(load_file(folder / "model.safetensors"))
    return model


def to_causal_lm(model: StackedLlama) -> LlamaForCausalLM:
    """The model as Hugging Face's class, fp32."""
    hf_model = model.hf_class(model.config)
    missing, unexpected = hf_model.load_state_dict(model.to_hf(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"weights do not fit {type(hf_model).__name__}: missing {missing}, unexpected {unexpected}")
    hf_model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0)
    return hf_model.eval()


def machine() -> str:
    """Processor of this machine, in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} cores used"
    return f"{torch.cuda.get_device_name()}, {processor}" if torch.cuda.is_available() else processor


def environment() -> dict[str, str]:
    """Date, machine and versions, for the record of a run."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_model_folder(model: StackedLlama, tokenizer_folder: Path, record: dict[str, Any], out: Path) -> None:
    """Write the model in bf16, tokenizer, record and card beside `out`, then put it in place of `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    fresh.chmod(0o755)
    to_causal_lm(model).bfloat16().save_pretrained(fresh)
    (fresh / "model.safetensors").chmod(0o644)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder / name, fresh / name)
    (fresh / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    (fresh / "README.md").write_text(model_card(model.config, record))
    replace_folder(fresh, out)


def replace_folder(fresh: Path, out: Path) -> None:
    """Rename `fresh` to `out`, keeping the previous folder until the new one is there."""
    previous = out.with_name(f".{out.name}-previous")
    shutil.rmtree(previous, ignore_errors=True)
    if out.exists():
        out.rename(previous)
    fresh.rename(out)
    shutil.rmtree(previous, ignore_errors=True)


def model_card(config: LlamaConfig, record: dict[str, Any]) -> str:
    """The model card of a record; every figure in it comes from the record."""
    variant = record["variant"]
    loops = config.loops if isinstance(config, OuroConfig) else 1
    losses = "\n".join(
        f"| {name} | {held_out['tokens']:,} | {held_out['loss']:.3f} | {math.exp(held_out['loss']):.2f} |"
        for name, held_out in record["held_out"].items()
    )
    exits = record["exits"]
    in_loops = f" in {loops} loops" if loops > 1 else ""
    kind = "looped model" if loops > 1 else "Llama"
    trained = VARIANT_TEXT[variant].format(loops=loops)
    per_exit = config.num_hidden_layers if loops > 1 else 1
    greedy, text = (" | ".join(f"{100 * share:.0f}%" for share in exits[kind].values()) for kind in ("greedy", "held_out"))
    return f"""---
license: apache-2.0
library_name: transformers
tags: [code, python, early-exit, demo]
---
# TIDE demo model: {variant}

A small {kind} of Python source code, {trained}. It exists to show early exit on any machine, without a
download; it writes plausible-looking Python, not correct Python. Written by `examples/train_demo_model.py`, this card
included; the figures are also in `training.json`.

- Shape: {config.num_hidden_layers} layers{in_loops}, hidden {config.hidden_size}, {config.num_attention_heads} heads of \
{config.head_dim}, {config.num_key_value_heads} KV head, MLP {config.intermediate_size}, vocabulary \
{config.vocab_size} (byte-level BPE), tied embeddings, {record["parameters"] / 1e6:.1f}M parameters, bf16
- Trained on: {record["tokens"] / 1e6:.2f}M tokens in {record["steps"]:,} steps of {record["recipe"]["batch"]} \
sequences of {record["recipe"]["length"]}{warm_start_text(record)}
- Data: Python source of this installation's standard library and site-packages; files are held out when \
`int(sha1(path), 16) % 20 == 0`, path relative to the library folder
- {record["date"]}, Python {record["python"]}, torch {record["torch"]}, {record["machine"]}, \
{record["cpu_minutes"]:.0f} CPU minutes

## Held-out loss

Nats per token, context of {record["recipe"]["length"]} tokens.

| held-out files of | tokens | loss | perplexity |
|---|---|---|---|
{losses}
{losses_by_loop(record["held_out"]) if loops > 1 else ""}
## Early exits

Share of tokens at which the final norm and LM head, put straight after an earlier layer, choose as the full model does
(fp32): on its own greedy text ({exits["prompts"]} held-out prompts of {exits["prompt_tokens"]} tokens, \
{exits["new_tokens"]} new tokens each; it loops: {100 * exits["greedy_repeated"]:.0f}% of the tokens complete a 4-gram \
that was there before), and on {exits["held_out_tokens"]:,} tokens of held-out text.

| after {"loop" if loops > 1 else "layer"} | {" | ".join(str(depth // per_exit) for depth in exits["greedy"])} |
|---|{"---|" * len(exits["greedy"])}
| greedy text | {greedy} |
| held-out text | {text} |

## Recipe

{recipe_text(record["recipe"])}

Use contexts of up to {record["recipe"]["length"]} tokens: longer ones were not trained.
"""


def losses_by_loop(held_out: dict[str, Any]) -> str:
    """The losses of all loops, as sentences."""
    named = (f"{name} {', '.join(f'{loss:.3f}' for loss in of['loops'].values())}" for name, of in held_out.items())
    return f"\nAfter each loop: {'; '.join(named)}.\n"


def warm_start_text(record: dict[str, Any]) -> str:
    """Where the weights came from, if not from scratch."""
    start = record["warm_start"]
    if start is None:
        return ", from scratch"
    seen = "" if start["tokens"] is None else f", which had seen {start['tokens'] / 1e6:.2f}M"
    inherited = "; some early-exit ability may come from them" if record["variant"] != start["variant"] else ""
    return f", after a warm start from the weights of a {start['variant']} model ({start['name']}){seen}{inherited}"


def recipe_text(recipe: dict[str, Any]) -> str:
    """The recipe as a list."""
    variant, schedule = recipe["variant"], recipe["schedule"]
    lines = [
        f"Muon (rate {recipe['matrix_lr']}, weight decay {recipe['weight_decay']}) for the matrices, AdamW (rate "
        f"{recipe['vector_lr']}, betas 0.9 and 0.95) for embeddings and norms, gradient clip 1 on the latter",
        f"rate: {schedule['warmup']} warm-up steps, constant, then {schedule['decay']} steps of linear decay to zero",
        f"{100 * recipe['stdlib_share']:.0f}% of the sequences from the standard library, bf16 products, fp32 weights, "
        f"seed {recipe['seed']}",
    ]
    if variant.get("loop_weight"):
        share = variant["distillation"]
        lines.append(
            f"plus {variant['loop_weight']} × the mean loss of the earlier loops, whose targets are to {100 * share:.0f}% the "
            "last loop's distribution; the gate as in the paper's second stage, on states that it does not change"
        )
    if variant["dropout"] or variant["exit_weight"]:
        lines.append(
            f"layer dropout {variant['dropout']} · (2^(l/(L-1)) - 1) per sequence; plus {variant['exit_weight']} × the "
            "loss of the shared head after two layers drawn each step, one shallow, one deep"
        )
    return "\n".join(f"- {line}" for line in lines)
