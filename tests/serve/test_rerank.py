"""/v1/rerank against transformers, on a tiny random model of Qwen3-Reranker's shape."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
from serve.live import Served, serving
from tide_serve.api import rerank
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tide_export import export
from tide_export.config import ExportConfig

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts bodies.", "", "The capital of China is Beijing, yes."]
PROMPT = (
    '<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. '
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, '
    "retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)  # fmt: skip


def bundle_of(folder: Path, words: list[str]) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A model whose tokens are bytes and ``words``, exported to ``folder``/out, and its tokenizer."""
    spelling = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(sorted(spelling.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = spelling, tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    backend.add_tokens(words)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=1024, initializer_range=0.3, eos_token_id=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    for part in (model, tokenizer):
        part.save_pretrained(folder / "reranker")
    config = ExportConfig(checkpoints="none", max_seq_len=640, verify=False, targets=("cpu",))
    export(str(folder / "reranker"), folder / "out", config)
    return model, tokenizer


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("rerank")
    models = bundle_of(folder, ["yes", "no", "<think>", "</think>"])
    with serving(folder / "out") as served:
        yield served, models


def post(served: Served, route: str = "/v1/rerank", **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}{route}", json={"query": QUERY, "documents": DOCUMENTS, **body}, timeout=60)


@pytest.mark.parametrize("top", [20, 1])
def test_scores_are_those_of_transformers(reranker: tuple[Served, Any], monkeypatch: pytest.MonkeyPatch, top: int) -> None:
    """Breaks: documents come in another order than the model's authors' code gives, or with other scores. With ``top`` 1 the
    answer "no" needs a pass of its own."""
    monkeypatch.setattr(rerank, "_TOP", top)
    served, (model, tokenizer) = reranker
    answer = post(served).json()
    differences = []
    for result in answer["results"]:
        prompt = PROMPT.format(query=QUERY, document=DOCUMENTS[result["index"]])
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[0, -1, tokenizer.convert_tokens_to_ids(["no", "yes"])]
        differences.append(abs(torch.log_softmax(logits, -1)[1].exp().item() - result["relevance_score"]))
    print(f"RESULT rerank_max_difference={max(differences):.2g}")
    assert max(differences) <= 1e-4
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == len(DOCUMENTS)
    assert answer["usage"]["total_tokens"] > 0


def test_answers_have_the_form_of_other_servers(reranker: tuple[Served, Any]) -> None:
    """Breaks: a client of Jina, Cohere or vLLM finds other documents, or more of them, than it asked for."""
    served, _ = reranker
    whole = post(served, model="reranker").json()["results"]
    assert sorted(result["index"] for result in whole) == [0, 1, 2, 3]
    assert all(result["document"]["text"] == DOCUMENTS[result["index"]] for result in whole)
    documents = [{"text": document} for document in DOCUMENTS]
    short = post(served, "/rerank", documents=documents, top_n=2, return_documents=False).json()["results"]
    assert short == [{name: result[name] for name in ("index", "relevance_score")} for result in whole[:2]]
    assert post(served, instruction="Find jokes").json()["results"] != whole


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"documents": []}, "documents", "at least one document"),
        ({"top_n": 0}, "top_n", "at least 1"),
        ({"documents": ["a", "b" * 9000]}, "documents[1]", "the context holds"),
        ({"documents": [1]}, None, "documents"),
    ],
)
def test_what_cannot_be_ranked_is_refused(reranker: tuple[Served, Any], body: dict[str, Any], param: str, words: str) -> None:
    """Breaks: a client does not hear which of its documents is wrong."""
    answer = post(reranker[0], **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and param in (None, error["param"])


@pytest.mark.slow
def test_a_model_without_the_answers_is_refused(tmp_path: Path) -> None:
    """Breaks: a chat model gives scores of parts of words."""
    bundle_of(tmp_path, ["yes"])
    with serving(tmp_path / "out") as served:
        answer = post(served)
    assert answer.status_code == 400 and '"yes" and "no" are 1 and 2 tokens' in answer.json()["error"]["message"]
