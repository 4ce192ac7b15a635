"""Plain text in Megatron's indexed format: the documents of a token store, in rows that Megatron would make."""

import filecmp
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mca_lib.data.indexed_format import token_dtype, write_index
from mca_lib.data.indexed_rows import IndexedRows, open_split
from mca_lib.data.indexed_split import sampled_digest
from mca_lib.data.token_store import IGNORE_INDEX, TokenStore
from tests.mca_lib.data.conftest import VOCAB_SIZE, write_jsonl
from tests.mca_lib.data.indexed_ranks import build_in_parts, kill_and_resume, read_by_megatron

LENGTH, SEED = 64, 7
SHARD_BYTES = 3000
TEXTS = [f"Ferry {i} leaves Norwick" + " with salt" * (i % 13) + "." for i in range(300)]
TEXTS[10:12] = ["", "  \n"]  # two rows that cannot be used
TEXTS[20] = TEXTS[21] = "Twice in the data."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed")
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in TEXTS[:200]])
    (folder / "b.txt").write_text("".join(f"{text}\n" for text in TEXTS[200:]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def spec(folder, tokenizer_dir):
    """`spec(output, **fields)` of both files."""

    def make(output: str, **fields):
        return {
            "files": [str(folder / "a.jsonl"), str(folder / "b.txt")],
            "formatting": "text",
            "objective": "pt",
            "storage": "indexed",
            "cutoff_len": LENGTH,
            "eval_fraction": 0.1,
            "seed": SEED,
            "tokenizer_dir": str(tokenizer_dir),
            "vocab_size": VOCAB_SIZE,
            "output": str(folder / output),
            "work": str(folder / f"{output} work"),
            "max_bad_fraction": 0.02,
            **fields,
        }

    return make


@pytest.fixture(scope="module")
def build(ranks, spec):
    """`build(output, **fields)` runs the job in a rank."""
    return lambda output, **fields: ranks(1, build_in_parts, spec(output, **fields), SHARD_BYTES)[0]


@pytest.fixture(scope="module")
def built(build):
    return build("one worker")


@pytest.fixture(scope="module")
def rows(folder, built) -> IndexedRows:
    return open_split(folder / "one worker" / "train")


def documents(store, count=None):
    return Counter(tuple(store.document(i)[0].tolist()) for i in range(store.num_documents))


def files(split: Path) -> list[str]:
    return sorted(path.name for path in split.iterdir())


# -- the same documents whatever the way -------------------------------------------------------------------------


def test_both_storages_have_the_same_documents_and_hold_out_the_same(folder, build, built, rows):
    plain = build("rows", storage="rows", cutoff_len=512)
    for split in ("train", "eval"):
        expected, found = TokenStore.open(folder / "rows" / split), open_split(folder / "one worker" / split)
        assert documents(found) == documents(expected)
    assert built["stats"]["rows"] == plain["stats"]["rows"]
    assert built["stats"]["named_rows"] == plain["stats"]["named_rows"]


def test_two_workers_write_the_same_bytes(folder, build, built):
    two = build("two workers", num_workers=2)
    assert (two["digest"], two["parts"]) == (built["digest"], built["parts"])
    for split in ("train", "eval"):
        names = files(folder / "one worker" / split)
        assert names == files(folder / "two workers" / split)
        assert (
            filecmp.cmpfiles(folder / "one worker" / split, folder / "two workers" / split, names, shallow=False)[0]
            == names
        )


def test_killed_and_resumed_equals_uninterrupted(folder, ranks, spec, built):
    ((killed_by, done, again, result),) = ranks(1, kill_and_resume, spec("resumed"), SHARD_BYTES, 3)
    assert killed_by == signal.SIGKILL
    assert done == ["00000", "00001", "00002"]
    assert again == []
    assert result == built


def test_parts_of_another_size_make_the_same_corpus_and_are_not_taken_for_the_earlier_ones(folder, ranks, spec, built):
    again = spec("other parts", work=str(folder / "one worker work"))
    assert ranks(1, build_in_parts, again, 2 * SHARD_BYTES)[0] == built


def test_rows_of_eval_files_are_held_out_whole_and_never_trained_on(folder, build):
    (folder / "held out.txt").write_text("Twice in the data.\nSeen nowhere else.\n", encoding="utf-8")
    result = build("eval files", eval_files=[str(folder / "held out.txt")])
    train, held_out = (open_split(folder / "eval files" / split) for split in ("train", "eval"))
    assert held_out.num_documents == 2
    assert not documents(train) & documents(held_out)
    assert result["stats"]["rows"]["dropped"] == {"equal to a row of the eval files": 2}


def test_max_rows_draws_the_rows_that_a_token_store_would_draw(folder, build):
    build("drawn rows", storage="rows", max_rows=50, cutoff_len=512)
    build("drawn", max_rows=50)
    assert documents(open_split(folder / "drawn" / "train")) == documents(open_split(folder / "drawn rows" / "train"))


# -- rows --------------------------------------------------------------------------------------------------------


def test_every_token_is_predicted_once_in_its_own_document(rows):
    corpus = rows.corpora[0]
    order = [rows.document(i)[0].tolist() for i in range(rows.num_documents)]
    strung = [token for document in order for token in document]
    inputs = [token for row in rows for token in row.input_ids.tolist()]
    assert inputs == strung[:-1]
    first = set(np.cumsum([0] + [len(document) for document in order]).tolist())
    expected = [IGNORE_INDEX if i + 1 in first else strung[i + 1] for i in range(len(inputs))]
    assert [label for row in rows for label in row.labels.tolist()] == expected
    assert sorted(corpus.document_index.tolist()) == list(range(rows.num_documents))


def test_positions_restart_in_each_piece_of_a_document(rows):
    assert any(len(row.document_lengths) > 2 for row in rows)
    for row in rows:
        assert row.document_lengths.min() >= 1
        assert row.position_ids.tolist() == [p for n in row.document_lengths for p in range(n)]
        assert len(row.documents) == len(row.document_lengths)


def test_all_rows_but_the_last_are_full_and_statistics_agree_with_the_rows(rows, built):
    lengths = [len(row.input_ids) for row in rows]
    assert set(lengths[:-1]) == {LENGTH}
    assert 0 < lengths[-1] <= LENGTH
    assert rows.row_lengths.tolist() == lengths
    stats = built["stats"]["splits"]["train"]
    assert stats["rows"] == len(lengths)
    assert stats["tokens"] == sum(lengths) == rows.num_tokens
    assert stats["loss_tokens"] == sum(int((row.labels != IGNORE_INDEX).sum()) for row in rows)
    assert stats["largest_id"] == max(int(row.input_ids.max()) for row in rows)


def test_rows_are_the_samples_of_megatron_but_for_labels_across_documents(folder, ranks, rows):
    (samples,) = ranks(1, read_by_megatron, folder / "one worker" / "train", LENGTH, SEED)
    assert len(samples) == len(rows) - (len(rows[-1].input_ids) < LENGTH)
    for row, (tokens, labels) in zip(rows, samples, strict=False):
        assert row.input_ids.tolist() == tokens
        inside = row.labels != IGNORE_INDEX
        assert row.labels[inside].tolist() == np.array(labels)[inside].tolist()


def test_rows_are_sequences_that_travel_to_workers_by_path(rows):
    import pickle

    again = pickle.loads(pickle.dumps(rows))
    assert np.array_equal(again[-1].input_ids, rows[len(rows) - 1].input_ids)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_other_tokens_of_the_same_lengths_have_another_digest(rows, tmp_path):
    split = Path(shutil.copytree(rows.path, tmp_path / "train"))
    assert sampled_digest(open_split(split)) == sampled_digest(rows)
    corpus = next(split.glob("*.bin"))
    np.fromfile(corpus, dtype=rows.corpora[0].tokens.tokens_T.dtype)[::-1].tofile(corpus)
    assert sampled_digest(open_split(split)) != sampled_digest(rows)


def test_a_large_corpus_opens_in_less_than_a_second(tmp_path):
    """20 million documents and a sparse file of 40 GB: nothing is read that the rows do not need."""
    import json
    import time

    lengths = np.full(20_000_000, 1000, dtype=np.int32)
    write_index(tmp_path / "corpus-0.idx", lengths, token_dtype(1024))
    with (tmp_path / "corpus-0.bin").open("wb") as file:
        os.truncate(file.fileno(), 2 * 1000 * len(lengths))
    np.save(tmp_path / "corpus-0.document_index.npy", np.arange(len(lengths), dtype=np.int32))
    starts = np.arange(0, 1000 * len(lengths), 4096)
    np.save(tmp_path / "corpus-0.sample_index.npy", np.stack([starts // 1000, starts % 1000], axis=1).astype(np.int32))
    meta = {
        "corpora": {"corpus-0": "corpus-0"},
        "blended": False,
        "sequence_length": 4096,
        "tokens": 1,
        "largest_id": 0,
    }
    (tmp_path / "indexed.json").write_text(json.dumps(meta))
    started = time.process_time()
    store = open_split(tmp_path)
    assert len(store[len(store) - 1].input_ids) == 4096
    assert time.process_time() - started < 1


# -- blends and corpora of the user ------------------------------------------------------------------------------


def test_a_blend_has_the_proportions_of_its_weights_to_within_one_row(folder, build):
    result = build("blend", blend={"a.jsonl": 1, "b.txt": 3.5})
    blend = open_split(folder / "blend" / "train")
    corpora = result["stats"]["splits"]["train"]["corpora"]
    for name, share in (("a.jsonl", 1 / 4.5), ("b.txt", 3.5 / 4.5)):
        assert abs(corpora[name]["rows"] - share * len(blend)) <= 1
    # Any part of an epoch has them, as Megatron interleaves.
    half = blend._blend[0][: len(blend) // 2]
    assert abs(int((half == 1).sum()) - 3.5 / 4.5 * len(half)) <= 1
    assert {len(row.input_ids) for row in blend} == {LENGTH}
    assert result["stats"]["splits"]["train"]["loss_tokens"] == sum(
        int((row.labels != IGNORE_INDEX).sum()) for row in blend
    )
    # The corpus of more rows than it has is repeated, whole; no row of the other comes twice.
    drawn = blend._blend[1][blend._blend[0] == 0]
    assert len(set(drawn.tolist())) == len(drawn)


@pytest.fixture
def corpus(folder, rows, tmp_path) -> Path:
    """A corpus of the user: what the job made of the text, under another name."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"mine{suffix}").write_bytes((folder / "one worker" / "train" / f"corpus-0{suffix}").read_bytes())
    return tmp_path / "mine.bin"


def test_a_corpus_of_the_user_is_used_in_place(folder, build, corpus, rows):
    result = build("given", files=[str(corpus)], formatting="indexed", eval_fraction=0.1)
    train, held_out = (open_split(folder / "given" / split) for split in ("train", "eval"))
    assert not list((folder / "given").rglob("*.bin"))
    assert documents(train) + documents(TokenStore.open(folder / "given" / "eval")) == documents(rows)
    assert held_out.num_documents == round(0.1 * rows.num_documents)
    assert result["stats"]["rows"]["kept"] == rows.num_documents
