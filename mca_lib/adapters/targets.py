"""Which Hugging Face modules get an adapter, and which Megatron layers these are. No torch.

Both follow from the family's weight table: a row of the kind Column, Row, QKV, GatedMLP or Packed is the weight of a
parallel linear layer, and its Hugging Face names are the modules that the layer is made of. `q_proj`, `k_proj` and
`v_proj` are one layer of Megatron and three adapters, as PEFT has them.

Left out whatever is asked for: the output layer and the embedding (no parallel linear layer of a transformer layer),
routers and the gate of the shared expert (bare tensors in Megatron), Mamba layers (their projections are several in
one), and multi-token prediction layers, which transformers does not load with the model: in a LoRA training they stay
as they are and take no part.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mca_lib.converter.fused import Fused
from mca_lib.converter.mappings import QKV, Column, GatedMLP, Packed, Row
from mca_lib.converter.plan import Entry, entries
from mca_lib.errors import ConfigError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.naming import MIXER

ALL_LINEAR = "all-linear"
WEIGHT = ".weight"
_LINEAR = (Column, Row, QKV, GatedMLP, Packed, Fused)


def linear_layers(config: McaModelConfig) -> Iterator[Entry]:
    """The rows of the weight table, written out, that are weights of linear layers which can have adapters."""
    # Modules have the names of transformers' classes, whatever the source calls their weights.
    for entry in entries(replace(config, source_prefixes={})):
        matrix = all(len(shape) == 2 for shape in entry.mapping.hf_shapes(config))
        linear = isinstance(entry.mapping, _LINEAR) and matrix and all(name.endswith(WEIGHT) for name in entry.hf)
        if linear and "{mtp}" not in entry.mapping.mca and MIXER not in entry.mca:
            yield entry


def modules(entry: Entry) -> tuple[str, ...]:
    """Names of the Hugging Face modules of a linear layer, in the order of its weight table's row."""
    return tuple(name.removesuffix(WEIGHT) for name in entry.hf)


def find_all_linear_modules(config: McaModelConfig) -> list[str]:
    """Last parts of the names of all modules that can have adapters, sorted: what `all-linear` stands for."""
    return sorted({name.rpartition(".")[2] for entry in linear_layers(config) for name in modules(entry)})


def target_names(config: McaModelConfig, target_modules: Sequence[str]) -> frozenset[str]:
    """Full names of the Hugging Face modules that get an adapter.

    Args:
        target_modules: as PEFT reads a list: the ends of names, whole parts between dots; or `all-linear`.

    Raises:
        ConfigError: a target is no linear layer of the model, or splits what transformers holds as one tensor.
    """
    known = [name for entry in linear_layers(config) for name in modules(entry)]
    if list(target_modules) == [ALL_LINEAR]:
        return frozenset(known)
    if not target_modules or ALL_LINEAR in target_modules:
        raise ConfigError(f"lora.target_modules: {list(target_modules)}: name modules, or {ALL_LINEAR} alone")
    chosen: set[str] = set()
    for target in target_modules:
        found = {name for name in known if name == target or name.endswith(f".{target}")}
        if not found:
            raise ConfigError(f"lora.target_modules: {_unknown(config, target)}")
        chosen |= found
    _check_experts(config, chosen)
    return frozenset(chosen)


def adapter_elements(config: McaModelConfig, target_modules: Sequence[str], r: int) -> int:
    """Elements of the adapters' matrices that a token is multiplied with: of experts those that it meets."""
    chosen, elements, experts = target_names(config, target_modules), 0, 0
    for entry in linear_layers(config):
        for name, (rows, columns) in zip(modules(entry), entry.mapping.hf_shapes(config), strict=True):
            if name in chosen and entry.mapping.per_expert:
                experts += r * (rows + columns)
            elif name in chosen:
                elements += r * (rows + columns)
    return elements + (experts * config.moe.topk // config.moe.num_experts if config.moe else 0)


def expert_entries(config: McaModelConfig) -> list[Entry]:
    return [entry for entry in linear_layers(config) if entry.mapping.per_expert]


def _unknown(config: McaModelConfig, target: str) -> str:
    leaves = find_all_linear_modules(config)
    last = target.rpartition(".")[2]
    others = {name.removesuffix(WEIGHT).rpartition(".")[2] for entry in entries(config) for name in entry.hf}
    if last in others - set(leaves):
        return f"{target!r} cannot have an adapter, only linear layers within the layers can: {', '.join(leaves)}"
    near = difflib.get_close_matches(last, leaves, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"those of this model are {', '.join(leaves)}"
    return f"no linear layer of the model is called {target!r}; {hint}"


def _check_experts(config: McaModelConfig, chosen: set[str]) -> None:
    """transformers 5 holds all experts of a layer as two tensors, of which PEFT adapts the whole.

    One is gate and up of all experts, the other down.
    """
    for kind in (GatedMLP, Row):
        names = {n for entry in expert_entries(config) if isinstance(entry.mapping, kind) for n in modules(entry)}
        if names & chosen and not names <= chosen:
            missing = min(names - chosen)
            raise ConfigError(
                "lora.target_modules: the experts' modules can only be adapted together (gate with up, in every expert "
                f"and layer), since transformers holds them as one tensor; {missing} is left out"
            )
