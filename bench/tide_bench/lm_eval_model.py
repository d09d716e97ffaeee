"""TIDE as a model of EleutherAI's lm-evaluation-harness, where importing this file registers it as ``tide``.

The harness asks for the log-likelihood of continuations and of whole texts, and for generated text. All of it runs by one depth
policy of one engine, as many requests at once as ``batch_size`` says.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import TokenizerInfo
from tide_runtime.errors import BundleError, ParamsError, PromptError
from tide_runtime.scoring import Score
from tide_runtime.text.chat_template import render_chat
from tide_runtime.text.tokenizer import Tokenizer
from tqdm import tqdm

_ROUNDS = 8  # batches that are handed to the engine at once: rows that become free are taken by the next request
_UNASKED = "cuda:0"  # lm-eval's --device where the user gives none
_SAMPLING = {"top_k", "top_p", "min_p", "repetition_penalty", "seed"}

logger = logging.getLogger(__name__)


@register_model("tide")
class TideLM(TemplateLM):
    """A bundle, run by one depth policy.

    Args:
        bundle: the folder that tide-export wrote.
        policy: ``full``, ``exact``, ``exit`` or ``auto`` (see `EngineOptions`).
        target, device: as `EngineOptions` has them; ``cuda:0``, which lm-eval gives where the user gives nothing, is ``auto``.
        batch_size: requests that run at once, or ``auto``: ``max_batch_size``, or else the engine's default. Policy ``exit`` may
            run all layers where several do.
        max_length: most tokens that a token may depend on; None: as many as the KV cache holds.
        max_gen_toks: new tokens where a task does not say how many.
        prefix_token_id: stands before a text without context; None: the model's BOS token, or else its EOS token.
        threads: of an operator; 0: one per core. They are one pool for the process, in which only TIDE must run ONNX Runtime.

    Raises ParamsError, and BundleError when the bundle is missing, broken, or has no tokenizer.
    """

    def __init__(
        self,
        bundle: str = "",
        policy: str = EngineOptions.policy,
        target: str = EngineOptions.target,
        device: str = EngineOptions.device,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = GenerationParams.max_new_tokens,
        prefix_token_id: int | None = None,
        threads: int = 0,
    ) -> None:
        super().__init__()
        if not bundle:
            raise ParamsError("no bundle is given; add --model_args bundle=FOLDER, the folder that tide-export wrote")
        options = EngineOptions(
            policy=policy,
            target=target,
            device="auto" if device == _UNASKED else device,
            max_batch=_max_batch(batch_size, max_batch_size),
            threads=ThreadOptions(threads, shared=True),
        )
        self.engine = Engine.load(bundle, options)
        manifest = self.engine.manifest
        if self.engine.tokenizer is None or manifest.tokenizer is None:
            raise BundleError(
                f"{bundle} has no tokenizer, and tasks are text; export it again from a model folder with a tokenizer.json"
            )
        self.text_tokenizer: Tokenizer = self.engine.tokenizer
        self._info: TokenizerInfo = manifest.tokenizer
        template = manifest.tokenizer.chat_template
        self._template = self.engine.bundle.text(template) if template is not None else None
        self.max_length = min(max_length or manifest.max_seq_len, manifest.max_seq_len)
        self.max_gen_toks = max_gen_toks
        self._prefix = prefix_token_id

    # --- text and tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text. Raises BundleError where the model names none."""
        found = self._special_id("eos_token")
        if found is None:
            found = next(iter(self.engine.manifest.generation.eos_token_ids), None)
        if found is None:
            raise BundleError("the model names no BOS and no EOS token; give one with --model_args prefix_token_id=ID")
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        if self._prefix is None:
            bos = self._special_id("bos_token")
            self._prefix = self.eot_token_id if bos is None else bos
        return self._prefix

    def _special_id(self, name: str) -> int | None:
        text = self._info.special_tokens.get(name)
        ids = self.text_tokenizer.encode(text, add_special_tokens=False) if text is not None else []
        return ids[0] if len(ids) == 1 else None

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of ``string``; None adds the tokenizer's special tokens unless the text begins with the first one itself."""
        if add_special_tokens is None:
            prefix = self.text_tokenizer.token(self.prefix_token_id)
            add_special_tokens = prefix is None or not string.startswith(prefix)
        return self.text_tokenizer.encode(string, add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        """Differs where another tokenizer or chat template would make other requests of a task."""
        files = [self._info.file, *([self._info.chat_template] if self._info.chat_template else [])]
        digests = "".join(self.engine.manifest.files[name].sha256 for name in files)
        return f"tide-{sha256(digests.encode()).hexdigest()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The model's template, for the record; empty where it has none or none is wanted."""
        return (self._template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat as text in the model's own template. Without ``add_generation_prompt`` the last message is to be continued.

        Raises PromptError when the bundle has no template or it refuses the messages.
        """
        text = render_chat(
            self._template or "",
            chat_history,
            special_tokens=self._info.special_tokens,
            add_generation_prompt=add_generation_prompt,
        )
        if not add_generation_prompt:
            last = chat_history[-1]["content"].strip()
            text = text[: text.rindex(last) + len(last)]
        return text

    def get_model_info(self) -> dict[str, Any]:
        """What the harness stores beside its results."""
        manifest = self.engine.manifest
        calibration = self.engine.manifest.calibration
        certificate = calibration.certificate if calibration is not None and self.engine.policy.name == "exit" else None
        return {
            "model_source": manifest.model.source,
            "model_sha": manifest.model.fingerprint,
            "model_dtype": manifest.dtype,
            "model_num_parameters": manifest.model.parameters,
            "tide_policy": self.engine.policy.name,
            "tide_target": self.engine.target,
            "tide_certified_disagreement": certificate.max_disagreement if certificate is not None else None,
        }

    # --- log-likelihoods

    def scores(self, texts: Sequence[tuple[list[int], int]], disable_tqdm: bool = False) -> Iterator[Score]:
        """`Score` of each text, given with its context's tokens, in their order."""
        with tqdm(total=len(texts), disable=disable_tqdm, desc=f"Scoring by {self.engine.policy.name}") as bar:
            for part in self._parts(texts):
                for score in self.engine.score_many(part):
                    bar.update()
                    yield score

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        texts = [self._text(context, continuation) for _, context, continuation in requests if continuation]
        scores = self.scores(texts, disable_tqdm)
        answers = list[tuple[float, bool]]()
        for key, _, continuation in requests:
            answer = (0.0, True)  # of a continuation without tokens
            if continuation:
                score = next(scores)
                answer = (sum(score.logprobs), score.argmax == continuation)
            self.cache_hook.add_partial("loglikelihood", key, answer)
            answers.append(answer)
        return answers

    def _text(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Both together, without the beginning of a long context, and how many tokens the context has."""
        if len(continuation) > self.max_length:
            raise PromptError(
                f"a continuation has {len(continuation)} tokens, more than the {self.max_length} that a token may depend on; "
                f"export with --max-seq-len {len(continuation)} or more"
            )
        context = self._end_of(context, self.max_length + 1 - len(continuation))  # the last token is only predicted
        return [*context, *continuation], len(context)

    def read_texts(self, texts: Sequence[str], disable_tqdm: bool = False) -> Iterator[list[Score]]:
        """What the policy makes of each whole text: scores of its windows, which have every token once."""
        windows = [self._windows(text) for text in texts]
        scores = self.scores([window for own in windows for window in own], disable_tqdm)
        for own in windows:
            yield list(islice(scores, len(own)))

    def _windows(self, text: str) -> list[tuple[list[int], int]]:
        pairs = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
        return [self._text(*make_disjoint_window(pair)) for pair in pairs]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text."""
        texts = [request.args[0] for request in requests]
        found = list[float]()
        for text, scores in zip(texts, self.read_texts(texts, disable_tqdm), strict=True):
            found.append(float(sum(sum(score.logprobs) for score in scores)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    # --- generated text

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Text behind each context, up to the first of the request's stop strings."""
        groups = defaultdict[GenerationParams, list[int]](list)
        for place, request in enumerate(requests):
            groups[generation_params(request.args[1], self.max_gen_toks)].append(place)
        found = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc=f"Generating by {self.engine.policy.name}") as bar:
            for params, places in groups.items():
                for part in self._parts(places):
                    prompts = [self._prompt(requests[place].args[0], params.max_new_tokens) for place in part]
                    for place, generation in zip(part, self.engine.generate(prompts, params), strict=True):
                        found[place] = generation.text or ""
                        self.cache_hook.add_partial("generate_until", requests[place].args, found[place])
                        bar.update()
        return found

    def _prompt(self, context: str, new_tokens: int) -> list[int]:
        if new_tokens >= self.max_length:
            raise ParamsError(
                f"max_gen_toks is {new_tokens}, which leaves no room for a context in {self.max_length} tokens; ask for fewer, "
                "or export with a larger --max-seq-len"
            )
        return self._end_of(self.tok_encode(context), self.max_length - new_tokens)

    def _end_of(self, context: list[int], room: int) -> list[int]:
        """The last ``room`` tokens of a context, or the one before a text that has none."""
        if len(context) > room:
            warning_once(logger, f"contexts that are too long lose their beginning, so that {self.max_length} tokens are enough")
        return context[-room:] or [self.prefix_token_id]

    def _parts(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        size = _ROUNDS * self.engine.max_batch
        return (items[start : start + size] for start in range(0, len(items), size))


def generation_params(gen_kwargs: dict[str, Any], max_gen_toks: int) -> GenerationParams:
    """Parameters of a task's ``generation_kwargs``. Raises ParamsError for those that TIDE has no equivalent of."""
    given: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, max_gen_toks))
    until, new_tokens, sampled = (given.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
    temperature, beams = given.pop("temperature", 1.0), given.pop("num_beams", 1)
    unknown = sorted(given.keys() - _SAMPLING) + ["num_beams"] * (beams != 1)
    if unknown:
        known = ", ".join(["until", "max_gen_toks", "do_sample", "temperature", *sorted(_SAMPLING)])
        raise ParamsError(f"generation_kwargs has {', '.join(unknown)}, which TIDE cannot do; known are {known}")
    stop = tuple(text for text in until if text)
    return GenerationParams(max_new_tokens=new_tokens, temperature=temperature if sampled else 0.0, stop=stop, **given)


def _max_batch(batch_size: int | str | None, most: int | None) -> int:
    if batch_size is None or str(batch_size).startswith("auto"):
        return most or EngineOptions.max_batch
    try:
        return int(batch_size)
    except ValueError:
        raise ParamsError(f"batch_size is {batch_size!r}; set it to a number of requests, or auto") from None
