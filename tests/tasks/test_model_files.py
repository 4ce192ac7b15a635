"""Which files of a model matter, and what is said about those that are not whole."""

import json
import struct
from pathlib import Path

import pytest

from mca_lib.checkpoint.side_files import tokenizer_files
from mca_lib.errors import ModelError
from tasks.model_files import Groups, check_model_files, safetensors_names, select
from tests.tasks.tiny_files import safetensors

BASE = ["config.json", "model.safetensors", "tokenizer.json"]


def chosen(*names: str, allow_pickle: bool = False, trust_remote_code: bool = False) -> Groups:
    return select(names, "model", allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)


def test_files_are_grouped_and_the_rest_is_left_alone() -> None:
    tokenizer = [
        "added_tokens.json", "additional_chat_templates/tools.jinja", "chat_template.jinja", "merges.txt",
        "special_tokens_map.json", "spm.model", "tekken.json", "tokenizer.4.0.json", "tokenizer.json",
        "tokenizer.model", "tokenizer.model.v3", "tokenizer_config.json", "vocab.json",
    ]  # fmt: skip
    others = ["README.md", "onnx/model.onnx", "consolidated.safetensors", "optimizer.pt", "x/tokenizer.json", "a.py"]
    assert chosen(*BASE[:2], *tokenizer, "generation_config.json", *others) == {
        "config": ("config.json",),
        "generation": ("generation_config.json",),
        "tokenizer": tuple(tokenizer),
        "weights": ("model.safetensors",),
    }


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (
            ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors"],
            ["model.safetensors"],
        ),
        (
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"],
        ),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"],
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
        ),
    ],
)
def test_weights_are_those_that_transformers_would_load(names: list[str], weights: list[str]) -> None:
    assert chosen("config.json", "tokenizer.json", *names, allow_pickle=True)["weights"] == tuple(weights)


def test_pinned_tokenizer_files_are_those_that_travel_with_the_weights(tmp_path: Path) -> None:
    names = [
        "tokenizer.json", "tokenizer_config.json", "tokenizer.4.0.json", "tokenizer.model", "tokenizer.model.v3",
        "tokenizer.bin", "tokenizer.py", "tokenizer_notes.txt", "spm.model", "tekken.json", "merges.txt", "vocab.json",
        "vocab.txt", "qwen.tiktoken", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja",
        "chat_template.json", "chat_template.bak", "additional_chat_templates/a.jinja",
        "additional_chat_templates/a.md",
    ]  # fmt: skip
    (tmp_path / "additional_chat_templates").mkdir()
    for name in names:
        (tmp_path / name).write_text("")
    assert chosen(*BASE, *names)["tokenizer"] == tuple(sorted(map(str, tokenizer_files(tmp_path))))


def test_python_counts_only_with_trust() -> None:
    assert chosen(*BASE, "modeling_x.py", "sub/y.py")["config"] == ("config.json",)
    trusted = chosen(*BASE, "modeling_x.py", "sub/y.py", trust_remote_code=True)["config"]
    assert trusted == ("config.json", "modeling_x.py", "sub/y.py")


@pytest.mark.parametrize(
    "name",
    ["../config.json", "../../x.tiktoken", "/etc/x.py", "a/../../x.py", "additional_chat_templates/../../x.jinja"],
)
def test_name_that_leads_out_of_the_folder_is_never_chosen(name: str) -> None:
    groups = chosen(*BASE, name, trust_remote_code=True)
    assert name not in [file for group in groups.values() for file in group]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.safetensors"], "no config.json"),
        (["config.json"], "no weights"),
        (["config.json", "model.safetensors"], "no tokenizer; expected tokenizer.json"),
        (["config.json", "model.safetensors", "tokenizer_config.json"], "no tokenizer"),
        (["config.json", "model.gguf"], "no weights"),
        (["config.json", "pytorch_model.bin"], "loading a pickle can run code"),
        (["config.json", "pytorch_model.bin.index.json"], "model.allow_pickle=true"),
    ],
)
def test_unusable_choice_is_refused(names: list[str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        chosen(*names)


# -- whole or not ------------------------------------------------------------------------------------------------


def header(content: object, body: bytes = b"") -> bytes:
    raw = json.dumps(content).encode()
    return struct.pack("<Q", len(raw)) + raw + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"{",
        header([]),
        header({"a": {}}),
        header({"a": {"data_offsets": "x"}}),
        header({"a": {"data_offsets": [0, 8]}}, b"1234567"),
        header({"a": {"data_offsets": [0, 8]}}, b"123456789"),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ],
)
def test_broken_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*fetch"):
        safetensors_names(path)


def test_whole_safetensors_file_lists_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"a": 3, "b": 0}))
    assert safetensors_names(path) == {"a", "b"}
    path.write_bytes(header({"__metadata__": {"format": "pt"}}))
    assert safetensors_names(path) == set()


@pytest.mark.parametrize("field", ["configuration_files", "transformers_weights"])
def test_config_that_names_other_files_is_refused(tmp_path: Path, field: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", field: "other.safetensors"}))
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": 3}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"config\.json: {field} names other files"):
        check_model_files(tmp_path, chosen(*BASE))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "cannot be read as JSON"),
        ("tokenizer.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.X", null]}}', "auto_map asks for Python code"),
    ],
)
def test_tokenizer_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(safetensors({"a": 3}))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name}: {words}") as caught:
        check_model_files(tmp_path, chosen(*(path.name for path in tmp_path.iterdir())))
    assert "\n" not in str(caught.value)


def sharded(folder: Path, weight_map: dict[str, str]) -> Groups:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors({"a": 4}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return chosen(*(path.name for path in folder.iterdir()))


def test_index_that_fits_is_accepted(tmp_path: Path) -> None:
    check_model_files(tmp_path, sharded(tmp_path, {"a": "model-00001-of-00002.safetensors"}))


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"b": "model-00002-of-00002.safetensors"}, "files that are missing: model-00002-of-00002.safetensors"),
        ({"b": "model-00001-of-00002.safetensors"}, "says that b is in model-00001"),
        ({}, "no weight_map"),
    ],
)
def test_index_that_does_not_fit_is_refused(tmp_path: Path, weight_map: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        check_model_files(tmp_path, sharded(tmp_path, weight_map))
