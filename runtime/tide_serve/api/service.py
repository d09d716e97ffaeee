"""What all routes share: the engine, the options, and the names of the model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from time import time

from tide_runtime import Engine, Generation

from tide_serve.api.logprobs import TokenTexts
from tide_serve.errors import ApiError
from tide_serve.observe.request_record import ServerState, current_record


@dataclass
class Service(ServerState):
    """A server with an engine. ``started``: Unix time, the ``created`` of the model."""

    engine: Engine
    started: int = field(default_factory=lambda: int(time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.model_names or (self.engine.manifest.model.name,)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """``system_fingerprint`` of answers: changes with the bundle, the target and the depth policy."""
        engine = self.engine
        parts = [engine.target, engine.policy.name, *(info.sha256 for _, info in sorted(engine.manifest.files.items()))]
        return f"tide_{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"

    def check_model(self, name: str) -> None:
        """Raise ApiError (404) for a model that is not served here."""
        if name not in self.model_names:
            message = f"the model {name!r} is not served here, expected one of {', '.join(self.model_names)}"
            raise ApiError(404, message, "model", "model_not_found")

    def generated(self, generation: Generation) -> None:
        """Note a generation that has ended, for the log and the traces. Routes call it once for each of a request's."""
        record = current_record.get()
        if record is None:  # the application runs without `tide_serve.http.middlewares.guard`
            return
        record.prompt_tokens += generation.stats.prompt_tokens
        record.output_tokens += generation.stats.new_tokens
        if self.config.log_text:
            record.output_texts.append(generation.text or "")
        self.observer.generated(record, generation)
