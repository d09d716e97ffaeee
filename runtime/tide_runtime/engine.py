"""The public API: load a bundle, generate from it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tide_runtime.backends import load_backend
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.certificate_coverage import with_promises
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.depth.registry import make_policy
from tide_runtime.device_loop.select import choose_drive
from tide_runtime.errors import BundleError, ParamsError, PromptError, TideError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.metrics import EngineMetrics
from tide_runtime.outputs import Chunk, Generation, finished
from tide_runtime.sampler import Sampler
from tide_runtime.scheduler import TokenEvent, run
from tide_runtime.scoring import Score, score_text
from tide_runtime.sequence import TokenSequence
from tide_runtime.targets.select import DeviceChoice, choose_target
from tide_runtime.text.chat_template import render_chat
from tide_runtime.text.tokenizer import TextStream, Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs. Defaults suit embedding in a service.

    Args:
        target: which target of the bundle; ``auto`` takes the best one for ``device``.
        policy: depth policy: ``full``, ``exact``, ``exit``, or ``auto``: what the calibration recommends, else ``full``.
        depth: options of the policies that skip layers.
        max_batch: sequences that run at once, fewer where engines were built for fewer; more prompts wait for a free slot.
        prefill_chunk: prompt tokens per prefill step.
        threads: ONNX Runtime's threads (see `ThreadOptions`).
        verify: compare the bundle's files with their SHA-256 when loading.
        device: ``auto`` (the GPU where the bundle has a target for it, else the processor), ``cpu``, ``cuda``, ``cuda:1``.
    """

    target: str = "auto"
    policy: str = "auto"
    depth: DepthOptions = field(default_factory=DepthOptions)
    max_batch: int = 16
    prefill_chunk: int = 256
    threads: ThreadOptions = field(default_factory=ThreadOptions)
    verify: bool = True
    device: str = "auto"

    def __post_init__(self) -> None:
        DeviceChoice.parse(self.device)
        for name in ("max_batch", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ParamsError(f"{name} is {value!r}; set it to an integer >= 1")


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
        self._check_params = policy.check_params
        self.drive = choose_drive(policy, self.backend)
        self.policy = self.drive.policy
        info = bundle.manifest.tokenizer
        self.tokenizer = Tokenizer.from_file(bundle.path(info.file)) if info is not None else None
        self._template = bundle.text(info.chat_template) if info is not None and info.chat_template is not None else None
        self._check_tokenizer()
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
        sequences = self._sequences(prompts, params or GenerationParams())
        for _ in self._events(sequences):
            pass
        return [self._finish(sequence) for sequence in sequences]

    def stream(self, prompt: Prompt, params: GenerationParams | None = None) -> Iterator[Chunk]:
        """Generate for one prompt, a chunk per token as soon as it is final; closing the iterator cancels the rest."""
        sequence = self._make_sequence(0, prompt, params or GenerationParams(), streamed=True)

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
        ids = list(_sequence(tokens))
        if not 1 <= prompt_tokens < len(ids):
            raise PromptError(f"prompt_tokens is {prompt_tokens} of {len(ids)} tokens; leave at least one token to score")
        for part in (ids[:-1], ids[1:]):  # the last token is never put into the cache
            self._prompt_ids(part)
        params = GenerationParams(max_new_tokens=len(ids) - prompt_tokens, ignore_eos=True)
        prompt = self._make_sequence(0, ids[:prompt_tokens], params)
        with self._lease_context(1) as context:
            return score_text(self._policy_for_scores(), context, prompt, ids[prompt_tokens:])

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

    def _sequences(self, prompts: Prompt | Sequence[Prompt], params: GenerationParams) -> list[TokenSequence]:
        several = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(_sequence(prompts))
        return [self._make_sequence(i, prompt, params) for i, prompt in enumerate(several)]  # type: ignore[arg-type]

    def _events(self, sequences: Sequence[TokenSequence]) -> Generator[TokenEvent, None, None]:
        """Generate for ``sequences``, an event per token; the caches go back to the pool when the iterator is closed."""
        with self._lease_context(len(sequences)) as context:
            yield from run(self.policy, context, sequences, self.max_batch)

    def _make_sequence(self, index: int, prompt: Prompt, params: GenerationParams, streamed: bool = False) -> TokenSequence:
        ids = self._prompt_ids(prompt)
        if params.stop and self.tokenizer is None:
            raise ParamsError("stop strings need a tokenizer, which this bundle has not; use eos_token_ids")
        self._check_params(params)
        cache_slots, vocab = self.manifest.max_seq_len, self.manifest.model.vocab_size
        eos = params.eos_token_ids if params.eos_token_ids is not None else self.manifest.generation.eos_token_ids
        # One token more than the cache holds can be generated: the last one is never written back.
        tokens = np.zeros(min(len(ids) + params.max_new_tokens, cache_slots + 1), np.int64)
        tokens[: len(ids)] = ids
        return TokenSequence(
            index=index,
            tokens=tokens,
            last_token=ids[-1],
            num_tokens=len(ids),
            prompt_tokens=len(ids),
            params=params,
            eos=frozenset(eos),
            sampler=Sampler(params, vocab, index),
            # Without stop strings or a listener the text is decoded once, at the end.
            text=TextStream(self.tokenizer, params.stop) if self.tokenizer is not None and (streamed or params.stop) else None,
            cache_slots=cache_slots,
        )

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError("this bundle has no tokenizer; give token ids instead of text")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(_sequence(prompt))
        vocab, slots = self.manifest.model.vocab_size, self.manifest.max_seq_len
        if not ids:
            raise PromptError("the prompt is empty; give at least one token (a model's BOS token will do)")
        for token in ids:
            if not isinstance(token, int | np.integer) or not 0 <= token < vocab:
                raise PromptError(f"the prompt has the token id {token!r}, expected integers from 0 to {vocab - 1}")
        if len(ids) > slots:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, the KV cache {slots} slots; shorten it, "
                f"or export with --max-seq-len {len(ids)} or more"
            )
        return ids

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

    def _check_tokenizer(self) -> None:
        vocab = self.manifest.model.vocab_size
        if self.tokenizer is not None and self.tokenizer.vocab_size > vocab:
            raise BundleError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens, the model's vocabulary {vocab}: "
                "tokenizer.json belongs to another model; export the bundle again"
            )


def _is_ids(prompts: object) -> bool:
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and np.issubdtype(prompts.dtype, np.number)
    return (
        isinstance(prompts, Sequence)
        and not isinstance(prompts, bytes)
        and len(prompts) > 0
        and isinstance(prompts[0], int | float | np.number)
    )


def _sequence(prompt: Any) -> Sequence[Any]:
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise PromptError(f"the prompt is {prompt!r:.80}, expected text or a list of token ids")
    return prompt  # type: ignore[return-value]  # an array of ids will do
