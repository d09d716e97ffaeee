"""The training loop: resumable, its batches and draws a function of the seed and the step's number."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .corpus import Corpus, training_batch
from .model import StackedLlama
from .optimizer import Schedule, build_optimizers
from .variants import Variant


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run's weights, besides the data and the starting weights."""

    variant: Variant
    schedule: Schedule
    batch: int = 16
    length: int = 256
    matrix_lr: float = 0.01
    vector_lr: float = 2e-3
    weight_decay: float = 0.1
    stdlib_share: float = 0.6
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    decay_start: int | None = None
    cpu_seconds: float = 0.0
    stop: bool = field(default=False, repr=False)


class Trainer:
    """Runs a recipe on a model; keeps its state in `folder` (`latest.pt`, `stable.pt` before the decay, `log.jsonl`).

    While it runs, a file `folder/decay` starts the decay, and SIGTERM or Ctrl-C saves the state and stops.
    """

    def __init__(self, model: StackedLlama, corpus: Corpus, recipe: Recipe, folder: Path):
        self.model = model
        self.corpus = corpus
        self.recipe = recipe
        self.folder = folder
        self.optimizers = build_optimizers(model, recipe.matrix_lr, recipe.vector_lr, recipe.weight_decay)
        self.progress = Progress()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def device(self) -> torch.device:
        return self.model.embedding.device

    def step(self) -> float:
        """One optimizer step; returns the full model's training loss in nats per token."""
        recipe, progress = self.recipe, self.progress
        loss, final = self.loss()
        loss.backward()
        vectors = self.optimizers[1].param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_(vectors, 1.0)
        factor = recipe.schedule.factor(progress.step, progress.decay_start)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad()
        progress.step += 1
        return final

    def loss(self) -> tuple[torch.Tensor, float]:
        """Training loss of the next step's batch, and the part of it that is the full model's."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + self.progress.step)
        windows = training_batch(self.corpus, self.progress.step, recipe.batch, recipe.length, recipe.stdlib_share, recipe.seed)
        return self.model.training_loss(torch.from_numpy(windows).to(self.device), recipe.variant, generator)

    def run(self, report: Callable[[dict[str, Any]], None], save_every: int = 100, report_every: int = 10) -> bool:
        """Train to the end of the schedule, or to a signal; returns whether the schedule is finished."""
        previous = [signal.signal(number, self.request_stop) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            return self.loop(report, save_every, report_every)
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), previous, strict=True):
                signal.signal(number, handler)
            self.save("latest.pt")

    def loop(self, report: Callable[[dict[str, Any]], None], save_every: int, report_every: int) -> bool:
        progress = self.progress
        schedule = self.recipe.schedule
        recent = []
        clock = time.process_time()
        while not schedule.finished(progress.step, progress.decay_start):
            if progress.stop:
                return False
            self.maybe_start_decay()
            recent.append(self.step())
            if progress.step % report_every == 0:
                elapsed = time.process_time() - clock
                clock = time.process_time()
                progress.cpu_seconds += elapsed
                self.log(report, sum(recent) / len(recent), len(recent) / max(elapsed, 1e-9))
                recent = []
            if progress.step % save_every == 0:
                self.save("latest.pt")
        return True

    def log(self, report: Callable[[dict[str, Any]], None], loss: float, steps_per_second: float) -> None:
        """Append a line to the log and hand it to `report`."""
        recipe, progress = self.recipe, self.progress
        line = {
            "step": progress.step,
            "tokens": progress.step * recipe.tokens_per_step,
            "loss": round(loss, 4),
            "rate": round(recipe.schedule.factor(progress.step, progress.decay_start), 4),
            "tokens_per_cpu_second": round(steps_per_second * recipe.tokens_per_step),
        }
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        report(line)

    def maybe_start_decay(self) -> None:
        """Begin the decay where it is planned, or as soon as the file `decay` appears."""
        progress = self.progress
        request = self.folder / "decay"
        if progress.decay_start is not None:
            return
        if request.exists() or progress.step >= self.recipe.schedule.planned_decay_start:
            request.unlink(missing_ok=True)
            self.save("stable.pt")
            progress.decay_start = progress.step

    def request_stop(self, number: int, frame: object) -> None:
        self.progress.stop = True

    def save(self, name: str) -> None:
        """Write the state through a temporary file, so that a kill never leaves half of one."""
        progress = self.progress
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": {
                "step": progress.step,
                "decay_start": progress.decay_start,
                "cpu_seconds": progress.cpu_seconds,
            },
        }
        torch.save(state, self.folder / f".{name}")
        (self.folder / f".{name}").replace(self.folder / name)

    def resume(self, name: str = "latest.pt") -> bool:
        """Continue from a saved state, if there is one."""
        if not (self.folder / name).exists():
            return False
        state = torch.load(self.folder / name, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        return True
