"""Capture through compiled segments: PyTorch's states and logits, in any family, and PyTorch where that is not so."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tide_calibrate.capture.compiled_pass as compiled_module
import torch
from calibrate.capture.test_capture import CANDIDATES, SPLIT, files, loaded, ragged
from export.architectures import FEW_LAYERS, LAYERS, VOCAB
from slow_cases import slow_but
from tide_calibrate.capture.capture import capture
from tide_calibrate.capture.compiled_pass import CompiledPass, fastest_pass
from tide_calibrate.capture.forward_pass import EagerPass
from tide_calibrate.temporary_bundle import TemporaryBundle
from tide_runtime.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TemporaryBundle:
    """The bundle of a tiny Llama; not deleted before the session ends."""
    return TemporaryBundle(loaded(), "fp32", CANDIDATES[:-1], tmp_path_factory.mktemp("bundle"))


@pytest.mark.parametrize("name", slow_but(["llama", "gemma2", "gpt2", "cohere", "granite", "mistral"], "llama", "gemma2"))
def test_states_and_logits_are_pytorchs(name: str, tmp_path: Path) -> None:
    """Heads are trained on the capture and run on the model: a soft-cap, scale or window that differed would mistrain them."""
    model, windows = loaded(name, layers=FEW_LAYERS), ragged()
    candidates = (1, FEW_LAYERS)
    eager = capture(model, windows, SPLIT, candidates, tmp_path / "eager", batch_size=4, top_k=5)
    with TemporaryBundle(model, "fp32", candidates[:-1], tmp_path) as temporary:
        fast = CompiledPass(temporary.path(), model.model, candidates, logit_bytes=5 * 4 * 4 * VOCAB)
        made = capture(model, windows, SPLIT, candidates, tmp_path / "fast", batch_size=4, top_k=5, make_pass=lambda: fast)
    assert not list(tmp_path.glob("bundle.*"))
    np.testing.assert_allclose(made.top_logits, eager.top_logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(made.logsumexp, eager.logsumexp, rtol=0, atol=1e-4)
    assert (made.top_ids[..., 0] == eager.top_ids[..., 0]).mean() > 0.999
    for boundary in candidates:
        np.testing.assert_allclose(made.hidden[boundary], eager.hidden[boundary], rtol=2e-3, atol=2e-3)


def test_interrupted_and_resumed_gives_the_same_bytes(
    bundle: TemporaryBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new pass has new caches; what an earlier one left in them must not matter. The bundle has further cuts, where step costs
    are measured: only the asked boundaries are written."""
    model, passes, run_pass = loaded(), [], CompiledPass.run

    def run(directory: Path) -> set[int]:
        make = partial(CompiledPass, bundle.path(), model.model, [2, LAYERS])
        return set(capture(model, ragged(), SPLIT, [2, LAYERS], directory, batch_size=2, make_pass=make).hidden)

    def interrupted(*arguments: Any) -> None:
        passes.append(1)
        if len(passes) == 4:
            raise KeyboardInterrupt
        run_pass(*arguments)

    assert run(tmp_path / "whole") == {2, LAYERS}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(CompiledPass, "run", interrupted)
        run(tmp_path / "resumed")
    run(tmp_path / "resumed")
    assert files(tmp_path / "resumed") == files(tmp_path / "whole")


def test_a_model_that_cannot_be_exported_is_captured_by_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tide-calibrate must not refuse what it could capture, and must say why it takes longer."""

    def refuse(*_: object) -> None:
        raise UnsupportedModelError("its layers differ")

    monkeypatch.setattr("tide_calibrate.temporary_bundle.write_bundle", refuse)
    notes: list[str] = []
    with TemporaryBundle(loaded(), "fp32", [1, 2], tmp_path) as temporary:
        assert isinstance(fastest_pass(loaded().model, temporary, [1, LAYERS], notes.append), EagerPass)
    assert len(notes) == 1 and "its layers differ" in notes[0] and "PyTorch" in notes[0]
    assert not list(tmp_path.iterdir())


def test_wrong_logits_are_found_out(bundle: TemporaryBundle) -> None:
    """A graph that computes another model would train heads for that one."""
    other = loaded()
    with torch.no_grad():
        other.model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    with pytest.raises(UnsupportedModelError, match="compiled logits differ by"):
        CompiledPass(bundle.path(), other.model, CANDIDATES)
    notes: list[str] = []
    assert isinstance(fastest_pass(other.model, bundle, CANDIDATES, notes.append), EagerPass) and notes
    assert isinstance(fastest_pass(other.model, None, CANDIDATES, notes.append), EagerPass) and len(notes) == 1
    assert compiled_module._TOLERANCE <= 1e-4
