"""The commands that keep a store in order, as typer sees them; bodies are in `flows.store_commands`."""

from pathlib import Path
from typing import Annotated

import typer

StorePath = Annotated[Path, typer.Option("--store", help="Folder of the artifact store.", show_default=True)]
Reference = Annotated[str, typer.Argument(help="STAGE/KEY or the first characters of a key; STAGE alone: its newest.")]
Model = Annotated[str, typer.Argument(help="Name of the model, as promote.model of its recipe.")]
Alias = Annotated[str, typer.Option(help="Name within the model.")]
DEFAULT = Path(".mcaflow/store")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for name, command in COMMANDS.items():
        app.command(name=name)(command)


def gc(
    keep_runs: Annotated[int, typer.Option(min=0, help="Keep what so many of the last runs used.")] = 10,
    keep_promotions: Annotated[int, typer.Option(min=1, help="Keep so many last holders of each alias.")] = 3,
    min_age: Annotated[str, typer.Option(help="Keep what is younger, for instance 1h or 7d.")] = "1h",
    delete: Annotated[bool, typer.Option("--delete", help="Remove them; without it, they are only listed.")] = False,
    store: StorePath = DEFAULT,
) -> None:
    """List, or remove, artifacts that no run, name or pin needs, and what dead runs left behind."""
    from flows.store_commands import collect_garbage

    collect_garbage(store, keep_runs=keep_runs, keep_promotions=keep_promotions, min_age=min_age, delete=delete)


def pin(
    reference: Annotated[str | None, typer.Argument(help="As of show; without it, the pins are listed.")] = None,
    reason: Annotated[str, typer.Option(help="Why, for whoever lists the pins.")] = "",
    store: StorePath = DEFAULT,
) -> None:
    """Keep an artifact, and what it was made of, at every gc."""
    from flows.store_commands import pin_artifact

    pin_artifact(store, reference, reason)


def unpin(reference: Reference, store: StorePath = DEFAULT) -> None:
    """Let gc take an artifact again."""
    from flows.store_commands import unpin_artifact

    unpin_artifact(store, reference)


def du(store: StorePath = DEFAULT) -> None:
    """Show how much each stage takes."""
    from flows.store_commands import show_usage

    show_usage(store)


def pack(
    reference: Reference,
    target: Annotated[Path, typer.Argument(help="Tar file to write.")],
    lineage: Annotated[bool, typer.Option(help="With all that it was made of.")] = True,
    store: StorePath = DEFAULT,
) -> None:
    """Write an artifact into one file, for another store."""
    from flows.store_commands import pack

    pack(store, reference, target, with_lineage=lineage)


def unpack(
    source: Annotated[Path, typer.Argument(help="Tar file of `mcaflow pack`.")], store: StorePath = DEFAULT
) -> None:
    """Bring the artifacts of a file into the store, every byte checked."""
    from flows.store_commands import unpack

    unpack(store, source)


def push(
    reference: Reference,
    url: Annotated[str, typer.Argument(help="Remote store, for instance s3://bucket/mcaflow.")],
    store: StorePath = DEFAULT,
) -> None:
    """Bring an artifact, and what it was made of, to a remote store."""
    from flows.store_commands import push

    push(store, reference, url)


def models(
    model: Annotated[str | None, typer.Argument(help="Show this model's history.")] = None, store: StorePath = DEFAULT
) -> None:
    """List the models that have a name, and which artifact has it."""
    from flows.store_commands import show_models

    show_models(store, model)


def promote(reference: Reference, model: Model, alias: Alias = "production", store: StorePath = DEFAULT) -> None:
    """Give an artifact a model's name by hand; runs do it themselves where their recipe has a promote section."""
    from flows.store_commands import promote_artifact

    promote_artifact(store, reference, model, alias)


def rollback(model: Model, alias: Alias = "production", store: StorePath = DEFAULT) -> None:
    """Give a model's name back to the artifact that had it before."""
    from flows.store_commands import roll_back

    roll_back(store, model, alias)


COMMANDS = {
    "gc": gc,
    "pin": pin,
    "unpin": unpin,
    "du": du,
    "pack": pack,
    "unpack": unpack,
    "push": push,
    "models": models,
    "promote": promote,
    "rollback": rollback,
}
