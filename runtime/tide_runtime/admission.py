"""What enters the engine: prompts and parameters are checked here, and become sequences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from tide_runtime.bundle.manifest import Manifest
from tide_runtime.embedding import EmbeddedSequence, embedding_size
from tide_runtime.errors import ParamsError, PromptError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.lora import LoraAdapter
from tide_runtime.sampler import Sampler
from tide_runtime.sequence import TokenSequence
from tide_runtime.text.grammar import GrammarCompiler, GrammarState
from tide_runtime.text.thought_state import ThoughtState, ThoughtVocabulary
from tide_runtime.text.tokenizer import TextStream, Tokenizer

Prompt = str | Sequence[int]


def ways_to_fit(manifest: Manifest, tokens: int) -> str:
    """What to do about a prompt of ``tokens``, more than the KV cache has slots: words for an error."""
    positions = manifest.model.max_position_embeddings  # 0: unknown
    if positions and tokens > positions:
        longer = f", and export with --max-seq-len {positions}" if manifest.max_seq_len < positions else ""
        return f"shorten it to at most {positions} tokens, the positions that the model knows{longer}"
    return f"shorten it, or export with --max-seq-len {tokens} or more (tide-run and tide-serve take it where they export)"


class Admission:
    """Turns prompts into sequences.

    Args:
        check_params: raises ParamsError where the depth policy cannot do what the parameters want.
        grammars: compiles those of requests.
        adapters: that requests may choose from.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        check_params: Callable[[GenerationParams], None],
        grammars: GrammarCompiler,
        adapters: Sequence[LoraAdapter] = (),
    ) -> None:
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.check_params = check_params
        self.grammars = grammars
        self.thoughts = ThoughtVocabulary(tokenizer, manifest.model.vocab_size) if tokenizer is not None else None
        self._adapters = {adapter.name: (number, adapter.digest) for number, adapter in enumerate(adapters, 1)}

    def sequences(self, prompts: Prompt | Sequence[Prompt], params: GenerationParams) -> list[TokenSequence]:
        """A sequence for each of ``prompts``, or for the one prompt. Raises PromptError or ParamsError."""
        return [self.sequence(prompt, params) for prompt in each_prompt(prompts)]

    def sequence(self, prompt: Prompt, params: GenerationParams, streamed: bool = False) -> TokenSequence:
        """A sequence for ``prompt``. Raises PromptError or ParamsError.

        Args:
            streamed: decode its text token by token. Without it, and without stop strings, the text is decoded at the end.
        """
        if self.manifest.embedding is not None:
            raise PromptError("this is an embedding model, which writes no text; use Engine.embed, or /v1/embeddings of a server")
        return self._sequence(prompt, params, streamed)

    def text_to_embed(self, text: Prompt, dimensions: int | None = None) -> EmbeddedSequence:
        """The sequence of a text to embed; ``dimensions`` as in `embedding_size`. Raises PromptError or ParamsError."""
        info = self.manifest.embedding
        if info is None:
            raise PromptError("this model writes text and has no embeddings; load the bundle of an embedding model")
        size = embedding_size(info, self.manifest.model.hidden_size, dimensions)
        prompt = info.prompt + text if isinstance(text, str) else text
        params = GenerationParams(max_new_tokens=1, ignore_eos=True)
        return EmbeddedSequence.of(self._sequence(prompt, params), info, size)

    def _sequence(self, prompt: Prompt, params: GenerationParams, streamed: bool = False) -> TokenSequence:
        ids = self.token_ids(prompt)
        if params.stop and self.tokenizer is None:
            raise ParamsError("stop strings need a tokenizer, which this bundle has not; use eos_token_ids")
        self.check_params(params)
        cache_slots = self.manifest.max_seq_len
        vocab = self.manifest.model.vocab_size
        if outside := [token for token, _ in params.logit_bias if token >= vocab]:
            raise ParamsError(f"logit_bias names the token id {outside[0]}, expected ids from 0 to {vocab - 1}")
        if params.thoughts is not None and self.thoughts is None:
            raise ParamsError("thoughts need a tokenizer, which this bundle has not; leave them out")
        adapter, digest = self._adapter(params.adapter)
        eos = params.eos_token_ids if params.eos_token_ids is not None else self.manifest.generation.eos_token_ids
        # One token more than the cache holds can be generated: the last one is never written back.
        tokens = np.zeros(min(len(ids) + params.max_new_tokens, cache_slots + 1), np.int64)
        tokens[: len(ids)] = ids
        answer = self.grammars.start(params.grammar) if params.grammar is not None else None
        grammar: GrammarState | ThoughtState | None = answer
        thoughts = None
        shown = {*params.shown_tokens}
        if params.thoughts is not None and self.thoughts is not None:
            thoughts = self.thoughts.start(params.thoughts, answer, eos)
            grammar = thoughts if params.forces_tokens else None
            shown |= self.thoughts.special(params.thoughts.marks).keys()
        return TokenSequence(
            tokens=tokens,
            num_tokens=len(ids),
            prompt_tokens=len(ids),
            params=params,
            eos=frozenset(eos),
            sampler=Sampler(params, vocab, len(ids)),
            adapter=adapter,
            adapter_digest=digest,
            long_rotary_from=self.manifest.long_rotary_from,
            grammar=grammar,
            thoughts=thoughts,
            text=self._text_stream(params, shown) if streamed or params.stop or shown else None,
        )

    def _text_stream(self, params: GenerationParams, shown: Collection[int]) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(self.tokenizer, params.stop, shown=shown, thoughts=params.thoughts)

    def _adapter(self, name: str | None) -> tuple[int | None, str]:
        """Number and digest of the adapter ``name``. Raises ParamsError if the engine has none of that name."""
        if name is None:
            return (0 if self._adapters else None), ""
        if name not in self._adapters:
            has = ", ".join(self._adapters) or "none"
            raise ParamsError(f"adapter is {name!r}, the engine has: {has}; load it with EngineOptions(adapters=…)", "adapter")
        return self._adapters[name]

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises PromptError for an empty or too long prompt, or ids outside the vocabulary."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError("this bundle has no tokenizer; give token ids instead of text")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(_items(prompt))
        vocab = self.manifest.model.vocab_size
        slots = self.manifest.max_seq_len
        if not ids:
            raise PromptError("the prompt is empty; give at least one token (a model's BOS token will do)")
        for token in ids:
            if not isinstance(token, int | np.integer) or not 0 <= token < vocab:
                raise PromptError(
                    f"the prompt has the token id {token!r}{self._spelt(token)}, expected integers from 0 to {vocab - 1}"
                )
        if len(ids) > slots:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, the KV cache {slots} slots; {ways_to_fit(self.manifest, len(ids))}"
            )
        return ids

    def _spelt(self, token: object) -> str:
        """What the tokenizer calls an id that the model has no embedding for: its tokenizer may be the larger one."""
        text = self.tokenizer.token(token) if self.tokenizer is not None and isinstance(token, int) and token >= 0 else None
        return f" ({text!r}, which the tokenizer has and the model has not)" if text is not None else ""

    def text_to_score(
        self, tokens: Sequence[int], prompt_tokens: int, as_prompt: bool, adapter: str | None = None
    ) -> tuple[TokenSequence, list[int]]:
        """The sequence of the first ``prompt_tokens`` of ``tokens``, and the tokens after them. Raises PromptError.

        Args:
            as_prompt: all tokens but the last are the sequence's prompt.
            adapter: see `GenerationParams`.
        """
        ids = list(_items(tokens))
        if not 1 <= prompt_tokens < len(ids):
            raise PromptError(f"prompt_tokens is {prompt_tokens} of {len(ids)} tokens; leave at least one token to score")
        for part in (ids[:-1], ids[1:]):  # the last token is never put into the cache
            self.token_ids(part)
        end = len(ids) - 1 if as_prompt else prompt_tokens
        params = GenerationParams(max_new_tokens=len(ids) - end, ignore_eos=True, adapter=adapter)
        sequence = self.sequence(ids[:end], params)
        return sequence, ids[prompt_tokens:]


def each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts, or the one prompt in a list. Raises PromptError for what is neither."""
    return [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(_items(prompts))  # type: ignore[list-item]


def _is_ids(prompts: object) -> bool:
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and np.issubdtype(prompts.dtype, np.number)
    return (
        isinstance(prompts, Sequence)
        and not isinstance(prompts, bytes)
        and len(prompts) > 0
        and isinstance(prompts[0], int | float | np.number)
    )


def _items(prompt: Any) -> Sequence[Any]:
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise PromptError(f"the prompt is {prompt!r:.80}, expected text or a list of token ids")
    return prompt  # type: ignore[return-value]  # an array of ids will do
