"""Write the small bundles that every later version must still load, and what each of them generates.

Run it at a release, on the code of that release, with nothing changed in it (it takes about a minute on one core):

    PYTHONPATH=tests .venv/bin/python -m release_bundles.make

It writes ``tests/release_bundles/COMMIT/``: a folder for each bundle (`RECIPES`), and ``expected.json`` with prompts, greedy
tokens by policy, the commit and the versions of the tools. Commit that folder and never change it;
``tests/runtime/test_release_bundles.py`` loads the bundles of every such folder. The models are random: nothing is downloaded.

Tokens must not hang on rounding, on the processor, or on how a policy weighs costs. Prompts are therefore drawn until, at every
token, the likeliest one leads by a clear margin, rows give the same alone and together, and `exit` gives the same when its
thresholds move a little and when it evaluates its exits whether that pays or not.

One bundle has packed weights, in the layout of the processor that ran this. Another kind of processor packs its own and computes
the same (README, "Memory").
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from export.stub_calibration import CERTIFICATE, exit_tensors
from safetensors.numpy import save_file
from tide_runtime import Engine, EngineOptions, Generation, GenerationParams, ThreadOptions
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.calibration import CalibrationInfo, CostTable, ExitInfo, StepCost
from tide_runtime.depth.exit import ExitDepth
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tide_export import ExportConfig, export
from tide_export.calibration.calibration_file import EXITS_NAME, CalibrationFile, DataInfo
from tide_export.load import fingerprint, load_model
from tide_export.targets.engines import ENGINE_FOLDER

ROOT = Path(__file__).parents[2]
CODE = ("tide_export", "runtime", "calibrate", "plugins")  # folders that decide what is in a bundle
SLOTS, NEW_TOKENS, PROMPT_TOKENS = 48, 24, (5, 11)
MARGINS = {"fp32": 0.02, "fp16": 0.06}  # least lead of the likeliest token's logit
SHIFTS = {"fp32": 0.003, "fp16": 0.01}  # of every threshold of policy exit, which must change no token
ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{% endif %}"""
VOCAB = 40

FULL, EXACT, EXIT = ("full", {}), ("exact", {}), ("exit", {})
PROPAGATE = ("exit", {"kv": "propagate"})  # runs the graphs kv_fill_c, too
PREFILL_EXIT = ("exit", {"kv": "propagate", "prefill_exit": True})
Case = tuple[str, dict[str, Any]]  # policy and the options of depth that differ from the defaults


@dataclass(frozen=True)
class Recipe:
    """One bundle: the model to make, how to calibrate and export it, the policies to run (none: for GPUs only).

    ``without_engines``: remove them, as engines of TensorRT take megabytes; the manifest still describes them.
    """

    model: PreTrainedConfig
    config: ExportConfig
    cases: Sequence[Case] = ()
    calibration: CalibrationInfo | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    chat: bool = False
    without_engines: bool = False


def llama(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def gemma2() -> Gemma2Config:
    """Every second layer attends to a window of 8 tokens; soft-caps on attention and on logits."""
    return Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, sliding_window=8, attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0, query_pre_attn_scalar=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def gpt2() -> GPT2Config:
    """Learned positions, LayerNorm, biases, one matrix for Q, K and V."""
    return GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_inner=16, n_positions=64, initializer_range=0.3, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


def costs(**more: Any) -> CostTable:
    """A table in which layers are nearly all of a step, so that exits clearly pay."""
    rest = dict(head_ms=0.1, exit_ms=0.02, host_ms=0.02, ask_extra_ms=0.01, deep_extra_ms=0.03)
    sizes = [(1, 1.0), (1, 4.0), (1, 16.0), (2, 1.0), (2, 1.5), (2, 4.0), (2, 16.0)]  # 1.5: rows of different lengths
    steps = [StepCost(rows, seq, 0.01, 1.0 + 0.02 * rows * seq, **rest) for rows, seq in sizes]
    return CostTable("cpu", "made up", unsplit_ms=3.2, steps=steps, **more)


HEADS_WITHOUT_TAIL = CalibrationInfo(
    exits=[
        ExitInfo(1, "linear", "mlp+max_probability", 0.2, 0.25, 0.2),
        ExitInfo(2, "identity", "mlp", 0.2, 0.27),
    ],
    draft_limit=6,
    recommended="exact",
    predicted={"exact": 1.6, "exact:router": 1.5, "exact:ngram": 1.1, "exit": 1.9, "full": 0.98},
    certificate=CERTIFICATE,
    costs=costs(warm_shares={"1": [0.9, 0.8], "2": [0.95, 0.9]}, padding=0.25, draw_ms=0.05),
    exit_depths={"1": 0.8, "2": 0.1},
)
TAILS = CalibrationInfo(
    exits=[ExitInfo(1, "tail:1", "max_probability", 0.25, 0.35)],
    draft_limit=4,
    recommended="exit",
    costs=costs(warm_shares={"1": [0.2], "2": [0.2]}),
    exit_depths={"1": 0.9},
)
ONE_EXIT = CalibrationInfo([ExitInfo(1, "identity", "max_probability", 0.2, 0.2)], 3, "full")
NO_EXITS = CalibrationInfo([], 6, "exact", {"exact": 1.05})
GPU_EXITS = CalibrationInfo([ExitInfo(1, "linear", "mlp", 0.5, None)], 6, "exact", certificate=None, costs=costs())

CPU = ExportConfig(max_seq_len=SLOTS, targets=("cpu",), packed_weights=False)
RECIPES = {
    "llama_plain_packed": Recipe(llama(2), replace(CPU, checkpoints="1", packed_weights=True), [FULL, EXACT], chat=True),
    "llama_exits": Recipe(llama(3), CPU, [FULL, EXACT, EXIT, PREFILL_EXIT], HEADS_WITHOUT_TAIL),
    "llama_tails_fp16": Recipe(llama(3), replace(CPU, dtype="fp16"), [FULL, EXACT, EXIT, PROPAGATE], TAILS),
    "gemma2_window_softcap": Recipe(gemma2(), CPU, [FULL, EXACT, EXIT, PROPAGATE], ONE_EXIT),
    "gpt2_no_exits": Recipe(
        gpt2(), replace(CPU, targets=("cpu", "cuda")), [FULL, EXACT], NO_EXITS,
        generation=dict(do_sample=True, temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.1),
    ),
    "llama_cuda_bf16": Recipe(llama(2), replace(CPU, targets=("cuda",), dtype="bf16"), calibration=GPU_EXITS),
    "llama_rtx_without_engines": Recipe(
        llama(2), replace(CPU, targets=("rtx-sm_89",), dtype="fp16", max_batch=4), calibration=GPU_EXITS, without_engines=True
    ),
}  # fmt: skip


# --- Exporting


def lively(model: PreTrainedModel) -> PreTrainedModel:
    """Have the layers outweigh the embedding, as text is a loop otherwise, and few tokens nearly as likely as the likeliest."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"post_(attention|feedforward)_layernorm", name) and model.config.model_type == "gemma2":
                parameter.add_(8.0)
            if name == "lm_head.weight":
                parameter.mul_(2.0)
    return model


def write_bundle(name: str, recipe: Recipe, out: Path) -> None:
    """Make the model, its tokenizer and calibration in the working directory, and export it to ``out``."""
    torch.manual_seed(2)
    model = lively(AutoModelForCausalLM.from_config(recipe.model).eval())
    model.generation_config.update(**recipe.generation)
    model.save_pretrained(name)
    if recipe.chat:
        train_tokenizer().save_pretrained(name)
    config = recipe.config
    if recipe.calibration is not None:
        calibration = write_calibration(Path(f"{name}.calibration"), recipe, fingerprint(load_model(name, "fp32")))
        config = replace(config, calibration=str(calibration))
    export(name, out, config)
    if recipe.without_engines:
        shutil.rmtree(out / ENGINE_FOLDER)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 40 tokens at most: the text it is for has few letters."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = [ENDOFTEXT, IM_START, IM_END]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB - 2, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["the tide rises and the tide falls", "user\nassistant\nsystem\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=ENDOFTEXT, eos_token=IM_END)
    tokenizer.chat_template = CHATML
    return tokenizer


def write_calibration(directory: Path, recipe: Recipe, model_fingerprint: str) -> Path:
    """A calibration directory as tide-calibrate writes it, with random exit heads and routers."""
    assert recipe.calibration is not None
    directory.mkdir()
    text = recipe.model.get_text_config()
    file = CalibrationFile(
        model="tiny", model_fingerprint=model_fingerprint, num_layers=text.num_hidden_layers, calibration=recipe.calibration,
        refusal="", data=DataInfo("texts/", 0, {"train": 3}, {"train": 900}, {"train": "ef" * 32}), heads=[], config={},
        tools={}, date="2026-11-21",
    )  # fmt: skip
    file.write(directory)
    tensors: dict[str, Any] = {}
    for seed, info in enumerate(recipe.calibration.exits):
        tensors |= exit_tensors(info, text.hidden_size, seed)
    save_file(tensors, directory / EXITS_NAME)
    (directory / "report").mkdir()
    (directory / "report" / "index.html").write_text("<!doctype html><title>Calibration</title>")
    return directory


# --- What the bundles generate

GREEDY = GenerationParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)


class Trials:
    """The engines of one bundle: one for each case, and those that must generate the same as it."""

    def __init__(self, directory: Path, recipe: Recipe, stack: contextlib.ExitStack) -> None:
        self.bundle, self.recipe, self._stack = Bundle.open(directory), recipe, stack
        self.margin, self.shift = MARGINS[recipe.config.dtype], SHIFTS[recipe.config.dtype]
        self.engines = [(case, [self._engine(case), *self._variants(case)]) for case in recipe.cases]

    def _engine(self, case: Case, shift: float = 0.0) -> Engine:
        policy, depth = case
        manifest = self.bundle.manifest
        if shift and manifest.calibration is not None:
            exits = [shifted(info, shift) for info in manifest.calibration.exits]
            manifest = replace(manifest, calibration=replace(manifest.calibration, exits=exits))
        options = EngineOptions(target="cpu", policy=policy, threads=ThreadOptions(1))
        options = replace(options, depth=replace(options.depth, **depth))
        return self._stack.enter_context(Engine(Bundle(self.bundle.directory, manifest), options))

    def _variants(self, case: Case) -> Iterator[Engine]:
        if case[0] == "exit":
            yield self._engine(case, self.shift)
            yield self._engine(case, -self.shift)
            always = self._engine(case)
            assert isinstance(always.policy, ExitDepth)
            always.policy.evaluates_always = True
            yield always

    def tokens(self, prompts: Sequence[list[int]]) -> list[list[list[int]]] | None:
        """[case][prompt]: the tokens generated; None where they are not certain enough, or show too little."""
        found: list[list[list[int]]] = []
        for case, (engine, *variants) in self.engines:
            together = engine.generate(list(prompts), GREEDY)
            if not self.clear(together) or not self.telling(case, together):
                return None
            tokens = [list(g.token_ids) for g in together]
            others = [[list(engine.generate(p, GREEDY)[0].token_ids) for p in prompts]]
            others += [[list(g.token_ids) for g in variant.generate(list(prompts), GREEDY)] for variant in variants]
            if any(other != tokens for other in others):
                return None
            found.append(tokens)
            # Where an exit gave the whole model's tokens, a test would not notice that it is no longer taken.
            if (tokens == found[0]) != (case[0] in ("full", "exact")):
                return None
        return found

    def clear(self, generations: Sequence[Generation]) -> bool:
        """Whether the likeliest token leads the next by the margin, everywhere."""
        leads = [step.top[0][1] - step.top[1][1] for g in generations for step in g.logprobs]
        return min(leads) >= self.margin and all(step.token == step.top[0][0] for g in generations for step in g.logprobs)

    def telling(self, case: Case, generations: Sequence[Generation]) -> bool:
        """Whether the text is no loop, and every exit of the bundle was used."""
        policy, depth = case
        if min(len(set(g.token_ids)) for g in generations) < 6:
            return False
        exits = self.recipe.calibration.exits if self.recipe.calibration is not None else []
        if policy == "exact" and exits:
            return any(g.stats.accepted.get("router") for g in generations)
        if policy == "exit":
            used = {layers for g in generations for layers in g.stats.token_depths}
            return len(used) == len(exits) + 1 and any(g.stats.prompt_exits for g in generations) == ("prefill_exit" in depth)
        return True

    def chat(self, random: np.random.Generator) -> dict[str, Any] | None:
        """A chat, its prompt's token ids and the answer; None where that is not certain enough."""
        engine = self.engines[0][1][0]
        words = random.permutation(["the", "tide", "rises", "falls", "and"])[:3]
        messages = [{"role": "system", "content": "tide"}, {"role": "user", "content": " ".join(words)}]
        ids = engine.chat_prompt(messages)
        (answer,) = engine.generate(ids, replace(GREEDY, max_new_tokens=SLOTS - len(ids)))
        if not self.clear([answer]):
            return None
        return {"messages": messages, "prompt": ids, "max_new_tokens": SLOTS - len(ids), "text": answer.text}


def shifted(info: ExitInfo, shift: float) -> ExitInfo:
    names = ("exact_threshold", "exit_threshold", "mlp_threshold")
    return replace(info, **{name: value + shift for name in names if (value := getattr(info, name)) is not None})


def expected_of(directory: Path, recipe: Recipe) -> dict[str, Any]:
    """Prompts that give certain tokens, and these tokens, for every case of the recipe."""
    if not recipe.cases:
        return {"without_engines": recipe.without_engines, "prompts": [], "cases": []}
    random = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        trials = Trials(directory, recipe, stack)
        for _ in range(2000):
            prompts = [random.integers(3, VOCAB - 2, count).tolist() for count in PROMPT_TOKENS]
            tokens = trials.tokens(prompts)
            chat = trials.chat(random) if tokens is not None and recipe.chat else None
            if tokens is not None and (chat is not None or not recipe.chat):
                pairs = zip(recipe.cases, tokens, strict=True)
                cases = [{"policy": policy, "depth": depth, "tokens": rows} for (policy, depth), rows in pairs]
                found = {"without_engines": False, "prompts": prompts, "cases": cases}
                return found | ({"chat": chat} if chat is not None else {})
    raise SystemExit(f"{directory.name}: no prompts give certain tokens; change the model's seed or the thresholds")


# --- The release


def code_commit() -> str:
    """The last commit that changed the code. Exits when the code has changes that are not committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    if git("status", "--porcelain", "--", *CODE):
        raise SystemExit(f"{', '.join(CODE)} have changes that are not committed; a release has none")
    return git("log", "-1", "--format=%h", "--", *CODE)


def to_json(expected: dict[str, Any]) -> str:
    """Indented, with lists of numbers on one line."""
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    return re.sub(r"\[[\d,\s]+\]", lambda numbers: json.dumps(json.loads(numbers[0])), text) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    commit = code_commit()
    release = Path(__file__).resolve().parent / commit
    if release.exists():
        raise SystemExit(f"{release} exists; the bundles of a release are written once")
    tools = ("tide-llm", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers", "numpy")
    versions = {"python": platform.python_version(), "machine": platform.machine()} | {name: version(name) for name in tools}
    bundles, made = {}, Path("release")
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):  # manifests name the model by a path without folders
        for name, recipe in RECIPES.items():
            write_bundle(name, recipe, made / name)
            bundles[name] = expected_of(made / name, recipe)
            kib = sum(path.stat().st_size for path in (made / name).rglob("*") if path.is_file()) / 1024
            print(f"{name}: {kib:.0f} KiB")
        expected = {"commit": commit, "versions": versions, "bundles": bundles}
        (made / "expected.json").write_text(to_json(expected), encoding="utf-8")
        shutil.copytree(made, release)


if __name__ == "__main__":
    main()
