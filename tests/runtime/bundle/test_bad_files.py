"""Files of a bundle that are missing, changed, or lie outside it are refused at load."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from runtime.bundle import test_bad_graphs, test_bad_manifests
from runtime.bundle.corruption import HEAD, SEGMENT, WEIGHTS, Corruption, Corruptions, edit, sign
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.errors import BundleError

corruption = Corruptions()
TOKENIZER, TEMPLATE = "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# --- Files


@corruption(BundleError, WEIGHTS, "is missing")
def missing_weights(bundle: Path) -> None:
    (bundle / WEIGHTS).unlink()


@corruption(BundleError, WEIGHTS, "bytes", "truncated")
def truncated_weights(bundle: Path) -> None:
    with (bundle / WEIGHTS).open("r+b") as file:
        file.truncate(1000)


@corruption(BundleError, "cannot load onnx/cpu.", options=EngineOptions(threads=ThreadOptions(1)))
def truncated_weights_signed_anew(bundle: Path) -> None:
    truncated_weights(bundle)
    sign(bundle, WEIGHTS)


@corruption(BundleError, WEIGHTS, "SHA-256")
def flipped_bit_in_the_weights(bundle: Path) -> None:
    flip(bundle / WEIGHTS)


@corruption(BundleError, SEGMENT, "SHA-256")
def flipped_bit_in_a_graph(bundle: Path) -> None:
    flip(bundle / SEGMENT)


@corruption(BundleError, TOKENIZER, "SHA-256")
def flipped_bit_in_the_tokenizer(bundle: Path) -> None:
    flip(bundle / TOKENIZER)


@corruption(BundleError, HEAD, "expected")
def a_graph_that_grew(bundle: Path) -> None:
    with (bundle / HEAD).open("ab") as file:
        file.write(b"\0")


@corruption(BundleError, HEAD, "is missing")
def a_directory_in_place_of_a_file(bundle: Path) -> None:
    (bundle / HEAD).unlink()
    (bundle / HEAD).mkdir()


@corruption(BundleError, HEAD, "not listed under files")
def graph_file_not_listed(bundle: Path) -> None:
    edit(bundle, "files", HEAD, remove=True)


@corruption(BundleError, WEIGHTS, "not listed under files")
def weights_not_listed(bundle: Path) -> None:
    edit(bundle, "files", WEIGHTS, remove=True)


# --- Paths that leave the bundle


def list_path(bundle: Path, path: str) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    edit(bundle, "files", path, value=manifest["files"][HEAD])
    edit(bundle, "targets", "cpu", "graphs", "head", value=path)


@corruption(BundleError, "'../head.onnx'", "leaves the bundle")
def path_to_the_parent(bundle: Path) -> None:
    shutil.copy(bundle / HEAD, bundle.parent / "head.onnx")
    list_path(bundle, "../head.onnx")


@corruption(BundleError, "'onnx/../../head.onnx'", "leaves the bundle")
def path_through_a_folder_to_the_parent(bundle: Path) -> None:
    list_path(bundle, "onnx/../../head.onnx")


@corruption(BundleError, "'/etc/passwd'", "leaves the bundle")
def absolute_path(bundle: Path) -> None:
    list_path(bundle, "/etc/passwd")


@corruption(BundleError, "leaves the bundle")
def path_with_backslashes(bundle: Path) -> None:
    list_path(bundle, "..\\head.onnx")


@corruption(BundleError, "leaves the bundle")
def path_with_a_drive(bundle: Path) -> None:
    list_path(bundle, "C:head.onnx")


@corruption(BundleError, HEAD, "is a link that leaves the bundle")
def link_out_of_the_bundle(bundle: Path) -> None:
    shutil.move(bundle / HEAD, bundle.parent / "head.onnx")
    (bundle / HEAD).symlink_to(bundle.parent / "head.onnx")


@corruption(BundleError, HEAD, "cannot be read")
def link_to_itself(bundle: Path) -> None:
    (bundle / HEAD).unlink()
    (bundle / HEAD).symlink_to(bundle / HEAD)


@corruption(BundleError, "cannot be read")
def file_name_no_file_system_has(bundle: Path) -> None:
    list_path(bundle, "x" * 5000)


# --- Tokenizer and chat template


@corruption(BundleError, TOKENIZER, "is missing")
def missing_tokenizer(bundle: Path) -> None:
    (bundle / TOKENIZER).unlink()


@corruption(BundleError, "not a readable tokenizer.json")
def tokenizer_of_another_kind(bundle: Path) -> None:
    (bundle / TOKENIZER).write_text('{"version": "1.0", "model": {"type": "Crystal ball"}}')
    sign(bundle, TOKENIZER)


@corruption(BundleError, TEMPLATE, "is missing")
def missing_chat_template(bundle: Path) -> None:
    (bundle / TEMPLATE).unlink()


@corruption(BundleError, TEMPLATE, "not UTF-8")
def chat_template_is_not_utf8(bundle: Path) -> None:
    (bundle / TEMPLATE).write_bytes(b"\xff\xfe\x00")
    sign(bundle, TEMPLATE)


@corruption(BundleError, "tokenizer.special_tokens.bos_token", "an object")
def special_token_as_object(bundle: Path) -> None:
    edit(bundle, "tokenizer", "special_tokens", "bos_token", value={"content": "<s>"})


@pytest.mark.parametrize("case", corruption.cases, ids=lambda case: case.name)
def test_bad_files_are_refused_with_the_fix(case: Corruption, bundle_copy: Path) -> None:
    """Damaged weights would give garbage, and a hostile bundle would have other files of the machine read."""
    case.check_refused(bundle_copy)


def test_without_verification_sizes_are_still_checked(bundle_copy: Path) -> None:
    options = EngineOptions(threads=ThreadOptions(1), verify=False)
    flip(bundle_copy / WEIGHTS)
    Engine.load(bundle_copy, options).close()  # verify=False: hashes are not compared
    truncated_weights(bundle_copy)
    with pytest.raises(BundleError, match="truncated"):
        Engine.load(bundle_copy, options)


# tide-inspect shows the manifest and opens no graph, so it does not detect broken ones.
SEEN_BY_BOTH = ["no_manifest", "newer_schema", "flipped_bit_in_the_weights", "path_to_the_parent"]
THROUGH_COMMANDS = [(m, n) for m in ("run", "inspect") for n in SEEN_BY_BOTH] + [("run", "garbage_signed_as_graph")]


@pytest.mark.parametrize(("module", "name"), THROUGH_COMMANDS)
def test_the_commands_end_with_one_message_and_exit_code_2(
    module: str, name: str, bundle_copy: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    every = *corruption.cases, *test_bad_manifests.corruption.cases, *test_bad_graphs.corruption.cases
    case = next(case for case in every if case.name == name)
    case.harm(bundle_copy)
    done = command(module, bundle_copy, *(["def"] if module == "run" else []))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and all(w in done.stderr for w in case.words)
    assert "Traceback" not in done.stderr
