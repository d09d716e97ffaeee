"""What a model's own masks let its tokens see, read from the functions that transformers would build them with.

The compiled attention knows causal masks and sliding windows. The argument ``sliding_window`` of an attention call is not all
that there is to know: some models have their window in the mask only, and a window changes nothing in short texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from tide_runtime.errors import TideError, UnsupportedModelError
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import DynamicCache, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

_MAX_POSITIONS = 2**18  # positions up to which a mask is examined; no model has a longer window
_NO_WINDOW = "a mask that is neither causal nor a sliding window is not supported"
_FULL, _SLIDING = "full_attention", "sliding_attention"
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@contextmanager
def recorded_windows(config: PreTrainedConfig, implementations: Sequence[str]) -> Iterator[set[int]]:
    """Context in which a model with an attention of ``implementations`` gets no masks, and the windows of those it asks for.

    A window is in tokens; 0: all earlier tokens. Asking for another kind of mask raises UnsupportedModelError.
    """
    positions = _positions(config)
    windows = set[int]()

    def record(*args: object, mask_function: MaskFunction, **kwargs: object) -> None:
        windows.add(_window(mask_function, positions))

    known = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping  # where transformers looks whether an attention has masks
    before = dict(known)
    known.update(dict.fromkeys(implementations, record))
    try:
        yield windows
    finally:
        known.clear()
        known.update(before)


class MaskedLayer(Protocol):
    """What a layer's attention was given, see `tide_export.model.traced_attention.TracedLayer`."""

    window: int | None
    masked: bool
    masked_by_hand: bool


def check_masks(config: PreTrainedConfig, layers: Sequence[MaskedLayer], masks: set[int]) -> None:
    """Raise UnsupportedModelError unless the attention of all ``layers`` sees what the model's masks show.

    Args:
        masks: windows of the masks that the model has asked for, see `recorded_windows`.
    """
    types = getattr(config, "layer_types", None) or []
    positions = _positions(config)
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    for number, layer in enumerate(layers):
        if layer.masked or (layer.masked_by_hand and windowed):
            raise UnsupportedModelError(
                "attention with a mask that the model makes itself is not supported: TIDE's sees all earlier tokens, or the last "
                "ones as the argument sliding_window says"
            )
        if layer.window is None or not masks:
            continue
        seen = 0 if layer.window >= positions else layer.window
        kind = types[number % len(types)] if types else ""
        told = len(masks) == 1 or kind == (_SLIDING if seen else _FULL)
        if seen not in masks or not told:
            raise UnsupportedModelError(
                f"a mask that hides more than its attention is told is not supported: layer {number} "
                f"{f'({kind}) ' if kind else ''}attends to {_described(seen)}, the model's masks show {_listed(masks)}"
            )
    _check_caches(config, [layer.window for layer in layers], positions)


def _check_caches(config: PreTrainedConfig, windows: Sequence[int | None], positions: int) -> None:
    """Raise UnsupportedModelError where a cache of transformers keeps fewer tokens than the layer sees in a pass: token by token
    the model is another one."""
    for number, (cache, window) in enumerate(zip(DynamicCache(config=config).layers, windows, strict=False)):
        kept = getattr(cache, "sliding_window", None) or positions
        if window is not None and kept < min(window or positions, positions):
            raise UnsupportedModelError(
                f"a model that differs from itself is not supported: layer {number} attends to {_described(window)} in one pass, "
                f"and its cache in transformers keeps {kept}"
            )


def declared_window(module: torch.nn.Module) -> int | None:
    """The window that ``layer_types`` of the config gives the layer of the attention ``module``."""
    config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if not types or number is None or types[number % len(types)] != _SLIDING:
        return None
    return getattr(config, "sliding_window", None)


def _positions(config: PreTrainedConfig) -> int:
    return min(getattr(config, "max_position_embeddings", None) or _MAX_POSITIONS, _MAX_POSITIONS)


def _window(function: MaskFunction, positions: int) -> int:
    with unset_fake_temporarily(), torch.no_grad():
        zero = torch.tensor(0)
        places = torch.arange(positions)

        def seen(place: int) -> torch.Tensor:
            return function(zero, zero, torch.tensor(place), places).expand(positions)

        try:
            window = int(seen(positions - 1).sum())
            for place in {0, window // 2, window - 1, window, positions // 2, positions - 1} & {*range(positions)}:
                if not torch.equal(seen(place), (places <= place) & (places > place - window)):
                    raise UnsupportedModelError(f"{_NO_WINDOW}: token {place} sees other tokens than the {window} up to itself")
        except TideError:
            raise
        except Exception as error:  # the model's function may read tensors of its pass
            raise UnsupportedModelError(f"{_NO_WINDOW}: the model's function for it reads what its pass has computed") from error
    return 0 if window == positions else window


def _described(window: int) -> str:
    return f"the last {window} tokens" if window else "all earlier tokens"


def _listed(masks: set[int]) -> str:
    return " or ".join(_described(window) for window in sorted(masks))
