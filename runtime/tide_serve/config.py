"""Options of the server, which are the defaults of the command line, and the sources of API keys."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tide_runtime.errors import ParamsError

KEYS_VARIABLE = "TIDE_API_KEYS"
LOG_FORMATS = ("auto", "text", "json")
_SHORT_KEY = 16  # characters; shorter keys can be guessed


@dataclass(frozen=True)
class ServeConfig:
    """Limits and policies of one server. Times are in seconds, sizes in bytes unless a name says otherwise.

    Args:
        model_names: names that requests may give as ``model``, the first one is shown; empty: the bundle's own name.
        api_keys: a request must carry one of them as ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``; empty: it needs none.
        max_body_bytes: size of a request's body.
        max_stop_strings, max_stop_chars: number of ``stop`` strings, and length of each.
        max_choices: number of answers (``n``) over all prompts of a request.
        max_schema_bytes, max_schema_depth: size and nesting of a grammar or JSON schema.
        max_tokens: most new tokens of a choice; None: as many as the KV cache holds. Also the default where a request names none.
        requests_at_once_per_key: requests in progress for each key (or client address without keys); more are refused with 429.
        requests_per_minute_per_key: rate of a token bucket for each key; 0: no limit.
        request_timeout: a generation ends after this time with what it has.
        body_timeout: for a request's headers and body to arrive.
        write_timeout: a client that reads nothing for so long is disconnected.
        drain_timeout: after SIGTERM, for requests in progress; later ones are refused with 503 meanwhile.
        cors_origins: allowed browser origins; empty: none.
        allowed_hosts: the header ``Host`` must name one of them, localhost or a loopback address; None: it is not checked.
            The command `tide-serve` checks it where it listens on loopback.
        log_format: of the log of `tide-serve`: text, json, or auto: text on a terminal, json elsewhere.
        strict_fields: refuse requests with fields that are not known; otherwise the log names them.
        log_text: write prompts and texts into the log.
        page: serve the chat page at ``/``.
        tls_certificate, tls_key: PEM files; both or neither.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 2 * 2**20
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_choices: int = 16
    max_schema_bytes: int = 64 * 2**10
    max_schema_depth: int = 32
    max_tokens: int | None = None
    requests_at_once_per_key: int = 256
    requests_per_minute_per_key: int = 0
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    drain_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    log_format: str = "auto"
    strict_fields: bool = False
    log_text: bool = False
    page: bool = True
    tls_certificate: Path | None = None
    tls_key: Path | None = None

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
        if self.log_format not in LOG_FORMATS:
            raise ParamsError(f"log_format is {self.log_format!r}; set it to one of: {', '.join(LOG_FORMATS)}")
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
