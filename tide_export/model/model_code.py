"""Where in a model's own code something failed, for messages: what Python or a library says of it names no reason that a user
could act on."""

from __future__ import annotations

import traceback

from torch import nn


def failing_code(model: nn.Module, error: BaseException) -> str:
    """The innermost method of a module of the model that ``error``, or an error behind it, passed through, such as
    ``LlamaAttention.forward``; modules of torch do not count. Else the model's class."""
    found = type(model).__name__
    seen = set[int]()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame, _ in traceback.walk_tb(current.__traceback__):
            owner = frame.f_locals.get("self")
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if isinstance(owner, nn.Module) and package not in ("torch", "tide_export"):
                found = f"{type(owner).__name__}.{frame.f_code.co_name}"
        current = current.__cause__ or current.__context__
    return found
