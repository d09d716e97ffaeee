"""Work that would hold up the streams of other clients runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
_LONG = 4096  # characters; encoding them takes about a millisecond


async def off_loop(size: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """``function(*arguments)``, which works on ``size`` characters; in a thread where they are many."""
    return function(*arguments) if size < _LONG else await asyncio.to_thread(function, *arguments)
