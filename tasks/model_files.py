"""Which files of a Hugging Face model directory matter, and whether they are whole. Without torch.

| group | files |
| --- | --- |
| weights | `model.safetensors`, or its index with shards; else `pytorch_model*.bin` if pickles are allowed |
| config | `config.json`, and the Python modules if remote code is trusted |
| tokenizer | the tokenizer's files and chat templates, and how images are prepared |
| generation | `generation_config.json` |

Everything else in a repository (other formats, images, notes) is left alone.
"""

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mca_lib.errors import ModelError

Groups = dict[str, tuple[str, ...]]

_SAFETENSORS, _SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SHARDS = {
    _SAFETENSORS_INDEX: re.compile(r"model-\d+-of-\d+\.safetensors"),
    _PICKLE_INDEX: re.compile(r"pytorch_model-\d+-of-\d+\.bin"),
}
# Also what transformers looks for by itself: any `*.model`, `tekken.json`, a `tokenizer.<version>.json`.
_TOKENIZER = re.compile(
    r"tokenizer[\w.-]*\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|tekken\.json"
    r"|[\w.-]+\.model(\.v\d+)?|[\w.-]+\.tiktoken|chat_template\.(jinja|json)"
    r"|additional_chat_templates/[\w.-]+\.jinja|(video_)?preprocessor_config\.json|processor_config\.json"
)
_VOCABULARY = re.compile(
    r"tokenizer(\.[\w.-]+)?\.json|[\w.-]+\.model(\.v\d+)?|[\w.-]+\.tiktoken|vocab\.(json|txt)|tekken\.json"
)
# transformers would apply these by itself, whatever the other files say.
_ADAPTER = re.compile(r"adapter_config\.json|adapter_model(-[\w-]+)?\.(safetensors|bin)(\.index\.json)?")
# Fields of config.json by which transformers reads other files than those of the table above.
_REDIRECTS = ("configuration_files", "transformers_weights")
_PYTHON = re.compile(r"([\w-]+/)*[\w-]+\.py")
# Larger headers are a sign of a file that is not safetensors at all.
_MAX_HEADER = 100 << 20


def select(names: Iterable[str], where: str, *, allow_pickle: bool, trust_remote_code: bool) -> Groups:
    """Files that matter, by group, out of all files of a model.

    Raises:
        ModelError: no config, no tokenizer, no weights, or weights only as pickles, which were not allowed.
    """
    present = set(names)
    if "config.json" not in present:
        raise ModelError(f"{where}: no config.json, so it is not a model in Hugging Face format; check the path")
    weights = _weights(present, where, allow_pickle)
    if not any(_VOCABULARY.fullmatch(name) for name in present):
        raise ModelError(f"{where}: no tokenizer; expected tokenizer.json (or tokenizer.model, vocab.json, vocab.txt)")
    python = [name for name in present if trust_remote_code and _PYTHON.fullmatch(name)]
    return {
        "weights": tuple(sorted(weights)),
        "config": tuple(sorted(["config.json", *python])),
        "tokenizer": tuple(sorted(name for name in present if _TOKENIZER.fullmatch(name))),
        "generation": tuple(sorted(present & {"generation_config.json"})),
    }


def refuse_adapter(names: Iterable[str], where: str) -> None:
    """Raise ModelError when a local directory holds a PEFT adapter; of a hub's repository it is not downloaded."""
    if adapter := sorted(name for name in names if _ADAPTER.fullmatch(name)):
        raise ModelError(
            f"{where}: holds a PEFT adapter ({', '.join(adapter[:3])}), which transformers would apply by itself; "
            "merge it into the weights first, or move these files elsewhere"
        )


def _weights(present: set[str], where: str, allow_pickle: bool) -> list[str]:
    """The file names that transformers would load, in its order of preference."""
    pickles = [(_PICKLE, _PICKLE_INDEX)]
    for single, index in [(_SAFETENSORS, _SAFETENSORS_INDEX), *(pickles if allow_pickle else [])]:
        if single in present:
            return [single]
        if index in present:
            return [index, *(name for name in present if _SHARDS[index].fullmatch(name))]
    if present & {_PICKLE, _PICKLE_INDEX}:
        raise ModelError(
            f"{where}: its weights are pickles (pytorch_model*.bin), and loading a pickle can run code; "
            "use a revision with safetensors, or set model.allow_pickle=true if you trust it"
        )
    raise ModelError(f"{where}: no weights; expected {_SAFETENSORS}, or {_SAFETENSORS_INDEX} with its shards")


def check_model_files(root: Path, groups: Groups) -> None:
    """Raise ModelError, naming the file, unless config, index and safetensors files are whole and fit together."""
    config = _read_json(root / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{root}/config.json: no model_type; not a model in Hugging Face format")
    _check_tokenizer(root, groups["tokenizer"])
    for field in _REDIRECTS:
        if config.get(field) is not None:
            raise ModelError(f"{root}/config.json: {field} names other files to be read instead; remove the field")
    tensors: dict[str, set[str]] = {}
    for name in groups["weights"]:
        if name.endswith(".safetensors"):
            tensors[name] = safetensors_names(root / name)
    for name in groups["weights"]:
        if name.endswith(".index.json"):
            _check_index(root, name, set(groups["weights"]), tensors)


def _check_tokenizer(root: Path, names: tuple[str, ...]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if name in names and _read_json(root / name).get("auto_map"):
            raise ModelError(
                f"{root}/{name}: auto_map asks for Python code of the model's own, which is not run; "
                "use a tokenizer without it"
            )


def _check_index(root: Path, index: str, files: set[str], tensors: dict[str, set[str]]) -> None:
    weight_map = _read_json(root / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{root}/{index}: no weight_map; fetch the file again")
    if missing := sorted({str(shard) for shard in weight_map.values()} - files):
        raise ModelError(f"{root}/{index}: names files that are missing: {', '.join(missing[:3])}; fetch them")
    for tensor, shard in weight_map.items():
        if shard in tensors and tensor not in tensors[shard]:
            raise ModelError(f"{root}/{index}: says that {tensor} is in {shard}, which does not hold it")


def safetensors_names(path: Path) -> set[str]:
    """Names of the tensors in a safetensors file, from its header.

    Layout: 8 bytes little-endian length of the header, the header as JSON, the tensors' bytes without gaps
    (https://huggingface.co/docs/safetensors).

    Raises:
        ModelError: truncated, or no safetensors file.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise ModelError(f"{path}: not a whole safetensors file ({size} bytes); fetch it again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max(ends.values(), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise ModelError(f"{path}: its safetensors header is damaged; fetch the file again") from None
    if expected != size:
        raise ModelError(f"{path}: {size} bytes instead of the {expected} that its header asks for; fetch it again")
    return set(ends)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object; fetch the file again")
    return content
