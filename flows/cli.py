"""``mcaflow``: run a recipe, see what a run would do, look into the store; convert, inspect and verify models.

Only the standard library and typer load at start; each command imports what it needs, so ``--help`` answers at once.
Exit codes: 0 done; 1 a stage failed or damage was found; 2 something for the user to mend; 3 `verify-model` cannot
tell; 130 interrupted, 143 terminated.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows import operate_cli, store_cli

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
Refresh = Annotated[
    list[str] | None, typer.Option(metavar="STAGE", help="Compute this stage anew although the store has it.")
]
First = Annotated[str | None, typer.Option("--from", metavar="STAGE", help="Compute this stage and all after it anew.")]
Until = Annotated[str | None, typer.Option(metavar="STAGE", help="Stop after this stage.")]
StorePath = Annotated[
    Path | None, typer.Option("--store", help="Folder of the artifact store; default: .mcaflow/store.")
]
Reference = Annotated[str, typer.Argument(help="STAGE/KEY or the first characters of a key; STAGE alone: its newest.")]


@app.command()
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    refresh: Refresh = None,
    first: First = None,
    until: Until = None,
    store: StorePath = None,
) -> None:
    """Run a recipe; stages that the store has are not computed again."""
    from flows.commands import run_recipe

    run_recipe(recipe, _with_store(overrides, store), refresh=refresh or [], first=first, until=until)


@app.command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    refresh: Refresh = None,
    first: First = None,
    until: Until = None,
    store: StorePath = None,
) -> None:
    """Show for each stage whether the store has it, and if not, which field changed."""
    from flows.commands import show_plan

    show_plan(recipe, _with_store(overrides, store), refresh=refresh or [], first=first, until=until)


@app.command()
def check(recipe: Recipe, overrides: Overrides = None, store: StorePath = None) -> None:
    """Check a recipe with its model and every row of its data, without running anything."""
    from flows.commands import check_everything

    check_everything(recipe, _with_store(overrides, store))


@app.command()
def agent(
    endpoint: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The run's launcher.rdzv_endpoint.")],
    keep: Annotated[bool, typer.Option("--keep", help="Go on with the next run when one has ended.")] = False,
) -> None:
    """Take part in a run of `launcher.kind: nodes` with this machine; before or after the run has started.

    Ends with the run's exit code. Whoever answers at HOST:PORT decides what runs here.
    """
    from flows.agent_command import take_part

    take_part(endpoint, keep=keep)


@app.command()
def fields(
    section: Annotated[str | None, typer.Argument(help="Only this section, for instance training.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the fields of a recipe: default, whether it is part of a key, choices, meaning."""
    from flows.commands import show_fields

    show_fields(section, as_json=as_json)


@app.command()
def hybrid_pattern(
    layers: Annotated[int | None, typer.Option(help="Layers of the transformer.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A recipe, or the directory of its model, that says so instead.")
    ] = None,
    mamba_every: Annotated[int, typer.Option(help="A Mamba layer before every so many layers; 0 for none.")] = 2,
    moe: Annotated[bool, typer.Option("--moe", help="The layers have experts (E) in place of an MLP (-).")] = False,
) -> None:
    """Print the pattern of a hybrid that starts from a transformer, for a recipe's checkpoint.pattern."""
    from flows.hybrid_command import print_pattern

    print_pattern(layers, model, mamba_every=mamba_every, moe=moe)


@app.command(name="ls")
def list_artifacts(
    stage: Annotated[str | None, typer.Argument(help="Only artifacts of this stage.")] = None, store: StorePath = None
) -> None:
    """List the artifacts of the store."""
    from flows.artifact_commands import list_artifacts

    list_artifacts(_store_path(store), stage)


@app.command()
def show(reference: Reference, store: StorePath = None) -> None:
    """Show one artifact: key, payload of the key, files, statistics."""
    from flows.artifact_commands import show_artifact

    show_artifact(_store_path(store), reference)


@app.command()
def lineage(reference: Reference, store: StorePath = None) -> None:
    """Show what an artifact was made from, up to the source."""
    from flows.artifact_commands import show_lineage

    show_lineage(_store_path(store), reference)


@app.command()
def verify(
    reference: Annotated[str | None, typer.Argument(help="One artifact; without it, all of them.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every byte.")] = False,
    store: StorePath = None,
) -> None:
    """Check artifacts against their recorded digests; exit code 1 when one is damaged."""
    from flows.artifact_commands import verify_artifacts

    verify_artifacts(_store_path(store), reference, full=full)


@app.command()
def convert(
    model: Annotated[Path, typer.Argument(help="Directory of a Hugging Face model.")],
    output: Annotated[Path, typer.Argument(help="MCA checkpoint to write; absent or an empty folder.")],
    check: Annotated[
        bool, typer.Option("--check", help="Load the result and compare its fp32 logits with transformers'.")
    ] = False,
) -> None:
    """Convert a Hugging Face model into an MCA checkpoint, which loads at any parallel layout."""
    from flows.model_commands import convert_model

    convert_model(model, output, check=check)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="MCA checkpoint: of convert, or of a store's train artifact.")],
    output: Annotated[Path, typer.Argument(help="Hugging Face directory to write; absent or an empty folder.")],
    dtype: Annotated[str, typer.Option(help="auto: as in the source; or float32, bfloat16, float16.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(help="Size of one weights file, for instance 5GB.")] = "5GB",
) -> None:
    """Write an MCA checkpoint as a Hugging Face model."""
    from flows.model_commands import export_checkpoint

    export_checkpoint(checkpoint, output, dtype=dtype, max_shard_size=max_shard_size)


@app.command()
def verify_model(
    model: Annotated[Path, typer.Argument(help="Directory of a Hugging Face model.")],
    layouts: Annotated[
        str | None,
        typer.Option(help="For instance TP2,PP2xFIRST1; default: a card's, with 3, 5 or 7 where 2 does not fit."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the card to this file.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Compare greedy generations too.")] = False,
    max_difference: Annotated[
        float | None, typer.Option(help="Largest |Δ| of a logit; default: by the noise of transformers itself.")
    ] = None,
    max_kl: Annotated[float | None, typer.Option(help="Largest mean KL per token; likewise.")] = None,
) -> None:
    """Compare a model with transformers at parallel layouts: one directory, read by two libraries.

    Exit code 1: not verified. 3: the comparison is too blunt for this model to tell.
    """
    from flows.model_commands import verify_one

    verify_one(model, layouts, output, generate=generate, max_difference=max_difference, max_kl=max_kl)


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="Directory of a model, MCA or Hugging Face, or a config.json.")],
    tensor: Annotated[int, typer.Option(help="Ranks that share each weight matrix.")] = 1,
    pipeline: Annotated[int, typer.Option(help="Ranks that share the stack of layers.")] = 1,
    virtual_pipeline: Annotated[int | None, typer.Option(help="Model chunks per pipeline rank.")] = None,
    context: Annotated[int, typer.Option(help="Ranks that share each sequence.")] = 1,
    expert: Annotated[int, typer.Option(help="Ranks that share the experts of a layer.")] = 1,
    expert_tensor: Annotated[int | None, typer.Option(help="Ranks that share each expert; default: --tensor.")] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split the activations between tensor parallel regions too.")
    ] = False,
    first_stage_layers: Annotated[
        int | None, typer.Option(help="Layers of the first stage; default: equal shares.")
    ] = None,
    last_stage_layers: Annotated[
        int | None, typer.Option(help="Layers of the last stage; default: equal shares.")
    ] = None,
    pipeline_layout: Annotated[
        str | None, typer.Option(help="What each stage holds, for instance 'Et*3|t*5L'.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks of all machines; default: the fewest these sizes allow.")
    ] = None,
    data: Annotated[int | None, typer.Option(help="Replicas of the model, instead of --ranks.")] = None,
    precision: Annotated[str, typer.Option(help="Of the weights, bf16 or fp32; gradients are fp32.")] = "bf16",
    distributed_optimizer: Annotated[bool, typer.Option(help="Replicas share the optimizer state.")] = True,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.")] = 1,
    recompute: Annotated[
        str, typer.Option(help="none; selective: core attention twice; full: all layers twice.")
    ] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show a model's config, its parameters, and the memory that training takes at a layout; allocates nothing."""
    from flows.inspect_command import inspect_model
    from mca_lib.models.layout import Layout

    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=virtual_pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        sequence_parallel=sequence_parallel,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        pipeline_layout=pipeline_layout,
    )
    training = {
        "precision": precision,
        "distributed_optimizer": distributed_optimizer,
        "sequence_length": sequence_length,
        "micro_batch_size": micro_batch_size,
        "recompute": recompute,
    }
    inspect_model(model, layout, training, ranks=ranks, data=data, as_json=as_json)


store_cli.register(app)
operate_cli.register(app)


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
