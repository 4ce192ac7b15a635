"""Bodies of the commands on models: `convert`, `export`, `verify-model`. The work is a job in a child process."""

import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any, NoReturn

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flows.artifact_commands import human_size
from flows.console import make_console
from mca_lib.converter.headers import check_weights
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint
from mca_lib.verification.card import Card, write_text
from tasks.errors import StageFailed
from tasks.jobs import run_job

MAX_LOGITS_DIFFERENCE = 1e-3
"""Of `convert --check`."""
_EXIT_CODES = {"not verified": 1, "inconclusive": 3}


def convert_model(model: Path, output: Path, *, check: bool) -> None:
    """``mcaflow convert``."""
    _check_source(model)
    limit = MAX_LOGITS_DIFFERENCE if check else None
    spec = {"model": str(model), "output": str(output), "max_logits_difference": limit}
    result = _run("convert", spec, f"convert {model.name}")
    print(
        f"{output}: {result['parameters']:,} parameters, {result['tensors']} tensors, {human_size(result['bytes'])}, "
        f"{result['dtype']}"
    )
    if result["logits"] is not None:
        print(f"fp32 logits differ from transformers' by at most {result['logits']['max_difference']:.2g}")


def export_checkpoint(checkpoint: Path, output: Path, *, dtype: str, max_shard_size: str) -> None:
    """``mcaflow export``."""
    _require_directory(checkpoint)
    spec = {
        "checkpoint": str(checkpoint),
        "output": str(output),
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    result = _run("export", spec, f"export {checkpoint.name}")
    print(f"{output}: {result['parameters']:,} parameters, {human_size(result['bytes'])}, {result['dtype']}")


def verify_one(
    model: Path,
    layouts: str | None,
    output: Path | None,
    *,
    generate: bool,
    max_difference: float | None,
    max_kl: float | None,
) -> None:
    """``mcaflow verify-model``; exit code 1 when the model is not verified, 3 when the comparison cannot tell."""
    from mca_lib.verification.layouts import parse_layout
    from mca_lib.verification.sample import require_tokenizer

    names = [name for name in (layouts or "").split(",") if name.strip()]
    for name in names:
        parse_layout(name)
    for name, value in (("--max-difference", max_difference), ("--max-kl", max_kl)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} {value}: it must be a positive number")
    if output is not None and output.is_dir():
        raise ConfigError(f"--output {output}: a folder; give the name of a file")
    _check_source(model)
    if generate:
        require_tokenizer(model)
    spec = {
        "model": str(model.absolute()),
        "layouts": names or None,
        "generate": generate,
        "max_difference": max_difference,
        "max_kl": max_kl,
    }
    result = _run("verify_model", spec, f"verify {model.name}", show_steps=True)
    if output is not None:
        write_text(output, result["markdown"])
        print(f"card: {output}")
    card = Card.from_dict(result["card"])
    _print_card(card)
    if card.verdict() == "verified":
        print(f"verified: {card.headline()}")
        return
    for text in card.problems() or [card.headline()]:
        print(f"mcaflow: {card.verdict()}: {text}", file=sys.stderr)
    sys.exit(_EXIT_CODES[card.verdict()])


def _print_card(card: Card) -> None:
    own = card.own_difference
    print(
        f"limits: max |Δ| {card.limits.max_difference:.2g}, KL {card.limits.kl:.2g}; "
        f"transformers, SDPA against eager attention: {own.max_difference:.2g}, {own.kl:.2g}"
    )
    for r in card.layouts:
        if r.everything is None:
            print(f"{r.layout:<10} {'refused' if r.refused else 'failed'}: {r.refused or r.failed}")
            continue
        back = f"{r.tensors} tensors bitwise" if not r.different else f"{len(r.different)} of {r.tensors} differ"
        print(
            f"{r.layout:<10} max |Δ| {r.everything.max_difference:.2g}, KL {r.everything.kl:.2g}, "
            f"top-1 {r.everything.top1:.2%}, round trip: {back}"
        )
    for s in card.sensitivity:
        noticed = "noticed" if card.limits.exceeded(s.measured) else "not noticed"
        print(
            f"with {s.change}: max |Δ| {s.measured.max_difference:.2g}, KL {s.measured.kl:.2g}, {noticed}"
            + ("" if s.required or noticed == "noticed" else " (rounding may cover one weight of a large model)")
        )
    if card.generations is not None:
        g = card.generations
        print(f"greedy generations: {g.identical} of {g.prompts} identical over {g.tokens} tokens")


def _run(job: str, spec: dict[str, Any], title: str, *, show_steps: bool = False) -> dict[str, Any]:
    """Run a job under a bar, or with a line for each thing that it does. Raises UserError; any other failure is one
    line and exit code 1."""
    signal.signal(signal.SIGTERM, _terminated)
    console = make_console(stderr=True)
    folder = Path(tempfile.mkdtemp(prefix="mcaflow-"))
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            bar = bars.add_task(f"{title}: starting", total=None)
            if not console.is_terminal:
                console.print(title, markup=False, highlight=False)
            doing = "starting"

            def show(report: dict[str, Any]) -> None:
                nonlocal doing
                if report.get("doing", doing) != doing:
                    doing = report["doing"]
                    if not console.is_terminal:
                        console.print(f"  {doing}", markup=False, highlight=False)
                bars.update(
                    bar, description=f"{title}: {doing}", completed=report["done"], total=report["total"] or None
                )
                if show_steps and "text" in report:
                    bars.console.print(report["text"], markup=False, highlight=False)

            result = run_job(job, spec, folder=folder, tag=f"{job}-{uuid.uuid4().hex}", on_progress=show)
    except StageFailed as error:
        print(f"mcaflow: error: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(1)  # the folder stays: it has the log
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        print("mcaflow: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _terminated(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _check_source(model: Path) -> None:
    """Raise ModelError for what config.json and the headers of the weights tell; says what a conversion leaves out."""
    _require_directory(model)
    if is_mca_checkpoint(model):
        raise ModelError(f"{model}: an MCA checkpoint; give the directory of a Hugging Face model")
    config = McaModelConfig.from_pretrained(model)
    stored = check_weights(config, model)
    if absent := config.mtp_num_layers - stored.mtp_num_layers:
        print(
            f"mcaflow: {model}: config.json counts {absent} multi-token prediction layer{'s' * (absent > 1)} and the "
            "files have none of their weights; they are left out",
            file=sys.stderr,
        )


def _require_directory(path: Path) -> None:
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory")
