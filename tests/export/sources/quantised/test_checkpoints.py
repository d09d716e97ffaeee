"""Quantised HuggingFace checkpoints: packed here from random integers, read back as exactly the weights that these mean."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export.architectures import tiny_model
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tide_runtime.errors import ModelFilesError, UnsupportedModelError
from transformers import AutoConfig, PreTrainedModel

from tide_export.sources.quantised.checkpoints import load_quantized_checkpoint

Tensors = dict[str, torch.Tensor]
Packer = Callable[[int, int, np.random.Generator], tuple[Tensors, NDArray[np.float32]]]
KEPT = ("embed", "wte", "wpe", "lm_head", "gate.w")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def int32_words(values: NDArray[np.integer], bits: int) -> torch.Tensor:
    """[R, C] → [R, ⌈C · bits / 32⌉]: the first value in the lowest bits."""
    fields = 32 // bits
    padded = np.pad(values.astype(np.uint64), ((0, 0), (0, -values.shape[1] % fields)))
    words = (padded.reshape(len(values), -1, fields) << (np.arange(fields, dtype=np.uint64) * np.uint64(bits))).sum(-1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def random_groups(
    rows: int, columns: int, bits: int, group_size: int, rng: np.random.Generator, symmetric: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Values [N, K], scales that fp16 holds exactly [N, G] and zero points of at least 1 [N, G]."""
    groups = 1 if group_size == -1 else columns // group_size
    scales = rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float16).astype(np.float32)
    zeros = rng.integers(1, 1 << bits, (rows, groups), np.uint8)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    return rng.integers(0, 1 << bits, (rows, columns), np.uint8), scales, zeros


def reference(
    values: NDArray[np.integer], scales: NDArray[np.float32], zeros: NDArray[np.integer] | int, group_of: NDArray[np.integer]
) -> NDArray[np.float32]:
    zero = zeros if isinstance(zeros, int) else zeros[:, group_of].astype(np.int64)
    return scales[:, group_of] * (values.astype(np.int64) - zero).astype(np.float32)


def gptq(
    bits: int = 4,
    group_size: int = 32,
    stored_zero_offset: int = 1,
    symmetric: bool = False,
    order: Callable[[NDArray, np.random.Generator], NDArray] = lambda group_of, rng: group_of,
) -> Packer:
    def pack(rows: int, columns: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        values, scales, zeros = random_groups(rows, columns, bits, group_size, rng, symmetric)
        group_of = order(np.arange(columns) // (columns // scales.shape[1]), rng)
        tensors = {
            "qweight": int32_words(values, bits).T.contiguous(),
            "qzeros": int32_words(zeros.T - stored_zero_offset, bits),
            "scales": torch.from_numpy(scales.T.copy()).half(),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return tensors, reference(values, scales, zeros, group_of)

    return pack


def awq(group_size: int = 32) -> Packer:
    def words(matrix: NDArray) -> torch.Tensor:
        return int32_words(matrix.reshape(len(matrix), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(matrix.shape), 4)

    def pack(rows: int, columns: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        values, scales, zeros = random_groups(rows, columns, 4, group_size, rng)
        tensors = {"qweight": words(values.T), "qzeros": words(zeros.T), "scales": torch.from_numpy(scales.T.copy()).half()}
        return tensors, reference(values, scales, zeros, np.arange(columns) // (columns // scales.shape[1]))

    return pack


def pack_quantized(bits: int = 4, group_size: int = 32, symmetric: bool = True) -> Packer:
    def pack(rows: int, columns: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        values, scales, zeros = random_groups(rows, columns, bits, group_size, rng, symmetric)
        tensors = {
            "weight_packed": int32_words(values, bits),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = int32_words(zeros.T, bits).T.contiguous()
        scales = tensors["weight_scale"].float().numpy()
        return tensors, reference(values, scales, zeros, np.arange(columns) // (columns // scales.shape[1]))

    return pack


def int_quantized(per_tensor: bool = False, symmetric: bool = True) -> Packer:
    def pack(rows: int, columns: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        weight = rng.integers(-128, 128, (rows, columns), np.int8)
        scale = rng.uniform(0.001, 0.01, (1,) if per_tensor else (rows, 1)).astype(np.float32)
        tensors = {"weight": torch.from_numpy(weight), "weight_scale": torch.from_numpy(scale)}
        zeros = np.zeros((rows, 1), np.int8)
        if not symmetric:
            zeros = rng.integers(-128, 128, (rows, 1), np.int8)
            tensors["weight_zero_point"] = torch.from_numpy(zeros)
        return tensors, reference(weight, np.broadcast_to(scale, (rows, 1)), zeros, np.zeros(columns, np.int64))

    return pack


def llm_int8(rows: int, columns: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
    weight = rng.integers(-127, 128, (rows, columns), np.int8)
    absmax = rng.uniform(0.1, 1.0, rows).astype(np.float32)
    tensors = {
        "weight": torch.from_numpy(weight),
        "SCB": torch.from_numpy(absmax),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, weight.astype(np.float32) * (absmax / np.float32(127))[:, None]


def code_book(double: bool, block_size: int = 64, nested_size: int = 16) -> Packer:
    """bitsandbytes of 4 bits; ``double``: the maxima of the blocks are quantised too."""

    def pack(rows: int, columns: int, rng: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
        code = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        indices = rng.integers(0, 16, rows * columns, np.uint8)
        blocks = rows * columns // block_size
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block_size, "dtype": "bfloat16", "shape": [rows, columns]}
        tensors = {
            "weight": torch.from_numpy(indices[::2] << 4 | indices[1::2])[:, None],
            "weight.quant_map": torch.from_numpy(code),
        }
        maxima = rng.uniform(0.1, 1, blocks).astype(np.float32)
        if double:
            nested_code = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            nested = rng.uniform(0.1, 1, -(-blocks // nested_size)).astype(np.float32)
            chosen = rng.integers(0, 256, blocks, np.uint8)
            maxima = nested_code[chosen] * nested[np.arange(blocks) // nested_size] + np.float32(0.5)
            state |= {"nested_blocksize": nested_size, "nested_dtype": "float32", "nested_offset": 0.5}
            tensors |= {
                "weight.nested_absmax": torch.from_numpy(nested),
                "weight.nested_quant_map": torch.from_numpy(nested_code),
            }
        tensors["weight.absmax"] = torch.from_numpy(chosen if double else maxima)
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return tensors, (code[indices] * maxima[np.arange(rows * columns) // block_size]).reshape(rows, columns)

    return pack


def gptq_settings(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq", **settings}


def awq_settings(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", **settings}


def compressed_settings(layout: str = "pack-quantized", activations: dict | None = None, **weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def int_settings(**weights: Any) -> dict[str, Any]:
    return compressed_settings("int-quantized", num_bits=8, **{"strategy": "channel", "group_size": None, **weights})


INT8 = int_settings()
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@dataclass
class Checkpoint:
    """A tiny model's directory whose projections are quantised, and what they mean."""

    directory: Path
    state: Tensors
    matrices: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def save(self) -> None:
        save_file(self.state, self.directory / "model.safetensors", metadata={"format": "pt"})

    def load(self, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Mapping, list[str]]:
        config = AutoConfig.from_pretrained(self.directory)
        return load_quantized_checkpoint(str(self.directory), config, dtype, None, False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Checkpoint]:
    """``checkpoint(settings, pack)``: the projections of the architecture, random and packed by ``pack``."""

    def make(settings: dict[str, Any], pack: Packer, architecture: str = "llama") -> Checkpoint:
        tiny_model(architecture).save_pretrained(tmp_path)
        made = Checkpoint(tmp_path, load_file(tmp_path / "model.safetensors"))
        rng = np.random.default_rng(0)
        for name in [n for n, t in made.state.items() if t.ndim == 2 and not any(x in n for x in KEPT)]:
            shape = made.state.pop(name).shape
            rows, columns = reversed(shape) if architecture == "gpt2" else shape  # a Conv1D is stored as [in, out]
            tensors, made.matrices[name] = pack(rows, columns, rng)
            made.state |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in tensors.items()}
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        made.save()
        return made

    return make


CHANNELS = dict(strategy="channel", group_size=None)
# Settings, packer, block sizes for 64 and 128 input features.
MAPPED: dict[str, tuple[dict[str, Any], Packer, tuple[int, int]]] = {
    "gptq 4 bits": (gptq_settings(), gptq(), (32, 32)),
    "gptq groups of 16": (gptq_settings(group_size=16), gptq(group_size=16), (16, 16)),
    "gptq groups of 64": (gptq_settings(group_size=64), gptq(group_size=64), (32, 32)),
    "gptq symmetric": (gptq_settings(sym=True), gptq(symmetric=True), (32, 32)),
    "gptq v2": (gptq_settings(checkpoint_format="gptq_v2"), gptq(stored_zero_offset=0), (32, 32)),
    "gptq 8 bits": (gptq_settings(bits=8, group_size=64), gptq(8, 64), (64, 64)),
    "gptq 8 bits, one group": (gptq_settings(bits=8, group_size=-1), gptq(8, -1), (64, 32)),
    "gptq groups in reverse": (gptq_settings(desc_act=True), gptq(order=lambda group_of, rng: group_of[::-1].copy()), (32, 32)),
    "gptq bits per module": (gptq_settings(dynamic={"-:lm_head": {}, r"+:.*proj": {"bits": 8}}), gptq(8), (32, 32)),
    "awq groups of 64": (awq_settings(group_size=64), awq(64), (32, 32)),
    "pack-quantized": (compressed_settings(), pack_quantized(), (32, 32)),
    "pack-quantized, zero points": (compressed_settings(symmetric=False), pack_quantized(symmetric=False), (32, 32)),
    "pack-quantized, channels": (compressed_settings(**CHANNELS), pack_quantized(group_size=-1), (32, 32)),
    "pack-quantized 8 bits": (compressed_settings(num_bits=8, group_size=64), pack_quantized(8, 64), (64, 64)),
    "int-quantized": (INT8, int_quantized(), (64, 32)),
    "int-quantized, zero points": (INT8, int_quantized(symmetric=False), (64, 32)),
    "int-quantized, one scale": (int_settings(strategy="tensor"), int_quantized(per_tensor=True), (64, 32)),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8, (64, 32)),
}
SCATTERED, SYMMETRIC = [gptq(symmetric=one, order=lambda group_of, rng: rng.permutation(group_of)) for one in (False, True)]
DEQUANTIZED: dict[str, tuple[dict[str, Any], Packer, str]] = {
    "gptq act-order": (gptq_settings(desc_act=True), SCATTERED, "act-order spreads their groups over the input features"),
    "gptq act-order, symmetric": (gptq_settings(desc_act=True, sym=True), SYMMETRIC, "act-order spreads their groups over"),
    "gptq groups of 8": (gptq_settings(group_size=8), gptq(group_size=8), "no groups of 8"),
    "nf4": (NF4, code_book(double=False), "code book with uneven steps"),
    "nf4, double quantisation": (NF4, code_book(double=True), "code book with uneven steps"),
}


def same_matrices(model: PreTrainedModel, expected: Mapping[str, NDArray[np.float32]]) -> bool:
    parameters = dict(model.named_parameters())
    return all(np.array_equal(parameters[name].detach().numpy(), matrix) for name, matrix in expected.items())


@pytest.mark.parametrize("case", MAPPED)
def test_weights_are_mapped_without_a_change(checkpoint: Callable[..., Checkpoint], case: str) -> None:
    """A wrong nibble order, zero point or group would give a model that answers with noise."""
    settings, pack, block_sizes = MAPPED[case]
    made = checkpoint(settings, pack)
    model, quantized, notes = made.load()
    assert same_matrices(model, made.matrices)
    assert quantized.keys() == made.matrices.keys() and not notes
    for name, weight in quantized.items():
        assert np.array_equal(weight.dequantized(), made.matrices[name])
        assert weight.block_size == block_sizes[weight.shape[1] == 128]
    unquantized = [n for n, t in made.state.items() if n in model.state_dict() and n not in made.matrices]
    assert "lm_head.weight" in unquantized
    assert all(torch.equal(model.state_dict()[name], made.state[name]) for name in unquantized)
    assert not model.training and not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("case", DEQUANTIZED)
def test_what_has_no_blocks_is_dequantised_and_said(checkpoint: Callable[..., Checkpoint], case: str) -> None:
    """Someone who exports such a checkpoint must learn why the bundle is as large as the original model's."""
    settings, pack, reason = DEQUANTIZED[case]
    made = checkpoint(settings, pack)
    model, quantized, notes = made.load()
    assert same_matrices(model, made.matrices)
    assert not quantized and len(notes) == 1
    assert "28 matrices (down_proj, gate_proj, k_proj" in notes[0] and reason in notes[0]


def test_symmetric_zero_points_are_left_out(checkpoint: Callable[..., Checkpoint]) -> None:
    """Zero points of 8 in every block cost memory and time for nothing."""
    _, quantized, _ = checkpoint(gptq_settings(), gptq(symmetric=True)).load()
    assert all(weight.zero_points is None for weight in quantized.values())


def test_tied_head_without_a_tensor_of_its_own(checkpoint: Callable[..., Checkpoint]) -> None:
    """Small models store embedding and head once; the head must not count as missing."""
    made = checkpoint(awq_settings(), awq())
    del made.state["lm_head.weight"]
    made.save()
    config = json.loads((made.directory / "config.json").read_text())
    (made.directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model, _, _ = made.load()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_zero_biases_that_the_model_lacks_are_dropped(checkpoint: Callable[..., Checkpoint]) -> None:
    """AutoGPTQ wrote a bias of zeros for every layer; others would change the model and are refused."""
    made = checkpoint(gptq_settings(), gptq())
    made.state[f"{Q_PROJ}.bias"] = torch.zeros(64)
    made.save()
    made.load()
    made.state[f"{Q_PROJ}.bias"] = torch.ones(64)
    made.save()
    with pytest.raises(ModelFilesError, match=r"unknown model\.layers\.0\.self_attn\.q_proj\.bias"):
        made.load()


def test_fused_experts_are_dequantised(checkpoint: Callable[..., Checkpoint]) -> None:
    """transformers joins a layer's experts in one tensor, which has no single quantised matrix."""
    made = checkpoint(gptq_settings(), gptq(), "mixtral")
    model, quantized, notes = made.load()
    assert all("self_attn" in name for name in quantized) and len(quantized) == 16
    assert notes == [
        "48 matrices (w1, w2, w3) were dequantised, because the model stores them in another layout than the checkpoint."
    ]
    expert = made.matrices[next(name for name in made.matrices if "layers.0" in name and "experts.3.w2" in name)]
    assert np.array_equal(model.get_submodule("model.layers.0.mlp.experts").down_proj[3].detach().numpy(), expert)


def test_conv1d_is_dequantised_the_right_way_round(checkpoint: Callable[..., Checkpoint]) -> None:
    """GPT-2 stores its weights as [in, out] and GPTQ packs them as it packs [out, in]."""
    made = checkpoint(gptq_settings(), gptq(), "gpt2")
    model, quantized, notes = made.load()
    assert same_matrices(model, {name: matrix.T for name, matrix in made.matrices.items()})
    assert not quantized and "16 matrices (c_attn, c_fc, c_proj)" in notes[0]


def test_quantised_activations_are_left_out_and_said(checkpoint: Callable[..., Checkpoint]) -> None:
    """W8A8 runs with floating-point activations; its users must not think otherwise."""
    made = checkpoint(
        {**INT8, **compressed_settings("int-quantized", {"num_bits": 8}, num_bits=8, group_size=None)}, int_quantized()
    )
    made.state[f"{Q_PROJ}.input_scale"] = torch.ones(1)
    made.save()
    _, quantized, notes = made.load()
    assert len(quantized) == 28 and "only its weights are quantised" in notes[0]


def nothing(state: Tensors) -> None:
    """The settings are wrong and not the tensors."""


def drop(part: str) -> Callable[[Tensors], None]:
    """Remove a ``part`` of the first query projection."""
    return lambda state: state.__delitem__(f"{Q_PROJ}.{part}")


def shorten(part: str, axis: int = 0) -> Callable[[Tensors], None]:
    name = f"{Q_PROJ}.{part}" if part != "norm" else "model.norm.weight"
    return lambda state: state.update({name: state[name].narrow(axis, 0, state[name].shape[axis] - 1).contiguous()})


def no_norm(state: Tensors) -> None:
    del state["model.norm.weight"]


GPTQ, AWQ = gptq_settings(), awq_settings()
OF_A_MODULE = gptq_settings(dynamic={r".*q_proj": {"desc_act": True}})
IN_ORDER = compressed_settings(actorder="group")
QUANT_STATE = "weight.quant_state.bitsandbytes__nf4"
WITHOUT_INDEX = r"has no .*q_proj\.g_idx, but desc_act is true"
WITHOUT_ZEROS = r"has no .*q_proj\.weight_zero_point, but symmetric is false"
# Settings, packer, damage, words of the error.
DAMAGED: dict[str, tuple[dict[str, Any], Packer, Callable[[Tensors], None], str]] = {
    "missing scales": (GPTQ, gptq(), drop("scales"), r"has no .*q_proj\.scales"),
    "missing qweight": (AWQ, awq(), drop("qweight"), r"has no .*q_proj\.qweight"),
    "missing norm": (AWQ, awq(), no_norm, r"lacks model\.norm\.weight"),
    "unknown tensor": (AWQ, awq(), lambda state: state.update(surplus=torch.zeros(1)), "has unknown surplus"),
    "another width": (AWQ, awq(), shorten("norm"), r"model\.norm\.weight has shape \(63,\), expected \(64,\)"),
    "gptq truncated": (GPTQ, gptq(), shorten("qweight"), r"q_proj\.qweight has shape \(7, 64\), expected \(8, 64\)"),
    "awq truncated": (AWQ, awq(), shorten("qzeros", 1), r"q_proj\.qzeros has shape \(2, 7\), expected \(2, 8\)"),
    "gptq index out of range": (GPTQ, gptq(), lambda state: state[f"{Q_PROJ}.g_idx"].fill_(2), "q_proj's group index"),
    "scales truncated": (compressed_settings(), pack_quantized(), shorten("weight_scale", 1), r"has shape \(64, 1\), expected"),
    "int8 without scale": (INT8, int_quantized(), drop("weight_scale"), r"q_proj\.weight has type torch\.int8"),
    "nf4 truncated": (NF4, code_book(True), shorten("weight"), "has 2047 bytes, expected 2048"),
    "nf4 without state": (NF4, code_book(True), drop(QUANT_STATE), "has no .*quant_state"),
}
UNSUPPORTED: dict[str, tuple[dict[str, Any], Packer, Callable[[Tensors], None], str]] = {
    "act-order without an index": (gptq_settings(desc_act=True), SCATTERED, drop("g_idx"), WITHOUT_INDEX),
    "act-order of a module, without an index": (OF_A_MODULE, SCATTERED, drop("g_idx"), WITHOUT_INDEX),
    "zero points missing": (
        compressed_settings(symmetric=False), pack_quantized(symmetric=False), drop("weight_zero_point"), WITHOUT_ZEROS
    ),
    "int8 zero points missing": (
        int_settings(symmetric=False), int_quantized(symmetric=False), drop("weight_zero_point"), WITHOUT_ZEROS
    ),
    "actorder without an index": (IN_ORDER, pack_quantized(), nothing, r"has no .*\.weight_g_idx, but actorder is group"),
    "group does not divide": (gptq_settings(group_size=48), gptq(), nothing, "(64|128) input features in groups of 48"),
    "awq group does not divide": (awq_settings(group_size=48), awq(), nothing, "in groups of 48"),
    "packed group does not divide": (compressed_settings(group_size=48), pack_quantized(), nothing, "in groups of 48"),
    "3 bits": (gptq_settings(bits=3), gptq(), nothing, "GPTQ weights of 3 bits"),
    "awq 8 bits": (awq_settings(bits=8), awq(), nothing, "AWQ weights of 8 bits"),
    "marlin": (gptq_settings(checkpoint_format="marlin"), gptq(), nothing, "layout 'marlin'"),
    "gemv": (awq_settings(version="gemv"), awq(), nothing, "layout 'gemv'.*interleaves"),
    "fp8": (compressed_settings("float-quantized"), int_quantized(), nothing, "float-quantized.*int-quantized"),
    "block scales": (int_settings(strategy="block"), int_quantized(), nothing, "strategy block"),
    "unknown method": ({"quant_method": "aqlm"}, awq(), nothing, "'aqlm'.*gptq, awq, compressed-tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*DAMAGED, *UNSUPPORTED])
def test_bad_checkpoints_are_named(checkpoint: Callable[..., Checkpoint], case: str) -> None:
    """Breaks: a checkpoint that does not fit becomes a wrong model, where the error should name the tensor or the setting."""
    settings, pack, damage, message = (DAMAGED | UNSUPPORTED)[case]
    made = checkpoint(settings, pack)
    damage(made.state)
    made.save()
    with pytest.raises(ModelFilesError if case in DAMAGED else UnsupportedModelError, match=message):
        made.load()


def test_symmetric_modules_among_others(checkpoint: Callable[..., Checkpoint]) -> None:
    """Breaks: a checkpoint that is asymmetric in some modules only is refused for zero points that the others do not have."""
    settings = compressed_settings(symmetric=False)
    of_attention = {"targets": ["re:.*self_attn.*"], "weights": settings["config_groups"]["group_0"]["weights"]}
    others = {"targets": ["Linear"], "weights": of_attention["weights"] | {"symmetric": True}}
    made = checkpoint({**settings, "config_groups": {"group_0": others, "group_1": of_attention}}, pack_quantized(symmetric=True))
    for name in [name for name in made.state if name.endswith("weight_packed") and "self_attn" in name]:
        zeros = torch.from_numpy(np.full((2, made.state[name].shape[0] // 8), 0x88888888, np.uint32).view(np.int32).T.copy())
        made.state[name.replace("weight_packed", "weight_zero_point")] = zeros
    made.save()
    model, _, _ = made.load()
    assert same_matrices(model, made.matrices)
    del made.state[f"{Q_PROJ}.weight_zero_point"]
    made.save()
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight_zero_point"):
        made.load()
