"""The draft head that a user names, read, measured and in its best form."""

from __future__ import annotations

from collections.abc import Callable

from tide_export.config import EAGLE3_PREFIX
from tide_export.drafters.base import LoadedDrafter, MeasuredDrafter
from tide_export.drafters.eagle3 import check_eagle3, load_eagle3
from tide_export.drafters.guesses import in_best_form, tokens_per_pass
from tide_export.drafters.mtp import load_mtp, mtp_tensors
from tide_export.drafters.replies import REPLIES, write_replies
from tide_export.sources.loaded_model import LoadedModel


def check_draft_head(draft_head: str, loaded: LoadedModel) -> None:
    """Raise ModelFilesError where ``draft_head`` is missing or belongs to another model, before minutes of work.

    ``loaded``: streamed or not.
    """
    if draft_head.startswith(EAGLE3_PREFIX):
        check_eagle3(draft_head.removeprefix(EAGLE3_PREFIX), loaded)
    else:
        mtp_tensors(loaded)


def load_drafter(draft_head: str, loaded: LoadedModel) -> LoadedDrafter:
    """The draft head ``draft_head``, ``eagle3:DIR`` or ``mtp``, for a model with its parameters in memory.

    Raises ModelFilesError if it cannot be read in full or belongs to another model.
    """
    if draft_head.startswith(EAGLE3_PREFIX):
        return load_eagle3(draft_head.removeprefix(EAGLE3_PREFIX), loaded)
    return load_mtp(loaded)


def import_drafter(
    draft_head: str,
    loaded: LoadedModel,
    note: Callable[[str], None],
    on_token: Callable[[int, int], None] = lambda done, all_tokens: None,
) -> MeasuredDrafter:
    """`load_drafter`, in the form that guesses best on replies of the model; some seconds to a minute.

    Args:
        note: called with a sentence on what was measured.
        on_token: see `write_replies`.
    """
    found = load_drafter(draft_head, loaded)
    replies = write_replies(loaded, found.taps, on_token=on_token)
    measured = in_best_form(found, replies)
    note(_summary(measured))
    return measured


def _summary(measured: MeasuredDrafter) -> str:
    shares = ", ".join(f"{share:.0%}" for share in measured.acceptance)
    chosen = f"draft head: {shares} of its 1st, 2nd … guesses are right on {REPLIES} replies of the model, "
    chosen += f"{tokens_per_pass(measured.acceptance):.2f} tokens per verification"
    if len(measured.tried) == 1:
        return chosen
    others = "; ".join(f"{tokens:.2f} {name}" for name, tokens in measured.tried.items() if name != measured.form)
    return f"{chosen}, {measured.form} (other ways to read it: {others})"
