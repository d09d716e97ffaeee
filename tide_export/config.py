"""Options of an export; the command line takes its defaults from here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tide_runtime.bundle.architectures import ARCHITECTURES
from tide_runtime.bundle.calibration import CalibrationInfo
from tide_runtime.bundle.manifest import DTYPES
from tide_runtime.errors import ParamsError, TargetError
from tide_runtime.option import check_choices, option

AUTO = "auto"  # only for exports, which know the machine that they are for; a calibration takes one of the others
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
    """Options of one export, as `tide-export` takes them; the default of its ``--weights`` is auto.

    The field ``quantizer`` names one of `tide_export.quantize.quantizers`; ``draft_head`` one of `tide_export.drafters`.
    """

    dtype: str = option("fp32", "Precision of weights and caches: fp32, fp16 or bf16.", one_of=DTYPES)
    weights: str = option(
        "source",
        "Precision of the matrices: auto (w8a8 where it fits this machine's memory, else 4 bits; source for GPUs), w8a8 "
        "(products of integers on processors, 8 bits a weight), source (as stored; blocks of GGUF, GPTQ, AWQ, "
        "compressed-tensors are kept), int8 or int4 (quantised here; embedding in 8 bits, head: --head-bits), fp32, fp16 or "
        "bf16 (dequantised). auto takes what a --calibration was made for.",
        command_default=AUTO,
    )
    quantizer: str = option(
        QUANTIZERS[0],
        "With --weights int4 (int8 is always rounded to nearest): rtn, "
        "gptq (minutes, reads text: --text), gptq_mixed (gptq, but the eighth of the weights whose "
        "rounding changes the output most has 8 bits: the most accurate, a tenth larger).",
    )
    head_bits: str = option(
        HEAD_BITS[0],
        "Of the head with --weights int4: 4, 8, or auto, which takes 4 where the head is a tenth of the model or more "
        "and the perplexity of a fixed text rises by at most 1%; the manifest has the figures.",
        one_of=HEAD_BITS,
    )
    text: str | None = option(
        None,
        "Text like what the model will write: a file, a directory or a hub data set. --weights w8a8 reads 256 tokens "
        "of it, by default of Python's documentation; --quantizer gptq and gptq_mixed need some 16,000. With --data they "
        "read that. With --calibration give the text that tide-calibrate read.",
        metavar="SOURCE",
    )
    kv: str = option(
        KV[0],
        "Precision of the KV cache: model (that of --dtype) or int8 (targets cpu and torch: a quarter of the memory of "
        "fp32; prompts take longer).",
        one_of=KV,
    )
    checkpoints: str = option(
        "auto",
        "Where to cut, in layers run before the cut: 6,12,18 or every:6 or none or auto (where the calibration has "
        "its exits; four even segments without one).",
    )
    max_seq_len: int | None = option(
        None, "KV cache slots per sequence: prompt and output together, in tokens. Default: the model's own, at most 4096."
    )
    calibration: str | None = option(
        None,
        "Exits for this model, as `tide-calibrate MODEL --data DATA --out DIR` made them: where tokens may stop, how "
        "sure a router must be, and what that gains. Without them every token takes every layer.",
        metavar="DIR",
    )
    data: str | None = option(
        None,
        "Calibrate exits first, on text like what the model will write: a file, a directory or a hub data set. Minutes; "
        "run `tide-calibrate` yourself to keep its files, choose its options, or export one calibration twice.",
        metavar="SOURCE",
    )
    draft_head: str | None = option(
        None,
        "A trained drafter for policy exact: eagle3:DIR, an EAGLE-3 head for this model (config.json and *.safetensors "
        "as SpecForge, EAGLE or speculators write them), or mtp, the multi-token-prediction layer in the checkpoint itself. "
        "No calibration is needed; how it is read best is tried on replies of the model, which is in memory for that.",
        metavar="eagle3:DIR|mtp",
    )
    targets: tuple[str, ...] = option(
        ("auto",),
        "What to compile for; repeatable, all in one bundle. auto: the CPU and what fits the GPU present, if any; all: "
        "what this machine can compile for. --list-targets shows the table. A target that fails does not spoil the others: "
        "the bundle is written without it, and the exit code is 3.",
        "--target",
        kind=list[str],
    )
    max_batch: int = option(16, "Most sequences in one step of TensorRT and TensorRT-RTX engines; other targets take any number.")
    force_rebuild: bool = option(
        False,
        "Build engines anew. By default those whose graph, precision, steps and tool are unchanged come from "
        "$TIDE_CACHE_DIR/engines or ~/.cache/tide/engines.",
        "--force-rebuild",
    )
    hardware_compatible: bool = option(
        False, "TensorRT, sm_80 and newer: engines for all GPUs from Ampere on; slower.", "--hardware-compatible"
    )
    version_compatible: bool = option(
        False, "TensorRT: engines that later releases of the same major version load.", "--version-compatible"
    )
    strip_weights: bool = option(
        False, "TensorRT: engines without weights, which lie beside them and are put in at load.", "--strip-weights"
    )
    tokenizer: str | None = option(
        None,
        "Take the tokenizer and its chat template from here: a directory with tokenizer.json, such a file, a .gguf file "
        "or a hub id. none: a bundle without tokenizer, whose prompts are token ids. Default: the model's own.",
        metavar="DIR",
    )
    verify: bool = option(True, "Compare the bundle with the eager model on real prompts before finishing.")
    explain: bool = option(False, "Print where a lowering pass did not apply, and why.", "--explain")

    def __post_init__(self) -> None:
        check_choices(self)
        weights = ExportConfig.weights if self.weights == AUTO else self.weights
        object.__setattr__(self, "dtype", dtype_with(weights, self.quantizer, self.dtype, ExportConfig.dtype))
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
