"""What is wrong with an indexed data set is said in one line, before anything is read that takes long."""

import struct
from pathlib import Path

import numpy as np
import pytest

from mca_lib.data.formats import resolve_sources
from mca_lib.data.indexed_format import token_dtype, write_index
from mca_lib.data.indexed_rows import open_split
from mca_lib.data.prepare import dataset
from mca_lib.data.rows import validate_sources
from mca_lib.data.spec import EXECUTOR
from mca_lib.data.split import held_out_keys, hold_out, hold_out_keys
from mca_lib.data.storage import INDEXED_FROM_BYTES, resolve_storage
from mca_lib.data.tokenization import build_executor
from mca_lib.errors import ConfigError, DataError
from tests.mca_lib.data.conftest import VOCAB_SIZE, section


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Three documents of 5, 6 and 7 tokens, the ids 0 to 17."""
    np.arange(18, dtype=token_dtype(VOCAB_SIZE)).tofile(tmp_path / "mine.bin")
    write_index(tmp_path / "mine.idx", np.array([5, 6, 7]), token_dtype(VOCAB_SIZE))
    return tmp_path / "mine.bin"


def validate(corpus, **fields):
    """As the preflight of a recipe does."""
    config = section(corpus, formatting="indexed", template=None, **fields)
    resolve_storage(config, "pt", resolve_sources(config, "pt"))
    return validate_sources(config, "pt")


def overwrite(path: Path, offset: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(data)


DAMAGES = {
    "no index": (lambda p: p.with_suffix(".idx").unlink(), r"files\[0\]: there is no mine\.idx beside .*mine\.bin"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-2]), r"mine\.bin: 34 bytes, but its index tells of 36"),
    "empty": (lambda p: p.write_bytes(b""), r"mine\.bin: holds no tokens"),
    "wrong dtype": (
        lambda p: overwrite(p.with_suffix(".idx"), 17, b"\x06"),
        r"mine\.idx: version 1 and dtype 6; supported are version 1 and dtypes 4 \(int32\), 8 \(uint16\)",
    ),
    "not an index": (lambda p: overwrite(p.with_suffix(".idx"), 0, b"x"), r"mine\.idx: not an index of Megatron's"),
    "short index": (
        lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:-8]),
        r"mine\.idx: 94 bytes, not the 102 of its header",
    ),
    "several sequences in a document": (
        lambda p: overwrite(p.with_suffix(".idx"), 26, struct.pack("<Q", 3)),
        r"mine\.idx: 3 sequences in 2 documents",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_corpus_is_named(corpus, damage):
    spoil, message = DAMAGES[damage]
    assert validate(corpus).rows == 3
    spoil(corpus)
    with pytest.raises(DataError, match=message) as caught:
        validate(corpus)
    assert "\n" not in str(caught.value)


def given(corpus, tokenizer_dir, tmp_path, **fields):
    """The job, which refuses before it needs Megatron."""
    spec = {
        "files": [str(corpus)],
        "formatting": "indexed",
        "objective": "pt",
        "storage": "indexed",
        "tokenizer_dir": str(tokenizer_dir),
        "vocab_size": VOCAB_SIZE,
        "output": str(tmp_path / "out"),
        **fields,
    }
    return dataset(spec, lambda *_, **__: None)


def test_what_only_a_reading_finds_is_named(corpus, tokenizer_dir, tmp_path):
    with pytest.raises(DataError, match=r"mine\.bin: token id 17 is not in the model's vocabulary of 17"):
        given(corpus, tokenizer_dir, tmp_path, vocab_size=17)
    overwrite(corpus.with_suffix(".idx"), 34, struct.pack("<3i", 4, 7, 7))
    with pytest.raises(DataError, match=r"mine\.idx: its documents are empty or do not lie end to end"):
        given(corpus, tokenizer_dir, tmp_path)


def test_an_id_beyond_the_vocabulary_is_named_by_its_row(corpus, tokenizer_dir, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The ferry leaves.\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"text\.txt:1: token id \d+ is not in the model's vocabulary of 3"):
        given(text, tokenizer_dir, tmp_path, formatting="text", vocab_size=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n \n", r"text\.txt: is empty; it must hold at least one row"),
        ('{"words": "a"}\n', r"text\.jsonl: no row has the column|1 of 1 rows are unusable"),
    ],
)
def test_a_text_file_without_usable_rows_is_refused(tokenizer_dir, tmp_path, content, message):
    text = tmp_path / ("text.jsonl" if content.startswith("{") else "text.txt")
    text.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        given(text, tokenizer_dir, tmp_path, formatting="text")


@pytest.mark.parametrize(
    ("objective", "fields", "message"),
    [
        (
            "pt",
            {"blend": {"mine.bin": 0.0}},
            r"dataset\.blend: the weight of 'mine\.bin' is 0; it must be",
        ),
        (
            "pt",
            {"blend": {"mime.bin": 1.0}},
            r"dataset\.blend: 'mime\.bin' is no .*did you mean 'mine\.bin'",
        ),
        ("pt", {"storage": "rows"}, r"dataset\.storage: rows does not go with formatting: indexed"),
        ("pt", {"packing": False}, r"dataset\.packing: false does not go with storage: indexed"),
        ("sft", {"formatting": "alpaca", "storage": "indexed"}, r"dataset\.storage: indexed is for training\.stage pt"),
        ("sft", {"formatting": "alpaca", "blend": {"mine.bin": 1.0}}, r"dataset\.blend is for training\.stage pt"),
    ],
)
def test_fields_that_contradict_each_other_are_named(corpus, objective, fields, message):
    if objective == "sft":
        corpus = corpus.with_suffix(".json")
        corpus.write_text("[]", encoding="utf-8")
    config = section(corpus, **{"formatting": "indexed", "template": None, **fields})
    with pytest.raises(ConfigError, match=message):
        resolve_storage(config, objective, resolve_sources(config, objective))


def test_a_file_that_the_blend_leaves_out_is_named(corpus):
    other = corpus.with_name("other.bin")
    for suffix in (".bin", ".idx"):
        other.with_suffix(suffix).write_bytes(corpus.with_suffix(suffix).read_bytes())
    config = section(corpus, other, formatting="indexed", template=None, blend={"mine.bin": 1.0})
    with pytest.raises(ConfigError, match=r"dataset\.blend: 'other\.bin' has no weight"):
        resolve_storage(config, "pt", resolve_sources(config, "pt"))


def test_auto_takes_the_indexed_format_for_much_plain_text(tmp_path):
    text = tmp_path / "text.txt"
    for size, expected in ((INDEXED_FROM_BYTES - 1, "rows"), (INDEXED_FROM_BYTES, "indexed")):
        with text.open("wb") as file:
            file.truncate(size)
        config = section(text, formatting="text", template=None)
        assert resolve_storage(config, "pt", resolve_sources(config, "pt")) == expected
        unpacked = section(text, formatting="text", template=None, packing=False)
        assert resolve_storage(unpacked, "pt", resolve_sources(unpacked, "pt")) == "rows"


def test_a_split_whose_files_do_not_belong_together_is_refused(tmp_path):
    (tmp_path / "indexed.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"indexed split .*: cannot be read \('corpora'\); build it again"):
        open_split(tmp_path)


def test_an_executor_that_is_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for kind, message in (("slurm", "slurm needs sbatch"), ("ray", "ray is not installed")):
        with pytest.raises(ConfigError, match=message):
            build_executor({**EXECUTOR, "kind": kind}, 2, [], 3, tmp_path)


def test_slurm_gets_what_the_recipe_says(tmp_path, monkeypatch):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\n", encoding="utf-8")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = {**EXECUTOR, "kind": "slurm", "partition": "cpu", "sbatch_args": {"account": "research"}}
    executor = build_executor(settings, 2, [], 3, tmp_path)
    arguments = executor.get_sbatch_args(max_array=3)
    assert (arguments["partition"], arguments["account"], arguments["array"]) == ("cpu", "research", "0-2%2")
    assert (arguments["time"], arguments["mem-per-cpu"]) == ("24:00:00", "4G")


def test_the_same_rows_are_held_out_by_keys_of_eight_bytes():
    contents = [b"%d" % (i % 90) for i in range(100)]  # some twice
    keys = hold_out_keys(contents, seed=3)
    for fraction in (0.0, 0.004, 0.1, 0.5, 0.99):
        expected = hold_out(contents, contents, fraction, 3)
        assert np.array_equal(np.isin(keys, held_out_keys(keys, fraction, 1000)), expected)
    assert np.isin(keys, held_out_keys(keys, 0.5, 7)).sum() == 7
    with pytest.raises(DataError, match="all 5 rows are equal"):
        held_out_keys(keys[:1].repeat(5), 0.1, 10)
