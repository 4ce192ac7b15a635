"""The plan of a conversion: every target tensor × its source tensors, checked before a byte of weights is read.

It is made of names, shapes and dtypes alone (a 70B model takes milliseconds) and refuses what would otherwise surface
as a wrong model: a source tensor that nothing uses, a target that nothing fills, a tensor used twice, a wrong shape.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mca_lib.converter.mapping import Mapping as WeightMapping
from mca_lib.converter.stacked import part_names, whole
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig
from mca_lib.models.families.base import Family
from mca_lib.models.hybrid.weights import KEPT_IN_FP32, MAMBA_WEIGHTS
from mca_lib.models.registry import family_of, weights_family

LISTED = 3
"""Names that an error lists before it only counts."""

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name without `torch.`"""


@dataclass(frozen=True)
class Entry:
    """One tensor of the Megatron model and the Hugging Face tensors that make it."""

    mapping: WeightMapping
    mca: str
    hf: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What `ModelConverter` carries out."""

    entries: tuple[Entry, ...]
    dtype: str
    """Dtype of most of the weights."""
    dtype_exceptions: dict[str, str]
    """Hugging Face name → dtype, where it is another."""
    copies: dict[str, str] = field(default_factory=dict)
    """Hugging Face name of a tensor that the source stores a second time → the tensor that it must equal."""
    mtp_num_layers: int = 0
    """Multi-token prediction layers that the source has."""
    prefixes: dict[str, str] = field(default_factory=dict)
    """The source's spelling of names; see `McaModelConfig.source_prefixes`."""

    def by_target(self) -> dict[str, Entry]:
        return {e.mca: e for e in self.entries}

    def config(self, config: McaModelConfig) -> McaModelConfig:
        """The config, with the dtypes, copies and multi-token prediction layers that the source really has.

        Tensors have the names of an export, which are those of the source unless that became a hybrid.
        """
        config = replace(config, source_prefixes=self.prefixes)
        exported = {entry.mca: entry for entry in entries(config)}
        names = {s: own for e in self.entries for s, own in zip(e.hf, exported[e.mca].hf, strict=True)}
        dtypes = {names.get(name, name): dtype for name, dtype in self.dtype_exceptions.items()}
        if self.dtype != "float32":
            fresh = fresh_entries(config, self)
            dtypes |= {entry.hf[0]: "float32" for entry in fresh if entry.mca.endswith(KEPT_IN_FP32)}
        copies = weights_family(config).copies_of(config)
        return replace(
            config,
            source_dtype=self.dtype,
            source_dtype_exceptions=dtypes,
            source_copies=tuple(name for name in self.copies if name in copies),
            mtp_num_layers=self.mtp_num_layers,
        )


def entries(config: McaModelConfig, family: Family | None = None) -> Iterator[Entry]:
    """The weight table of the model, or that of a family, with layers and experts written out."""
    for mapping in (family or weights_family(config)).mappings(config):
        for index in mapping.indices(config):
            yield Entry(mapping, mapping.mca.format(**index), tuple(name.format(**index) for name in mapping.hf))


def stored_entries(entry: Entry, config: McaModelConfig) -> list[Entry]:
    """An entry for each of the tensors that a checkpoint stores for one."""
    suffixes = [suffix for suffix, _ in entry.mapping.stored_parts(config)]
    if len(suffixes) == 1:
        return [entry]
    return [Entry(entry.mapping.part(suffix), entry.mca + suffix, entry.hf) for suffix in suffixes]


def fresh_entries(config: McaModelConfig, plan: Plan) -> list[Entry]:
    """Tensors that the source has no part of: those of the fresh layers of a hybrid that was a transformer."""
    if config.hybrid is None or family_of(config.model_type).hybrid:
        return []
    planned = plan.by_target()
    return [entry for entry in entries(config) if entry.mca not in planned]


def make_plan(config: McaModelConfig, source: Mapping[str, TensorInfo], family: Family | None = None) -> Plan:
    """Match the family's table with the tensors that a Hugging Face directory holds.

    A hybrid that starts from a transformer has fresh layers too, which are no part of the plan.

    Raises:
        ModelError: something is missing, unused, used twice, mis-shaped or of an unusable dtype; lists the names.
    """
    family = family or family_of(config.model_type)
    config = replace(_as_stored(config, source), source_prefixes=family.prefixes_in(source))
    planned = tuple(e for e in entries(config, family) if family.hybrid or e.mapping not in MAMBA_WEIGHTS)
    source = _in_parts(source, planned)
    problems: dict[str, list[str]] = defaultdict(list)
    problems.update(_mtp_problem(config, source, family))
    for name, count in Counter(e.mca for e in planned).items():
        if count > 1:
            problems["filled twice"].append(name)
    for name, count in Counter(n for e in planned for n in e.hf).items():
        if count > 1:
            problems["used twice"].append(name)
    by_row: dict[str, set[str]] = defaultdict(set)
    for entry in planned:
        for name, shape in zip(entry.hf, entry.mapping.hf_shapes(config), strict=True):
            if name not in source:
                problems["missing"].append(name)
                continue
            found = source[name]
            by_row[entry.mapping.mca].add(found.dtype)
            if found.shape != shape:
                problems["of the wrong shape"].append(f"{name} {list(found.shape)}, expected {list(shape)}")
            if found.dtype not in FLOAT_DTYPES:
                problems["of an unsupported dtype"].append(f"{name} ({found.dtype})")
    problems["of mixed dtypes across one fused or stacked tensor"] += [r for r, d in by_row.items() if len(d) > 1]
    unused = set(source) - {n for e in planned for n in e.hf}
    unused -= {n for n in unused if any(re.fullmatch(p, n) for p in family.ignored_weights)}
    copies = {name: of for name, of in family.copies_of(config).items() if name in unused}
    for name, of in copies.items():
        if of in source and source[name].shape != source[of].shape:
            shapes = f"{list(source[name].shape)}, expected {list(source[of].shape)} as {of}"
            problems["of the wrong shape"].append(f"{name} {shapes}")
        if source[name].dtype not in FLOAT_DTYPES:
            problems["of an unsupported dtype"].append(f"{name} ({source[name].dtype})")
    problems["not used by the model"] += sorted(unused - copies.keys())
    _raise(config, problems)
    dtypes = {whole(n): source[n].dtype for e in planned for n in e.hf}
    common = Counter(dtypes.values()).most_common(1)[0][0]
    dtypes |= {n: source[n].dtype for n in copies}
    exceptions = {n: d for n, d in dtypes.items() if d != common}
    return Plan(planned, common, exceptions, copies, config.mtp_num_layers, config.source_prefixes)


def _in_parts(source: Mapping[str, TensorInfo], planned: tuple[Entry, ...]) -> dict[str, TensorInfo]:
    """The source with the parts of stacked tensors, of which the plan names parts, in their place."""
    parts = part_names({n: info.shape for n, info in source.items()}, (n for e in planned for n in e.hf))
    found = {name: info for name, info in source.items() if name not in parts}
    for name, names in parts.items():
        found |= dict.fromkeys(names, TensorInfo(source[name].shape[1:], source[name].dtype))
    return found


def _as_stored(config: McaModelConfig, source: Mapping[str, TensorInfo]) -> McaModelConfig:
    """The config without multi-token prediction layers where the source has not a single tensor of them.

    transformers drops these layers when it loads a model and still writes their number on save (5.24: 1 even for a
    model that never had one). A source with some of their tensors is missing the others.
    """
    layers = range(config.num_layers, config.num_layers + config.mtp_num_layers)
    prefixes = ("mtp.", *(f"model.layers.{i}." for i in layers))
    return config if any(name.startswith(prefixes) for name in source) else replace(config, mtp_num_layers=0)


def _mtp_problem(config: McaModelConfig, source: Mapping[str, TensorInfo], family: Family) -> dict[str, list[str]]:
    """Says that the config counts other multi-token prediction layers than the source has."""
    field = next((f.hf for f in family.fields if "mtp_num_layers" in f.targets), None)
    matches = filter(None, (re.match(r"(model|mtp)\.layers\.(\d+)\.", name) for name in source))
    numbers = {(match[1], int(match[2])) for match in matches}
    found = sum(kind == "mtp" or number >= config.num_layers for kind, number in numbers)
    if field is None or found == config.mtp_num_layers:
        return {}
    return {f"{field} of config.json": [f"{config.mtp_num_layers}, and the files have {found}: set it to {found}"]}


def _raise(config: McaModelConfig, problems: dict[str, list[str]]) -> None:
    found = [f"{what}: {_listed(names)}" for what, names in problems.items() if names]
    if found:
        raise ModelError(f"the weights do not fit {config.described} of this config; " + "; ".join(found))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
