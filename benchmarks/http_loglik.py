"""lm-evaluation-harness over HTTP, with its own client for OpenAI's completions, against the same bundle in process.

    python -m benchmarks.http_loglik                             # SmolLM2-135M-Instruct, int4: 3 minutes
    python -m benchmarks.http_loglik --bundle engine/

Every log-likelihood of the local task `tide_choice` is asked for both ways: `local-completions` sends token ids with `echo` and
`logprobs` to tide-serve, and `tide` scores them in its own process. The texts of `tide_quote` are generated both ways too.
"""

from __future__ import annotations

import json as json_module
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from lm_eval import evaluate
from lm_eval.api.model import LM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from tide_bench.lm_eval_model import TideLM
from tide_bench.report import Report
from tide_runtime.bundle import Bundle

from benchmarks.lm_eval_policies import TASKS
from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.serving.http_server import tide_serve

CHOICE, QUOTE = "tide_choice", "tide_quote"
CONCURRENT = 4


def tokenizer_folder(bundle: Path, folder: Path) -> Path:
    """The bundle's tokenizer as transformers loads it."""
    opened = Bundle.open(bundle, verify=False)
    info = opened.manifest.tokenizer
    assert info is not None
    (folder / "tokenizer.json").write_bytes(opened.path(info.file).read_bytes())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **info.special_tokens}
    (folder / "tokenizer_config.json").write_text(json_module.dumps(settings), encoding="utf-8")
    return folder


def answers(model: LM) -> dict[str, list[Any]]:
    """Task → what the model answered to each item's requests."""
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False).load([CHOICE, QUOTE])
    found = evaluate(model, tasks, bootstrap_iters=0)
    assert found is not None
    return {task: [sample["resps"] for sample in found["samples"][task]] for task in (CHOICE, QUOTE)}


def over_http(bundle: Path) -> dict[str, list[Any]]:
    with TemporaryDirectory() as temporary, tide_serve(bundle) as server:
        model = LocalCompletionsAPI(
            model="tide",
            base_url=f"http://{server.address}/v1/completions",
            tokenizer=str(tokenizer_folder(bundle, Path(temporary))),
            tokenized_requests=True,
            num_concurrent=CONCURRENT,
        )
        return answers(model)


def in_process(bundle: Path) -> dict[str, list[Any]]:
    model = TideLM(bundle=str(bundle), batch_size=CONCURRENT, device="cpu")
    with model.engine:
        return answers(model)


def main(
    bundle: Annotated[Path | None, typer.Option(help="A bundle with a tokenizer. Default: SmolLM2-135M-Instruct, int4.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare log-likelihoods and texts over HTTP with those in process."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every data set that is loaded by a function
    report = Report("http_loglik", bundle=bundle.name if bundle else "SmolLM2-135M-Instruct int4")
    folder = bundle or folder_of("int4", GGUF_MODELS["smollm2"], cache / "smollm2")
    http, own = over_http(folder), in_process(folder)
    pairs = [
        (one, two) for item, other in zip(http[CHOICE], own[CHOICE], strict=True) for one, two in zip(item, other, strict=True)
    ]
    texts = sum(one != two for one, two in zip(http[QUOTE], own[QUOTE], strict=True))
    report.add("log_likelihoods", len(pairs))
    report.add("http_loglik_max_diff", max(abs(one[0][0] - two[0][0]) for one, two in pairs))
    report.add("http_greedy_flags_differ", sum(bool(one[0][1]) != bool(two[0][1]) for one, two in pairs))
    report.add("http_texts_differ", texts)
    report.statement(
        "lm-evaluation-harness over HTTP",
        f"`local-completions`: {len(pairs)} log-likelihoods differ from those in process by "
        f"{report.results['http_loglik_max_diff']:.2g} at most.",
    )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
