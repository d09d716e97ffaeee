"""What all routes share: the engine, the options, and the names of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time

from tide_runtime import Engine

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError


@dataclass
class Service:
    """One engine behind HTTP.

    Args:
        started: Unix time, the ``created`` of the model.
        draining: SIGTERM has come; new requests are refused.
    """

    engine: Engine
    config: ServeConfig
    started: int = field(default_factory=lambda: int(time()))
    draining: bool = False

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.model_names or (self.engine.manifest.model.name,)

    @property
    def ready(self) -> bool:
        return self.engine.healthy and not self.draining

    def check_model(self, name: str) -> None:
        """Raise ApiError (404) for a model that is not served here."""
        if name not in self.model_names:
            raise ApiError(
                404,
                f"the model {name!r} is not served here, expected one of {', '.join(self.model_names)}",
                "model",
                "model_not_found",
            )
