"""`tide-export --draft-head`: the imported drafter is in the bundle, its origin in the manifest; texts are the model's own."""

from pathlib import Path

import pytest
from export.architectures import random_model, tiny_model
from export.drafters.reference import Eagle3, mtp_tensors
from export.drafters.test_mtp import MIMO
from runtime.depth.speculation.eager_head import guess_always
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.errors import ModelFilesError, ParamsError
from tiny_tokenizer import write_byte_tokenizer

from tide_export import ExportConfig, export
from tide_export.model.mimo import MiMoConfig

PROMPTS = [[5, 9, 2, 7], [8, 8, 1, 30, 4, 6, 2]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "llama"
    tiny_model("llama").save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters") / "mimo"
    random_model(MiMoConfig(**MIMO)).save_pretrained(folder)
    save_file(load_file(folder / "model.safetensors") | mtp_tensors(), folder / "model.safetensors", {"format": "pt"})
    write_byte_tokenizer(folder)
    return folder


@pytest.mark.parametrize("kind", slow_but(["eagle3", "mtp"], "eagle3"))
def test_texts_are_the_models_own(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An imported drafter would run in a bundle that says nothing of it, or change a text."""

    guess_always(monkeypatch, 3)
    source, head = request.getfixturevalue("llama" if kind == "eagle3" else "mimo"), kind
    if kind == "eagle3":
        head = f"eagle3:{Eagle3(draft_vocab=64).write(tmp_path / 'head', eagle_aux_hidden_state_layer_ids=[1, 2, 3])}"
    manifest = export(str(source), tmp_path / "engine", ExportConfig(max_seq_len=96, draft_head=head, targets=("cpu", "torch")))
    info = manifest.draft_head
    assert info is not None and info.kv is not None
    assert (info.kind, info.source) == (kind, head.removeprefix("eagle3:") if kind == "eagle3" else str(source))
    assert len(info.sha256) == 64 and info.vocabulary == (64 if kind == "eagle3" else 128)
    params = GenerationParams(max_new_tokens=24, ignore_eos=True)
    texts = {}
    for policy, target in (("full", "cpu"), ("exact", "cpu"), ("exact", "torch")):
        threads, depth = ThreadOptions(1), DepthOptions(draft="head")
        options = EngineOptions(policy=policy, target=target, device="cpu", threads=threads, depth=depth)
        with Engine.load(tmp_path / "engine", options) as engine:
            done = engine.generate([list(prompt) for prompt in PROMPTS], params)
        texts[policy, target] = [one.token_ids for one in done]
        guessed = sum(one.stats.drafted.get("head", 0) for one in done)
        assert bool(guessed) == (policy == "exact"), "the head never guessed"
    assert texts["exact", "cpu"] == texts["exact", "torch"] == texts["full", "cpu"]


def test_a_wrong_head_leaves_nothing_behind(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="brings no MTP layer"):
        export(str(llama), tmp_path / "engine", ExportConfig(draft_head="mtp"))
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        export(str(llama), tmp_path / "engine", ExportConfig(draft_head=f"eagle3:{tmp_path}"))
    assert not any(tmp_path.iterdir())
    with pytest.raises(ParamsError, match="eagle3:DIR"):
        ExportConfig(draft_head="eagle3:")
