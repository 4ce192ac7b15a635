"""What can be known to fail is said before anything expensive starts, without torch and without Megatron.

check_recipe     the recipe alone: store, template, files, tasks, a local model directory; milliseconds
check_pending    what is to be computed: every row of the data for *dataset*, launcher and trackers for *train*, data of
                 tasks on a hub for *evaluate*
check_model      the model's config.json and headers against the recipe; for a model of a hub right after the download
check_space      room in the store for what the run is going to write
"""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flows.graph import StageName
from flows.plan import make_plan
from flows.recipe import PipelineConfig
from mca_lib.adapters.targets import target_names
from mca_lib.converter.headers import check_weights
from mca_lib.data.formats import resolve_sources, shows_images
from mca_lib.data.rows import validate_sources
from mca_lib.data.storage import check_executor, resolve_storage
from mca_lib.data.templates import check_template
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.layout_rules import check_training_layout
from mca_lib.models.registry import config_from_hf
from mca_lib.models.training_rules import check_adapters_alone, check_training_options
from mca_lib.models.vision.directory import check_images
from mca_lib.tokenizer import file_vocabulary_size, foreign_id
from mca_lib.trainers.llama_factory import check_longest
from mca_lib.trainers.llama_factory import check_model as check_backend
from mca_lib.trainers.tracking import tracker_problems
from tasks.checkpoint_config import starting_model
from tasks.convert import converted_bytes
from tasks.evaluate import check_task_data, check_tasks
from tasks.launchers.check import check_devices, check_launcher, check_secrets
from tasks.promote import check_gate
from tasks.push import push_problem
from tasks.store import ArtifactStore
from tasks.train import tracker_secrets, training_space

# Bytes that a stage writes per byte of the model's weights.
_WEIGHTS_WRITTEN = {"convert": 1.1, "translate": 1.1, "export": 1.1}


def check_recipe(config: PipelineConfig) -> None:
    """Raise a UserError for a store, a data file, a template or a local model that cannot be used."""
    _check_features(config)
    if remote := config.store.open().remote:
        remote.require_package()
    if config.promote.push_to is not None and (problem := push_problem(config.promote.push_to)):
        raise ConfigError(f"promote.push_to: {problem}")
    check_gate(config.promote, check_tasks(config.eval))
    if config.dataset.template is not None:
        check_template(config.dataset.template)
    resolve_storage(config.dataset, config.training.stage, resolve_sources(config.dataset, config.training.stage))
    local = Path(config.model.name_or_path).expanduser()
    if config.model.source == "local" or (config.model.source == "auto" and os.path.isdir(local)):
        check_model(config, local)


def check_pending(
    config: PipelineConfig,
    again: Collection[str] = (),
    until: StageName | None = None,
    store: ArtifactStore | None = None,
) -> None:
    """Raise a UserError for too many unusable rows, a launcher or a tracker that is not here, or a store without write
    access. Of what the store has already nothing is asked, but of the stages in `again`, and nothing of what is not
    needed `until` that stage. `store` is that of the recipe, where it is open.
    """
    store = store or config.store.open()
    pending = _pending(config, store, again, until)
    if pending:
        store.require_writable()
    if "train" in pending:
        check_launcher(config.launcher)
        check_devices(config.launcher, config.training)
        check_secrets(config.launcher, tracker_secrets(config.training))
        for problem in tracker_problems(config.training.report_to):
            raise ConfigError(f"training.report_to: {problem}")
    if "evaluate" in pending:
        check_task_data(config.eval)
    if "dataset" in pending:
        check_executor(config.dataset.executor.kind)
        validate_sources(config.dataset, config.training.stage)


def check_model(config: PipelineConfig, model_dir: Path) -> None:
    """Raise a UserError when this model cannot be trained by this recipe: family, weights, layout, length."""
    source = config_from_hf(_read_config(model_dir))
    model = starting_model(source, config.checkpoint)
    check_training_layout(model, config.parallel)
    check_training_options(model, config.training)
    if config.training.finetuning_type == "lora":
        check_adapters_alone(model, config.training)
        target_names(model, config.lora.target_modules)
    if not config.training.use_mca:
        check_backend(model, adapters=config.training.finetuning_type == "lora")
        check_longest(model, config.dataset.cutoff_len)
    positions = source.max_position_embeddings
    if config.dataset.cutoff_len > positions:
        raise ConfigError(
            f"dataset.cutoff_len: {config.dataset.cutoff_len} is longer than the {positions} positions of the model "
            f"in {model_dir}; use at most {positions}"
        )
    check_weights(source, model_dir)
    if shows_images(resolve_sources(config.dataset, config.training.stage)):
        check_images(source, model_dir)
    _check_vocabulary(config, model_dir, source.vocab_size)


def check_space(
    config: PipelineConfig, model_dir: Path, again: Collection[str], until: StageName | None, store: ArtifactStore
) -> None:
    """Raise a StoreError when the store's disk has no room for what is still to be computed. An estimate."""
    weights = converted_bytes(model_dir, starting_model(config_from_hf(_read_config(model_dir)), config.checkpoint))
    pending = _pending(config, store, again, until)
    needed = sum(weights * factor for stage, factor in _WEIGHTS_WRITTEN.items() if stage in pending)
    if "train" in pending:
        needed += training_space(weights, config.training)
    store.require_space(int(needed), "this run")


def _pending(
    config: PipelineConfig, store: ArtifactStore, again: Collection[str], until: StageName | None
) -> set[StageName]:
    """The stages to compute: those in `again`, and what neither the store nor the remote one has."""
    rows = make_plan(config, store, again, until)
    return {row.stage for row in rows if row.verdict != "hit" and not row.remote}


def _check_vocabulary(config: PipelineConfig, model_dir: Path, rows: int) -> None:
    """Every token needs a row of its own. A tokenizer without tokenizer.json waits for the dataset stage."""
    size = file_vocabulary_size(model_dir)
    if size is not None and size > rows and not config.checkpoint.resize_vocabulary:
        raise ModelError(foreign_id(model_dir, size - 1, rows))


def _check_features(config: PipelineConfig) -> None:
    if config.model.trust_remote_code:
        raise ConfigError("model.trust_remote_code: not available in this release; use false")


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model.name_or_path: {path} does not exist; a model directory needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model.name_or_path: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model.name_or_path: {path} is not a JSON object")
    return content
