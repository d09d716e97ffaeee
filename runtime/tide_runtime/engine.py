"""The public API: load a bundle, generate from it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tide_runtime.admission import Admission, Prompt
from tide_runtime.backends import load_backend
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.certificate_coverage import with_promises
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.depth.registry import make_policy
from tide_runtime.device_loop.select import choose_drive
from tide_runtime.engine_options import EngineOptions
from tide_runtime.errors import PromptError, TideError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.metrics import EngineMetrics
from tide_runtime.outputs import Chunk, Generation, finished
from tide_runtime.scheduler import TokenEvent, run
from tide_runtime.scoring import Score, score_text
from tide_runtime.sequence import TokenSequence
from tide_runtime.targets.select import DeviceChoice, choose_target
from tide_runtime.text.chat_template import render_chat
from tide_runtime.text.tokenizer import Tokenizer


class Engine:
    """A loaded bundle.

    Thread-safe: any number of threads may call `generate` and `stream` at once. Weights are shared; each call takes KV
    caches of its own from a pool (and gives them back), so concurrent calls neither wait for nor see each other.
    """

    def __init__(self, bundle: Bundle, options: EngineOptions) -> None:
        self.bundle = bundle
        self.manifest: Manifest = bundle.manifest
        self.options = options
        device = DeviceChoice.parse(options.device)
        self.target = options.target if options.target != "auto" else choose_target(bundle.manifest, device)
        policy = make_policy(options.policy, bundle.manifest, options.prefill_chunk, options.depth)
        self.backend = load_backend(bundle, self.target, options.threads, device.ordinal)
        if isinstance(policy, ExactDepth):
            policy.keep_within(self.backend.invariant_tokens, bundle.manifest.rounds(self.target))
        self.drive = choose_drive(policy, self.backend)
        self.policy = self.drive.policy
        info = bundle.manifest.tokenizer
        self.tokenizer = Tokenizer.from_file(bundle.path(info.file)) if info is not None else None
        self._template = bundle.text(info.chat_template) if info is not None and info.chat_template is not None else None
        self.admission = Admission(bundle.manifest, self.tokenizer, policy.check_params)
        self._metrics = EngineMetrics(bundle.manifest.model.num_layers)
        self._idle: list[ExecutionContext] = []
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def load(cls, directory: str | Path, options: EngineOptions | None = None, device: str | None = None) -> Engine:
        """Load the bundle in ``directory``. ``device`` replaces that of the options.

        Raises BundleError when it is broken, TargetError when it cannot run here.
        """
        options = options or EngineOptions()
        options = options if device is None else replace(options, device=device)
        return cls(Bundle.open(directory, verify=options.verify), options)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: GenerationParams | None = None) -> list[Generation]:
        """Generate for one prompt or several (strings or token ids), sequences of any length together; results in their order.

        Raises PromptError for an empty or too long prompt or ids outside the vocabulary, before anything is computed.
        """
        sequences = self.admission.sequences(prompts, params or GenerationParams())
        for _ in self._events(sequences):
            pass
        return [self._finish(sequence) for sequence in sequences]

    def stream(self, prompt: Prompt, params: GenerationParams | None = None) -> Iterator[Chunk]:
        """Generate for one prompt, a chunk per token as soon as it is final; closing the iterator cancels the rest."""
        sequence = self.admission.sequence(prompt, params or GenerationParams(), streamed=True)

        def chunks() -> Iterator[Chunk]:
            try:
                with closing(self._events([sequence])) as events:
                    yield from map(self._chunk, events)
            except GeneratorExit:
                if sequence.finish_reason is None:
                    sequence.cancel()
                    self._finish(sequence)
                raise

        return chunks()

    def score(self, tokens: Sequence[int], prompt_tokens: int = 1) -> Score:
        """Log-probabilities of the text ``tokens`` behind its first ``prompt_tokens``, by the engine's policy.

        Under ``exit`` each token is scored at the depth where the policy stops; ``full`` and ``exact`` give the model's own.

        Raises PromptError when no token is left to score, or for ids outside the vocabulary.
        """
        prompt, scored = self.admission.text_to_score(tokens, prompt_tokens)
        with self._lease_context(1) as context:
            return score_text(self._policy_for_scores(), context, prompt, scored)

    def _policy_for_scores(self) -> DepthPolicy:
        """The engine's policy as it reads a given text: ``exact`` reads as ``full``, as it would only draft another text."""
        return getattr(self.policy, "full", self.policy) if self.policy.name == "exact" else self.policy

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], **extra: Any) -> list[int]:
        """Token ids of a chat in the model's own template, ready for the assistant's turn.

        Raises PromptError when the bundle has no template or a message is malformed.
        """
        if self._template is None or self.tokenizer is None or self.manifest.tokenizer is None:
            raise PromptError("this model has no chat template; give a plain prompt instead")
        special = self.manifest.tokenizer.special_tokens
        text = render_chat(self._template, messages, special_tokens=special, **extra)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def default_params(self, **changes: Any) -> GenerationParams:
        """The generation defaults that the model's authors ship, with ``changes``."""
        info = self.manifest.generation
        defaults = dict(
            temperature=info.temperature, top_k=info.top_k, top_p=info.top_p, repetition_penalty=info.repetition_penalty
        )
        return GenerationParams(**{**defaults, **changes})

    @property
    def depth(self) -> int:
        """Decoder layers of the model."""
        return self.manifest.model.num_layers

    @property
    def draft_limitation(self) -> str | None:
        """How this machine's kernels limit the drafts of policy ``exact``, or its equality with ``full``; None: they do not."""
        return self.policy.limitation if isinstance(self.policy, ExactDepth) else None

    @property
    def max_batch(self) -> int:
        """Sequences that run at once: as in the options, or fewer where engines were built for fewer."""
        profiles = self.manifest.targets[self.target].profiles
        return min([self.options.max_batch, *(profile.rows[2] for profile in profiles)])

    def metrics(self) -> str:
        """Totals since the engine was loaded, in the Prometheus text format."""
        return self._metrics.text(dict(self.backend.launches))  # a copy: other threads launch on

    def close(self) -> None:
        """Release the caches. Calls in progress finish; later ones raise."""
        with self._lock:
            self._closed, idle = True, self._idle
            self._idle = []
        for context in idle:
            context.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _events(self, sequences: Sequence[TokenSequence]) -> Generator[TokenEvent, None, None]:
        """Generate for ``sequences``, an event per token; the caches go back to the pool when the iterator is closed."""
        with self._lease_context(len(sequences)) as context:
            yield from run(self.policy, context, sequences, self.max_batch)

    @contextmanager
    def _lease_context(self, sequences: int) -> Iterator[ExecutionContext]:
        """KV caches for up to ``sequences`` sequences, from the pool when one is large enough."""
        # Caches of one sequence are as long as they may get, which the attention of an exiting prefill would read through.
        wanted = min(max(sequences, 1), self.max_batch) + self.options.depth.prefill_exit
        with self._lock:
            if self._closed:
                raise TideError("the engine is closed; load it again")
            fitting = [s for s in self._idle if s.capacity >= wanted]
            context = min(fitting, key=lambda s: s.capacity) if fitting else None
            if context is not None:
                self._idle.remove(context)
        if context is None:
            context = self.backend.context(wanted)
        else:
            context.clear()
        sound = True
        try:
            yield context
        except TideError:
            sound = False  # a request that failed may have left NaN in its caches, which must not reach another
            raise
        finally:
            with self._lock:
                kept = sound and not self._closed
                if kept:
                    self._idle.append(context)
            if not kept:
                context.close()

    def _chunk(self, event: TokenEvent) -> Chunk:
        sequence = event.sequence
        done = self._finish(sequence) if sequence.finish_reason is not None else None
        return Chunk(event.text, event.token, done)

    def _finish(self, sequence: TokenSequence) -> Generation:
        generation = finished(sequence, self.policy.name, self.tokenizer)
        stats = with_promises(generation.stats, sequence, self.manifest, self.options.depth)
        generation = replace(generation, stats=stats)
        self._metrics.add(generation)
        return generation
