"""Arms that read GGUF files: how they find one, and what a user is told when the file or a package is missing."""

import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from export.sources.gguf.llama_gguf import write_llama
from tide_bench.arm_folders import ArmFolders
from tide_bench.arm_pool import ArmPool
from tide_bench.arms import OTHER_ARMS
from tide_bench.arms.genai import build_model_folder
from tide_bench.arms.llamacpp import LlamacppArm
from tide_bench.arms.openvino import OpenvinoArm
from tide_bench.arms.process import ArmError
from tide_bench.config import BenchConfig
from tide_bench.output_checks import Terms, broken_promise
from tide_bench.report import Phases
from tide_bench.source_model import find_gguf
from tide_runtime.errors import ModelFilesError, ParamsError

GGUF_ARMS = ("llamacpp", "openvino")


def test_the_bundles_source_is_the_file_unless_another_is_given(tmp_path: Path) -> None:
    """llama.cpp would be timed on another model than the bundle's, or not at all."""
    source, given = tmp_path / "source.gguf", tmp_path / "given.gguf"
    source.touch(), given.touch()
    assert find_gguf(None, str(source)) == source and find_gguf(given, str(source)) == given


@pytest.mark.parametrize(("given", "source"), [(None, "org/name"), (Path("model.bin"), "a.gguf"), (None, "absent.gguf")])
def test_without_a_gguf_file_the_user_learns_which_option_takes_one(given: Path | None, source: str) -> None:
    """A library's own message about a bad file names neither the option nor what it is for."""
    with pytest.raises(ModelFilesError, match="--gguf"):
        find_gguf(given, source)


@pytest.mark.parametrize("name", GGUF_ARMS)
def test_a_missing_file_leaves_out_only_its_arm(name: str) -> None:
    """A bundle from HuggingFace weights could not be compared with anything when --vs names llama.cpp too."""
    manifest: Any = SimpleNamespace(model=SimpleNamespace(fingerprint="f" * 64, source="org/name"))
    folders = ArmFolders(Path(), manifest, "no model here", Path())
    pool = ArmPool(folders, Phases(lambda text: None))
    assert pool.start([OTHER_ARMS[name]]) == [] and "--gguf" in pool.failures[name]


@pytest.mark.parametrize(
    ("arm", "module", "package"), [(LlamacppArm, "xllamacpp", "xllamacpp"), (OpenvinoArm, "openvino_genai", "openvino-genai")]
)
def test_a_missing_package_is_named_as_pip_takes_it(arm: Any, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither package is called as its module is found."""
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("tide_bench.arms.llamacpp.native_server", lambda: None)
    with pytest.raises(ArmError, match=f"pip install {package}"):
        arm(Path("model.gguf"))


def test_without_genai_its_row_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row would say that no metadata was found."""

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("tide_bench.arms.genai.version", version)
    with pytest.raises(ArmError, match=r"pip install 'tide-llm\[bench\]'"):
        build_model_folder(Path(), "identity", Path())


def test_arms_that_round_run_only_when_named() -> None:
    """A bundle in fp32 would by default be ranked against int4 weights."""
    names = ("genai-int4", *GGUF_ARMS)
    assert not set(names) & set(BenchConfig().rivals) and BenchConfig(rivals=names).rivals == names
    with pytest.raises(ParamsError, match=r"llama\.cpp; choose from: .*llamacpp"):
        BenchConfig(rivals=("llama.cpp",))


def test_a_rounded_text_is_not_held_against_its_arm() -> None:
    """llama.cpp, whose products have 8 bits, would never be ranked."""
    terms = Terms(near_tie=0.0, certified=None)
    assert broken_promise("rounded", [[1]], [[2]], [[3]], lambda text, one, other: 9.0, terms) == ""
    assert broken_promise("same", [[1]], [[2]], [[3]], lambda text, one, other: 9.0, terms) != ""


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """HuggingFace folder with weights that Q4_0 holds exactly, and the GGUF file written from it."""
    for module in ("xllamacpp", "gguf"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            steps = torch.randint(-7, 8, parameter.shape)
            steps.view(-1, 32)[:, 0] = -8  # the largest of a block gives its scale
            parameter.data = steps / 64.0
    model.save_pretrained(folder)
    stored = gguf.GGMLQuantizationType.Q4_0
    write_llama(folder, folder / "tiny.gguf", lambda name, matrix: (gguf.quantize(matrix, stored), stored))
    return folder, folder / "tiny.gguf"


def test_llama_cpp_continues_token_ids_as_the_model_does(tiny_llama: tuple[Path, Path]) -> None:
    """Prompts would be tokenized once more, rows mixed up, or keys rotated in another order than the file has them."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, file = tiny_llama
    prompts = torch.randint(3, 512, (3, 12), generator=torch.Generator().manual_seed(1)).tolist()
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(torch.tensor(prompts)).logits[:, -1].argmax(-1).tolist()
    arm = LlamacppArm(file)
    timing = arm.generate(prompts, 6)
    assert [row[0] for row in timing.tokens] == expected and [len(row) for row in timing.tokens] == [6, 6, 6]
    assert arm.generate(prompts[1:2], 6).tokens[0][0] == expected[1]
    assert timing.first_token_s > 0 and timing.decode_s > 0
    arm.close()


def test_a_truncated_file_is_an_error_with_a_remedy(tiny_llama: tuple[Path, Path], tmp_path: Path) -> None:
    """The process would end with llama.cpp's own message, or none."""
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny_llama[1].read_bytes()[:20_000])
    with pytest.raises(ArmError, match=r"cannot load .*short\.gguf.*--gguf"):
        LlamacppArm(short)
