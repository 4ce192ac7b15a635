"""One Hugging Face model at all layouts → `Card`. No torch in this process: ranks do the work, forked from a pool.

Memory: one copy of the model in fp32 while transformers computes the reference, then one spread over the ranks of a
layout, one layout after the other; the reference logits lie in a file.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blake3 import blake3

from mca_lib.converter.headers import check_weights, weight_files
from mca_lib.errors import ConfigError, ModelError
from mca_lib.models.config import McaModelConfig, is_mca_checkpoint, read_hf_config
from mca_lib.models.layout import Layout
from mca_lib.models.registry import config_from_hf
from mca_lib.models.size import total
from mca_lib.ranks import RankError, RankPool
from mca_lib.verification.card import Card, Generations, LayoutResult, Sensitivity
from mca_lib.verification.difference import Measured, Sums
from mca_lib.verification.images import with_images
from mca_lib.verification.layouts import STANDARD, layout_name, parse_layout, ranks_of, refusal, stand_in
from mca_lib.verification.limits import Limits
from mca_lib.verification.sample import Sample, require_tokenizer
from mca_lib.verification.tables import unsupported

PERTURBATION = 1e-2
NEW_TOKENS = 32
TIMEOUT_S = 24 * 3600.0

_WORK = "mca_lib.verification."
"""Ranks import what they do; it brings torch and Megatron."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Verification:
    """What to do."""

    directory: Path
    layouts: tuple[str, ...] = STANDARD
    limits: Limits | None = None
    """None: from the noise of transformers itself, see `Limits.of_noise`."""
    generate: bool = False
    stand_ins: bool = False
    """Where 2 ranks do not divide the model, try 3, 5 or 7."""
    tiny: bool = False
    """The model is so small that a single weight must show."""


def verify(task: Verification, pool: RankPool, tell: Tell = lambda text: None) -> Card:
    """Measure everything.

    Raises:
        UserError: the model is unsupported, incomplete or inconsistent, or a layout's name is wrong.
        RankError: the reference could not be computed.
    """
    directory = task.directory.absolute()
    if is_mca_checkpoint(directory):
        raise ModelError(f"{directory}: an MCA checkpoint; give the directory of a Hugging Face model")
    hf = read_hf_config(directory)
    if hf.get("quantization_config"):
        raise ModelError(f"{directory}: the weights are quantized; there is no fp32 reference to compare with")
    config = McaModelConfig.from_pretrained(directory)
    files = weight_files(directory)
    check_weights(config, directory)
    wanted = [parse_layout(name) for name in task.layouts]
    if task.generate:
        require_tokenizer(directory)
    sample = on_one_rank(
        pool, _WORK + "sample:make_sample", directory, config.vocab_size, config.max_position_embeddings
    )
    sample = with_images(sample, config)
    with tempfile.TemporaryDirectory(prefix="mcaflow-verify-") as folder:
        run = _Run(directory, Path(folder), config, sample, pool, tell)
        own, largest = run.reference()
        limits = task.limits or Limits.of_noise(own, largest)
        results = [result for layout in wanted for result in run.layout(layout, limits, task.stand_ins)]
        return Card(
            model_type=config.model_type,
            model=directory.name,
            parameters=total(config),
            versions={name: version(name) for name in ("transformers", "megatron-core", "torch")},
            config_digest=_config_digest(hf),
            weights_digest=_digest(sorted(files)),
            sample_tokens=sample.tokens,
            loss_tokens=sample.loss_tokens,
            limits=limits,
            own_difference=own,
            layouts=tuple(results),
            sensitivity=tuple(run.sensitivity(task.tiny)),
            unsupported=unsupported(config.model_type),
            generations=run.generations() if task.generate else None,
            largest_logit=largest,
        )


@dataclass(frozen=True)
class _Run:
    """The steps of one verification."""

    directory: Path
    work: Path
    config: McaModelConfig
    sample: Sample
    pool: RankPool
    tell: Tell

    def reference(self) -> tuple[Measured, float]:
        """Write transformers' logits; returns how far its own kinds of attention are apart, and the largest |logit|."""
        self.tell("transformers")
        largest = self._one(_WORK + "reference:write_reference", self.directory, self.work, self.sample)
        own = self._one(_WORK + "reference:own_difference", self.directory, self.work, self.sample)
        return Measured(**own), largest

    def layout(self, layout: Layout, limits: Limits, stand_ins: bool) -> Sequence[LayoutResult]:
        """The result at a layout, and where that is refused, of what stands in for it."""
        result = self._measured(layout)
        problem = result.problem(limits)
        self.tell(f"{result.layout:<10} " + ("refused" if result.refused else problem or "ok"))
        other = stand_in(self.config, layout) if stand_ins and result.refused else None
        return [result, *(self.layout(other, limits, False) if other else ())]

    def sensitivity(self, tiny: bool) -> Sequence[Sensitivity]:
        """The model with one place changed; in a tiny one, one weight must show."""
        layers = self.config.attention_layers
        weight = f"decoder.layers.{layers[len(layers) // 2]}.self_attention.linear_proj.weight"
        self.tell("one weight changed")
        perturbed = self._one(
            _WORK + "measure:compare_perturbed", self.directory, self.work, self.sample, weight, PERTURBATION
        ).measured()
        change, hf = _changed_config(read_hf_config(self.directory))
        self.tell(change)
        copy = self.work / "changed"
        copy.mkdir()
        for path in self.directory.iterdir():
            if path.name != "config.json":
                (copy / path.name).symlink_to(path)
        (copy / "config.json").write_text(json.dumps(hf))
        sums: Sums = self._one(_WORK + "measure:compare", copy, self.work, self.sample)
        return [
            Sensitivity(f"one element of `{weight}` off by {PERTURBATION:g}", perturbed, required=tiny),
            Sensitivity(change, sums.measured()),
        ]

    def generations(self) -> Generations:
        """Greedy, both models."""
        texts = self._one(_WORK + "sample:prompts", self.directory)
        room = self.config.max_position_embeddings - max(map(len, texts))
        tokens = min(NEW_TOKENS, room)
        self.tell("greedy generations")
        expected = self._one(_WORK + "reference:greedy", self.directory, texts, tokens)
        found = self._one(_WORK + "measure:greedy", self.directory, texts, tokens)
        different = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]
        first = None
        if different:
            pairs = zip(expected[different[0]], found[different[0]], strict=True)
            position = next(i for i, (a, b) in enumerate(pairs) if a != b)
            first = f"Prompt {different[0] + 1} differs from token {position + 1} on."
        return Generations(len(texts), tokens, len(texts) - len(different), first)

    def _measured(self, layout: Layout) -> LayoutResult:
        name, ranks = layout_name(layout), ranks_of(layout)
        if reason := refusal(self.config, layout):
            return LayoutResult(name, ranks, refused=reason)
        try:
            reports = self.pool.run_ranks(
                ranks, _WORK + "measure:measure", self.directory, self.work, layout, self.sample, timeout=TIMEOUT_S
            )
        except RankError as error:
            if error.user_error is not None and not isinstance(error.user_error, ConfigError):
                raise error.user_error from error
            return LayoutResult(name, ranks, failed=error.summary)
        everything = sum((r.everything for r in reports), Sums())
        with_loss = sum((r.with_loss for r in reports), Sums())
        copies = max(1, everything.tokens // self.sample.tokens)
        if everything.tokens != copies * self.sample.tokens:
            return LayoutResult(name, ranks, failed=f"{everything.tokens} of {self.sample.tokens} tokens were compared")
        returned = reports[0].round_trip
        return LayoutResult(
            name,
            ranks,
            everything=everything.measured(copies),
            with_loss=with_loss.measured(copies),
            tensors=returned.tensors,
            different=returned.different,
        )

    def _one(self, function: str, *args: Any) -> Any:
        return on_one_rank(self.pool, function, *args)


def on_one_rank(pool: RankPool, function: str, *args: Any) -> Any:
    """Run `module:function` on one rank, whose memory is gone afterwards. Raises what a user can mend as itself."""
    try:
        return pool.run_ranks(1, function, *args, timeout=TIMEOUT_S)[0]
    except RankError as error:
        if error.user_error is not None:
            raise error.user_error from error
        raise


def _changed_config(hf: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(what is changed, config.json with it): the rope scaling left out, or where there is none, another base.

    A model without a rope has other norms instead.
    """
    config = config_from_hf(hf)
    if hf.get("text_config"):
        told, text = _changed_rope(hf["text_config"])
        return told, hf | {"text_config": text}
    if not config.rotary:
        return "the norms' epsilon twice as large", hf | {"layer_norm_epsilon": 2 * config.norm_epsilon}
    if config.sliding_rotary_base is not None:  # the other rope stays
        ropes = hf.get("rope_parameters") or {}
        full = {"rope_parameters": ropes["full_attention"]} if ropes.get("full_attention") else {}
        told, changed = _changed_rope({k: v for k, v in hf.items() if k != "rope_parameters"} | full)
        return told, changed | {"rope_parameters": {**ropes, "full_attention": changed["rope_parameters"]}}
    return _changed_rope(hf)


def _changed_rope(hf: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    spelling = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    given = hf.get(spelling) or {}
    base = given.get("rope_theta", hf.get("rope_theta")) or 10000.0
    scaled = given.get("rope_type", given.get("type")) not in (None, "default")
    base = base if scaled else base * 1.01
    changed = {k: v for k, v in hf.items() if k not in ("rope_scaling", "rope_parameters", "rope_theta")}
    axes = {name: given[name] for name in ("mrope_section", "mrope_interleaved") if name in given}
    changed["rope_parameters"] = {"rope_type": "default", "rope_theta": base, **axes}
    return "the rope scaling left out" if scaled else "the rope's base 1 % higher", changed


def _config_digest(hf: dict[str, Any]) -> str:
    content = {k: v for k, v in hf.items() if k != "transformers_version"}
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _digest(paths: Sequence[Path]) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    for path in paths:
        hasher.update(path.name.encode())
        hasher.update_mmap(path)
    return hasher.hexdigest()[:32]
