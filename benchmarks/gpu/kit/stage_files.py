"""A stage's files: the JSON that is its result, and the journal and the log that it is made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.kit.journal import Journal
from benchmarks.gpu.kit.plan import Stage

START = "start"  # the case of a process that dies before its first one
_LOG_CHARACTERS = 24_000  # of a stage's output that its JSON keeps


@dataclass(frozen=True)
class StageFiles:
    """``out``: the folder of results. ``work``: of everything else. ``mirrors``: further folders that get each result."""

    stage: Stage
    out: Path
    work: Path
    mirrors: tuple[Path, ...] = ()

    @property
    def journal(self) -> Path:
        return self.work / f"stage{self.stage.number}.jsonl"

    @property
    def log(self) -> Path:
        return self.work / f"stage{self.stage.number}.log"

    def log_tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:] if self.log.exists() else ""

    def read(self) -> dict[str, Any] | None:
        """The result of an earlier call."""
        path = self.out / self.stage.file_name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write(self, content: dict[str, Any]) -> None:
        """Written in full before it takes its name: a reader, or a run that is killed meanwhile, finds no half of a file."""
        for folder in (self.out, *self.mirrors):
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f".{self.stage.file_name}"
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            partial.replace(folder / self.stage.file_name)

    def begin(self, earlier: dict[str, Any] | None) -> None:
        """Start the journal anew, with the results of ``earlier``, whose other cases are to be run."""
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        self.journal.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        for result in earlier["cases"] if earlier is not None else []:
            if result["case"] != START:
                Journal(self.journal).end(result)
