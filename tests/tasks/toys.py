"""Small stages with real files, and the processes that run them."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tasks.stage import Artifact, Input, Produced, Stage, StageContext
from tasks.store import ArtifactStore

# Prints a line when the stage has begun; used to kill it at known and at random moments.
STARTED = "started"


@dataclass(frozen=True)
class Letter(Stage):
    """Writes `text` into some files. `log` gets a line for each time it is computed."""

    name: ClassVar[str] = "letter"
    version: ClassVar[int] = 1

    text: str
    log: Path | None = None
    files: int = 3
    hold: bool = False
    """Wait for ever after the first half of the files."""

    def identity(self) -> dict:
        return {"text": self.text, "files": self.files}

    def produce(self, ctx: StageContext) -> Produced:
        if self.log:
            with open(self.log, "a") as log:
                log.write(f"{os.getpid()}\n")
        for i in range(self.files):
            if self.hold and i == self.files // 2:
                print(STARTED, flush=True)
                signal.pause()
            path = ctx.staging / f"folder{i % 2}" / f"{i}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{self.text} {i}\n" * 100)
        return Produced(stats={"files": self.files}, file_parts={"first": ("folder0/0.txt",)})


@dataclass(frozen=True)
class Exported(Letter):
    """In place of an exported model."""

    name: ClassVar[str] = "export"

    def produce(self, ctx: StageContext) -> Produced:
        (ctx.staging / "config.json").write_text(self.text)
        (ctx.staging / "tokenizer.json").write_text(self.text.partition("@")[2])
        return Produced()


@dataclass(frozen=True)
class Copy(Stage):
    """Depends on a letter."""

    name: ClassVar[str] = "copy"
    version: ClassVar[int] = 1

    letter: Artifact
    style: str = "plain"

    def identity(self) -> dict:
        return {"style": self.style}

    def inputs(self) -> dict[str, Input]:
        return {"letter": Input.of(self.letter)}

    def produce(self, ctx: StageContext) -> Produced:
        text = "".join((self.letter.path / rel).read_text() for rel in sorted(self.letter.record.files))
        (ctx.staging / "copy.txt").write_text(text)
        return Produced()


_PRELUDE = """
import os, signal, sys
from pathlib import Path, PosixPath
from tasks.stage import ensure
from tasks.store import ArtifactStore
from tests.tasks.toys import Copy, Letter
"""


def start(code: str, *arguments: object) -> subprocess.Popen:
    """A Python process that runs `code` with these toys imported and `arguments` in `sys.argv`; its output is piped."""
    command = [sys.executable, "-c", _PRELUDE + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_letter(store: ArtifactStore, letter: Letter) -> subprocess.Popen:
    """A process that ensures the letter and prints whether it was cached."""
    code = f"print(ensure(ArtifactStore(sys.argv[1]), {letter!r}).cached)"
    return start(code, store.root)


def whole(store: ArtifactStore) -> bool:
    """Whether every artifact of the store is whole, read byte by byte."""
    return all(damage is None for _, _, damage in store.verify(full=True))
