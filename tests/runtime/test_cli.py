"""``tide-run`` and ``tide-inspect`` as a user meets them: real processes, their output, their exit codes."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import typer
from cli_in_process import Run
from tide_runtime import Chunk, Engine, EngineOptions, GenerationParams
from tide_runtime.cli.conversation import converse
from tide_runtime.cli.errors import run_app
from tide_runtime.cli.run import _answer
from tide_runtime.errors import BundleError
from tide_runtime.scheduling.handle import GenerationHandle

Process = Callable[..., subprocess.CompletedProcess[str]]
PROMPT = "def add(a, b):"
SHORT = ("--max-new-tokens", 8, "--ignore-eos", "--threads", 1)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> str:
    [result] = engine.generate(PROMPT, GenerationParams(max_new_tokens=8, ignore_eos=True))
    assert result.text
    return result.text


# --- tide-run


def test_text_goes_to_stdout_and_figures_to_stderr(bundle: Path, process: Process, expected: str) -> None:
    """So that `tide-run … > file` holds the text and nothing else."""
    done = process("run", bundle, PROMPT, *SHORT)
    assert (done.returncode, done.stdout) == (0, expected + "\n")
    for figure in ("prompt 8 tokens", "new 8 tokens", "first token", "ms", "tokens/s", "policy exact", "finish length"):
        assert figure in done.stderr
    assert "depth 4.0 of 4 layers per token" in done.stderr


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_the_prompt_may_come_from_stdin(bundle: Path, command: Run, expected: str, argument: list[str]) -> None:
    done = command("run", bundle, *argument, *SHORT, stdin=PROMPT)
    assert (done.code, done.out) == (0, expected + "\n")


def test_json_is_one_object_with_everything(bundle: Path, command: Run, engine: Engine, expected: str) -> None:
    done = command("run", bundle, PROMPT, *SHORT, "--json", "--logprobs", 2)
    assert (done.code, done.err) == (0, "")
    result = json.loads(done.out)
    assert set(result) == {"text", "token_ids", "finish_reason", "logprobs", "stats"}
    [wanted] = engine.generate(PROMPT, GenerationParams(max_new_tokens=8, ignore_eos=True, logprobs=2))
    assert (result["text"], result["finish_reason"]) == (expected, "length")
    assert result["token_ids"] == list(wanted.token_ids)
    assert [entry["id"] for entry in result["logprobs"]] == result["token_ids"]
    for entry in result["logprobs"]:
        assert len(entry["top"]) == 2
        assert entry["top"][0] == {key: entry[key] for key in ("id", "text", "logprob")}  # greedy took the likeliest
    stats = result["stats"]
    assert (stats["prompt_tokens"], stats["new_tokens"], stats["policy"]) == (8, 8, "exact")
    assert (stats["layers_per_token"], stats["num_layers"]) == (4.0, 4)
    assert stats["time_to_first_token_ms"] > 0 and stats["tokens_per_second"] > 0


def test_a_chat_goes_through_the_models_template(bundle: Path, command: Run, engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def?"}]
    params = GenerationParams(max_new_tokens=8, ignore_eos=True)
    [wanted] = engine.generate(engine.chat_prompt(messages), params)
    done = command("run", bundle, "def?", *SHORT, "--chat", "--system", "Be brief.", "--json")
    assert json.loads(done.out)["token_ids"] == list(wanted.token_ids)


def test_a_seed_and_sampling_options_reach_the_sampler(bundle: Path, command: Run, engine: Engine) -> None:
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 5}
    options = [text for name, value in sampling.items() for text in (f"--{name.replace('_', '-')}", value)]
    [wanted] = engine.generate(PROMPT, GenerationParams(max_new_tokens=8, ignore_eos=True, **sampling))  # type: ignore[arg-type]
    done = command("run", bundle, PROMPT, *SHORT, *options, "--json")
    assert json.loads(done.out)["token_ids"] == list(wanted.token_ids)


def test_stop_strings_may_be_repeated(bundle: Path, command: Run, expected: str) -> None:
    stop = expected[2:4]
    done = command("run", bundle, PROMPT, *SHORT, "--stop", "never there", "--stop", stop)
    assert done.out == expected[: expected.index(stop)] + "\n"
    assert "finish stop" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--max-new-tokens", "many"], "--max-new-tokens"),
        (["--stop", ""], "non-empty"),
        (["--policy", "psychic"], "set it to one of: auto, full"),
        (["--target", "tpu"], "no target 'tpu'"),
        (["--threads", "-2"], "threads is -2"),
        (["--logprobs", "2"], "--json"),
        (["--system", "Be brief."], "--chat"),
        (["--warp", "9"], "--warp"),
        (["--max-new-tokens", "8", "one too many"], "one too many"),
    ],
)
def test_bad_options_exit_with_2_and_one_message(bundle: Path, command: Run, arguments: list[str], words: str) -> None:
    done = command("run", bundle, PROMPT, *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("prompt", ["", "x" * 100])
def test_a_bad_prompt_exits_with_2(bundle: Path, command: Run, prompt: str) -> None:
    done = command("run", bundle, prompt)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: the prompt ")


def test_a_prompt_that_is_not_utf8_exits_with_2(bundle: Path) -> None:
    command = [sys.executable, "-m", "tide_runtime.cli.run", str(bundle)]
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True, timeout=60, env={**os.environ, "PYTHONUTF8": "1"})
    assert done.returncode == 2
    assert b"error: the prompt on stdin is not utf-8 text" in done.stderr.replace(b"\n", b"")


def test_a_reader_that_leaves_is_no_error(bundle: Path) -> None:
    """`tide-run … | head -1` must end without a traceback."""
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "tide_runtime.cli.run", str(bundle), PROMPT]
    process = subprocess.Popen(command, stdout=write_end, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    os.close(write_end)
    os.close(read_end)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (1, b"")


def test_a_terminal_without_utf8_shows_what_it_can(bundle: Path) -> None:
    """The tiny model emits stray bytes, so U+FFFD: Latin-1 has no such character, and that must not end the run."""
    command = [sys.executable, "-m", "tide_runtime.cli.run", str(bundle), PROMPT, "--ignore-eos"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


def start_conversation(bundle: Path) -> tuple[subprocess.Popen[bytes], int]:
    """`tide-run --chat` on a terminal of its own, at its first question."""
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "tide_runtime.cli.run", str(bundle), "--chat", "--stats", *map(str, SHORT)]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores Ctrl-C
    process = subprocess.Popen(command, stdin=its_end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heard)
    os.close(its_end)
    assert process.stdout is not None and process.stdout.read(2) == b"> "
    return process, terminal


class Conversation:
    """`tide-run -i` in this process; ``asked``: the messages of each prompt."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.asked, self._monkeypatch = engine, list[list[dict[str, str]]](), monkeypatch
        chat_prompt = engine.chat_prompt

        def recorded(asked: list[dict[str, str]]) -> list[int]:
            self.asked.append(list(asked))
            return chat_prompt(asked)

        monkeypatch.setattr(engine, "chat_prompt", recorded)

    def hold(self, *said: str | type[BaseException]) -> None:
        """Say this, and then Ctrl-D; an exception takes the place of a line."""

        def answer(prompt: str) -> str:
            line = next(lines, EOFError)
            if isinstance(line, str):
                return line
            raise line

        lines = iter(said)
        self._monkeypatch.setattr("builtins.input", answer)
        params, opening = GenerationParams(max_new_tokens=8, ignore_eos=True), [{"role": "system", "content": "s"}]
        note = partial(print, file=sys.stderr)
        converse(self.engine, opening, partial(_answer, self.engine, params, True), note)


def test_ctrl_c_stops_an_answer_and_not_the_conversation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Breaks: a user who stops a long answer loses the conversation; or the model forgets the part that it wrote."""
    cancelled, write, deliver, cancel = threading.Event(), sys.stdout.write, GenerationHandle.deliver, GenerationHandle.cancel
    delivered: list[Chunk] = []

    def deliver_slowly(handle: GenerationHandle, chunk: Chunk) -> None:
        """Deliver three tokens before Ctrl-C, and the rest after it."""
        delivered.append(chunk)
        assert len(delivered) < 4 or cancelled.wait(60)
        deliver(handle, chunk)

    def cancel_and_go_on(handle: GenerationHandle) -> None:
        cancel(handle)
        cancelled.set()

    def interrupted_write(text: str) -> int:
        count = write(text)
        if text and not cancelled.is_set():
            raise KeyboardInterrupt
        return count

    monkeypatch.setattr(GenerationHandle, "deliver", deliver_slowly)
    monkeypatch.setattr(GenerationHandle, "cancel", cancel_and_go_on)
    monkeypatch.setattr(sys.stdout, "write", interrupted_write)
    with engine.with_options(EngineOptions(policy="full", threads=engine.options.threads)) as engine_of_steps:
        conversation = Conversation(engine_of_steps, monkeypatch)
        conversation.hold("a", "b")
    _, first, second = conversation.asked
    part = second[2]["content"]
    params = GenerationParams(max_new_tokens=8, ignore_eos=True)
    whole, after = (engine.generate(engine.chat_prompt(asked), params)[0].text or "" for asked in (first, second))
    assert part and whole.startswith(part) and part != whole
    assert [message["content"] for message in second] == ["s", "a", part, "b"]
    printed = capsys.readouterr()
    assert printed.out == f"{part}\n{after}\n\n" and "finish cancelled" in printed.err


def test_a_conversation_outlives_a_message_that_does_not_fit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Breaks: one message too many ends the program, and the conversation with it."""
    conversation = Conversation(engine, monkeypatch)
    conversation.hold("a", "x" * 100, "b", " /clear ", "a")
    said = [[message["content"] for message in asked] for asked in conversation.asked[1:]]
    answer = said[1][2]
    assert said == [["s", "a"], ["s", "a", answer, "x" * 100], ["s", "a", answer, "b"], ["s", "a"]]
    printed = capsys.readouterr()
    assert "error: the prompt has" in printed.err and "/clear begins a new one" in printed.err
    assert printed.out.count(answer) >= 2 and printed.err.count("policy exact") == 3


def test_ctrl_c_exits_with_130(bundle: Path) -> None:
    process, terminal = start_conversation(bundle)
    stderr = b""
    for _ in range(10):  # a signal that comes just before the process waits for input wakes nobody: send another
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, stderr = process.communicate(timeout=2)
            break
    process.kill()
    os.close(terminal)
    assert process.returncode == 130 and stderr.endswith(b"\ninterrupted\n")


def test_a_conversation_has_a_banner_and_a_history(bundle: Path) -> None:
    """Breaks: Up prints ^[[A, nothing says how to leave, or figures stand between the turns."""
    pytest.importorskip("readline", reason="this Python has no readline")
    terminal, its_end = os.openpty()
    command = [sys.executable, "-m", "tide_runtime.cli.run", str(bundle), "-i", *map(str, SHORT)]
    process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, env={**os.environ, "TERM": "vt100"})
    os.close(its_end)
    screen = b""

    def answer(typed: bytes, awaited: bytes) -> None:
        """Type, and read until the terminal shows ``awaited`` behind what it shows now."""
        nonlocal screen
        seen = len(screen)
        os.write(terminal, typed)
        while awaited not in screen[seen:]:
            assert select.select([terminal], [], [], 30)[0], screen
            screen += os.read(terminal, 1000)

    answer(b"", b"> ")
    answer(b"word\n", b"\n> ")
    answer(b"\x1b[A", b"word")
    answer(b"\x7f\n", b"\n> ")
    answer(b"/help\n", b"\n> ")
    answer(b"/bye\n", b"/bye")
    assert process.wait(60) == 0
    os.close(terminal)
    text = screen.decode()
    assert text.count("tiny-llama. Ctrl-C stops an answer, /clear begins") == 1 and text.count("Ctrl-D or /bye ends") == 2
    assert "tokens/s" not in text and "^[[A" not in text


def test_messages_are_printed_word_for_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths and prompts hold [brackets] and :colons:; rich would swallow them as markup."""
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise BundleError("no [bold] file at /tmp/[red]x[/red]/:smile:")

    monkeypatch.setattr(sys, "argv", ["tide-test"])
    with pytest.raises(SystemExit) as ended:
        run_app(app)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no [bold] file at /tmp/[red]x[/red]/:smile:\n"


# --- tide-inspect


def test_inspect_shows_the_bundle_as_tables(bundle: Path, command: Run) -> None:
    done = command("inspect", bundle)
    assert (done.code, done.err) == (0, "")
    for word in ("tiny-llama", "LlamaForCausalLM", "segment_0", "segment_2", "head", "onnxruntime-cpu", "attention_gqa 4"):
        assert word in done.out
    assert "━━━━━━━━━━━━┃━━━━━━━━━━━━━━━━━━━━━━━━┃━━━━━━━━━━━━" in done.out
    assert "4 layers, checkpoints after 1, 3" in done.out
    assert "tokenizer/chat_template.jinja" in done.out and "bos_token <|endoftext|>" in done.out


def test_inspect_json_agrees_with_the_bundle(bundle: Path, command: Run) -> None:
    facts = json.loads(command("inspect", bundle, "--json").out)
    assert (facts["kv_cache_dtype"], facts["kv_cache_bytes_per_token"]) == ("fp32", 4 * 2 * (16 + 16) * 4)
    assert facts["kv_cache_bytes_per_row"] == 4 * 2 * (16 + 16) * 64 * 4  # layers, heads, key and value, slots, fp32
    files = [file for file in bundle.rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert facts["bundle_bytes"] == sum(file.stat().st_size for file in files)
    assert [graph["layers"] for graph in facts["graphs"]] == [[0, 1], [1, 3], [3, 4], None]
    assert facts["checkpoints"] == [1, 3]
    cpu = facts["targets"]["cpu"]
    assert cpu["weight_bytes"] == (bundle / "onnx/weights.bin").stat().st_size
    assert cpu["graph_bytes"] == sum(file.stat().st_size for file in bundle.glob("onnx/cpu.*.onnx"))
    assert cpu["uncut_bytes"] == sum(file.stat().st_size for file in bundle.glob("onnx/cpu.uncut*.onnx")) > 0
    assert cpu["graph_bytes"] == sum(graph["file_bytes"]["cpu"] for graph in facts["graphs"]) + cpu["uncut_bytes"]
    purposes = cpu["bytes_by_purpose"]
    assert purposes["products"] + purposes["embedding, where not tied"] > 4 * 60_000, "fp32 matrices"
    parts = purposes["products"], purposes["embedding, where not tied"], purposes["norms and tables"]
    assert sum(parts) + purposes["other targets, and padding"] == cpu["weight_bytes"] and purposes["scales of blocks"] == 0
    assert purposes["tokenizer"] == sum(file.stat().st_size for file in (bundle / "tokenizer").iterdir())
    assert facts["generation"]["eos_token_ids"] == [0, 2]


def test_inspect_verifies_unless_told_not_to(bundle_copy: Path, command: Run) -> None:
    with (bundle_copy / "onnx/weights.bin").open("r+b") as file:
        file.write(b"\xff")
    refused = command("inspect", bundle_copy)
    assert refused.code == 2 and "weights.bin does not match" in refused.err
    assert command("inspect", bundle_copy, "--no-verify").code == 0
