"""`tide-run` and `tide-serve` with a model in place of a bundle: exported once, found again, never half-written."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from cli_in_process import Run
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from tide_runtime.cached_folders import CachedFolders
from tide_runtime.cli import exported_model
from tide_runtime.cli.exported_model import bundle_of, is_model
from tide_runtime.cli.exporter_process import Verifications, run_exporter
from tide_runtime.errors import MissingExtraError, ModelFilesError, OutputError, ParamsError, VerificationError

CONFIG = '{"architectures": ["LlamaForCausalLM"]}'


class Exports:
    """An exporter that writes one file; ``arguments``: of every call."""

    def __init__(self, size: int = 10) -> None:
        self.arguments: list[list[str]] = []
        self.size, self.code, self.seconds = size, 0, 0.0

    def __call__(self, arguments: list[str], lock: IO[bytes]) -> int:
        self.arguments.append(arguments)
        time.sleep(self.seconds)
        if self.code == 0:
            out = Path(arguments[-1])
            out.mkdir()
            (out / "manifest.json").write_bytes(bytes(self.size))
        return self.code


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(exported_model, "MODULES", {"export": frozenset({"json"})})  # the exporter is replaced, too
    return tmp_path / "cache" / "bundles"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "model.q4.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    return file


def release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let go of every folder, as the end of this process would."""
    from tide_runtime import cached_folders

    for lock in cached_folders._in_use.values():
        lock.close()
    monkeypatch.setattr(cached_folders, "_in_use", {})


def test_a_file_is_exported_once(
    gguf: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every `tide-run FILE.gguf` would take minutes."""
    export = Exports()
    first, again = bundle_of(str(gguf), export=export), bundle_of(str(gguf), export=export)
    assert first == again and first.parent == cache and first.name.startswith("model.q4-")
    [arguments] = export.arguments
    assert arguments == [str(gguf), "--weights", "auto", "--out", str(first)]
    said = capsys.readouterr().err
    assert str(first) in said and f"tide-export {gguf} --weights auto --out DIR" in said
    monkeypatch.chdir(gguf.parent)  # another spelling of the path
    assert bundle_of(gguf.name, export=export) == first and len(export.arguments) == 1


def test_a_changed_file_or_other_weights_are_another_model(gguf: Path) -> None:
    """A file that was downloaded anew would run as the old one."""
    export = Exports()
    made = [bundle_of(str(gguf), export=export), bundle_of(str(gguf), "int4", export=export)]
    times = gguf.stat().st_atime_ns, gguf.stat().st_mtime_ns
    gguf.write_bytes(b"GGUF" + bytes(99) + b"1")
    os.utime(gguf, ns=times)
    made.append(bundle_of(str(gguf), export=export))
    os.utime(gguf, ns=(times[0], times[1] + 1))
    made.append(bundle_of(str(gguf), export=export))
    assert len(set(made)) == 4


def test_a_longer_context_is_another_bundle(gguf: Path) -> None:
    """Breaks: prompts of more than 4,096 tokens are refused, whatever the model can read; or the short bundle is found again."""
    export = Exports()
    made = [bundle_of(str(gguf), max_seq_len=length, export=export) for length in (None, 8192, 16384, 8192)]
    assert len(set(made)) == 3 and made[1] == made[3]
    options = [arguments[1:-2] for arguments in export.arguments]
    assert options == [["--weights", "auto", *more] for more in ([], ["--max-seq-len", "8192"], ["--max-seq-len", "16384"])]


def test_a_hub_id_is_pinned_to_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle would be of another commit than its key says, or of an old one for ever."""
    config = tmp_path / "snapshots" / "c0ffee" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG, encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda model, file: str(config))
    export = Exports()
    assert bundle_of("some-org/some-model", export=export).name.startswith("some-org--some-model-")
    assert export.arguments[0][:3] == ["some-org/some-model", "--revision", "c0ffee"]

    def refuse(model: str, file: str) -> str:
        raise OSError("401 Client Error\nlong text")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ModelFilesError, match=r"no folder some-org/other here, .*: 401 Client Error$"):
        bundle_of("some-org/other", export=export)


ON_THE_HUB = {
    RemoteEntryNotFoundError: r"org/files on the hub has no config\.json; .* `hf download org/files FILE\.gguf .*` and give",
    RepositoryNotFoundError: r"no folder org/files here, and the hub gives no such model: 404 Client Error$",
    GatedRepoError: r"the hub gives no such model: 404 Client Error$",
    LocalEntryNotFoundError: r"no folder org/files here, and the hub is not reached to look for one: 404 Client Error$",
}


@pytest.mark.parametrize("kind", ON_THE_HUB, ids=lambda kind: kind.__name__)
def test_what_the_hub_lacks_is_named(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a repository of GGUF files is said not to exist, and the user looks for a mistake in its name."""
    response: Any = SimpleNamespace(headers={}, request=None)
    arguments = {"response": response} if issubclass(kind, HfHubHTTPError) else {}

    def refuse(model: str, file: str) -> str:
        raise kind("404 Client Error\nlong text", **arguments)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ModelFilesError, match=ON_THE_HUB[kind]):
        bundle_of("org/files", export=Exports())


def test_bundles_are_taken_as_they_are(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped path would be looked up on the hub, and a bundle exported once more."""
    assert bundle_of(str(bundle)) == bundle
    with pytest.raises(ParamsError, match="is a bundle; leave it out"):
        bundle_of(str(bundle), "int4")
    with pytest.raises(ParamsError, match=r"--max-seq-len is for models .* is a bundle, which has its length; leave it out"):
        bundle_of(str(bundle), max_seq_len=8192)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundles").mkdir()
    assert not is_model("bundles/mistyped") and not is_model(str(tmp_path)) and is_model("org/name")


def test_broken_files_are_refused_before_any_work(tmp_path: Path, gguf: Path) -> None:
    export = Exports()
    gguf.write_bytes(b"<html>404</html>")
    with pytest.raises(ModelFilesError, match="does not begin with GGUF"):
        bundle_of(str(gguf), export=export)
    with pytest.raises(ModelFilesError, match="there is no file"):
        bundle_of(str(tmp_path / "missing.gguf"), export=export)
    assert not export.arguments


def test_a_failed_export_leaves_nothing(gguf: Path, cache: Path) -> None:
    """The next call would take half a bundle, or what a killed exporter left would stay for ever."""
    export = Exports()
    export.code = 2
    with pytest.raises(SystemExit) as end:
        bundle_of(str(gguf), export=export)
    assert end.value.code == 2
    assert not [path for path in cache.iterdir() if path.is_dir()]
    [name] = [path.stem for path in cache.iterdir()]
    (cache / f".{name}.killed").mkdir()
    export.code = 0
    bundle_of(str(gguf), export=export)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [name]


def test_without_the_exporter(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported_model, "MODULES", {"export": frozenset({"json", "no_such_module"})})
    with pytest.raises(MissingExtraError, match=r"needs no_such_module.*pip install 'tide-llm\[export\]'"):
        bundle_of(str(gguf))


def test_a_cache_that_cannot_be_written(gguf: Path, cache: Path) -> None:
    cache.parent.write_text("a file", encoding="utf-8")
    with pytest.raises(OutputError, match="TIDE_CACHE_DIR"):
        bundle_of(str(gguf), export=Exports())


def test_two_processes_export_once(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both would take the minutes and the memory of an export. Threads stand for processes: each opens the lock itself."""
    export, found = Exports(), list[Path]()
    export.seconds = 0.5
    threads = [threading.Thread(target=lambda: found.append(bundle_of(str(gguf), export=export))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(export.arguments) == 1 and len(found) == 2 and found[0] == found[1]
    assert f"another process exports {gguf}; waiting for it" in capsys.readouterr().err


def folders(cache: Path, names: str, monkeypatch: pytest.MonkeyPatch, size: int = 100) -> CachedFolders:
    """Folders of ``size`` bytes with one-letter names, made in this order."""
    monkeypatch.setenv("TIDE_CACHE_GIB", str(250 / 2**30))
    cached = CachedFolders(cache)
    for number, name in enumerate(names):
        cached.make(name, lambda path, lock: (path.mkdir(), (path / "file").write_bytes(bytes(size)))[0])
        os.utime(cache / f"{name}.lock", (number, number))
    return cached


def test_the_longest_unused_folders_go_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache would fill the disk, or lose what is used every day."""
    cached = folders(cache, "ab", monkeypatch)
    release(monkeypatch)
    assert cached.find("a") == cache / "a"  # now b is the oldest
    release(monkeypatch)
    folders(cache, "c", monkeypatch)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["a", "c"]


def test_a_folder_in_use_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server would lose the graphs that it loads later."""
    folders(cache, "abc", monkeypatch)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["a", "b", "c"]


def test_a_limit_that_is_no_number(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_CACHE_GIB", "much")
    with pytest.raises(ParamsError, match="TIDE_CACHE_GIB is 'much'"):
        CachedFolders(cache)


Says = Callable[[str], object]
VERIFIES_BEHIND = """
import pathlib, shutil, signal, sys, time
from tide_runtime.cli.exporter_process import step_behind
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background ignore it
out, in_place = (sys.argv[sys.argv.index(name) + 1] for name in ("--out", "--in-place"))
out = pathlib.Path(out)
out.mkdir()
(out / "manifest.json").write_text('{"verified": "not verified yet"}')
step_behind(int(in_place))
word = pathlib.Path(sys.argv[1] + ".word")
while not word.exists():
    time.sleep(0.01)
if word.read_text() == "equal":
    (out / "manifest.json").write_text('{"verified": "on a processor"}')
else:
    shutil.rmtree(out)
    sys.exit(2)
"""


@pytest.fixture
def says(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Lets the exporter, which has stepped behind, find its bundle ``equal`` to the model or not."""
    (tmp_path / "tide_export").mkdir()
    (tmp_path / "tide_export" / "__init__.py").touch()
    (tmp_path / "tide_export" / "cli.py").write_text(VERIFIES_BEHIND, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.chdir(tmp_path)  # which comes before it
    return gguf.with_name(f"{gguf.name}.word").write_text


def test_a_bundle_is_used_before_it_is_verified(gguf: Path, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: the first answer waits until the bundle was compared with its model, or others export it meanwhile."""
    with Verifications() as verifications:
        first = bundle_of(str(gguf), verifications=verifications)
        assert verifications.running and bundle_of(str(gguf)) == first
        says("equal")
        verifications.finish()
    release(monkeypatch)
    assert bundle_of(str(gguf)) == first and "on a processor" in (first / "manifest.json").read_text(encoding="utf-8")


def test_a_bundle_that_fails_behind_an_answer(gguf: Path, says: Says) -> None:
    """Breaks: a wrong model goes on answering."""
    with Verifications() as verifications:
        bundle = bundle_of(str(gguf), verifications=verifications)
        says("other")
        with pytest.raises(VerificationError, match="no answer that it gave can be relied on"):
            verifications.finish()
    assert not bundle.exists()


def test_a_command_ends_the_verification_with_itself(gguf: Path, says: Says) -> None:
    """Breaks: the processor is busy for minutes after Ctrl-C; or a mistyped option costs minutes of export."""
    with Verifications() as verifications:
        bundle_of(str(gguf), verifications=verifications)
    assert not verifications.running
    with pytest.raises(ParamsError), Verifications() as verifications:
        bundle_of(str(gguf), "int4", verifications=verifications)
        raise ParamsError("an option is wrong")
    assert verifications.running
    says("equal")
    verifications.finish()


def test_a_bundle_whose_exporter_was_killed_is_exported_again(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a bundle whose comparison with its model never ended is used by every later command."""
    manifests = ['{"verified": "not verified yet"}', '{"verified": "on a processor"}']

    def export(arguments: list[str], lock: IO[bytes]) -> int:
        Path(arguments[-1]).mkdir()
        (Path(arguments[-1]) / "manifest.json").write_text(manifests.pop(0), encoding="utf-8")
        return 0

    for left in (1, 0, 0):
        bundle_of(str(gguf), export=export)
        assert len(manifests) == left
        release(monkeypatch)


SLOW_EXPORTER = """
import pathlib, sys, time
marker = pathlib.Path(sys.argv[1])
try:
    marker.write_text("runs")
    time.sleep(60)
except KeyboardInterrupt:
    marker.write_text("cleaned up")
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_waits_for_the_exporter(tmp_path: Path, number: signal.Signals) -> None:
    """The exporter would go on in the background, or be killed before it has removed what it wrote."""
    (tmp_path / "tide_export").mkdir()
    (tmp_path / "tide_export" / "__init__.py").touch()
    (tmp_path / "tide_export" / "cli.py").write_text(SLOW_EXPORTER, encoding="utf-8")
    marker = tmp_path / "marker"
    caller = (
        f"import sys; from tide_runtime.cli.exporter_process import run_exporter; "
        f"sys.exit(run_exporter([{str(marker)!r}], open({str(tmp_path / 'lock')!r}, 'ab')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", caller]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's jobs in the background ignore it
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, preexec_fn=heard)
    wait_for(lambda: marker.exists() and marker.read_text(encoding="utf-8") == "runs")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0 and b"KeyboardInterrupt" in errors
    assert marker.read_text(encoding="utf-8") == "cleaned up"


def test_an_exporter_that_ran_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills it without a word."""
    script = tmp_path / "killed.sh"
    script.write_text("#!/bin/sh\nkill -9 $$\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with (tmp_path / "lock").open("ab") as lock, pytest.raises(OutputError, match="too little memory"):
        run_exporter([], lock)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_command_gives_the_exporter_its_context(bundle: Path, gguf: Path, command: Run) -> None:
    """Breaks: `tide-run FILE.gguf --max-seq-len N` runs the bundle of 4,096 tokens; or a bundle's own length is ignored."""

    def export(arguments: list[str], lock: IO[bytes]) -> int:
        shutil.copytree(bundle, arguments[-1])
        return 0

    kept = bundle_of(str(gguf), max_seq_len=32, export=export)
    done = command("run", gguf, "def", "--max-seq-len", 32, "--max-new-tokens", 4, "--threads", 1)
    assert done.code == 0 and f"bundle {kept}" in done.err, done.err
    refused = command("run", bundle, "def", "--max-seq-len", 32)
    assert (refused.code, refused.out) == (2, "")
    assert "--max-seq-len is for models that are exported now" in refused.err
