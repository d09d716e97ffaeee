"""GGUF files as models: a tiny random Llama, written as llama.cpp's converter writes it, and damaged in many ways."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from cli_in_process import Done, cli_runner
from export.sources.gguf.llama_gguf import gguf_name, write_llama
from export.sources.gguf.test_gguf_blocks import FORMATS, random_blocks
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError, TideError, UnsupportedModelError
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tide_export import cli
from tide_export.load import fingerprint, load_model
from tide_export.model.fake_parameters import without_parameters
from tide_export.sources.gguf.file import GgufTensor, read_file
from tide_export.sources.gguf.source import GgufParameters

HEADS, KV_HEADS = 4, 2
IDS = torch.tensor([[5, 90, 7, 7, 280, 3]])
Q_PROJ = b"blk.1.attn_q.weight"


def stored_bytes(kind: str, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """Random blocks of small values: a model of wild ones hides differences behind its saturated attention."""
    if kind not in FORMATS:
        return gguf.quantize(np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32), GGMLQuantizationType[kind])
    data = random_blocks(kind, *shape, seed=seed)
    blocks = data.reshape(shape[0], -1, gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
    for place in FORMATS[kind][0]:
        halves = blocks[..., place : place + 2].copy().view(np.float16)
        blocks[..., place : place + 2] = (halves * np.float16(0.003)).view(np.uint8)
    return data


def as_transformers_has_it(name: str, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Undoes what llama.cpp's converter does to the rows of query and key: it puts the two that rotate together side by side."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
    return matrix if heads is None else matrix.reshape(heads, -1, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def written(folder: Path, kind: Callable[[str], str] | str = "Q4_K", tied: bool = False) -> tuple[Path, PreTrainedModel]:
    """A GGUF file whose tensors have the format ``kind`` (of their name), and the model that it holds, dequantised by gguf."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        vocab_size=300, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "huggingface")
    matrices: dict[str, NDArray[np.float32]] = {}

    def store(name: str, matrix: NDArray[np.float32]) -> tuple[NDArray, GGMLQuantizationType]:
        stored = GGMLQuantizationType[kind if isinstance(kind, str) else kind(name)]
        data = stored_bytes(stored.name, matrix.shape, len(matrices))
        matrices[name] = as_transformers_has_it(name, gguf.dequantize(data, stored))
        return data, stored

    file = folder / "model.gguf"
    write_llama(folder / "huggingface", file, store)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(matrices[gguf_name(name)]))
    return file, model


def logits(model: PreTrainedModel) -> NDArray[np.float32]:
    with torch.no_grad():
        return model(IDS).logits.numpy()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_model_of_the_file(kind: str, tied: bool, tmp_path: Path) -> None:
    """Rows of queries and keys in the file's order, or a head without its embedding, would give a model that talks nonsense."""
    file, expected = written(tmp_path, kind, tied)
    loaded = load_model(str(file), "fp32")
    assert np.array_equal(logits(loaded.model), logits(expected)) and np.abs(logits(expected)).max() > 0.1
    parameters = dict(loaded.model.named_parameters(remove_duplicate=False))
    assert loaded.quantized.keys() == {name for name, parameter in parameters.items() if parameter.ndim == 2}
    for name, weight in loaded.quantized.items():
        # The parameter is gguf's sum of scaled value and minimum, rounded in another order.
        np.testing.assert_allclose(weight.dequantized(), parameters[name].detach().numpy(), rtol=0, atol=1e-5)
        assert weight.origin == kind
    assert (loaded.quantized["lm_head.weight"] is loaded.quantized["model.embed_tokens.weight"]) == tied
    assert loaded.notes == () and loaded.tokenizer is not None and not loaded.model.training


def test_a_file_of_mixed_formats(tmp_path: Path) -> None:
    """Files named Q4_K_M have some tensors in Q6_K; norms and now and then a matrix are in floating point."""
    kinds = {"attn_v": "Q6_K", "token_embd": "Q8_0", "output": "F16", "ffn_down": "F32"}
    file, expected = written(tmp_path, lambda name: kinds.get(name.split(".")[-2], "Q4_K"))
    loaded = load_model(str(file), "fp32")
    assert np.array_equal(logits(loaded.model), logits(expected)) and loaded.notes == ()
    origins = {name: weight.origin for name, weight in loaded.quantized.items()}
    assert origins["model.layers.1.self_attn.v_proj.weight"] == "Q6_K" and origins["model.embed_tokens.weight"] == "Q8_0"
    assert "lm_head.weight" not in origins and "model.layers.0.mlp.down_proj.weight" not in origins and len(origins) == 13


def with_tensors(folder: Path, **changed: GgufTensor) -> GgufParameters:
    """The parameters of a file with other tensors, by the names' middle parts, in the first layer."""
    file, model = written(folder)
    named = {f"blk.0.{name}.weight": tensor for name, tensor in changed.items()}
    fake = without_parameters(lambda: LlamaForCausalLM(model.config))
    return GgufParameters(file.name, fake, "llama", {**read_file(file)[1], **named})


def test_formats_without_blocks_of_their_own_are_dequantised_and_said(tmp_path: Path) -> None:
    """Someone who exports such a file must learn why the bundle is as large as the original model's."""
    tensor = GgufTensor("blk.0.attn_q.weight", "Q3_K", np.zeros((256, 110), np.uint8))
    parameters = with_tensors(tmp_path, attn_q=tensor)
    assert parameters.notes == ["1 tensors of type Q3_K were dequantised: that has no layout that the kernels take"]
    assert "model.layers.0.self_attn.q_proj.weight" not in parameters.low_bits and len(parameters.low_bits) == 15


def test_tensors_that_are_not_the_parameters(tmp_path: Path) -> None:
    """Blocks would be kept for a parameter that has other values, or of another shape."""
    experts = GgufTensor("blk.0.ffn_down.weight", "Q4_0", np.stack([random_blocks("Q4_0", 256, 512, seed=99)] * 2))
    parameters = with_tensors(tmp_path, ffn_down=experts)
    assert parameters.notes == ["1 tensors of type Q4_0 were dequantised: that holds the matrices of several experts"]
    with pytest.raises(ModelFilesError, match=r"down_proj\.weight has shape \(2, 256, 512\), expected \(256, 512\)"):
        parameters.value("model.layers.0.mlp.down_proj.weight")
    with pytest.raises(ModelFilesError, match=r"up_proj\.weight has shape \(8, 512\), expected \(512, 256\)"):
        with_tensors(tmp_path, ffn_up=GgufTensor("blk.0.ffn_up.weight", "Q4_0", random_blocks("Q4_0", 8, 512, seed=99)))


@pytest.mark.parametrize("kind", [*FORMATS, "F16", "F32", "BF16"])
def test_rows_of_a_parameter(kind: str, tmp_path: Path) -> None:
    """A head that is read in pieces would have the rows of other tokens, or another type's numbers."""
    parameters = load_model(str(written(tmp_path, kind)[0]), "fp32", stream=True).parameters
    for name in ("lm_head.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert torch.equal(parameters.rows(name, 100, 50), parameters.value(name)[100:150])


def test_dequantised_on_request(tmp_path: Path) -> None:
    """``--weights fp32`` is for a bundle without low-bit products."""
    file, expected = written(tmp_path)
    loaded = load_model(str(file), "fp32", weights="fp32")
    assert not loaded.quantized and loaded.weights == "fp32" and np.array_equal(logits(loaded.model), logits(expected))


def test_the_fingerprint_follows_the_file_and_not_its_name(tmp_path: Path) -> None:
    """A file without its suffix, as caches keep them, would be read as safetensors; a changed one be taken for the calibrated."""
    file, _ = written(tmp_path)
    first = load_model(str(file), "fp32")
    renamed = file.rename(tmp_path / "blob")
    again = load_model(str(renamed), "fp32")
    assert again.quantized.keys() == first.quantized.keys() and len(fingerprint(again)) == 64
    before = fingerprint(again)
    raw = bytearray(renamed.read_bytes())
    raw[-1] ^= 1
    renamed.write_bytes(raw)
    assert fingerprint(load_model(str(renamed), "fp32")) != before


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:size]


def after(key: bytes, skip: int, value: int, size: int = 4) -> Callable[[bytes], bytes]:
    """Write ``value`` of ``size`` bytes, ``skip`` bytes behind ``key``."""

    def edit(raw: bytes) -> bytes:
        place = raw.index(key) + len(key) + skip
        return raw[:place] + value.to_bytes(size, "little") + raw[place + size :]

    return edit


def swap(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw.replace(old, new)


# Behind a key: 4 bytes of type, the value. Behind a tensor's name: 4 bytes, the shape as 2 × 8 bytes, 4 bytes of type.
DAMAGED: dict[str, tuple[Callable[[bytes], bytes], type[TideError], str]] = {
    "empty": (cut(0), ModelFilesError, r"no GGUF file.*download it again"),
    "a text": (lambda raw: b"404: Not Found", ModelFilesError, r"no GGUF file.*download it again"),
    **{f"{size} bytes": (cut(size), ModelFilesError, "cut short") for size in (4, 10, 24, 40, 100, 500, 3000, 8000, 300_000)},
    "last byte missing": (cut(-1), ModelFilesError, "cut short"),
    "future version": (lambda raw: raw[:4] + bytes([9, 0, 0, 0]) + raw[8:], ModelFilesError, "cannot be read"),
    "far too many tensors": (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], ModelFilesError, "cannot be read"),
    "no architecture": (swap(b"general.architecture", b"general.architektura"), ModelFilesError, "names no architecture"),
    "unknown architecture": (swap(b"llama", b"lamma"), UnsupportedModelError, "'lamma'.*HuggingFace checkpoint"),
    "unknown tensor type": (after(Q_PROJ, 20, 77), ModelFilesError, r"77.*is not a valid GGMLQuantizationType.*upgrade gguf"),
    "tensor missing": (
        swap(Q_PROJ, b"blk.1.attn_x.weight"),
        ModelFilesError,
        r"no tensor blk\.1\.attn_q\.weight for model\.layers\.1\.self_attn\.q_proj\.weight",
    ),
    "tensor of another shape": (
        after(Q_PROJ, 12, 128, 8),
        ModelFilesError,
        r"tensor blk\.1\.attn_v\.weight begins at \d+, expected \d+",
    ),
    "config of other widths": (after(b"llama.feed_forward_length", 4, 768), ModelFilesError, r"expected \(.*768"),
    "more layers in the config": (after(b"llama.block_count", 4, 3), ModelFilesError, r"no tensor blk\.2\."),
    "fewer layers in the config": (after(b"llama.block_count", 4, 1), ModelFilesError, r"tensor blk\.1\..* 1 layers"),
    "heads that do not divide": (
        after(b"llama.attention.head_count", 4, 7),
        UnsupportedModelError,
        r"number of attention heads \(7\)",
    ),
    "no heads": (after(b"llama.attention.head_count", 4, 0), UnsupportedModelError, r"number of attention heads \(0\)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return written(tmp_path_factory.mktemp("whole"))[0].read_bytes()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """``tide-export`` in this process."""
    return cli_runner("tide-export", cli.main, monkeypatch, capsys, 200)


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_named(case: str, whole: bytes, tmp_path: Path) -> None:
    """The user would get a traceback, or a bundle whose missing weights are random."""
    damage, error, message = DAMAGED[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(damage(whole))
    with pytest.raises(error, match=message):
        load_model(str(file), "fp32")


@pytest.mark.parametrize("case", ["a text", "8000 bytes", "unknown architecture", "tensor missing", "heads that do not divide"])
def test_the_command_ends_with_the_reason(case: str, whole: bytes, tmp_path: Path, run: Callable[..., Done]) -> None:
    """A script would take a failed export for a good one, or find half a bundle."""
    file = tmp_path / "model.gguf"
    file.write_bytes(DAMAGED[case][0](whole))
    done = run(file, "--out", tmp_path / "engine")
    assert done.code == TideError.exit_code and "model.gguf" in done.err and "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
