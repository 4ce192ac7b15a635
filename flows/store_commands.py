"""Bodies of the commands that keep a store in order: gc, pin, du, pack, unpack, models, promote, rollback, push."""

import sys
from pathlib import Path

from flows.artifact_commands import find_artifact, human_size
from flows.console import make_console, plain_table
from mca_lib.errors import ConfigError
from tasks.aliases import Aliases, Decision
from tasks.collect import Collection, Policy, collect, folder_size, survey
from tasks.ledger import store_lock
from tasks.pins import pin, pins, unpin
from tasks.promote import require_model
from tasks.store import ArtifactStore


def collect_garbage(store: Path, *, keep_runs: int, keep_promotions: int, min_age: str, delete: bool) -> None:
    """``mcaflow gc``."""
    opened = ArtifactStore(store, create=False)
    policy = Policy(runs=keep_runs, promotions=keep_promotions, young_seconds=seconds_of(min_age))
    found = (collect if delete else survey)(opened, policy)
    _print_collection(found, deleted=delete)


def _print_collection(found: Collection, *, deleted: bool) -> None:
    table = plain_table("", "size", "why")
    for item in sorted(found.items, key=lambda item: -item.size):
        table.add_row(item.name if item.name.startswith(".") else short(item.name), human_size(item.size), item.why)
    if found.items:
        make_console().print(table)
    verb = "removed" if deleted else "would be removed"
    print(f"{len(found.items)} {verb}, {human_size(found.size)}; {len(found.kept)} artifacts stay")
    if found.items and not deleted:
        print("nothing was changed; add --delete to remove them")


def short(name: str) -> str:
    """stage/key with the first digits of the key."""
    stage, _, key = name.rpartition("/")
    return f"{stage}/{key[:12]}"


def pin_artifact(store: Path, reference: str | None, reason: str) -> None:
    """``mcaflow pin``; without a reference, the pins that there are."""
    opened = ArtifactStore(store, create=False)
    if reference is None:
        for (stage, key), why in pins(opened).items():
            print(f"{stage}/{key[:12]}  {why}".rstrip())
        return
    artifact = find_artifact(opened, reference)
    pin(opened, artifact, reason)
    print(f"{artifact.stage}/{artifact.key[:12]} stays, with what it was made of")


def unpin_artifact(store: Path, reference: str) -> None:
    """``mcaflow unpin``."""
    opened = ArtifactStore(store, create=False)
    artifact = find_artifact(opened, reference)
    if not unpin(opened, artifact):
        raise ConfigError(f"{artifact.stage}/{artifact.key[:12]} is not pinned; see `mcaflow pin`")
    print(f"{artifact.stage}/{artifact.key[:12]} is no longer pinned")


def show_usage(store: Path) -> None:
    """``mcaflow du``."""
    opened = ArtifactStore(store, create=False)
    sizes: dict[str, list[int]] = {}
    for record in opened.records():
        size = 0 if record.external else sum(entry.size for entry in record.files.values())
        sizes.setdefault(record.stage, []).append(size)
    table = plain_table("", "artifacts", "size")
    for stage, of_stage in sorted(sizes.items(), key=lambda item: -sum(item[1])):
        table.add_row(stage, str(len(of_stage)), human_size(sum(of_stage)))
    for folder in (".work", ".runs", ".quarantine", ".staging", ".trash"):
        path = opened.root / folder
        if path.is_dir() and (size := folder_size(path)):
            table.add_row(folder, "", human_size(size))
    make_console().print(table)
    total = sum(sum(of_stage) for of_stage in sizes.values())
    print(f"{human_size(total)} of artifacts in {opened.root}")


def pack(store: Path, reference: str, target: Path, *, with_lineage: bool) -> None:
    """``mcaflow pack``."""
    from tasks.transfer import export_bundle

    opened = ArtifactStore(store, create=False)
    members = export_bundle(opened, find_artifact(opened, reference), target, with_lineage=with_lineage)
    for member in members:
        print(f"{member.stage}/{member.key[:12]}")
    print(f"{target}: {len(members)} artifacts, {human_size(target.stat().st_size)}")


def unpack(store: Path, source: Path) -> None:
    """``mcaflow unpack``."""
    from tasks.transfer import import_bundle

    import_bundle(ArtifactStore(store), source, print)


def push(store: Path, reference: str, url: str) -> None:
    """``mcaflow push``: the artifact and all that it was made of; exit code 1 where one could not be stored."""
    from tasks.report import LogReporter

    opened = ArtifactStore(store, create=False, remote=url)
    nodes, failed = [opened.lineage(find_artifact(opened, reference))], 0
    while nodes:
        node = nodes.pop()
        nodes += node.inputs
        if node.artifact is None or node.artifact.record.external is not None:
            continue
        done = opened.remote.push(node.artifact, LogReporter(node.stage))
        failed += not done
        print(f"{node.stage}/{node.key[:12]}  {'is there' if done else 'could not be stored'}")
    if failed:
        sys.exit(1)


def show_models(store: Path, model: str | None) -> None:
    """``mcaflow models``; of one model, its history."""
    names = Aliases(ArtifactStore(store, create=False))
    if model is None:
        table = plain_table("model", "alias", "artifact", "since", "promotions")
        for name, alias, history in names.all():
            last = history[-1]
            table.add_row(name, alias, f"{last.stage}/{last.key[:12]}", last.time, str(len(history)))
    else:
        table = plain_table("alias", "time", "artifact", "", "by", "metrics")
        histories = [(alias, history) for name, alias, history in names.all() if name == model]
        if not histories:
            raise ConfigError(f"{model}: no model of this name; see `mcaflow models`")
        for alias, history in histories:
            for item in reversed(history):
                metrics = ", ".join(f"{name} {value:.4g}" for name, value in item.metrics.items())
                back = "rollback" if item.rollback else ""
                table.add_row(alias, item.time, f"{item.stage}/{item.key[:12]}", back, item.run, metrics)
    make_console().print(table)


def promote_artifact(store: Path, reference: str, model: str, alias: str) -> None:
    """``mcaflow promote``: by hand, without a gate."""
    opened = ArtifactStore(store, create=False)
    artifact = find_artifact(opened, reference)
    with store_lock(opened, exclusive=False):  # no collection between the look and the name
        require_model(opened, artifact)
        decision = Aliases(opened).promote(model, artifact, alias=alias, run="mcaflow promote")
    _print_decision(model, alias, decision)


def roll_back(store: Path, model: str, alias: str) -> None:
    """``mcaflow rollback``."""
    opened = ArtifactStore(store, create=False)
    _print_decision(model, alias, Aliases(opened).rollback(model, alias=alias, run="mcaflow rollback"))


def _print_decision(model: str, alias: str, decision: Decision) -> None:
    now, before = decision.promoted, decision.before
    assert now is not None, decision
    was = f", was {before.stage}/{before.key[:12]}" if before and before.key != now.key else ""
    print(f"{model}/{alias} is {now.stage}/{now.key[:12]}{was}")


def seconds_of(text: str) -> float:
    """``90``, ``15m``, ``2h``, ``7d`` in seconds."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, factor = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e10:
        raise ConfigError(f"{text!r} is no duration; write for instance 90s, 15m, 2h or 7d")
    return seconds
