"""The public API: load a bundle, generate from it."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tide_runtime.admission import Admission, Prompt, each_prompt
from tide_runtime.backends import load_backend
from tide_runtime.backends.base import Backend
from tide_runtime.backends.observed import Observer, observed
from tide_runtime.backends.recurrent_states import StateMemory
from tide_runtime.backends.step_arrays import RowPadding
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import LOOP, Manifest
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.certificate_coverage import with_promises
from tide_runtime.depth.options import with_draft_head_of
from tide_runtime.depth.policy import BackendFacts, EnginePolicy
from tide_runtime.depth.registry import make_policy
from tide_runtime.device_loop.driver_choice import DriverChoice, capture_steps, choose_driver, with_captures
from tide_runtime.engine_options import EngineOptions
from tide_runtime.errors import ParamsError, PromptError
from tide_runtime.generation_params import BIAS_LIMIT, GenerationParams
from tide_runtime.lora import read_adapters
from tide_runtime.metrics import EngineMetrics, EngineStats
from tide_runtime.outputs import Chunk, Generation, finished
from tide_runtime.prefix_cache_folder import PrefixCacheFolder
from tide_runtime.scheduling.budgets import StepBudget, device_blocks, kv_blocks
from tide_runtime.scheduling.handle import GenerationHandle, ResultHandle
from tide_runtime.scheduling.loop import EngineLoop, Submitted
from tide_runtime.scheduling.prefix_disk import PrefixDisk
from tide_runtime.scheduling.prefix_tree import PrefixTree
from tide_runtime.scheduling.scheduler import Scheduler, SchedulerOptions
from tide_runtime.scheduling.snapshot_tree import SnapshotTree
from tide_runtime.scoring import ForcedSequence, Score
from tide_runtime.sequence import TokenSequence
from tide_runtime.targets.target_choice import DeviceChoice, choose_target
from tide_runtime.text.chat_template import render_chat
from tide_runtime.text.grammar import Grammar, GrammarCompiler
from tide_runtime.text.tokenizer import Tokenizer

_LOGITS_BYTES = 1 << 26  # logits that a step's prompts may fill, in bytes; more would hold memory without being faster


class Engine:
    """A loaded bundle.

    Any number of threads and asyncio event loops may call it at once. One thread of the engine's own runs all requests together
    (`EngineLoop`): they share launches, KV memory and the prefix cache, and none of that changes a text. The thread of an engine
    that is dropped without `close` ends with it.

    Args:
        backend: a loaded target of the bundle, whose weights this engine shares; None: loaded here.
        policy: runs in place of the one that ``options`` name.
        tokenizer: the bundle's, which another engine has read; None: read here.
    """

    def __init__(
        self,
        bundle: Bundle,
        options: EngineOptions,
        *,
        backend: Backend | None = None,
        policy: EnginePolicy | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.bundle = bundle
        self.manifest: Manifest = bundle.manifest
        self.options = options
        device = DeviceChoice.parse(options.device)
        self.target = options.target if options.target != "auto" else choose_target(bundle.manifest, device)
        share = options.share_weights or bool(options.adapters)
        loaded = backend or load_backend(bundle, self.target, options.threads, device.ordinal, device.kind, share)
        adapters = read_adapters(options.adapters)
        self.backend: Backend = loaded.with_bits(options.bits)
        if adapters:
            self.backend = self.backend.with_adapters(adapters)
        capture_steps(self.backend)
        self.drive = DriverChoice(policy, "the policy was given") if policy is not None else self._choose_driver()
        self.policy = self.drive.policy
        info = bundle.manifest.tokenizer
        self.tokenizer = tokenizer or (Tokenizer.from_file(bundle.path(info.file)) if info is not None else None)
        chat, tools = (info.chat_template, info.tool_chat_template) if info is not None else (None, None)
        self._template = bundle.text(chat) if chat is not None else None
        self._tool_template = bundle.text(tools) if tools is not None else self._template
        self.grammars = GrammarCompiler(
            bundle.path(info.file) if info is not None else None,
            bundle.manifest.model.vocab_size,
            bundle.manifest.generation.eos_token_ids,
        )
        self.admission = Admission(bundle.manifest, self.tokenizer, self.policy.check_params, self.grammars, adapters)
        self._metrics = EngineMetrics(bundle.manifest.model.num_layers)
        rows = self.backend if self.policy.uses_draft_head else self.backend.without_draft_head()
        self._memory = memory = StateMemory.of(rows.kv_bytes_per_token, rows.state_bytes)
        of_rows = getattr(loaded, "device", None)
        kv_memory = options.kv_memory
        blocks = kv_blocks(memory, kv_memory, self.max_batch, bundle.manifest.max_seq_len, of_rows is not None)
        embeds = bundle.manifest.embedding is not None  # then every token is needed, as its state is pooled
        keeps_prefixes = self.policy.can_resume and self.backend.has_prefix_blocks and not embeds
        caches_prefixes = options.prefix_cache and keeps_prefixes
        prefix_blocks = blocks if caches_prefixes else 0
        if caches_prefixes and of_rows is not None:
            prefix_blocks = device_blocks(of_rows, memory, blocks if kv_memory is None else blocks // 2)
            blocks += prefix_blocks if kv_memory is None else 0
        tree = self._make_tree() if caches_prefixes else None
        budget = StepBudget(
            CostModel.of(bundle.manifest, self.backend.pass_costs), options.prefill_chunk, self.backend.packs_steps
        )
        scheduler = Scheduler(
            SchedulerOptions(
                max_batch=self.max_batch,
                blocks=blocks,
                prefix_blocks=prefix_blocks,
                row_blocks=memory.row_blocks,
                slots=bundle.manifest.max_seq_len,
                lookahead=self.policy.lookahead,
                prompt_tokens=budget,
                max_logits=max(self.max_batch, _LOGITS_BYTES // (4 * bundle.manifest.logits_size)),
                can_preempt=self.policy.can_resume,
                max_queue=options.max_queue,
                consecutive_rows=not self.backend.packs_steps,
            ),
            tree,
            self._prefix_disk(tree),
        )
        finish = partial(_finished, self.policy.name, self.tokenizer, self.manifest, options, self._metrics)
        as_rows = {"loops_as_rows": True} if self.policy.loops_as_rows else {}
        make_context = partial(rows.context, self.max_batch, prefix_blocks, **as_rows)
        captures = with_captures(self.backend, self.policy, make_context)
        self._loop = EngineLoop(self.policy, captures or make_context, scheduler, finish, self._metrics)
        if captures is not None:
            self._loop.prepare()
        weakref.finalize(self, self._loop.stop, abort=True)

    def _make_tree(self) -> PrefixTree:
        snapshot_blocks = self._memory.snapshot_blocks
        return SnapshotTree(snapshot_blocks) if snapshot_blocks else PrefixTree()

    def _prefix_disk(self, tree: PrefixTree | None) -> PrefixDisk | None:
        folder, limit = self.options.prefix_dir, self.options.prefix_disk
        if folder is None:
            return None
        if tree is None or not self.backend.bits_key:
            raise ParamsError(
                f"prefix_dir is set, and policy {self.policy.name} on target {self.target} writes no prefixes; leave it out"
            )
        policy = self.policy.name, repr(self.options.depth)
        return PrefixDisk(PrefixCacheFolder(Path(folder), limit), [*self.backend.bits_key, *policy])

    def _choose_driver(self) -> DriverChoice:
        if self.bits_limitation is not None and self.options.bits == "same":
            warnings.warn(self.bits_limitation, RuntimeWarning, stacklevel=4)
        facts = BackendFacts(
            self.max_batch,
            self.backend.pass_costs,
            same_bits=self.backend.row_padding is not None,
            rounds=self.manifest.rounds(self.target),
            adapted=bool(self.options.adapters),
            loop_costs=(lambda: self.backend.loop_costs) if LOOP in self.manifest.targets[self.target].graphs else None,
        )
        policy, depth = self.options.policy, self.options.depth
        manifest = with_draft_head_of(self.manifest, self.target, policy, depth)
        return choose_driver(make_policy(policy, manifest, depth, facts), self.backend)

    @classmethod
    def load(cls, directory: str | Path, options: EngineOptions | None = None, device: str | None = None) -> Engine:
        """Load the bundle in ``directory``. ``device`` replaces that of the options.

        Raises BundleError when it is broken, TargetError when it cannot run here.
        """
        options = options or EngineOptions()
        options = options if device is None else replace(options, device=device)
        return cls(Bundle.open(directory, verify=options.verify), options)

    def with_options(self, options: EngineOptions, observer: Observer | None = None) -> Engine:
        """An engine of other ``options`` on the weights that this one has loaded, with caches and a loop of its own.

        Args:
            observer: receives every launch of a graph, with its tokens and seconds, in the new engine's thread.

        Raises ParamsError when ``options`` name another target, device or other threads than the weights were loaded for.
        """
        own = {"target": self.target, "device": self.options.device, "threads": self.options.threads}
        for name, loaded in own.items():
            if getattr(options, name) not in ("auto", loaded):
                raise ParamsError(
                    f"{name} is {getattr(options, name)}, but the weights are loaded for {loaded}; load another engine"
                )
        backend = self.backend if observer is None else observed(self.backend, observer)
        options = replace(options, target=self.target, device=self.options.device)
        return Engine(self.bundle, options, backend=backend, tokenizer=self.tokenizer)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: GenerationParams | None = None) -> list[Generation]:
        """Generate for one prompt or several (strings or token ids), sequences of any length together; results in their order.

        Raises PromptError for an empty or too long prompt or ids outside the vocabulary, before anything is computed.
        """
        return self._run(self.admission.sequences(prompts, params or GenerationParams()))

    def stream(self, prompt: Prompt, params: GenerationParams | None = None) -> Iterator[Chunk]:
        """Generate for one prompt, a chunk per token as soon as it is final; closing the iterator cancels the rest."""
        return iter(self.submit(prompt, params))

    def submit(
        self,
        prompt: Prompt,
        params: GenerationParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        streamed: bool = True,
    ) -> GenerationHandle:
        """Queue a prompt and return at once; the handle is iterated, awaited or cancelled.

        Args:
            priority: requests of a higher one start first, and keep their KV memory when it gets short.
            timeout: seconds from now after which the request ends with ``finish_reason`` "deadline".
            streamed: deliver a chunk per token; otherwise the handle gives the result only, with less work per token.

        Raises PromptError, ParamsError; QueueFullError when ``max_queue`` requests wait; EngineClosedError.
        """
        sequence = self.admission.sequence(prompt, params or GenerationParams(), streamed)
        request = self._request(sequence, priority, timeout, streamed)
        self._loop.submit([request])
        return request.handle

    def score(self, tokens: Sequence[int], prompt_tokens: int = 1) -> Score:
        """Log-probabilities of the text ``tokens`` after its first ``prompt_tokens``, by the engine's policy.

        ``full`` and ``exact`` give the model's own, in prompt passes, which have the bits of decode steps. Under ``exit`` each
        token is scored at the depth where the policy stops, so they are decoded one after the other; so they are where prompt
        passes may have other bits: on GPUs, and on machines with a `bits_limitation`.

        Raises PromptError when no token is left to score, or for ids outside the vocabulary.
        """
        return self.score_many([(tokens, prompt_tokens)])[0]

    def score_many(self, texts: Sequence[tuple[Sequence[int], int]], decode: bool = False) -> list[Score]:
        """`score` for several texts, each with its ``prompt_tokens``, which run together; results in their order.

        Args:
            decode: decode every token, as generating the text would, to measure what that takes.

        Raises PromptError as `score` does, before anything is computed.
        """
        sequences = [self._forced(*text, decode=decode) for text in texts]
        self._run(sequences)
        return [sequence.score() for sequence in sequences]

    def submit_score(
        self, tokens: Sequence[int], prompt_tokens: int = 1, top: int = 0, adapter: str | None = None
    ) -> ResultHandle[Score]:
        """Queue a text to score, as `score` does, and return at once.

        Args:
            top: how many of the likeliest tokens to report at each place.
            adapter: see `GenerationParams`.

        Raises PromptError; ParamsError; QueueFullError when ``max_queue`` requests wait; EngineClosedError.
        """
        sequence = self._forced(tokens, prompt_tokens, top, adapter=adapter)
        request = self._request(sequence, streamed=False)
        self._loop.submit([request])
        return ResultHandle(request.handle, sequence.score)

    def embed(self, texts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> NDArray[np.float32]:
        """Vectors [N, H] of the texts of an embedding model, strings or token ids of any lengths; of one text [1, H].

        Args:
            dimensions: numbers of a vector, where the model was trained for shorter ones.

        Raises PromptError, also where the model is none, and ParamsError, before anything is computed.
        """
        sequences = [self.admission.text_to_embed(text, dimensions) for text in each_prompt(texts)]
        self._run(sequences)
        return np.stack([sequence.embedding() for sequence in sequences])

    def submit_embedding(self, text: Prompt, dimensions: int | None = None) -> ResultHandle[NDArray[np.float32]]:
        """Queue a text to embed, as `embed` does, and return at once; the result is its vector [H].

        Raises PromptError; ParamsError; QueueFullError when ``max_queue`` requests wait; EngineClosedError.
        """
        sequence = self.admission.text_to_embed(text, dimensions)
        request = self._request(sequence, streamed=False)
        self._loop.submit([request])
        return ResultHandle(request.handle, sequence.embedding)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
        """Token ids of a chat in the model's own template, ready for the assistant's turn.

        Raises PromptError when the bundle has no template or a message is malformed.
        """
        text = self.chat_text(messages, **extra)
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **extra: Any) -> str:
        """The text of `chat_prompt`, with its special tokens. Raises PromptError as that does."""
        template = self._tool_template if extra.get("tools") else self._template
        if template is None or self.tokenizer is None or self.manifest.tokenizer is None:
            raise PromptError("this model has no chat template; give a plain prompt instead")
        return render_chat(template, messages, special_tokens=self.manifest.tokenizer.special_tokens, **extra)

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile ``grammar``, which requests with it then find compiled. Raises GrammarError with the reason where it cannot."""
        self.grammars.start(grammar)

    def default_params(self, **changes: Any) -> GenerationParams:
        """The generation defaults that the model's authors ship, with ``changes``."""
        info = self.manifest.generation
        defaults = dict(
            temperature=info.temperature,
            top_k=info.top_k,
            top_p=info.top_p,
            min_p=info.min_p,
            repetition_penalty=info.repetition_penalty,
        )
        bias = dict.fromkeys(info.suppress_tokens, -BIAS_LIMIT) | dict(changes.pop("logit_bias", ()))
        return GenerationParams(**{**defaults, **changes}, logit_bias=tuple(bias.items()))

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template (Jinja); None: the bundle has none."""
        return self._template

    @property
    def tool_chat_template(self) -> str | None:
        """Source of the template of chats with tools, which few models have beside `chat_template`; otherwise that one."""
        return self._tool_template

    @property
    def depth(self) -> int:
        """Decoder layers of the model."""
        return self.manifest.model.num_layers

    @property
    def bits_limitation(self) -> str | None:
        """How a text may depend on what shares its launches on this machine, and what that does to policy ``exact``; None: texts
        do not depend on it."""
        if self.backend.row_padding is not None:
            return None
        if self.options.bits == "fast":
            without = "runs as full" if self.manifest.rounds(self.target) else "may choose otherwise than full"
            return (
                "bits is fast, so launches are not padded: a text may depend on the requests that run beside it, and policy "
                f"exact {without}"
            )
        if self.manifest.rounds(self.target):
            return (
                "this machine's low-bit kernels round differently where other tokens share a launch: a text may depend on the "
                "requests that run beside it, and policy exact runs as full"
            )
        return (
            "this machine's kernels sum in another order where other tokens share a launch: where two tokens are almost equally "
            "likely, a text may depend on the requests that run beside it, and on the drafts of policy exact"
        )

    @property
    def row_padding(self) -> RowPadding | None:
        """How launches are padded on this machine, so that a text does not depend on what shares them; None: nothing helps."""
        return self.backend.row_padding

    @property
    def max_batch(self) -> int:
        """Sequences that run at once: as in the options, or fewer where engines were built for fewer."""
        profiles = self.manifest.targets[self.target].profiles
        return min([self.options.max_batch, *(profile.rows[2] for profile in profiles)])

    @property
    def healthy(self) -> bool:
        """Whether the engine takes requests: it is not closed, and its backend has not failed step after step."""
        return self._loop.healthy

    @property
    def step_time(self) -> float:
        """Seconds that the running step has taken so far; 0 while none runs. A step that takes minutes hangs."""
        return self._loop.step_time

    def stats(self) -> EngineStats:
        """What the engine does now, and totals since it was loaded."""
        return self._loop.stats(self._memory.block_bytes)

    def metrics(self) -> str:
        """The same and histograms of latencies, in the Prometheus text format."""
        # The counter is copied, as the loop goes on counting.
        return self._metrics.text(self.stats(), dict(self.backend.launches), self.bits_limitation is None)

    def close(self, abort: bool = False) -> None:
        """Wait for the requests in progress, or cancel them when ``abort``, and free the caches. Later requests are refused."""
        self._loop.stop(abort)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(abort=kind is not None)

    def _run(self, sequences: Sequence[TokenSequence]) -> list[Generation]:
        """Run ``sequences`` together and wait for all of them."""
        requests = [self._request(sequence, streamed=False) for sequence in sequences]
        handles = [request.handle for request in requests]
        self._loop.submit(requests, forced=True)
        try:
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:  # where one has failed, or on Ctrl-C
                handle.cancel()

    def _forced(
        self, tokens: Sequence[int], prompt_tokens: int, top: int = 0, decode: bool = False, adapter: str | None = None
    ) -> ForcedSequence:
        same_bits = self.backend.row_padding is not None and self.backend.packs_steps
        as_prompt = self.policy.runs_every_layer and same_bits and not decode
        return ForcedSequence.of(*self.admission.text_to_score(tokens, prompt_tokens, as_prompt, adapter), num_top=top)

    def _request(
        self, sequence: TokenSequence, priority: int = 0, timeout: float | None = None, streamed: bool = True
    ) -> Submitted:
        request = Submitted(sequence, priority, math.inf if timeout is None else monotonic() + timeout)
        request.handle = GenerationHandle(partial(self._loop.abort, request), streamed, owner=self)
        return request


def _finished(
    policy: str,
    tokenizer: Tokenizer | None,
    manifest: Manifest,
    options: EngineOptions,
    metrics: EngineMetrics,
    sequence: TokenSequence,
) -> Generation:
    generation = finished(sequence, policy, tokenizer)
    generation = replace(generation, stats=with_promises(generation.stats, sequence, manifest, options.depth))
    metrics.add(generation)
    return generation
