"""``mcaflow``: run a recipe, see what a run would do, and look into the store.

Only the standard library and typer load at start; each command imports what it needs, so ``--help`` answers at once.
Exit codes: 0 done; 1 a stage failed or damage was found; 2 something for the user to mend; 130 interrupted,
143 terminated.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="mcaflow",
    help="Train language models on Megatron-Core as a pipeline of cached stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Recipe = Annotated[Path, typer.Argument(help="YAML recipe, for instance deployments/recipes/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the recipe.")
]
StorePath = Annotated[
    Path | None, typer.Option("--store", help="Folder of the artifact store; default: .mcaflow/store.")
]
Reference = Annotated[str, typer.Argument(help="STAGE/KEY or the first characters of a key; STAGE alone: its newest.")]


@app.command()
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    refresh: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="Compute this stage anew although the store has it.")
    ] = None,
    store: StorePath = None,
) -> None:
    """Run a recipe; stages that the store has are not computed again."""
    from flows.commands import run_recipe

    run_recipe(recipe, _with_store(overrides, store), refresh or [])


@app.command()
def plan(recipe: Recipe, overrides: Overrides = None, store: StorePath = None) -> None:
    """Show for each stage whether the store has it, and if not, which field changed."""
    from flows.commands import show_plan

    show_plan(recipe, _with_store(overrides, store))


@app.command()
def check(recipe: Recipe, overrides: Overrides = None, store: StorePath = None) -> None:
    """Check a recipe with its model and every row of its data, without running anything."""
    from flows.commands import check_everything

    check_everything(recipe, _with_store(overrides, store))


@app.command()
def fields(
    section: Annotated[str | None, typer.Argument(help="Only this section, for instance training.")] = None,
) -> None:
    """List the fields of a recipe: default, whether it is part of a key, meaning."""
    from flows.commands import show_fields

    show_fields(section)


@app.command(name="ls")
def list_artifacts(
    stage: Annotated[str | None, typer.Argument(help="Only artifacts of this stage.")] = None, store: StorePath = None
) -> None:
    """List the artifacts of the store."""
    from flows.commands import list_artifacts

    list_artifacts(_store_path(store), stage)


@app.command()
def show(reference: Reference, store: StorePath = None) -> None:
    """Show one artifact: key, payload of the key, files, statistics."""
    from flows.commands import show_artifact

    show_artifact(_store_path(store), reference)


@app.command()
def lineage(reference: Reference, store: StorePath = None) -> None:
    """Show what an artifact was made from, up to the source."""
    from flows.commands import show_lineage

    show_lineage(_store_path(store), reference)


@app.command()
def verify(
    reference: Annotated[str | None, typer.Argument(help="One artifact; without it, all of them.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every byte.")] = False,
    store: StorePath = None,
) -> None:
    """Check artifacts against their recorded digests; exit code 1 when one is damaged."""
    from flows.commands import verify_artifacts

    verify_artifacts(_store_path(store), reference, full=full)


def main() -> None:
    """Entry point: errors that the user can mend are one line on stderr and exit code 2."""
    from mca_lib.errors import UserError

    try:
        app()
    except UserError as error:
        print(f"mcaflow: error: {error}", file=sys.stderr)
        sys.exit(2)


def _with_store(overrides: list[str] | None, store: Path | None) -> list[str]:
    return [*(overrides or []), *([f"store.path={json.dumps(os.fspath(store))}"] if store else [])]


def _store_path(store: Path | None) -> Path:
    return store or Path(".mcaflow/store")


if __name__ == "__main__":
    main()
