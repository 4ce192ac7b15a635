"""What a run would do, stage by stage, without doing it.

A stage whose inputs are in the store is looked up by its key: hit, or miss with the fields that changed, old → new,
against the nearest record. A stage behind a miss has no key yet: if the stage before it reproduces the same content,
it is a hit after all.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from flows.graph import StageName, nodes_until
from flows.recipe import PipelineConfig
from tasks.record import library_versions
from tasks.stage import FieldChange, Hit, probe
from tasks.store import Artifact, ArtifactStore


@dataclass(frozen=True)
class PlanRow:
    """One stage of the plan."""

    stage: StageName
    verdict: Literal["hit", "miss", "waits"]
    detail: str
    """Key of a hit, reason of a miss, or the stages that are waited for."""
    changed: tuple[FieldChange, ...] = ()
    remote: bool = False
    """A miss that is fetched from the remote store, not computed."""
    libraries: tuple[str, ...] = ()
    """Libraries that have another version now than when a hit was made; they are part of no key."""


def make_plan(
    config: PipelineConfig, store: ArtifactStore, again: Collection[str] = (), until: StageName | None = None
) -> list[PlanRow]:
    """The verdict on each stage up to `until`, in pipeline order; those in `again` are computed anew. Changes nothing.

    Raises:
        UserError: the recipe cannot run at all, for instance because a file is missing.
    """
    found: dict[StageName, Artifact] = {}
    rows = []
    for node in nodes_until(config, until).values():
        if node.name in again:
            rows.append(PlanRow(node.name, "miss", "anew, as asked for"))
            continue
        missing = [name for name in node.after if name not in found]
        if missing:
            rows.append(PlanRow(node.name, "waits", f"for {', '.join(missing)}"))
            continue
        answer = probe(store, node.build({name: found[name] for name in node.after}))
        if isinstance(answer, Hit):
            found[node.name] = answer.artifact
            rows.append(PlanRow(node.name, "hit", answer.artifact.key, libraries=_drift(answer.artifact)))
        else:
            changed = tuple(_by_recipe_name(node.name, change) for change in answer.changed)
            reason = f"{', '.join(change.field for change in changed)} changed" if changed else answer.reason
            rows.append(PlanRow(node.name, "miss", reason, changed, answer.remote))
    return rows


# Where the identity fields of a stage stand in the recipe.
_SECTION: dict[StageName, str] = {
    "download": "model",
    "dataset": "dataset",
    "convert": "checkpoint",
    "translate": "checkpoint",
    "train": "training",
    "export": "export",
    "evaluate": "eval",
}

# Identity fields that stand in the section of another stage.
_ELSEWHERE: dict[tuple[StageName, str], str] = {("dataset", "identity.objective"): "training.stage"}


# Sections of the recipe that are a part of the identity of the stage train.
_OWN_SECTIONS = ("lora", "dpo")


def reason_in_recipe_names(stage: StageName, reason: str) -> str:
    """Why a stage was computed, with its fields named as in the recipe."""
    for section in _OWN_SECTIONS:
        reason = reason.replace(f"identity.{section}.", f"{section}.")
    return reason.replace("identity.", f"{_SECTION[stage]}.")


def _by_recipe_name(stage: StageName, change: FieldChange) -> FieldChange:
    """The change under the name that the recipe has for the field, where it is a field of the recipe."""
    if (stage, change.field) in _ELSEWHERE:
        return replace(change, field=_ELSEWHERE[stage, change.field])
    section = _SECTION[stage]
    field = change.field.removeprefix("identity.")
    if stage == "train" and field.partition(".")[0] in _OWN_SECTIONS:
        return replace(change, field=field)
    known = PipelineConfig.model_fields[section].annotation.model_fields
    if change.field.startswith("identity.") and field.partition(".")[0].partition("[")[0] in known:
        return replace(change, field=f"{section}.{field}")
    return change


def _drift(artifact: Artifact) -> tuple[str, ...]:
    now, then = library_versions(), artifact.record.producer.libraries
    return tuple(f"{name} {then[name]} → {now[name]}" for name in then if name in now and now[name] != then[name])
