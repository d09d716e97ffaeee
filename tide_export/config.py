"""Options of an export; the command line takes its defaults from here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tide_runtime.bundle.architectures import ARCHITECTURES
from tide_runtime.bundle.calibration import CalibrationInfo
from tide_runtime.bundle.manifest import DTYPES
from tide_runtime.errors import ParamsError, TargetError

AUTO = "auto"  # of an export, which knows the machine that it is for; a calibration takes one of the others
WEIGHTS = ("source", *DTYPES, "int8", "int4", "w8a8")
QUANTIZERS = ("rtn", "gptq", "gptq_mixed")
HEAD_BITS = ("auto", "4", "8")
KV = ("model", "int8")
EAGLE3_PREFIX = "eagle3:"
_AMPERE = 80


@dataclass(frozen=True)
class TrtOptions:
    """Options of TensorRT engines.

    Args:
        hardware_compatible: engines built on Ampere or newer run on every GPU from Ampere on. Otherwise TensorRT supports
            only the GPU model that they were built on.
        version_compatible: later releases of the same major version load the engines.
        strip_weights: engines without weights; the runtime refits them at load from files in the same folder.
    """

    hardware_compatible: bool = False
    version_compatible: bool = False
    strip_weights: bool = False

    def check(self, compute: int) -> None:
        """Raise TargetError for options that TensorRT does not support on GPUs of capability ``compute`` (times ten)."""
        if self.hardware_compatible and compute < _AMPERE:
            raise TargetError(f"--hardware-compatible engines need Ampere or newer; leave it out for trt-sm_{compute}")

    def configure(self, trt: Any, config: Any) -> None:
        """Set the options on a builder configuration of module ``trt``."""
        if self.hardware_compatible:
            config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        if self.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if self.strip_weights:
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)
            config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)

    def runs_on(self, compute: int) -> list[int]:
        """The capabilities of the GPUs that an engine built on ``compute`` runs on."""
        if not self.hardware_compatible:
            return [compute]
        return [one.compute for one in ARCHITECTURES if one.compute >= _AMPERE and not one.ptx]

    @property
    def flags(self) -> list[str]:
        """The options that are set, as command-line flags: ``--version-compatible``, …"""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value]

    def __str__(self) -> str:
        """Suffix of the engines' tool in the manifest: empty, or `, version-compatible`, …"""
        return "".join(f", {name.removeprefix('--')}" for name in self.flags)


@dataclass(frozen=True)
class ExportConfig:
    """Options of one export.

    Args:
        dtype: precision of weights and caches, fp32, fp16 or bf16.
        weights: ``auto``, the default of the commands, chooses for the model and this machine, see `tide_export.chosen_weights`;
            ``source`` keeps weights as they are stored, in low bits or not; ``w8a8`` makes products of integers, see
            `tide_export.quantize.integer_weights`; ``int8`` and ``int4`` quantise all matrices with
            ``quantizer``, embedding and head (but see ``head_bits``) in 8 bits, and leave those that have these bits already; a
            precision dequantises them, and is ``dtype`` too.
        quantizer: see `tide_export.quantize.quantizers`.
        head_bits: of the head with ``weights`` int4: ``auto`` takes 4 where that costs little perplexity; see
            `tide_export.quantize.head_bits`.
        text: that the quantizer gptq and w8a8 read, as ``data``; without it they read ``data``, and w8a8 without either Python's
            documentation.
        kv: ``model`` keeps keys and values in ``dtype``, ``int8`` rounds them; see `tide_export.quantize.kv_scales`.
        checkpoints: where to cut, in layers run before the cut: ``"6,12,18"``, ``"every:6"``, ``"none"`` or
            ``"auto"`` (the exits of the calibration; four even segments without one).
        max_seq_len: KV cache slots per sequence (prompt and output together), in tokens; None takes the model's own
            maximum, at most 4096.
        targets: kinds of machine to compile for; ``auto`` is the CPU and targets for the GPU present, if any; ``all``
            is every target that this machine can compile for.
        verify: compare the finished bundle with the eager model and refuse to finish on a mismatch.
        explain: print where lowering passes did not apply, and the reasons.
        calibration: a directory that ``tide-calibrate`` wrote for this model; its exits go into the bundle.
        data: text to calibrate on first: a file, a directory or a hub data set, as ``tide-calibrate --data`` takes it. The
            quantizer gptq reads it too.
        max_batch: most sequences in one step of an engine; other targets take any number.
        force_rebuild: build engines even if the cache has them.
        tokenizer: the directory, tokenizer.json, GGUF file or hub id of the tokenizer; ``none`` writes a bundle without one. None
            takes the model's own.
        hardware_compatible, version_compatible, strip_weights: options of TensorRT engines; see TrtOptions.
        draft_head: ``eagle3:DIR``, the EAGLE-3 head in a folder, or ``mtp``, the layer for further tokens that the checkpoint
            has; see `tide_export.drafters`.
    """

    dtype: str = "fp32"
    checkpoints: str = "auto"
    max_seq_len: int | None = None
    targets: tuple[str, ...] = ("auto",)
    verify: bool = True
    explain: bool = False
    calibration: str | None = None
    data: str | None = None
    max_batch: int = 16
    force_rebuild: bool = False
    hardware_compatible: bool = False
    version_compatible: bool = False
    strip_weights: bool = False
    weights: str = "source"
    quantizer: str = QUANTIZERS[0]
    head_bits: str = HEAD_BITS[0]
    text: str | None = None
    kv: str = KV[0]
    tokenizer: str | None = None
    draft_head: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ParamsError(f"dtype is {self.dtype!r}; set it to one of: {', '.join(DTYPES)}")
        weights = ExportConfig.weights if self.weights == AUTO else self.weights
        object.__setattr__(self, "dtype", dtype_with(weights, self.quantizer, self.dtype, ExportConfig.dtype))
        if self.kv not in KV:
            raise ParamsError(f"kv is {self.kv!r}; set it to one of: {', '.join(KV)}")
        if self.head_bits not in HEAD_BITS:
            raise ParamsError(f"head_bits is {self.head_bits!r}; set it to one of: {', '.join(HEAD_BITS)}")
        if self.head_bits == "4" and self.weights != "int4":
            raise ParamsError("head_bits is 4, which needs weights int4; leave it out or choose those")
        if self.max_seq_len is not None and self.max_seq_len < 1:
            raise ParamsError(f"max_seq_len is {self.max_seq_len}; set it to at least 1 token")
        if not self.targets:
            raise ParamsError("no target given; --target auto is the default")
        if self.max_batch < 1:
            raise ParamsError(f"max_batch is {self.max_batch}; set it to at least 1 sequence")
        if self.calibration is not None and self.data is not None:
            raise ParamsError(
                "both a calibration and data to calibrate on are given; leave out --data to use the calibration as it is, "
                "or leave out --calibration to make a new one"
            )
        if self.data is not None and self.text is not None:
            raise ParamsError(
                "both --data and --text are given; leave out --text, as the quantizer reads the text that the exits are "
                "calibrated on, or leave out --data to calibrate no exits"
            )
        self._check_text()
        if self.weights == "w8a8" and self.dtype != "fp32":
            raise ParamsError(f"weights w8a8 need activations in fp32, and dtype is {self.dtype}; leave out --dtype")
        if self.draft_head is not None and not re.fullmatch(rf"mtp|{EAGLE3_PREFIX}.+", self.draft_head):
            raise ParamsError(
                f"draft head is {self.draft_head!r}; set it to {EAGLE3_PREFIX}DIR, the folder of an EAGLE-3 head, or to mtp, the "
                "layer for further tokens that the checkpoint brings along"
            )
        if not re.fullmatch(r"auto|none|every:[1-9]\d*|\d+(,\d+)*", self.checkpoints):
            raise ParamsError(
                f"checkpoints is {self.checkpoints!r}; set it to layers such as 6,12,18, to every:6, to none, or to auto"
            )

    def _check_text(self) -> None:
        needs = self.weights == "int4" and reads_text(4, self.quantizer)
        if needs and self.quantizer_text is None:
            others = ", ".join(name for name in QUANTIZERS if not reads_text(4, name))
            raise ParamsError(
                f"the quantizer {self.quantizer} reads text like the text to be generated, and none is given; add "
                f"--text FILE (some 16,000 tokens), or choose one that needs none: {others}"
            )
        if self.text is not None and not needs and self.weights not in (AUTO, "w8a8"):
            raise ParamsError(
                "--text is given, and only --weights w8a8 and --weights int4 --quantizer gptq read it; leave it out or "
                "choose those"
            )

    @property
    def quantizer_text(self) -> str | None:
        """What gptq and w8a8 read."""
        return self.text if self.text is not None else self.data

    @property
    def trt(self) -> TrtOptions:
        """The options of TensorRT engines."""
        return TrtOptions(self.hardware_compatible, self.version_compatible, self.strip_weights)


def dtype_with(weights: str, quantizer: str, dtype: str, default: str) -> str:
    """The dtype that ``weights`` and ``dtype`` mean together. Raises ParamsError for unknown names, or two precisions."""
    if weights not in WEIGHTS:
        raise ParamsError(f"weights is {weights!r}; set it to one of: {', '.join(WEIGHTS)}")
    if quantizer not in QUANTIZERS:
        raise ParamsError(f"quantizer is {quantizer!r}; set it to one of: {', '.join(QUANTIZERS)}")
    if weights in DTYPES and dtype not in (weights, default):
        raise ParamsError(f"weights is {weights} and dtype {dtype}; leave out one of them")
    return weights if weights in DTYPES else dtype


def reads_text(bits: int, quantizer: str) -> bool:
    """Whether the quantizer needs text; 8 bits are rounded to nearest whatever its name."""
    return bits == 4 and quantizer.startswith("gptq")


def weights_title(weights: str, quantizer: str) -> str:
    """The two options as one name, which tells models apart: ``source``, ``fp32``, ``int4 rtn``."""
    return f"{weights} {quantizer}" if weights in ("int4", "int8") else weights


def checkpoint_layers(spec: str, num_layers: int, calibration: CalibrationInfo | None = None, loops: int = 1) -> list[int]:
    """Layers run before each cut, increasing, each from 1 to num_layers - 1: the last layer is never a checkpoint.

    ``auto`` takes the cuts that the exits of ``calibration`` need; without one the ends of ``loops``, or four even segments of a
    model that has none. Raises ParamsError for layers that do not exist or that conflict with those exits.
    """
    if calibration is None:
        return loop_ends(num_layers, loops) if spec == "auto" and loops > 1 else _layers(spec, num_layers)
    needed = calibration.cuts(num_layers)
    layers = needed if spec == "auto" else _layers(spec, num_layers)
    missing = [str(layer) for layer in needed if layer not in layers]
    if missing:
        raise ParamsError(
            f"checkpoints {spec} lack {', '.join(missing)}, where the calibration's exits need a cut; add them, or leave "
            f"out --checkpoints to cut at {', '.join(map(str, needed))}"
        )
    if calibration.tail_layers and layers[-1] > needed[-1]:
        raise ParamsError(
            f"checkpoints {spec} cut through the last {calibration.tail_layers} layers, which the calibration's exits run "
            f"as one segment; cut nowhere after {needed[-1]}"
        )
    return layers


def loop_ends(num_layers: int, loops: int) -> list[int]:
    """Layers run at the end of each loop but the last."""
    return [loop * num_layers // loops for loop in range(1, loops)]


def _layers(spec: str, num_layers: int) -> list[int]:
    if spec == "auto":
        pieces = min(4, num_layers)
        return [round(i * num_layers / pieces) for i in range(1, pieces)]
    if spec == "none":
        return []
    if spec.startswith("every:"):
        return list(range(int(spec[6:]), num_layers, int(spec[6:])))
    layers = [int(part) for part in spec.split(",")]
    if sorted(set(layers)) != layers or layers[0] < 1 or layers[-1] >= num_layers:
        raise ParamsError(
            f"checkpoints {spec} do not fit a model of {num_layers} layers; give rising numbers from 1 to {num_layers - 1} "
            "(how many layers run before each cut)"
        )
    return layers
