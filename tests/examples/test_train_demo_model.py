"""Training of the demo models: what would break for someone who trains or uses one."""

import math
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_demo_model  # noqa: E402
from demo_training.corpus import Corpus, SourceFile, is_held_out, library_files, window_starts  # noqa: E402
from demo_training.evaluation import exit_agreement, greedy, held_out_loss, repeated_share  # noqa: E402
from demo_training.layer_skip import draw_exits, dropout_probabilities, keep_mask  # noqa: E402
from demo_training.looped import StackedOuro  # noqa: E402
from demo_training.model import StackedLlama  # noqa: E402
from demo_training.model_folder import load_stacked, stacked, to_causal_lm, write_model_folder  # noqa: E402
from demo_training.optimizer import Schedule  # noqa: E402
from demo_training.trainer import Recipe, Trainer  # noqa: E402
from demo_training.variants import VARIANTS  # noqa: E402

from tide_export.looped_models import OuroConfig  # noqa: E402

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


def test_decay_on_demand_ends_the_run_and_keeps_the_state_before_it(corpus: Corpus, tmp_path: Path) -> None:
    trainer = tiny_trainer(corpus, tmp_path, steps=1000, decay=3)
    trainer.run(lambda line: (tmp_path / "decay").touch() if line["step"] == 4 else None, report_every=1)
    assert trainer.progress.step == 7
    assert not (tmp_path / "decay").exists()

    extended = tiny_trainer(corpus, tmp_path, steps=1000, decay=3)
    assert extended.resume("stable.pt")
    assert (extended.progress.step, extended.progress.decay_start) == (4, None)


def test_rate_warms_up_stays_and_decays_to_zero() -> None:
    schedule = Schedule(total=20, warmup=3, decay=5)
    rates = [schedule.factor(step, None if step < 15 else 15) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(rates[3:16]) == {1.0}
    assert rates[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert schedule.finished(20, 15) and not schedule.finished(19, 15)


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


def test_an_epoch_reads_every_part_of_a_stream_once() -> None:
    starts = window_starts(tokens=1000, length=10, first=0, count=99, seed=3)
    assert len({start // 10 for start in starts}) == 99
    assert starts == window_starts(1000, 10, 0, 40, 3) + window_starts(1000, 10, 40, 59, 3)
    assert max(window_starts(1000, 10, 0, 5000, 3)) + 10 <= 1000


def test_layer_dropout_rises_with_depth() -> None:
    probabilities = dropout_probabilities(layers=24, peak=0.1)
    assert probabilities[0] == 0 and probabilities[-1] == pytest.approx(0.1)
    assert (probabilities.diff() > 0).all()
    kept = keep_mask(24, 20_000, 0.1, torch.Generator().manual_seed(0)).mean(dim=(1, 2, 3))
    torch.testing.assert_close(1 - kept, probabilities, atol=0.01, rtol=0)


def test_a_skipped_layer_leaves_the_hidden_state_alone() -> None:
    model, ids = perturbed_model(), torch.arange(12).view(2, 6)
    keep = torch.ones(2, 2, 1, 1)
    keep[1, 0] = 0  # the first sequence skips the second layer
    states = model.hidden_states(ids, [1, 2], keep)
    assert torch.equal(states[1][0], states[2][0])
    assert not torch.equal(states[1][1], states[2][1])


def test_early_exits_cover_a_shallow_and_a_deep_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [draw_exits(24, generator) for _ in range(400)]
    assert {shallow for shallow, _ in drawn} == set(range(4, 12))
    assert {deep for _, deep in drawn} == set(range(12, 24))


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


def test_exit_agreement_is_one_when_the_later_layers_do_nothing() -> None:
    model = perturbed_model()
    with torch.no_grad():
        model.output[1].zero_()
        model.down[1].zero_()
    hf_model = to_causal_lm(model)
    tokens = greedy(hf_model, torch.arange(24).view(3, 8), new_tokens=5)
    assert tokens.shape == (3, 13)
    assert torch.equal(tokens[:, -1], hf_model(tokens[:, :-1]).logits[:, -1].argmax(-1))
    assert exit_agreement(hf_model, tokens, new_tokens=5, depths=[1]) == {1: 1.0}
    with pytest.raises(ValueError, match="must lie in"):
        exit_agreement(hf_model, tokens, new_tokens=5, depths=[2])


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


def test_loops_that_change_nothing_agree_and_others_do_not() -> None:
    """Agreement would be reported of other states than the loops' ends."""
    tokens = torch.arange(24).view(2, 12) * 91 % 2048
    assert exit_agreement(to_causal_lm(fresh_model(LOOPED)), tokens, 8, [2, 4]) == {2: 1.0, 4: 1.0}
    assert exit_agreement(to_causal_lm(perturbed_model(LOOPED)), tokens, 8, [2])[2] < 1
    with pytest.raises(ValueError, match="must lie in"):
        exit_agreement(to_causal_lm(fresh_model(LOOPED)), tokens, 8, [3])


def test_the_first_loop_of_a_grown_model_is_the_llama_cut_off_there() -> None:
    """A warm start would begin far from what the Llama knew."""
    llama, ids = perturbed_model(), torch.arange(64).view(2, 32) * 91 % 2048
    grown, cut = fresh_model(LOOPED), llama.logits(ids)
    grown.grow_from(llama, ids)
    first, *_, last = (grown.head(state) for state in grown.hidden_states(ids, [2, 4, 6]).values())
    assert (first - cut).norm() < 0.4 * cut.norm()
    assert (last - first).norm() < 0.4 * first.norm()
    wide = LlamaConfig(**{**CONFIG.to_dict(), "hidden_size": 128})
    with pytest.raises(ValueError, match="embeddings"):
        grown.grow_from(fresh_model(wide), ids)


def test_the_gate_learns_when_to_leave_and_changes_nothing_else() -> None:
    """The gate would cost quality, or leave where the next loop helps."""
    model = perturbed_model(LOOPED)
    states = [torch.randn(1, 6, 64), torch.randn(1, 6, 64)]
    losses = [torch.full((1, 6), nats) for nats in (3.0, 1.0, 1.0)]
    for _ in range(200):
        model.gate_loss(states, losses).backward()
        assert {name for name, weight in model.named_parameters() if weight.grad is not None} == {"exit_gate", "exit_gate_bias"}
        with torch.no_grad():
            for weight in (model.exit_gate, model.exit_gate_bias):
                weight.sub_(0.3 * weight.grad)
        model.zero_grad()
    normed = [torch.nn.functional.rms_norm(state, (64,), model.final_norm) for state in states]
    leave = [torch.sigmoid(state @ model.exit_gate[0] + model.exit_gate_bias) for state in normed]
    assert leave[0].max() < 0.3 and leave[1].min() > 0.4


def test_repetition_counts_grams_seen_before_in_the_row() -> None:
    looping, fresh = [1, 2, 3, 4, 1, 2, 3, 4, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert repeated_share(torch.tensor([looping]), new_tokens=4) == 0.5
    assert repeated_share(torch.tensor([looping, fresh]), new_tokens=4) == 0.25


def test_standard_library_corpus_has_no_tests_and_no_duplicates() -> None:
    stdlib = library_files()["stdlib"]
    assert len({file.text for file in stdlib}) == len(stdlib) > 100
    assert not any({"test", "tests", "encodings"} & set(file.path.split("/")) for file in stdlib)


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


def test_streams_too_short_for_the_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        window_starts(tokens=100, length=64, first=0, count=1, seed=0)
    with pytest.raises(ValueError, match="fewer than one window"):
        held_out_loss(fresh_model(), np.zeros(10, dtype=np.uint16), 32, 1 << 16, [2])
