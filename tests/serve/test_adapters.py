"""LoRA adapters over HTTP: each is a model of its own name."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file
from serve.live import Served
from tide_runtime import GenerationParams
from tide_runtime.errors import ParamsError
from tide_runtime.lora import CONFIG, TENSORS
from tide_serve.config import ServeConfig

PROMPT = "def add(a, b):"


def write_adapter(folder: Path, seed: int) -> Path:
    """Random matrices of rank 4 beside all value projections of the tiny model."""
    random = np.random.default_rng(seed)
    shapes = {"A": (4, 64), "B": (32, 4)}
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora_{kind}.weight": random.normal(size=shape).astype("f4")
            for layer in range(4)
            for kind, shape in shapes.items()
        },
        folder / TENSORS,
    )
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return folder


def test_models_are_adapters(serve_app: Callable[..., AbstractContextManager[Served]], tmp_path: Path) -> None:
    """Breaks: an answer of another adapter, or of the model itself, than the request names."""
    folders = {name: tmp_path / name for name in ("one", "two")}
    for seed, folder in enumerate(folders.values()):
        folder.mkdir()
        write_adapter(folder, seed)
    with serve_app(adapters=folders) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        base = served.engine.manifest.model.name
        assert [model.id for model in client.models.list()] == [base, "one", "two"]
        assert client.models.retrieve("two").to_dict()["parent"] == base
        texts = {}
        for name in (base, "one", "two"):
            made = client.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0)
            params = GenerationParams(max_new_tokens=12, adapter=None if name == base else name)
            assert made.model == name and made.choices[0].text == served.engine.generate(PROMPT, params)[0].text
            texts[name] = made.choices[0].text
            echoed = client.completions.create(model=name, prompt=PROMPT, max_tokens=1, temperature=0, echo=True, logprobs=1)
            texts[name] += str(echoed.choices[0].logprobs)
        assert len({*texts.values()}) == 3
        with pytest.raises(openai.NotFoundError, match=f"expected one of {base}, one, two"):
            client.completions.create(model="three", prompt=PROMPT)


def test_names_are_checked(serve_app: Callable[..., AbstractContextManager[Served]], tmp_path: Path) -> None:
    """Breaks: an adapter that hides the model, or one that its option does not name."""
    with (
        pytest.raises(ParamsError, match="one is the name of a model and of an adapter"),
        serve_app(ServeConfig(model_names=("one",)), adapters={"one": write_adapter(tmp_path, 1)}),
    ):
        pass
