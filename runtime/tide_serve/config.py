"""Options of the server, which are the defaults of the command line, and the sources of API keys."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tide_runtime.errors import ParamsError
from tide_runtime.option import check_choices, option

KEYS_VARIABLE = "TIDE_API_KEYS"
LOG_FORMATS = ("auto", "text", "json")
_SHORT_KEY = 16  # characters; shorter keys can be guessed
_network = partial(option, rich_help_panel="Network")
_safety = partial(option, rich_help_panel="Safety")
_limit = partial(option, rich_help_panel="Limits of a request and of a client")
_seconds = partial(option, rich_help_panel="Times, in seconds")
_watching = partial(option, rich_help_panel="Watching it")


@dataclass(frozen=True)
class ServeConfig:
    """Limits and policies of one server, as `tide-serve` takes them.

    Args:
        api_keys: a request must carry one of them as ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``; empty: it needs none.
        allowed_hosts: the header ``Host`` must name one of them, localhost or a loopback address; None: it is not checked.
            The command `tide-serve` checks it where it listens on loopback.
    """

    tls_certificate: Path | None = _network(None, "PEM file with the certificate and its chain.")
    tls_key: Path | None = _network(None, "PEM file with its private key.")
    model_names: tuple[str, ...] = _network(
        (),
        "Name that requests give as `model`; repeatable. Default: the file's, without .gguf, or the folder's.",
        "--model-name",
        kind=list[str],
    )
    page: bool = _network(True, "Serve a chat page at /.")
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = _safety(
        (),
        "Origin, such as https://example.org, whose web pages may use this server; repeatable. Default: none.",
        "--cors-origin",
        kind=list[str],
    )
    allowed_hosts: tuple[str, ...] | None = _safety(
        None,
        "Name that the header Host may have in addition to localhost; repeatable. Default on a network: any.",
        "--allowed-host",
        kind=list[str] | None,
    )
    requests_at_once_per_key: int = _limit(256, "Of each key, or of each address without keys.", "--requests-at-once")
    requests_per_minute_per_key: int = _limit(0, "Of each key or address; 0: no limit.", "--requests-per-minute")
    max_tokens: int | None = _limit(None, "Most new tokens of an answer. Default: what the KV cache holds.")
    max_body_bytes: int = _limit(2 * 2**20, "Size of a request.")
    max_choices: int = _limit(16, "Answers to a request (`n`, prompts).")
    max_stop_strings: int = _limit(16, "Number of `stop`.")
    max_stop_chars: int = _limit(256, "Length of each.")
    max_schema_bytes: int = _limit(64 * 2**10, "Size of a schema or grammar.")
    max_schema_depth: int = _limit(32, "Its nesting.")
    request_timeout: float = _seconds(600.0, "An answer ends after this time with what it has.")
    body_timeout: float = _seconds(30.0, "For the headers of a request, and for its body, to arrive.")
    write_timeout: float = _seconds(60.0, "A client that reads nothing for so long is disconnected.")
    drain_timeout: float = _seconds(
        30.0, "On SIGTERM or Ctrl-C, for answers in progress; new requests get 503. A second signal ends the server at once."
    )
    strict_fields: bool = _limit(False, "Refuse fields that are not known. Default: the log names them.", "--strict-fields")
    log_format: str = _watching(
        "auto", "Of the log on stderr: text, json, or auto: text on a terminal, json elsewhere.", one_of=LOG_FORMATS
    )
    log_text: bool = _watching(False, "Write prompts and answers into the log.", "--log-text")

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_stop_strings", "max_stop_chars", "max_choices", "max_schema_bytes",
                     "max_schema_depth", "requests_at_once_per_key"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ParamsError(f"{name} is {value!r}; set it to an integer >= 1")
        for name in ("request_timeout", "body_timeout", "write_timeout", "drain_timeout"):
            if getattr(self, name) <= 0:
                raise ParamsError(f"{name} is {getattr(self, name)!r}; set it to seconds > 0")
        if self.requests_per_minute_per_key < 0:
            raise ParamsError(
                f"requests_per_minute_per_key is {self.requests_per_minute_per_key}; set it to 0 (no limit) or more"
            )
        check_choices(self)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParamsError(f"max_tokens is {self.max_tokens}; set it to an integer >= 1, or leave it out")
        for name in self.allowed_hosts or ():
            if not name or "/" in name or ":" in name:
                raise ParamsError(f"the allowed host is {name!r}; give a name such as example.org, without scheme and port")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ParamsError("TLS needs a certificate and a key; give both --tls-certificate and --tls-key")


def api_keys(file: Path | None, given: Sequence[str]) -> tuple[str, ...]:
    """All keys of ``file``, one a line (``#`` begins a comment), of the environment variable, separated by commas, and ``given``.

    Raises ParamsError for a source without keys, which would leave the server open, and for keys that no header can carry.
    """
    keys = list(given)
    if file is not None:
        keys += _source(f"the file {file}", (line.partition("#")[0] for line in _lines(file)))
    if (variable := os.environ.get(KEYS_VARIABLE)) is not None:
        keys += _source(f"the environment variable {KEYS_VARIABLE}", variable.split(","))
    for key in keys:
        if not key or not all("!" <= character <= "~" for character in key):
            raise ParamsError("an API key is empty or has characters outside printable ASCII; use letters and digits")
    return tuple(dict.fromkeys(keys))


def short_keys(keys: Sequence[str]) -> int:
    """How many of ``keys`` are too short to be safe."""
    return sum(len(key) < _SHORT_KEY for key in keys)


def _source(name: str, entries: Iterable[str]) -> list[str]:
    keys = [entry.strip() for entry in entries if entry.strip()]
    if not keys:
        raise ParamsError(f"{name} has no API key; add one, or leave the option out to serve without keys")
    return keys


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(
            f"the API keys' file {file} cannot be read ({error}); give a text file with a key on each line"
        ) from error
