"""Models whose layers pass on several residual streams (hyper-connections)."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from export.architectures import DEEPSEEK_V4, FEW_LAYERS, STREAMS, random_model
from export.stub_calibration import write_calibration
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth.options import DepthOptions
from transformers import PreTrainedModel

from tide_export import ExportConfig, export
from tide_export.load import fingerprint, load_model
from tide_export.quantize.layerwise import eager_pass

HIDDEN = DEEPSEEK_V4.hidden_size
EXITS = [ExitInfo(1, "identity", "max_probability", 0.02)]
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [9, 3], [4] * 12]
pytestmark = pytest.mark.slow  # its trace
PARAMS = GenerationParams(max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model(DEEPSEEK_V4)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Verified, with an exit after the first layer."""
    folder = tmp_path_factory.mktemp("streams")
    model.save_pretrained(folder / "model")
    marks = fingerprint(load_model(str(folder / "model"), "fp32", tokenizer="none"))
    write_calibration(folder / "calibration", EXITS, marks, FEW_LAYERS, HIDDEN)
    config = ExportConfig(calibration=str(folder / "calibration"), max_seq_len=64, targets=("cpu",), tokenizer="none")
    export(str(folder / "model"), folder / "bundle", config)
    with Engine.load(folder / "bundle", EngineOptions(policy="full", threads=ThreadOptions(1))) as loaded:
        yield loaded


def test_full_and_exact_write_the_models_text(model: PreTrainedModel, engine: Engine) -> None:
    """One stream, or streams mixed up, would be another model; drafts would be verified from a part of a token's state."""
    assert engine.manifest.hidden_width == STREAMS * HIDDEN
    exact = engine.with_options(replace(engine.options, policy="exact"))
    for ids in PROMPTS:
        expected = model.generate(torch.tensor([ids]), max_new_tokens=PARAMS.max_new_tokens, do_sample=False, eos_token_id=None)
        for one in (engine, exact):
            assert list(one.generate([ids], PARAMS)[0].token_ids) == expected[0, len(ids) :].tolist()


def test_exits_read_all_streams(model: PreTrainedModel, engine: Engine) -> None:
    """An early token would be that of another state; or deferred layers would run from a part of one."""
    early = engine.with_options(replace(engine.options, policy="exit", depth=DepthOptions(threshold=0.02)))
    params, depths = replace(PARAMS, depth_budget=1.5), set[int]()  # a budget, so that exits are evaluated
    for ids in PROMPTS:
        written = early.generate([ids], params)[0]
        text = [*ids, *written.token_ids]
        passed = eager_pass(model, [text], range(1, FEW_LAYERS + 1))
        for place, (token, depth) in enumerate(zip(written.token_ids[1:], written.stats.token_depths, strict=True), len(ids)):
            streams = torch.from_numpy(passed.states[depth][place]).view(1, 1, STREAMS, HIDDEN)
            with torch.no_grad():
                logits = model.lm_head(model.model.norm(model.model.hc_head(streams)))
            assert token == int(logits.argmax())
            depths.add(depth)
    assert len(depths) > 1, "no token left early, or all did"
