"""What a stage says about itself, and what it gets to work with. `tasks.stage` runs it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tasks.canonical import JSON, canonical
from tasks.jobs import run_job
from tasks.process import run_command
from tasks.record import FileEntry
from tasks.report import Reporter
from tasks.store import Artifact, ArtifactStore


@dataclass(frozen=True)
class Input:
    """An input artifact, or the part of one that the stage depends on. `path` is where an external payload lies."""

    digest: str
    stage: str
    key: str
    path: Path | None = None

    @staticmethod
    def of(artifact: Artifact, part: str | None = None) -> "Input":
        """The whole artifact, or one of its `parts`: a change elsewhere in it then changes no key."""
        digest = artifact.digest if part is None else artifact.parts[part]
        return Input(digest, artifact.stage, artifact.key, artifact.path)


@dataclass(frozen=True)
class Produced:
    """What a stage made, beside the files in its staging folder."""

    digest: str | None = None
    """Semantic digest; None takes the digest over the files."""
    parts: dict[str, str] = field(default_factory=dict)
    """Digests of parts that later stages depend on separately: "tokenizer", "config", "eval"."""
    stats: dict[str, Any] = field(default_factory=dict)
    external: Path | None = None
    """The payload lies there (a local model directory), not in the store."""
    external_files: dict[str, FileEntry] = field(default_factory=dict)
    """The files below `external` that are the payload, as they were when the key was made."""
    file_parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """More `parts`, each the digest over some of the files."""


class Stage(ABC):
    """One stage with its parameters and input artifacts. Subclasses are usually frozen dataclasses."""

    name: ClassVar[str]
    """Folder in the store."""
    version: ClassVar[int]
    """Raised by hand when the meaning of the output changes."""

    def resolve(self, store: ArtifactStore, report: Reporter) -> "Stage":
        """The stage with everything that its identity needs; called first, by `ensure` and `probe` alike."""
        return self

    @abstractmethod
    def identity(self) -> dict[str, JSON]:
        """What changes the bytes of the output, and nothing else."""

    def inputs(self) -> dict[str, Input]:
        """Input artifacts by role."""
        return {}

    @abstractmethod
    def produce(self, ctx: "StageContext") -> Produced:
        """Write the payload into `ctx.staging`. May be called again after a failure, with the same `ctx.work`."""

    def external(self) -> Path | None:
        """Where the payload lies if it stays outside of the store; a hit is verified there."""
        return None

    def space_needed(self) -> int:
        """Bytes that must be free on the store's disk before this stage starts; an estimate."""
        return 16 << 20


@dataclass(frozen=True)
class StageContext:
    """What a stage works with while it produces."""

    staging: Path
    """Private folder on the store's file system; what is in it gets published."""
    work: Path
    """Folder kept per key across attempts (checkpoints, logs); removed after publishing."""
    report: Reporter
    store: ArtifactStore
    tag: str
    """Marks the child processes of this key; see `tasks.process`."""
    check: Callable[[], None]
    """Raises LeaseLost when another run has taken over, Cancelled when this one is to stop."""

    @property
    def logs(self) -> Path:
        """Folder of the children's specs, results and logs."""
        return self.work / "logs"

    def run_job(self, name: str, spec: dict[str, Any], **options: Any) -> dict[str, Any]:
        """One job of `mca_lib.job` in a child process; options as of `run_command`. See `tasks.jobs`."""
        return run_job(name, spec, folder=self.logs, **self._defaults(options))

    def run_command(self, argv: Sequence[str], *, log_name: str = "command", **options: Any) -> None:
        """A supervised child process, log in `logs/<log_name>.log`; options as of `tasks.process.run_command`."""
        run_command(argv, log_path=self.logs / f"{log_name}.log", **self._defaults(options))

    def _defaults(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"tag": self.tag, "check": self.check, "on_progress": self._forward} | dict(options)

    def _forward(self, report: dict[str, Any]) -> None:
        """A line of a child's progress file: {"done", "total", metrics...}, {"info": text} or {"warning": text}."""
        if "done" in report:
            metrics = {name: value for name, value in report.items() if name not in ("done", "total")}
            self.report.progress(report["done"], report.get("total"), **metrics)
        elif isinstance(report.get("info"), str):
            self.report.info(report["info"])
        elif isinstance(report.get("warning"), str):
            self.report.warning(report["warning"])


def key_payload(stage: Stage) -> dict[str, JSON]:
    """What the key of a stage is made of. Raises CanonicalError for a value that has no canonical form."""
    payload = {
        "stage": stage.name,
        "version": stage.version,
        "identity": stage.identity(),
        "inputs": {role: entry.digest for role, entry in stage.inputs().items()},
    }
    return canonical(payload, stage.name)
