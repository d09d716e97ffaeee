"""POST /v1/embeddings, of bundles that are embedding models.

``input`` is a text, token ids, or a list of either. ``dimensions`` shortens vectors where the model was trained for that. Vectors
of ``encoding_format`` base64 are float32, little-endian, as OpenAI's clients ask for them.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray

from tide_serve.api.queued import results_of
from tide_serve.api.service import ServedModel
from tide_serve.errors import ApiError
from tide_serve.observe.request_record import current_record
from tide_serve.request.prompt_ids import each_prompt, ids_of_texts, off_loop

_MAX_INPUTS = 2048  # inputs of one request; OpenAI's limit
Vector = NDArray[np.float32]


async def answer_embeddings(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    info = model.engine.manifest.embedding
    if info is None:
        message = f"the model {model.name!r} writes text and has no embeddings; name an embedding model"
        raise ApiError(404, message, "model", "no_embeddings")
    texts = each_prompt(body["input"], "input")
    if len(texts) > _MAX_INPUTS:
        raise ApiError(400, f"input has {len(texts)} texts; send at most {_MAX_INPUTS} at once", "input")
    inputs = [info.prompt + text if isinstance(text, str) else text for text in texts]
    ids = await ids_of_texts(model.engine, inputs, "input")
    tokens = sum(map(len, ids))
    if (record := current_record.get()) is not None:
        record.prompt_tokens += tokens
    submit = model.engine.submit_embedding
    dimensions = body.get("dimensions")
    vectors = await results_of(model, request, (partial(submit, text, dimensions) for text in ids))
    as_text = body.get("encoding_format") == "base64"
    return await off_loop(sum(map(len, vectors)), _answer, model.name, vectors, as_text, tokens)


def _answer(name: str, vectors: Sequence[Vector], as_text: bool, tokens: int) -> Response:
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if as_text else vector.tolist()}
        for index, vector in enumerate(vectors)
    ]
    usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
