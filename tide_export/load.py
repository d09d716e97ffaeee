"""Load a causal LM and its tokenizer, or raise the reason why it cannot be compiled. Pickled files are rejected.

Sources: a HuggingFace directory or hub id, quantised or not, and GGUF files. Low-bit weights are kept apart from the model, whose
parameters have their dequantised values: tracing, calibration and verification compute with the bundle's matrices.

A model is *streamed* where it can be: its parameters are fake, and each value is made from the files when it is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tide_runtime.errors import ModelFilesError, TideError, UnsupportedModelError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import tide_export.model.looped_models  # registers its classes with transformers
import tide_export.model.mimo  # noqa: F401  # registers its classes with transformers
from tide_export.config import reads_text, weights_title
from tide_export.model.embedding_model import give_states, read_embedding
from tide_export.model.fake_parameters import without_parameters
from tide_export.model.long_rotary import LONGROPE
from tide_export.model.probe import probe_layers
from tide_export.model.remote_code import check_remote_code, code_digests
from tide_export.model.traced_recurrence import with_limits_of_config
from tide_export.quantize.quantized_parameters import QuantizedParameters, in_memory
from tide_export.quantize.quantizers import quantize_for_text
from tide_export.sources.accounting import check_names, check_values, read_headers, weight_files
from tide_export.sources.checkpoint_parameters import CheckpointParameters
from tide_export.sources.gguf.file import is_gguf
from tide_export.sources.gguf.source import first_line, load_gguf
from tide_export.sources.loaded_model import LoadedModel
from tide_export.sources.quantised.checkpoints import find_settings, load_quantized_checkpoint
from tide_export.sources.source_tokenizer import load_tokenizer
from tide_export.weights.quantized_weight import QuantizedWeight

CHECKPOINT_METHODS = ("gptq", "awq", "compressed-tensors", "bitsandbytes")
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_model(
    source: str,
    dtype: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: str = "source",
    tokenizer: str | None = None,
    stream: bool = False,
    note: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load ``source`` in ``dtype``: a local directory, a hub id, or a GGUF file.

    Args:
        weights: ``source`` keeps low-bit weights; `quantized` makes others of the dequantised ones.
        tokenizer: see `load_tokenizer`.
        stream: leave the parameters in the files, where the source's form allows it.
        note: called with a sentence before a model that cannot be streamed is loaded.

    Raises ModelFilesError if files are missing, truncated or pickled, UnsupportedModelError if TIDE cannot compile the model.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    if is_gguf(source):
        model, parameters, embedding = load_gguf(Path(source), TORCH_DTYPES[dtype])
        check_supported(model.config)
        layers = probe_layers(with_limits_of_config(model))
        own = load_tokenizer(source, tokenizer)
        files = (Path(source),)
        if weights in TORCH_DTYPES:
            parameters.low_bits = {}
        low_bits = parameters.low_bits
        notes = tuple(parameters.notes)
        made = {"notes": notes, "streamed": parameters, "probed": layers, "embedding": embedding}
        loaded = LoadedModel(model, own, source, None, files, low_bits, **made)
    else:
        loaded = _load_huggingface(source, dtype, revision, trust_remote_code, tokenizer, stream, note)
    loaded = loaded if stream else in_memory(loaded)
    return replace(loaded, quantized={}, weights=weights, notes=()) if weights in TORCH_DTYPES else loaded


def held_in_memory(loaded: LoadedModel, reason: str, note: Callable[[str], None]) -> LoadedModel:
    """`in_memory`, and before it a ``note`` on the reason and on the memory that a streamed model will take."""
    if loaded.streamed is not None:
        note(_in_memory_note(loaded.model, reason))
    return in_memory(loaded)


def quantized(
    loaded: LoadedModel,
    weights: str,
    quantizer: str,
    advance: Callable[[int, int], None] | None = None,
    tokens: torch.Tensor | None = None,
) -> LoadedModel:
    """``loaded`` with all matrices in the bits of ``weights`` (int4, int8) by ``quantizer``; others as they are.

    ``advance``: called with the number of matrices done, and of all. ``tokens``: [B, T] ids, where `reads_text`. The model's
    parameters are changed in place.
    """
    if weights not in ("int4", "int8"):
        return loaded
    bits = int(weights.removeprefix("int"))
    done: dict[str, QuantizedWeight] = {}
    if reads_text(bits, quantizer):
        assert tokens is not None
        loaded = in_memory(loaded)
        done = quantize_for_text(loaded.model, quantizer, loaded.quantized, tokens, loaded.loops, advance)
    text = hashlib.sha256(tokens.numpy().tobytes()).hexdigest() if tokens is not None else ""
    parameters = QuantizedParameters(loaded.parameters, loaded.model, bits, loaded.quantized, done=done)
    title = weights_title(weights, quantizer)
    notes = tuple(parameters.notes)
    changed = replace(loaded, quantized=parameters.low_bits, weights=title, text=text, notes=notes, streamed=parameters)
    return changed if loaded.streamed is not None else in_memory(changed, advance)


def _with_tied(model: PreTrainedModel, quantized: Mapping[str, QuantizedWeight]) -> dict[str, QuantizedWeight]:
    """``quantized`` under every name that a shared parameter has: the trace may use any of them."""
    names = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    weights = {names[name]: weight for name, weight in quantized.items()}
    return {name: weights[key] for name, key in names.items() if key in weights}


def _load_huggingface(
    source: str,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,
    tokenizer: str | None,
    stream: bool,
    note: Callable[[str], None] | None,
) -> LoadedModel:
    _check_directory(source)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    quantized: Mapping[str, QuantizedWeight] = {}
    streamed: CheckpointParameters | None = None
    try:
        check_remote_code(source, revision, trust_remote_code)
        config = AutoConfig.from_pretrained(source, **options)
        check_supported(config)
        _leave_out_encoders(config)
        find_settings(source, config, revision)
        embedding = read_embedding(source, revision, config)
        method = quantization_method(config)
        if method is not None and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:  # transformers would only warn
            raise UnsupportedModelError(
                f"{source} was quantised by {method!r}, which cannot be read; take a checkpoint of one of "
                f"{', '.join(CHECKPOINT_METHODS)}, or the original model"
            )
        files = weight_files(source, revision)
        fake = None
        if stream or embedding is not None:
            fake = _without_parameters(config, TORCH_DTYPES[dtype], trust_remote_code)
            reason = _in_memory_reason(fake, files, trust_remote_code)
            if reason and embedding is not None:
                raise UnsupportedModelError(f"{source} is an embedding model, and {reason}; take the original checkpoint")
            if reason and note is not None:
                note(_in_memory_note(fake, reason))
            fake = fake if reason is None else None
        if method in CHECKPOINT_METHODS:
            model, quantized, notes = load_quantized_checkpoint(source, config, TORCH_DTYPES[dtype], revision, trust_remote_code)
            quantized = _with_tied(model, quantized)
        elif fake is not None:
            left_out = give_states(fake) if embedding is not None else None
            model, (streamed, notes) = fake, _stream_plain(source, fake, config, revision, files, left_out)
        else:
            model, notes = _load_plain(source, config, TORCH_DTYPES[dtype], options)
    except TideError:
        raise
    except (OSError, SafetensorError) as error:
        raise ModelFilesError(f"cannot load {source}: {first_line(error)}") from error
    except (ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} cannot load {source}: {first_line(error)}"
        ) from error
    layers = probe_layers(with_limits_of_config(model.eval()))
    own = load_tokenizer(source, tokenizer, config, options)
    files = files or weight_files(source, revision)
    notes = tuple(notes)
    code = code_digests(model)
    made = {"notes": notes, "streamed": streamed, "code": code, "probed": layers, "embedding": embedding}
    return LoadedModel(model, own, source, revision, files, quantized, **made)


def _leave_out_encoders(config: PreTrainedConfig) -> None:
    """Set the configs of parts that the model runs without to None, as for images or sound: the bundle reads text."""
    for name, spec in getattr(config, "sub_configs_defaults", {}).items():
        if getattr(spec, "optional", False):
            setattr(config, name, None)


def _auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes the model: one for text if there is one, else one that also reads images or sound.

    Raises UnsupportedModelError where there is none, and no code came with the model.
    """
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    found = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
    if found is None and not getattr(config, "auto_map", None):
        raise UnsupportedModelError(
            f"{config.model_type} is not supported, because transformers {transformers.__version__} has no model of this type "
            "that writes text"
        )
    return found or AutoModelForCausalLM


def _without_parameters(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    make = partial(_auto_class(config).from_config, config, dtype=dtype, trust_remote_code=trust_remote_code)
    return without_parameters(make)


def _in_memory_reason(fake: PreTrainedModel, files: tuple[Path, ...], trust_remote_code: bool) -> str | None:
    """Why transformers has to load the checkpoint of ``fake`` as a whole; None where it can be streamed."""
    if method := quantization_method(fake.config):
        return f"its checkpoint is quantised by {method}, and is unpacked as a whole"
    if trust_remote_code and getattr(fake.config, "auto_map", None):
        return "the code that comes with it may change parameters when they are loaded"
    if fake._get_dtype_plan(fake.dtype):
        return f"some of its parameters stay in fp32 beside those in {fake.dtype}"
    return None if files else "its files have names that only transformers finds"


def _in_memory_note(model: PreTrainedModel, reason: str) -> str:
    gib = sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters()) / 2**30
    return f"the whole model is held in memory, {gib:.1f} GiB for its parameters, because {reason}"


def _stream_plain(
    source: str,
    fake: PreTrainedModel,
    config: PreTrainedConfig,
    revision: str | None,
    files: tuple[Path, ...],
    left_out: str | None = None,
) -> tuple[CheckpointParameters, list[str]]:
    """The values of the parameters of ``fake``, which gets its buffers, and sentences on tensors that were left out.

    ``left_out``: a module that the files may have and ``fake`` has not.
    """
    headers = {name: one for name, one in read_headers(files).items() if left_out is None or not name.startswith(f"{left_out}.")}
    notes = check_names(source, fake, headers, config)
    parameters = CheckpointParameters(source, fake, files, headers)
    parameters.fill_buffers()
    fake.adjust_generation_fn(
        None, False, None, source, None, False, None, False, None, revision=revision, subfolder="", trust_remote_code=False
    )
    return parameters, notes


def _load_plain(source: str, config: PreTrainedConfig, dtype: torch.dtype, options: dict) -> tuple[PreTrainedModel, list[str]]:
    """The model, and sentences on tensors that were left out. The names are checked first: transformers' errors have none."""
    headers = read_headers(weight_files(source, options["revision"]))
    # A quantiser of transformers changes the modules, and a converted pull request of the hub has other files: its report counts.
    own_names = bool(headers) and quantization_method(config) is None
    notes: list[str] = []
    if own_names:
        with torch.device("meta"):
            skeleton = _auto_class(config).from_config(config, dtype=dtype, trust_remote_code=options["trust_remote_code"])
        notes = check_names(source, skeleton, headers, config)
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    loaded: tuple[PreTrainedModel, Mapping[str, Collection]] = _auto_class(config).from_pretrained(
        source, config=config, dtype=dtype, use_safetensors=True, **reported, **options
    )
    model, report = loaded
    check_values(source, model, report, own_names)
    return model, notes


def quantization_method(config: PreTrainedConfig) -> str | None:
    """How the checkpoint was quantised, None where it was not."""
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method)) if method is not None else None


def check_supported(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for model families that are not one stack of layers of known kinds."""
    text = config.get_text_config()
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is not supported, because it is an encoder-decoder; TIDE compiles decoder-only models"
        )
    if getattr(text, "num_hidden_layers", None) is None:
        raise UnsupportedModelError(
            f"{name} is not supported, because its config describes no single stack of layers (num_hidden_layers)"
        )
    if getattr(text, "altup_num_inputs", 0):
        raise UnsupportedModelError(
            f"{name} is not supported, because its layers pass on copies of the whole batch (AltUp); TIDE compiles layers that "
            "pass on each token's state, of one residual stream or several"
        )
    if getattr(text, "alibi", False) or name in ("bloom", "mpt"):
        raise UnsupportedModelError(f"{name} is not supported, because ALiBi position biases have no compiled attention kernel")
    scaling = getattr(text, "rope_parameters", None) or {}
    by_layer_type = {value.get("rope_type") for value in scaling.values() if isinstance(value, dict)}
    for kind in ("dynamic", LONGROPE):
        if kind in by_layer_type or scaling.get("rope_type") == kind != LONGROPE:
            raise UnsupportedModelError(
                f"{name} is not supported, because its {kind!r} rotary embedding depends on the length of the whole sequence"
            )


def weight_bytes(loaded: LoadedModel) -> int:
    """Bytes that the weights take in a bundle at least: low-bit values and their scales, and all other parameters."""
    total = 0
    for name, parameter in loaded.model.named_parameters():
        weight = loaded.quantized.get(name)
        values = parameter.numel()
        total += parameter.nbytes if weight is None else values * weight.bits // 8 + 4 * values // weight.block_size
    return total


def fingerprint(loaded: LoadedModel) -> str:
    """SHA-256 over the names, types, shapes and bytes of the weights, in name order.

    Hashes the weights as stored in the model's files, before `load_model` converts them, so the fingerprint depends on neither
    dtype nor sharding; a GGUF file is hashed whole. A model without files is hashed in memory. Quantising makes another model.
    """
    digest = hashlib.sha256()
    if loaded.weights not in ("source", *TORCH_DTYPES):
        digest.update(f"{loaded.weights}{loaded.text}".encode())
    if loaded.weight_files and is_gguf(str(loaded.weight_files[0])):
        with loaded.weight_files[0].open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()
    stored = _stored_weights(loaded.weight_files)
    in_memory = sorted(loaded.model.state_dict().items())
    for name, tensor in stored if loaded.weight_files else in_memory:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def _stored_weights(files: tuple[Path, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of safetensors files, one at a time, in name order."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
        for name, number in sorted((name, number) for number, file in enumerate(opened) for name in file.keys()):  # noqa: SIM118
            yield name, opened[number].get_tensor(name)


def _check_directory(source: str) -> None:
    path = Path(source)
    if not path.exists():
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise ModelFilesError(f"there is no directory {source}; give a model directory or a hub id such as org/name")
        return
    if not path.is_dir() or not (path / "config.json").is_file():
        raise ModelFilesError(f"{source} holds no config.json, so it is not a HuggingFace model directory")
    if not list(path.glob("*.safetensors")):
        pickled = sorted(p.name for p in path.glob("*.bin")) + sorted(p.name for p in path.glob("*.pt"))
        if pickled:
            raise ModelFilesError(
                f"{source} has only pickled weights ({pickled[0]}), which can run code when loaded; "
                "save the model again with save_pretrained, which writes safetensors"
            )
        raise ModelFilesError(f"{source} has no weights: expected *.safetensors beside config.json")
