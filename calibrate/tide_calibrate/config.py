"""Options of a calibration; the command line takes its defaults from here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from tide_runtime.bundle.manifest import DTYPES
from tide_runtime.errors import ParamsError
from tide_runtime.option import check_choices, option

from tide_calibrate.kinds import check_router, parse_kind
from tide_export.config import QUANTIZERS, WEIGHTS, ExportConfig, dtype_with, loop_ends

OWN_REFERENCE = "fp32"

AUTO_HEADS = ("identity", "linear", "tail:1", "tail:2")
MAX_AUTO_CANDIDATES = 8
_MAX_WINDOW = 1 << 17
_MAX_WINDOWS = 10_000_000
_MAX_MINUTES = 10_000
_text = partial(option, rich_help_panel="Text")
_training = partial(option, rich_help_panel="Training")
_choice = partial(option, rich_help_panel="Certificate and predicted speed")
_model = partial(option, rich_help_panel="Model")


@dataclass(frozen=True)
class CalibrationConfig:
    """Options of one calibration, as `tide-calibrate` takes them.

    ``max_disagreement`` is ε and ``confidence`` 1 - δ of the certificate. Exits are trained and certified on dequantised weights
    with activations that are not rounded to int8; step costs are those of the low-bit products, on a target, whatever ``device``
    is. Heads are trained for fewer steps where ``minutes`` are short, and then only the kinds that agree best after the deepest
    candidate are trained after the others. At most the hidden size is used of ``rank``; half of the ``prompts`` choose exits.
    """

    heads: str = _training("auto", "Exit heads to train: auto (identity, linear, tail:1, tail:2), or a list: linear,tail:2.")
    candidates: str = _training(
        "auto", "Where tokens may stop, in layers run: 4,8,12 or every:2 or auto (the first two thirds; ends of loops)."
    )
    router: str = _training(
        "auto",
        "Score that decides whether a token stops: mlp, max_probability, mlp+max_probability, gate (of a looped model "
        "that has one), or auto.",
    )
    max_disagreement: float = _choice(
        0.01, "Share of tokens at which policy exit may differ from the full model, or from --reference."
    )
    confidence: float = _choice(0.95, "Confidence of the certificate of that share.")
    window: int = _text(256, "Tokens per window of text.")
    max_windows: int = _text(2000, "Windows of text used at most.")
    rank: int = _training(128, "Rank of the translators, at most 128.")
    prompts: int = _choice(64, "Held-out prompts that the model continues; speed is predicted on these continuations.")
    new_tokens: int = _choice(96, "Tokens of each continuation.")
    minutes: float = _training(
        8.0,
        "Minutes to aim at for a small model and 100,000 tokens. Training exits takes a fifth, the draft head a sixth: "
        "fewer mean fewer steps, and fewer kinds of exit heads at every candidate; more allow more steps and more replies.",
    )
    draft_head: bool | None = _training(
        None,
        "Train a draft head, which guesses tokens for policy exact from the model's own states. Given neither way, one "
        "is trained, and left out again where exact is measured to be no faster with it.",
    )
    seed: int = _training(0, "Random seed; the same seed, data and costs give the same bytes.")
    dtype: str = _model("fp32", "Precision the model runs in; export it in the same.", one_of=DTYPES)
    weights: str = _model(
        ExportConfig.weights,
        f"Weights to calibrate for: {', '.join(WEIGHTS)}, as tide-export takes it; export with the same.",
    )
    quantizer: str = _model(
        ExportConfig.quantizer,
        f"With --weights int8 or int4: {', '.join(QUANTIZERS)}; export with the same. gptq and gptq_mixed read --data; "
        "export with --text DATA.",
    )
    reference: str = _choice(
        "",
        "The model that the certificate compares with: fp32 (the weights before --weights rounds them), or the "
        "directory, file or hub id of the original of a GGUF or GPTQ model. Default: the calibrated model's own last layer.",
        show_default=False,
    )
    device: str = _model("cpu", "What PyTorch runs on: cpu, cuda, cuda:1.")

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
        check_choices(self)
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
