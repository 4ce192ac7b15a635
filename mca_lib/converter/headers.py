"""What the headers of a Hugging Face directory's weight files say. No torch: preflight reads them in milliseconds."""

import json
import math
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from mca_lib.converter.block_scaled import dequantized
from mca_lib.converter.plan import TensorInfo, make_plan
from mca_lib.converter.stacked_experts import unstacked
from mca_lib.errors import ModelError
from mca_lib.models.config import McaModelConfig, read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLE_FILE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_ADAPTER_CONFIG, _OTHER_WEIGHTS = "adapter_config.json", "transformers_weights"

_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Name in a header → torch's name, bytes of an element."""
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    info: TensorInfo
    start: int
    """Byte of the file at which its data begin."""


def check_weights(config: McaModelConfig, directory: Path) -> McaModelConfig:
    """Raise ModelError when safetensors files and config do not fit; pickles have no header and wait for `convert`.

    Returns:
        the config with the dtypes and multi-token prediction layers that the files really have; of pickles as it is
    """
    tensors: dict[str, TensorInfo] = {}
    for path, names in weight_files(directory).items():
        if path.suffix == ".bin":
            return config
        found = read_header(path)
        check_against_index(path, names, found)
        tensors |= found
    try:
        shown = unstacked(dequantized(tensors, config.hf_config), config.hf_config)
        return make_plan(config, shown).config(config)
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of a safetensors file. Raises ModelError when it is damaged or truncated."""
    return {name: tensor.info for name, tensor in read_layout(path).items()}


def read_layout(path: Path) -> dict[str, StoredTensor]:
    """What a safetensors file holds, and where. Raises ModelError when it is damaged or truncated.

    Format: 8 bytes little-endian length of the header, JSON header, data (https://github.com/huggingface/safetensors).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MAX_HEADER):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = _check_offsets(header)
        if size != 8 + length + end:
            raise ValueError(f"it has {size} bytes and its header promises {8 + length + end}")
        return {
            name: StoredTensor(
                TensorInfo(tuple(t["shape"]), _DTYPES.get(t["dtype"], (t["dtype"],))[0]),
                8 + length + t["data_offsets"][0],
            )
            for name, t in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise ModelError(f"{path}: not a whole safetensors file: {e}") from e


def _check_offsets(header: dict[str, dict]) -> int:
    """Bytes of data: the tensors lie end to end, each as long as its shape says. Raises ValueError."""
    position = 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = tensor["data_offsets"]
        if start != position:
            raise ValueError(f"{name} begins at byte {start} of the data, the one before ends at {position}")
        if tensor["dtype"] in _DTYPES:
            expected = math.prod(tensor["shape"]) * _DTYPES[tensor["dtype"]][1]
            if stop - start != expected:
                raise ValueError(f"{name} has {stop - start} bytes, its shape and dtype make {expected}")
        position = stop
    return position


def weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Weight files and the names that the index puts into each (None: there is no index).

    Raises ModelError when there are none, or when transformers would load others.
    """
    _check_transformers_loads_them(directory)
    # In transformers' order, which is also that of `tasks.model_files`: the single file goes before an index.
    for single, index in ((SINGLE_FILE, INDEX_FILE), (PICKLE_FILE, PICKLE_INDEX)):
        if (directory / single).is_file():
            return {directory / single: None}
        if (directory / index).is_file():
            return _indexed(directory, index)
    raise ModelError(f"{directory}: no weights; expected {SINGLE_FILE} or {INDEX_FILE}")


def _check_transformers_loads_them(directory: Path) -> None:
    """Raise ModelError where transformers (5.24) takes other weights than those of the usual names."""
    if (directory / _ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{directory}: {_ADAPTER_CONFIG} is there, and transformers would apply that PEFT adapter: merge it into "
            "the model with PEFT's merge_and_unload, or move the adapter's files elsewhere"
        )
    config = directory / "config.json"
    other = read_json(config, ModelError).get(_OTHER_WEIGHTS) if config.is_file() else None
    if other is not None:
        raise ModelError(
            f"{config}: {_OTHER_WEIGHTS}={other!r} has transformers load that file instead of {SINGLE_FILE}: remove "
            f"the key, and give the file with the weights the name {SINGLE_FILE}"
        )


def _indexed(directory: Path, index: str) -> dict[Path, set[str] | None]:
    weight_map = read_json(directory / index, ModelError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory / index}: weight_map is missing or empty")
    files: dict[Path, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{directory / index}: {name} is in {file!r}, which is no file name")
        files[directory / file].add(name)
    if missing := sorted(p.name for p in files if not p.is_file()):
        raise ModelError(f"{directory / index}: missing file {', '.join(missing)}")
    return dict(sorted(files.items()))


def check_against_index(path: Path, expected: set[str] | None, found: dict[str, TensorInfo]) -> None:
    """Raises ModelError when a file holds other tensors than the index says; None: there is no index."""
    if expected is None:
        return
    if absent := sorted(expected - set(found)):
        raise ModelError(f"{path}: lacks {absent[0]}, which the index puts there ({len(absent)} in all)")
    if extra := sorted(set(found) - expected):
        raise ModelError(f"{path}: holds {extra[0]}, which the index does not know ({len(extra)} in all)")
