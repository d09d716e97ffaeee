"""Commands as a shell meets them, in this process: importing torch in another one for each test takes too long."""

import io
import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


def cli_runner(
    name: str, main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> Run:
    """What runs the command ``name`` with given arguments and the text ``stdin``, on a terminal of so many ``columns``."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own handlers
    monkeypatch.setenv("COLUMNS", str(columns))

    def run_with(*arguments: object, stdin: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        return Done(int(end.value.code or 0), *capsys.readouterr())

    return run_with
