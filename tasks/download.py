"""Stage *download*: a model directory, pinned to exact bytes.

A local directory stays where it is: the artifact is a record of the digests of its files, and so is the key. A hub
model is pinned to a commit, which is the key; its files are copied into the store. The same files have the same
content digest either way, so a model that moves from the hub to a folder invalidates nothing.
"""

import dataclasses
import json
import os
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from mca_lib.errors import ModelError
from tasks.canonical import JSON, blake3_hex, canonical_json
from tasks.contract import Produced, Stage, StageContext
from tasks.jobs import run_job
from tasks.links import link
from tasks.model_files import Groups, check_model_files, refuse_adapter, select
from tasks.record import FileEntry
from tasks.report import Reporter
from tasks.section import Section
from tasks.store import ArtifactStore

# The only secrets that the children of this stage see, and no reports of use to anyone.
_CHILD: dict[str, Any] = {
    "secrets": ("HF_TOKEN", "MODELSCOPE_API_TOKEN"),
    "env": {"HF_HUB_DISABLE_TELEMETRY": "1"},
}


class ModelConfig(Section):
    """Where the model comes from."""

    name_or_path: str = Field(min_length=1)
    """Local directory in Hugging Face format, or a repository id such as `Qwen/Qwen3-0.6B`."""
    source: Literal["auto", "local", "huggingface", "modelscope"] = "auto"
    """`auto` takes a local directory where one exists, else the Hugging Face Hub."""
    revision: str = "main"
    """Branch, tag or commit of a hub repository; resolved to a commit, which is recorded."""
    allow_pickle: bool = False
    """Accept `pytorch_model*.bin`, whose loading can run code, where there is no safetensors file."""
    trust_remote_code: bool = False
    """Run Python code that the model repository carries. Not available in this release: a recipe with true is refused,
    since no supported model type needs it."""


@dataclass(frozen=True)
class LocalModel:
    """A directory, with the digests of the files that matter."""

    root: Path
    groups: Groups
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class HubModel:
    """A commit of a repository, with its files as the hub lists them; `files` is None when only the commit is known."""

    source: str
    repo: str
    commit: str
    files: list[dict[str, Any]] | None


@dataclass(frozen=True)
class DownloadStage(Stage):
    """Identity: the digests of a local directory's files, or repository and commit."""

    name: ClassVar[str] = "download"
    version: ClassVar[int] = 1

    config: ModelConfig
    pinned: LocalModel | HubModel | None = None
    """Set by `resolve`, without which there is no identity."""

    def resolve(self, store: ArtifactStore, report: Reporter) -> "DownloadStage":
        """Look at the directory, or ask the hub which commit the revision is.

        Raises:
            ModelError: there is no such model, or the hub cannot be reached and was never asked before.
        """
        name, source = self.config.name_or_path, self.config.source
        local = Path(name).expanduser()
        if source == "local" or (source == "auto" and (local.is_dir() or _is_path(name))):
            return dataclasses.replace(self, pinned=self._local(local, store))
        return dataclasses.replace(self, pinned=self._hub(store, report))

    def identity(self) -> dict[str, JSON]:
        match self.pinned:
            case LocalModel(files=files):
                return {"source": "local", "files": {rel: entry.digest for rel, entry in files.items()}}
            case HubModel(source=source, repo=repo, commit=commit):
                flags = {"allow_pickle": self.config.allow_pickle, "trust_remote_code": self.config.trust_remote_code}
                return {"source": source, "repo": repo, "commit": commit, **flags}
        raise ValueError("DownloadStage.resolve() comes before identity()")

    def external(self) -> Path | None:
        return self.pinned.root if isinstance(self.pinned, LocalModel) else None

    def space_needed(self) -> int:
        if isinstance(self.pinned, HubModel) and self.pinned.files is not None:
            return sum(file["size"] for file in self._wanted(self.pinned.files))
        return super().space_needed()

    def produce(self, ctx: StageContext) -> Produced:
        if isinstance(self.pinned, LocalModel):
            size = sum(entry.size for entry in self.pinned.files.values())
            return Produced(
                external=self.pinned.root,
                external_files=self.pinned.files,
                file_parts=self.pinned.groups,
                stats={"source": "local", "bytes": size},
            )
        return self._download(self.pinned, ctx)

    # -- local --------------------------------------------------------------------------------------------------

    def _local(self, root: Path, store: ArtifactStore) -> LocalModel:
        if not root.is_dir():
            raise ModelError(f"model.name_or_path: there is no directory {root}; check the path")
        root = root.resolve()
        # Python modules may lie in folders; nothing else is looked for there, so a large folder costs nothing.
        patterns = ["*", "additional_chat_templates/*", *(["**/*.py"] if self.config.trust_remote_code else [])]
        found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
        names = [str(path.relative_to(root)) for path in found]
        refuse_adapter(names, f"model.name_or_path: {root}")
        groups = self._select(names)
        check_model_files(root, groups)
        cache = store.statcache.folder(root)
        files = {}
        for rel in sorted(rel for group in groups.values() for rel in group):
            size, digest, _ = cache.digest(root / rel, rel)
            files[rel] = FileEntry(size=size, digest=digest)
        cache.save()
        return LocalModel(root, groups, files)

    # -- hub ----------------------------------------------------------------------------------------------------

    def _hub(self, store: ArtifactStore, report: Reporter) -> HubModel:
        source = "modelscope" if self.config.source == "modelscope" else "huggingface"
        question = {"source": source, "repo": self.config.name_or_path, "revision": self.config.revision}
        memory = store.root / ".revisions" / f"{blake3_hex(canonical_json(question), 16)}.json"
        with tempfile.TemporaryDirectory() as folder:
            tag = f"resolve-{uuid.uuid4().hex}"
            answer = run_job("resolve_model", question, folder=Path(folder), tag=tag, **_CHILD)
        if "unreachable" in answer:
            known = _recall(memory)
            if known is None and _is_commit(self.config.revision):
                known = {"commit": self.config.revision, "files": None}
            if known is None:
                raise ModelError(
                    f"model.name_or_path: {self.config.name_or_path} is no local directory, and the hub cannot be "
                    f"reached ({answer['unreachable']}); name a directory, or run once with access to the hub"
                )
            commit = f"the last known commit of {question['repo']}, {known['commit'][:12]}"
            report.warning(f"the hub cannot be reached ({answer['unreachable']}); using {commit}")
            return HubModel(source, question["repo"], known["commit"], known["files"])
        _remember(memory, question | answer, report)
        return HubModel(source, question["repo"], answer["commit"], answer["files"])

    def _download(self, pinned: HubModel, ctx: StageContext) -> Produced:
        if pinned.files is None:
            raise ModelError(f"model.name_or_path: {pinned.repo} is not in the store and the hub cannot be reached")
        wanted = self._wanted(pinned.files)
        size = sum(file["size"] for file in wanted)
        snapshot = ctx.work / "snapshot"
        ctx.report.info(f"{pinned.repo} at {pinned.commit[:12]}: {len(wanted)} files, {size / 1e6:.1f} MB")
        spec = {
            "source": pinned.source,
            "repo": pinned.repo,
            "revision": pinned.commit if pinned.source == "huggingface" else self.config.revision,
            "files": wanted,
            "target": str(snapshot),
        }
        ctx.run_job("download_model", spec, **_CHILD)
        groups = self._select([file["name"] for file in pinned.files])
        check_model_files(snapshot, groups)
        for file in wanted:
            link(snapshot / file["name"], ctx.staging / file["name"])
        return Produced(
            file_parts=groups,
            stats={"source": pinned.source, "repo": pinned.repo, "commit": pinned.commit, "bytes": size},
        )

    def _wanted(self, files: list[dict[str, Any]]) -> list[dict[str, Any]]:
        by_name = {file["name"]: file for file in files}
        return [by_name[name] for group in self._select(by_name).values() for name in group]

    def _select(self, names: Any) -> Groups:
        config = self.config
        return select(
            names,
            f"model.name_or_path: {config.name_or_path}",
            allow_pickle=config.allow_pickle,
            trust_remote_code=config.trust_remote_code,
        )


def _is_path(name: str) -> bool:
    """Whether a name can only be meant as a path: a repository id has one slash at most, inside."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith("/") or name.count("/") > 1


def _is_commit(revision: str) -> bool:
    return len(revision) == 40 and all(digit in "0123456789abcdef" for digit in revision)


def _recall(memory: Path) -> dict[str, Any] | None:
    """The hub's last answer, if there is a readable one."""
    try:
        known = json.loads(memory.read_bytes())
        return {"commit": known["commit"], "files": known["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(memory: Path, answer: dict[str, Any], report: Reporter) -> None:
    draft = memory.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
    try:
        memory.parent.mkdir(exist_ok=True)
        draft.write_text(json.dumps(answer))
        os.replace(draft, memory)
    except OSError as error:
        report.info(f"the commit is not remembered for offline runs: {error.strerror}")
