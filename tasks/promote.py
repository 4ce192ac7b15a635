"""Promotion: the exported model gets a name, `production` of a model, when the recipe's conditions hold.

The holder of the name is measured on this run's held-out rows, as one more cached evaluation, so that figures compare.
That takes a while, so it happens without the lock of the name; under the lock the holder must still be that one, else
the comparison starts over. So of two runs at once, the later one is compared with what the earlier one has promoted.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from mca_lib.errors import ConfigError, UserError
from tasks.aliases import PRODUCTION, Aliases, Decision, Promotion, identity
from tasks.evaluate import EvaluateStage
from tasks.gate import Condition, parse_condition
from tasks.section import Execution, Section
from tasks.store import Artifact, ArtifactStore, Lineage

_NAME = r"^[A-Za-z0-9][\w.-]{0,99}$"
MEASURES = ("heldout_loss", "perplexity", "accuracy")
PREFERENCES = ("chosen_likelier", "reward_accuracy", "reward_margin")
"""With pairs of answers alone. Rewards compare with the base model, which has none of its own."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


class PromoteConfig(Section):
    """The name that the result gets, and when."""

    model: Execution[str | None] = Field(default=None, pattern=_NAME)
    """Name of the model in the store, for instance `support-chat`; null: nothing is promoted."""
    alias: Execution[str] = Field(default=PRODUCTION, pattern=_NAME)
    """Name within the model that the result gets."""
    gate: Execution[list[str]] = Field(default_factory=list)
    """Conditions, all of which must hold, for instance `heldout_loss < production - 0.01` or `accuracy >= base`."""
    push_to: Execution[str | None] = None
    """Where the promoted model is brought: a directory, or a repository `hf://organization/name`, with HF_TOKEN."""


@dataclass(frozen=True)
class Verdict:
    """What became of a run's model."""

    model: str
    alias: str
    decision: Decision
    production: Mapping[str, Any] | None
    """metrics.json of the model that had the name, on this run's rows; None where there was none to measure."""

    @property
    def message(self) -> str:
        """In one line per reason."""
        now, before = self.decision.promoted, self.decision.before
        name = f"{self.model}/{self.alias}"
        if now is None:
            return f"{name} not promoted: " + "; ".join(self.decision.refusals)
        was = f", was {before.stage}/{before.key[:12]}" if before is not None and before != now else ""
        return f"{name} is {now.stage}/{now.key[:12]}{was}"


def promotion_problems(config: PromoteConfig, *, pairs: bool, held_out: bool, tasks: bool = False) -> Iterator[str]:
    """What is wrong with the section, as `field: what is wrong and what to do`.

    Args:
        pairs: the rows are pairs of answers.
        held_out: some of them are held out.
        tasks: lm-eval's are measured; what they measure is checked against their files (`check_gate`).
    """
    if config.gate and config.model is None:
        yield "promote.gate: conditions for no promotion; name the model in promote.model"
    if config.push_to is not None and config.model is None:
        yield "promote.push_to: only what is promoted is pushed; name the model in promote.model"
    known = MEASURES + (PREFERENCES if pairs else ())
    for text in config.gate:
        try:
            condition = parse_condition(text)
        except ConfigError as error:
            yield f"promote.{error}"
            continue
        if tasks and "." in condition.metric:
            continue
        if condition.metric not in known:
            yield f"promote.gate: {text!r}: {condition.metric} is not measured; measures are {', '.join(known)}"
        elif not held_out:
            yield f"promote.gate: {text!r}: no rows are held out; set dataset.eval_fraction or dataset.eval_files"
        elif condition.metric.startswith("reward_") and "base" in condition.needs:
            yield f"promote.gate: {text!r}: rewards are counted from the base model, which has none; use a number"


def check_gate(config: PromoteConfig, measured: Collection[str]) -> None:
    """Raises ConfigError for a condition on what no task measures; `measured` is what they do."""
    for text in config.gate:
        metric = parse_condition(text).metric
        if "." in metric and metric not in measured:
            near = difflib.get_close_matches(metric, measured, n=8, cutoff=0.0)
            raise ConfigError(f"promote.gate: {text!r}: no task measures {metric}; measured: {', '.join(sorted(near))}")


def measures(metrics: Mapping[str, Any], model: str) -> dict[str, float]:
    """Figures of `base` or `trained` in a metrics.json, by the names that conditions use."""
    tasks = {name: figures[model]["value"] for name, figures in metrics.get("tasks", {}).items()}
    if not metrics["documents"]:
        return tasks
    figures = metrics["models"][model]
    perplexity = figures["perplexity"]
    found = {
        "heldout_loss": figures["loss"],
        "perplexity": math.inf if perplexity is None else perplexity,  # null where it is too large
        "accuracy": figures["accuracy"],
    }
    if preference := metrics.get("preference"):
        found["chosen_likelier"] = preference["likelier"][model]
        if model == "trained":
            found |= {name: preference[name] for name in ("reward_accuracy", "reward_margin")}
    return found | tasks


def require_model(store: ArtifactStore, artifact: Artifact) -> None:
    """Raise ConfigError unless the artifact is the directory of an exported model, whole."""
    name = f"{artifact.stage}/{artifact.key[:12]}"
    if artifact.stage != "export":
        raise ConfigError(f"{name} is no exported model; promote an artifact of stage export")
    if (found := store.get(artifact.stage, artifact.key)) is None or found.digest != artifact.digest:
        raise ConfigError(f"{name} is damaged or no longer in the store; see `mcaflow verify`, or run its recipe again")


def promote(
    store: ArtifactStore,
    config: PromoteConfig,
    evaluation: EvaluateStage,
    metrics: Mapping[str, Any],
    measure: Callable[[EvaluateStage], Mapping[str, Any]],
    run: str,
) -> Verdict:
    """Give the name to the model of `evaluation`, unless a condition of the gate does not hold. Doing it twice is once.

    Args:
        metrics: what `evaluation` has found.
        measure: evaluates another model on the same rows.
        run: who asks, for the history.
    """
    assert config.model is not None
    require_model(store, evaluation.trained)
    names, conditions = Aliases(store), [parse_condition(text) for text in config.gate]
    trained, base = measures(metrics, "trained"), measures(metrics, "base")
    while True:
        holder = names.current(config.model, config.alias)
        production, obstacle = _measure_holder(store, holder, evaluation, measure)

        def refusals(
            current: Promotion | None,
            holder: Promotion | None = holder,
            production: Mapping[str, Any] | None = production,
            obstacle: str | None = obstacle,
        ) -> tuple[str, ...]:
            if current != holder:
                raise _HolderChanged
            if _was_withdrawn(names, config, evaluation.trained):
                return ("it was rolled back; `mcaflow promote` gives it the name again",)
            others = {"base": base, "production": production and measures(production, "trained")}
            return tuple(_failures(conditions, trained, others, obstacle))

        try:
            decision = names.promote(
                config.model,
                evaluation.trained,
                alias=config.alias,
                run=run,
                metrics=_finite(trained),
                refusals=refusals,
            )
        except _HolderChanged:
            continue
        return Verdict(config.model, config.alias, decision, production)


class _HolderChanged(Exception):
    """Another run was faster; what was measured is not of the present holder."""


def _failures(
    conditions: list[Condition],
    trained: Mapping[str, float],
    others: Mapping[str, Mapping[str, float] | None],
    obstacle: str | None,
) -> Iterator[str]:
    for condition in conditions:
        if obstacle is not None and PRODUCTION in condition.needs:
            yield f"{condition.text}: {obstacle}"
        elif failure := condition.failure(trained, others):
            yield failure


def _measure_holder(
    store: ArtifactStore,
    holder: Promotion | None,
    evaluation: EvaluateStage,
    measure: Callable[[EvaluateStage], Mapping[str, Any]],
) -> tuple[Mapping[str, Any] | None, str | None]:
    """(Figures of the holder on the rows of `evaluation`, why there are none). Both None where nobody else holds it."""
    trained = evaluation.trained
    if holder is None or identity(holder) == identity(trained):
        return None, None
    name = f"production, {holder.stage}/{holder.key[:12]},"
    artifact = store.get(holder.stage, holder.key)
    if artifact is None or artifact.digest != holder.digest:
        return None, f"{name} is no longer whole in the store; run its recipe again, or promote by hand"
    if _tokenizer(artifact) != _tokenizer(trained):
        return None, f"{name} has another tokenizer, so that its figures do not compare; promote by hand"
    base = _own_base(store, artifact) if "config.json" not in artifact.record.files else evaluation.base
    if base is None:
        return None, f"{name} is an adapter whose model is no longer in the store; promote by hand"
    try:
        return measure(replace(evaluation, base=base, trained=artifact)), None
    except UserError as error:
        return None, f"{name} cannot be evaluated on these rows: {error}"


def _tokenizer(model: Artifact) -> dict[str, str]:
    files = model.record.files
    return {name: files[name].digest for name in _TOKENIZERS if name in files}


def _own_base(store: ArtifactStore, adapter: Artifact) -> Artifact | None:
    """The model that an adapter belongs to."""
    nodes: list[Lineage] = [store.lineage(adapter)]
    while nodes:
        node = nodes.pop()
        if node.stage == "download" and not node.replaced:
            return node.artifact
        nodes += node.inputs
    return None


def _was_withdrawn(names: Aliases, config: PromoteConfig, artifact: Artifact) -> bool:
    return (artifact.stage, artifact.key, artifact.digest) in names.withdrawn(config.model or "", config.alias)


def _finite(found: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if math.isfinite(value)}
