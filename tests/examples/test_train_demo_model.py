"""Training of the demo models: what would break for someone who trains or uses one."""

import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_demo_model  # noqa: E402
from demo_training.corpus import Corpus, SourceFile, is_held_out  # noqa: E402
from demo_training.evaluation import held_out_loss  # noqa: E402
from demo_training.looped import StackedOuro  # noqa: E402
from demo_training.model import StackedLlama  # noqa: E402
from demo_training.model_folder import load_stacked, stacked, to_causal_lm, write_model_folder  # noqa: E402
from demo_training.optimizer import Schedule  # noqa: E402
from demo_training.trainer import Recipe, Trainer  # noqa: E402
from demo_training.variants import VARIANTS  # noqa: E402

from tide_export.model.looped_models import OuroConfig  # noqa: E402

TOKENIZER_FOLDER = EXAMPLES / "demo_model" / "stock"
CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
)
LOOPED = OuroConfig(**{name: getattr(CONFIG, name) for name in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "tie_word_embeddings", "bos_token_id", "eos_token_id")}, total_ut_steps=3)  # fmt: skip


@pytest.fixture(scope="module")
def files() -> list[SourceFile]:
    return [SourceFile(f"package/module_{i}.py", f"def function_{i}(x):\n    return x + {i}\n\n" * 4) for i in range(120)]


@pytest.fixture(scope="module")
def corpus(files: list[SourceFile]) -> Corpus:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FOLDER / "tokenizer.json"))
    return Corpus.from_files({"stdlib": files[:60], "site-packages": files[60:]}, tokenizer)


def fresh_model(config: LlamaConfig = CONFIG) -> StackedLlama:
    model = stacked(config, torch.float32, compiled=False)
    model.initialize(seed=1)
    return model


def perturbed_model(config: LlamaConfig = CONFIG) -> StackedLlama:
    """A model whose every weight matters: fresh ones add nothing to the residual stream, and their norms are one."""
    model = fresh_model(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


def tiny_trainer(corpus: Corpus, folder: Path, variant: str = "layerskip", steps: int = 8, decay: int = 2) -> Trainer:
    recipe = Recipe(VARIANTS[variant], Schedule(total=steps, warmup=1, decay=decay), batch=4, length=32)
    return Trainer(fresh_model(LOOPED if variant == "looped" else CONFIG), corpus, recipe, folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_falls(corpus: Corpus, tmp_path: Path, variant: str) -> None:
    lines: list[dict] = []
    trainer = tiny_trainer(corpus, tmp_path, variant, steps=30, decay=10)
    assert trainer.run(lines.append, report_every=5)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    depths = [*trainer.model.exit_depths, trainer.model.depth]
    losses, _ = held_out_loss(trainer.model, corpus.held_out["stdlib"], 32, 1 << 16, depths)
    assert losses[trainer.model.depth] < math.log(2048) - 1
    if variant != "stock":
        assert max(losses.values()) < math.log(2048) - 1


def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(corpus: Corpus, tmp_path: Path) -> None:
    whole = tiny_trainer(corpus, tmp_path / "whole")
    assert whole.run(lambda line: None)

    first = tiny_trainer(corpus, tmp_path / "parts")
    stop_at_five = lambda line: first.request_stop(15, None) if line["step"] == 5 else None  # noqa: E731
    assert not first.run(stop_at_five, report_every=1)
    second = tiny_trainer(corpus, tmp_path / "parts")
    assert second.resume()
    assert second.progress.step == 5
    assert second.run(lambda line: None)

    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight, second.model.get_parameter(name)), name


def test_split_is_by_hash_of_the_path_and_disjoint(files: list[SourceFile], corpus: Corpus) -> None:
    assert is_held_out("base64.py") and not is_held_out("argparse.py")
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FOLDER / "tokenizer.json"))
    text = {
        name: "".join(tokenizer.decode(of[part].tolist()) for part in of)
        for name, of in (("train", corpus.train), ("held out", corpus.held_out))
    }
    for file in files:
        here, elsewhere = ("held out", "train") if file.held_out else ("train", "held out")
        assert file.text in text[here]
        assert file.text not in text[elsewhere]


def test_saved_folder_loads_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    model, ids = perturbed_model(), torch.arange(40).view(2, 20) * 37 % 2048
    torch.testing.assert_close(to_causal_lm(model)(ids).logits, model.logits(ids), atol=2e-5, rtol=2e-5)

    recipe = asdict(Recipe(VARIANTS["layerskip"], Schedule(total=3, warmup=1, decay=1)))
    record = {
        "variant": "layerskip", "steps": 1, "tokens": 128, "parameters": 1, "cpu_minutes": 1.0, "date": "",
        "machine": "", "torch": "", "python": "", "recipe": recipe,
        "warm_start": {"name": "start", "variant": "stock", "tokens": 7_000_000},
        "held_out": {"stdlib": {"tokens": 4096, "loss": 2.5}},
        "exits": {**train_demo_model.EXIT_PROMPTS, "greedy": {1: 0.625}, "greedy_repeated": 0.5, "held_out_tokens": 4096,
                  "held_out": {1: 0.31}},
    }  # fmt: skip
    for _ in range(2):  # the second time it replaces a folder
        write_model_folder(model, TOKENIZER_FOLDER, record, tmp_path / "demo")
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    hf_model = LlamaForCausalLM.from_pretrained(tmp_path / "demo", dtype=torch.float32)
    reloaded = load_stacked(tmp_path / "demo", torch.float32, compiled=False)
    torch.testing.assert_close(hf_model(ids).logits, reloaded.logits(ids), atol=2e-5, rtol=2e-5)
    card = (tmp_path / "demo" / "README.md").read_text()
    assert "| stdlib | 4,096 | 2.500 | 12.18 |" in card and "62%" in card and "7.00M" in card


def test_looped_model_computes_what_transformers_does(tmp_path: Path) -> None:
    """The published folder would be another model than the one that was trained."""
    model, ids = perturbed_model(LOOPED), torch.arange(40).view(2, 20) * 37 % 2048
    assert isinstance(model, StackedOuro)
    hf_model, states = to_causal_lm(model), model.hidden_states(ids, [2, 4, 6])
    torch.testing.assert_close(hf_model(ids).logits, model.logits(ids), atol=2e-5, rtol=2e-5)
    for ours, theirs in zip(states.values(), hf_model.model(ids).loop_states, strict=True):
        normed = torch.nn.functional.rms_norm(ours, ours.shape[-1:], model.final_norm, LOOPED.rms_norm_eps)
        torch.testing.assert_close(theirs, normed, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(hf_model.model.early_exit_gate.weight, model.exit_gate)
    again = fresh_model(LOOPED)
    again.load_hf(hf_model.state_dict())
    assert all(torch.equal(weight, again.get_parameter(name)) for name, weight in model.named_parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plain", "--out", "o", "--state", "s"], "unknown variant"),
        (["looped", "--out", "o", "--state", "s", "--base", str(TOKENIZER_FOLDER)], "does not train"),
    ],
)
def test_wrong_arguments_end_with_code_2_and_say_why(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(train_demo_model.app, arguments)
    assert result.exit_code == 2
    assert message in result.output
