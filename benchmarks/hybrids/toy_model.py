"""A toy hybrid that knows the replies to the code-rewriting tasks by heart: random weights copy nothing, so they say little of
what drafts from the text are worth. What is accepted depends on request and reply alone, however the model came to the reply.

Layers are Qwen3.5's, the tokenizer is the demo models'. Training takes a few minutes on one core.
"""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

from tide_bench.build_cache import cached_folder, files_digest, run_in_process
from tide_bench.bundles import export_bundle
from tide_bench.report import cores
from tokenizers import Tokenizer

from benchmarks.models.model_folders import DEMO_MODELS
from benchmarks.tasks.task_set import PROMPTS, load_tasks

KIND = "code_rewrite"
_TOKENIZER = DEMO_MODELS / "stock"
_SLOTS, _END = 1024, 0  # the tokenizer's <|endoftext|>
CONFIG: dict[str, Any] = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, max_position_embeddings=_SLOTS,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, bos_token_id=_END, eos_token_id=_END,
    linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]},
)  # fmt: skip
_STEPS, _BATCH, _RATE, _LOSS = 400, 5, 2e-3, 0.01  # it ends when the loss of every batch is so low
_TEMPLATE = "{{ messages[-1]['content'] }}\n"


def toy_bundle(cache: Path) -> Path:
    """The bundle of the toy, which is trained when ``cache`` does not hold it."""
    files = [Path(__file__), PROMPTS / f"{KIND}.json"]
    identity = f"{files_digest(files)} torch {version('torch')} transformers {version('transformers')}"
    weights = cached_folder(cache / "toy_hybrid" / "weights", identity, lambda folder: run_in_process(train, folder))
    return export_bundle(weights, identity, cache / "toy_hybrid" / "bundle", max_seq_len=_SLOTS)


def lessons() -> list[tuple[list[int], list[int]]]:
    """Token ids of each task's request and of the reply that it takes as right."""
    (kind,) = (kind for kind in load_tasks() if kind.kind == KIND)
    encode = Tokenizer.from_file(str(_TOKENIZER / "tokenizer.json")).encode
    pairs = [(f"{task.turns[0]}\n", f"```python\n{task.check['reference']}```\n") for task in kind.tasks]
    return [(encode(request).ids, [*encode(reply).ids, _END]) for request, reply in pairs]


def train(folder: Path) -> None:
    """Train the toy on all cores, and write its HuggingFace folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(cores())
    torch.set_flush_denormal(True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **CONFIG), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    known = lessons()
    ids = torch.zeros(len(known), max(len(request) + len(reply) for request, reply in known), dtype=torch.long)
    targets = torch.full_like(ids, -100)
    for row, (request, reply) in enumerate(known):
        end = len(request) + len(reply)
        ids[row, :end] = torch.tensor([*request, *reply])
        targets[row, len(request) - 1 : end - 1] = torch.tensor(reply)
    began, losses = perf_counter(), [1.0]
    for step in range(_STEPS):
        losses = []
        for part, wanted in zip(ids.split(_BATCH), targets.split(_BATCH), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=part, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}: {max(losses):.3f} nats per token", flush=True)
        if max(losses) < _LOSS:
            break
    model.eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_TOKENIZER / name, folder / name)
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    record = {"loss": max(losses), "steps": step + 1, "seconds": perf_counter() - began}
    (folder / "training.json").write_text(json.dumps(record), encoding="utf-8")


def toy_training(cache: Path) -> dict[str, float]:
    """What training the toy in ``cache`` came to: the last ``loss`` in nats per token, ``steps``, and ``seconds``."""
    return json.loads((cache / "toy_hybrid" / "weights" / "training.json").read_text(encoding="utf-8"))
