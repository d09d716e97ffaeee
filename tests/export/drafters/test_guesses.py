"""The search for the form in which a drafter was trained, and the shares that a bundle records."""

from pathlib import Path

import pytest
import torch
from export.architectures import VOCAB, tiny_model
from export.drafters.reference import Eagle3
from tide_runtime.errors import ModelFilesError

from tide_export.drafters.base import Form, LoadedDrafter
from tide_export.drafters.eagle3 import load_eagle3
from tide_export.drafters.guesses import chain, in_best_form, tokens_per_pass
from tide_export.drafters.importing import import_drafter
from tide_export.drafters.replies import Replies, write_replies
from tide_export.sources.loaded_model import LoadedModel


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return LoadedModel(tiny_model("llama"), None, "tiny")


@pytest.fixture(scope="module")
def replies(target: LoadedModel) -> Replies:
    return write_replies(target, [1, 2, 3, 4], count=8, prompt_tokens=8, reply_tokens=56)


def _trained(found: LoadedDrafter, form: Form, replies: Replies) -> None:
    """Fit the head's last matrix, in ``form``, to the model's likeliest tokens by least squares."""
    form.apply(found.drafter)
    tapped = torch.cat([replies.states[tap] for tap in found.drafter.taps], -1)
    features, wanted = [], []
    with torch.no_grad():
        for ahead, (_, states) in enumerate(chain(found.drafter, tapped, replies.ids, 2)):
            features.append(found.drafter.norm(states).flatten(0, 1))
            wanted.append(replies.argmax[:, 1 + ahead : 1 + ahead + states.shape[1]].flatten())
        ones = torch.nn.functional.one_hot(torch.cat(wanted), VOCAB).float()
        inputs = torch.cat(features)
        fitted = torch.linalg.solve(inputs.T @ inputs + 0.1 * torch.eye(inputs.shape[1]), inputs.T @ ones)
        found.drafter.lm_head.weight.copy_(20 * fitted.T)


@pytest.mark.parametrize("planted", range(4))
def test_the_form_in_which_a_head_was_trained_is_found(
    planted: int, target: LoadedModel, replies: Replies, tmp_path: Path
) -> None:
    """Configs leave the form open, and another form costs most hits."""
    folder = Eagle3().write(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 2, 3], norm_before_residual=None)
    found = load_eagle3(str(folder), target)
    assert len(found.forms) == 4
    _trained(found, found.forms[planted], replies)
    measured = in_best_form(found, replies)
    assert measured.form == found.forms[planted].name
    assert found.drafter.taps == found.forms[planted].taps
    assert measured.tried[measured.form] == round(tokens_per_pass(measured.acceptance), 4)
    assert measured.acceptance[0] > 0.3
    assert [low for low, _ in measured.classes] == sorted(low for low, _ in measured.classes)


def test_an_import_reports_every_form(target: LoadedModel, tmp_path: Path) -> None:
    notes: list[str] = []
    folder = Eagle3().write(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    first, again = (import_drafter(f"eagle3:{folder}", target, notes.append) for _ in range(2))
    assert set(first.tried) == {"taps count layers run before", "taps name layers"}
    assert "tokens per verification" in notes[0] and "other ways to read it" in notes[0]
    assert (first.sha256, first.acceptance, first.classes) == (again.sha256, again.acceptance, again.classes)
    with pytest.raises(ModelFilesError, match="brings no MTP layer"):
        import_drafter("mtp", target, notes.append)
