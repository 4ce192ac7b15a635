"""Artifacts that a person wants kept: `<store>/.pins/<stage>-<key>` with the reason."""

from tasks.store import Artifact, ArtifactStore

FOLDER = ".pins"


def pin(store: ArtifactStore, artifact: Artifact, reason: str = "") -> None:
    """Keep the artifact, and what it was made of, at every collection; pinning it again replaces the reason."""
    with store.guard("cannot be written"):
        folder = store.root / FOLDER
        folder.mkdir(exist_ok=True)
        (folder / f"{artifact.stage}-{artifact.key}").write_text(reason + "\n", encoding="utf-8")


def unpin(store: ArtifactStore, artifact: Artifact) -> bool:
    """Whether it was pinned."""
    with store.guard("cannot be written"):
        try:
            (store.root / FOLDER / f"{artifact.stage}-{artifact.key}").unlink()
        except FileNotFoundError:
            return False
    return True


def pins(store: ArtifactStore) -> dict[tuple[str, str], str]:
    """Reason by (stage, key)."""
    folder = store.root / FOLDER
    if not folder.is_dir():
        return {}
    found = {}
    for path in sorted(folder.iterdir()):
        stage, _, key = path.name.rpartition("-")
        found[stage, key] = path.read_text(encoding="utf-8", errors="replace").strip()
    return found
