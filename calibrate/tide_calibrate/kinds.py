"""Names of exit heads and routers: TIDE's, and those that packages register (`tide_runtime.plugins`)."""

from __future__ import annotations

from typing import Any

from tide_runtime.errors import ParamsError
from tide_runtime.plugins import HEADS, ROUTERS, extension, installed, known, package_of

OWN_HEADS = ("identity", "linear", "tail")
OWN_ROUTERS = ("auto", "mlp", "max_probability", "mlp+max_probability", "gate")


def parse_kind(kind: str) -> tuple[str, int]:
    """Parse ``tail:2`` to ("tail", 2), and ``linear`` or the head of a package to (its name, 0).

    Raises ParamsError for any other form.
    """
    name, colon, count = kind.partition(":")
    takes_count = name == "tail"
    exists = name in OWN_HEADS or name in installed(HEADS)
    if not exists or bool(colon) != takes_count or (takes_count and not (count.isdecimal() and int(count) > 0)):
        own = ("identity", "linear", "tail:k with k layers (1, 2, …)")
        raise ParamsError(f"{kind!r} is no exit head; known are {known(HEADS, own)}")
    return name, int(count) if takes_count else 0


def check_router(name: str) -> None:
    """Raise ParamsError for a router that does not exist."""
    if name not in OWN_ROUTERS and name not in installed(ROUTERS):
        raise ParamsError(f"router is {name!r}; set it to one of: {known(ROUTERS, OWN_ROUTERS)}")


def package_fields(head: str, router: str) -> dict[str, Any]:
    """The fields of ExitInfo that describe a head and a router of packages; empty for TIDE's."""
    fields = dict[str, Any]()
    if parse_kind(head)[0] not in OWN_HEADS:
        fields["head_package"] = package_of(installed(HEADS)[head])
    if router not in OWN_ROUTERS:
        router_class = extension(ROUTERS, router)
        fields |= {"router_package": package_of(installed(ROUTERS)[router]), "reads_logits": router_class.reads_logits}
    return fields
