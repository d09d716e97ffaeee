"""Options of a calibration; the command line takes its defaults from here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tide_runtime.bundle.manifest import DTYPES
from tide_runtime.errors import ParamsError

from tide_calibrate.kinds import check_router, parse_kind
from tide_export.config import ExportConfig, dtype_with, loop_ends

OWN_REFERENCE = "fp32"

AUTO_HEADS = ("identity", "linear", "tail:1", "tail:2")
MAX_AUTO_CANDIDATES = 8
_MAX_WINDOW = 1 << 17
_MAX_WINDOWS = 10_000_000
_MAX_MINUTES = 10_000


@dataclass(frozen=True)
class CalibrationConfig:
    """Options of one calibration.

    Args:
        heads: exit heads to train: ``auto`` (identity, linear, tail:1, tail:2) or a list such as ``linear,tail:2``.
        candidates: layers after which a token may stop, as layers run: ``"4,8,12"``, ``"every:2"`` or ``"auto"``.
        router: the score that decides whether a token stops; ``auto`` chooses the kind by the cost model. ``gate``: the exit gate
            that a looped model was trained with. A package's is used only where it is named.
        max_disagreement: ε, the share of tokens at which policy ``exit`` may differ from the full model.
        confidence: 1 - δ, the confidence of the certificate.
        window: tokens per window of text.
        max_windows: maximum number of windows, all splits together.
        rank: rank of the translators; at most the hidden size is used.
        prompts: held-out prompts that the model continues, to predict speed; half of them are used to choose exits.
        new_tokens: tokens per continuation.
        minutes: what calibrating a small model on 100,000 tokens may take. A fifth of it is for training exits: where that is
            short, heads are trained for fewer steps, and then only the kinds that agree best after the deepest candidate are
            trained after the others; a sixth is for the draft head. More than the default allows more steps, more text to learn
            from, and more replies for the draft head.
        draft_head: train a draft head, which guesses tokens from the model's final state for policy ``exact``. None: train
            it, and leave it out where policies are measured and it does not make ``exact`` faster.
        seed: random seed of splits, windows and training.
        dtype: precision of the model, fp32, fp16 or bf16.
        weights, quantizer: form of the weights, as in ExportConfig. Exits are trained and certified on the dequantised weights
            with activations that are not rounded to int8; step costs are those of the low-bit products.
        device: what PyTorch runs on, for capture, training and traces: ``cpu``, ``cuda``, ``cuda:1``. Step costs are a target's.
        reference: the model that the certificate compares with: ``fp32`` for the source's weights before they are rounded, or a
            directory, GGUF file or hub id; empty for the calibrated model's own full depth.
    """

    heads: str = "auto"
    candidates: str = "auto"
    router: str = "auto"
    max_disagreement: float = 0.01
    confidence: float = 0.95
    window: int = 256
    max_windows: int = 2000
    rank: int = 128
    prompts: int = 64
    new_tokens: int = 96
    minutes: float = 8.0
    draft_head: bool | None = None
    seed: int = 0
    dtype: str = "fp32"
    weights: str = ExportConfig.weights
    quantizer: str = ExportConfig.quantizer
    reference: str = ""
    device: str = "cpu"

    def __post_init__(self) -> None:
        self._check_names()
        for name, above in (("max_disagreement", 0), ("confidence", 0.5)):
            value = getattr(self, name)
            if not above < value < 1:
                raise ParamsError(f"{name} is {value}; set it between {above} and 1, such as {getattr(type(self), name)}")
        if not 0 < self.minutes <= _MAX_MINUTES:
            raise ParamsError(f"minutes is {self.minutes}; set it above 0, at most {_MAX_MINUTES}")
        bounds = {"window": (16, _MAX_WINDOW), "max_windows": (16, _MAX_WINDOWS), "rank": (1, 128)}
        bounds |= {"prompts": (2, 4096), "new_tokens": (8, 4096), "seed": (0, 2**32 - 1)}
        for name, (lowest, highest) in bounds.items():
            if not lowest <= getattr(self, name) <= highest:
                raise ParamsError(f"{name} is {getattr(self, name)}; set it from {lowest} to {highest}")

    def _check_names(self) -> None:
        object.__setattr__(self, "dtype", dtype_with(self.weights, self.quantizer, self.dtype, CalibrationConfig.dtype))
        for kind in self.head_kinds:
            parse_kind(kind)
        check_router(self.router)
        if self.dtype not in DTYPES:
            raise ParamsError(f"dtype is {self.dtype!r}; set it to one of: {', '.join(DTYPES)}")
        if self.reference == OWN_REFERENCE and self.dtype == "fp32" and self.weights in ("source", *DTYPES):
            raise ParamsError(
                f"reference fp32 is the calibrated model itself with weights {self.weights}: nothing is rounded; add --weights "
                "int8 or int4, or give the checkpoint that the source was made from, as a directory or hub id"
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ParamsError(f"device is {self.device!r}; set it to cpu, cuda, or cuda:1 for the second GPU")
        if not re.fullmatch(r"auto|every:[1-9]\d*|\d+(,\d+)*", self.candidates):
            raise ParamsError(f"candidates is {self.candidates!r}; set it to layers such as 4,8,12, to every:2, or to auto")

    @property
    def head_kinds(self) -> tuple[str, ...]:
        """Kinds of heads to train, in order and without duplicates."""
        return AUTO_HEADS if self.heads == "auto" else tuple(dict.fromkeys(self.heads.split(",")))


def require_positive(options: object, *names: str) -> None:
    """Raise ParamsError that names the first of these attributes that is not above 0."""
    for name in names:
        if not getattr(options, name) > 0:
            raise ParamsError(f"{name} must be above 0, got {getattr(options, name)}")


def candidate_layers(spec: str, num_layers: int, loops: int = 1) -> list[int]:
    """Layers run before each candidate exit, ascending, from 1 to num_layers - 1 (an exit after the last layer saves nothing).

    ``auto`` takes up to 8 layers, evenly spaced over the first two thirds; of a looped model the ends of ``loops``. Raises
    ParamsError for layers that do not exist, or a model too shallow for an exit.
    """
    if spec == "auto" and loops > 1:
        return loop_ends(num_layers, loops)
    deepest = num_layers * 2 // 3 if spec == "auto" else num_layers - 1
    if deepest < 1:
        raise ParamsError(f"the model has {num_layers} layers, too few for an exit before the last one")
    if spec == "auto":
        count = min(deepest, MAX_AUTO_CANDIDATES)
        return [round((i + 1) * deepest / count) for i in range(count)]
    layers = list(range(int(spec[6:]), num_layers, int(spec[6:]))) if spec.startswith("every:") else _parse_list(spec)
    if not layers or layers[0] < 1 or layers[-1] > deepest:
        raise ParamsError(
            f"candidates {spec} do not fit a model of {num_layers} layers; give rising numbers from 1 to {deepest} "
            "(how many layers run before each candidate exit)"
        )
    return layers


def _parse_list(spec: str) -> list[int]:
    layers = [int(part) for part in spec.split(",")]
    if sorted(set(layers)) != layers:
        raise ParamsError(f"candidates is {spec}; give rising numbers, each once")
    return layers
