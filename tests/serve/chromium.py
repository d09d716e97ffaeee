"""A page in a headless Chromium that a test types into, clicks and looks at, over the DevTools protocol
(https://chromedevtools.github.io/devtools-protocol), through the browser's pipe: messages of JSON, each ended by a NUL."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from select import select
from shutil import which
from typing import Any

import pytest

_ANSWER_S = 30
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


class Page:
    """One tab.

    Args:
        complaints: lines of the console that report an error or warning, and exceptions.
        requests: addresses of all requests that the page has made or tried.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._number = write, read, b"", 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load ``url`` and wait until its scripts have run."""
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression; promises are awaited."""
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 20) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} did not become true; the console has {self.complaints}"
            time.sleep(0.01)

    def text(self, selector: str) -> str:
        """What the reader sees of the first match."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Click into the middle of the first match."""
        x, y = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press Enter, Tab, Escape or Space."""
        code = {"Enter": 13, "Tab": 9, "Escape": 27, "Space": 32}[key]
        name, typed = {"Enter": (key, "\r"), "Space": (" ", " ")}.get(key, (key, ""))
        event = {"key": name, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        self._call("Input.dispatchKeyEvent", type="keyDown" if typed else "rawKeyDown", text=typed, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select([self._read], [], [], _ANSWER_S)[0], f"the browser has said nothing for {_ANSWER_S} s"
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
            self.complaints.append(" ".join(str(argument.get("value")) for argument in details["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(details["exceptionDetails"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(details["entry"]["text"])


@contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    """A fresh browser whose profile is below ``folder``. Skips the test where no browser is installed."""
    browser = next((path for name in BROWSERS if (path := which(name))), None)
    if browser is None:
        pytest.skip("no headless browser is installed; apt-get install chromium-headless-shell")
    (their_read, our_write), (our_read, their_write) = _pipe(), _pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    command = [browser, *options, f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--disable-background-networking"]
    # The browser reads file descriptor 3 and writes 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{their_read} 4>&{their_write}', "bash", *command]
    process = subprocess.Popen(shell, pass_fds=(their_read, their_write), stderr=subprocess.DEVNULL)
    os.close(their_read)
    os.close(their_write)
    try:
        yield Page(our_write, our_read)
    finally:
        os.close(our_write)
        process.terminate()
        process.wait(20)
        os.close(our_read)


def _pipe() -> tuple[int, int]:
    """A pipe whose numbers are neither 3 nor 4."""
    ends = os.pipe()
    moved = [fcntl(end, F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
