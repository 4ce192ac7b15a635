"""The `dataset` job as a whole: what goes in comes out, nothing leaks, and the same input gives the same bytes."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from mca_lib.data.alignment import UnusableRow
from mca_lib.data.control_tokens import GuardedTokenizer
from mca_lib.data.token_store import ARRAYS, IGNORE_INDEX
from mca_lib.errors import ConfigError, DataError, ModelError
from tests.mca_lib.data.conftest import VOCAB_SIZE, alpaca_rows, write_json, write_jsonl


def documents(store):
    """Token sequences with their masks, in no order."""
    return sorted((tuple(t.tolist()), tuple(m.tolist())) for t, m in map(store.document, range(store.num_documents)))


def texts(store, tokenizer):
    return [tokenizer.decode(store.document(i)[0].tolist()) for i in range(store.num_documents)]


def store_bytes(built, split):
    return b"".join((built.output / split / f"{name}.npy").read_bytes() for name in ARRAYS)


# -- what comes out ----------------------------------------------------------------------------------------------


def test_every_row_becomes_a_document_with_its_answer_as_labels(build, tokenizer):
    rows = alpaca_rows(40)
    built = build(rows, packing=False)
    store = built.store()
    assert len(store) == 40
    found = {}
    for row in store:
        learned = tokenizer.decode(row.labels[row.labels != IGNORE_INDEX].tolist())
        found[learned.removesuffix("<|im_end|>\n")] = tokenizer.decode(row.input_ids.tolist())
    for row in rows:
        question = row["instruction"] + ("\n" + row["input"] if row["input"] else "")
        assert f"<|im_start|>user\n{question}<|im_end|>" in found[row["output"]]


def test_packing_changes_the_rows_and_not_the_documents(build):
    packed, plain = build(alpaca_rows(60), packing=True), build(alpaca_rows(60), packing=False)
    assert documents(packed.store()) == documents(plain.store())
    assert len(packed.store()) < len(plain.store()) == 60
    assert packed.store().row_lengths.max() <= 256
    assert packed.store().num_loss_tokens == plain.store().num_loss_tokens


def test_rows_are_shuffled_by_the_seed(build, tokenizer):
    one, again, other = (build(alpaca_rows(50), packing=False, seed=seed) for seed in (1, 1, 2))
    assert texts(one.store(), tokenizer) == texts(again.store(), tokenizer)
    assert texts(one.store(), tokenizer) != texts(other.store(), tokenizer)
    assert documents(one.store()) == documents(other.store())


def test_statistics_agree_with_the_store(build):
    built = build([*alpaca_rows(50), {"instruction": "x", "output": None}], eval_fraction=0.1, max_bad_fraction=0.1)
    stats = built.stats
    assert stats["rows"] == {
        "read": 51,
        "bad": {"column 'output' is null": 1},
        "not_drawn": 0,
        "dropped": {},
        "truncated": 0,
        "kept": 50,
    }
    for name in ("train", "eval"):
        store, split = built.store(name), stats["splits"][name]
        assert (split["rows"], split["documents"]) == (len(store), store.num_documents)
        assert split["tokens"] == sum(len(row.input_ids) for row in store)
        assert split["loss_tokens"] == sum(int((row.labels != IGNORE_INDEX).sum()) for row in store)
        assert split["fill"] == pytest.approx(split["tokens"] / (len(store) * 256), abs=1e-6)
        assert split["document_length"]["max"] == max(len(t) for t, _ in documents(store))
        assert split["largest_id"] == max(int(row.input_ids.max()) for row in store)
    assert json.loads((built.output / "stats.json").read_text()) == stats
    assert built.progress[0] == (0, 50)
    assert built.progress[-1] == (50, 50)


def test_meta_says_how_to_read_and_how_to_stop(build):
    meta = json.loads((build(alpaca_rows(5)).output / "meta.json").read_text())
    assert (meta["cutoff_len"], meta["objective"], meta["template"], meta["packing"]) == (256, "sft", "chatml", True)
    assert meta["stop_token_ids"] == [1, 2]
    assert meta["pad_token_id"] == 0


def test_nothing_but_the_artifact_is_left(build):
    built = build(alpaca_rows(30), eval_fraction=0.1)
    assert sorted(p.name for p in built.output.iterdir()) == ["eval", "meta.json", "preview.md", "stats.json", "train"]


def test_bad_rows_are_named_in_statistics_and_preview(build, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*alpaca_rows(3), {"instruction": "x", "output": ""}])
    built = build([path], max_bad_fraction=0.5)
    assert built.stats["named_rows"] == [f"{path}:4: empty output"]
    assert "empty output" in (built.output / "preview.md").read_text()


# -- long rows ---------------------------------------------------------------------------------------------------


def test_an_over_long_row_keeps_its_beginning_and_is_counted(build, tokenizer):
    row = {"instruction": "Q", "output": "word " * 300}
    built = build([row, *alpaca_rows(3)], packing=False, cutoff_len=64)
    whole = build([row, *alpaca_rows(3)], packing=False, cutoff_len=2048)
    assert built.stats["rows"]["truncated"] == 1
    assert whole.stats["rows"]["truncated"] == 0
    (cut,) = (t for t, _ in documents(built.store()) if len(t) == 64)
    (full,) = (t for t, _ in documents(whole.store()) if len(t) > 64)
    assert cut == full[:64]


def test_a_row_whose_answer_is_cut_off_is_dropped_and_counted(build):
    built = build([{"instruction": "word " * 300, "output": "lost"}, *alpaca_rows(3)], cutoff_len=64)
    assert built.stats["rows"]["dropped"] == {"all tokens with loss lie beyond cutoff_len": 1}
    assert built.stats["rows"]["kept"] == 3
    assert "(row 1): all tokens with loss" in built.stats["named_rows"][0]


@pytest.mark.parametrize("left", [0, 2])
def test_a_cutoff_that_loses_most_rows_is_an_error_that_names_it(build, left):
    lost = [{"instruction": "word " * 300 + str(i), "output": "lost"} for i in range(3)]
    message = rf"dataset\.cutoff_len: 64 cuts off every token with loss of 3 of {3 + left} rows.*\.json:1 \(row 1\)"
    with pytest.raises(DataError, match=message):
        build([*lost, *alpaca_rows(left)], cutoff_len=64)


def test_a_cutoff_that_loses_half_of_the_rows_is_accepted(build):
    lost = [{"instruction": "word " * 300 + str(i), "output": "lost"} for i in range(3)]
    assert build([*lost, *alpaca_rows(3)], cutoff_len=64).stats["rows"]["kept"] == 3


# -- rows that only encoding finds to be unusable ------------------------------------------------------------------


def tool_rows(tmp_path, good, bad):
    """sharegpt rows with a tool call, which in the last `bad` rows is not JSON."""
    calls = ['{"name": "sum", "arguments": {"a": 1}}'] * good + ["not JSON"] * bad
    tools = json.dumps([{"name": "sum", "description": "adds", "parameters": {"type": "object", "properties": {}}}])
    return write_jsonl(
        tmp_path / "calls.jsonl",
        [
            {
                "conversations": [{"from": "human", "value": f"ask {i}"}, {"from": "function_call", "value": call}],
                "tools": tools,
            }
            for i, call in enumerate(calls)
        ],
    )


CALLS = {"formatting": "sharegpt", "template": "qwen", "cutoff_len": 1024}
CALL_COLUMNS = {"messages": "conversations", "tools": "tools"}


def test_rows_that_encoding_finds_unusable_count_as_bad(build, tmp_path):
    path = tool_rows(tmp_path, good=10, bad=40)
    with pytest.raises(DataError) as caught:
        build([path], columns=CALL_COLUMNS, **CALLS)
    assert str(caught.value) == (
        "40 of 50 rows are unusable (40 × tools or tool call not understood), dataset.max_bad_fraction allows 0.01; "
        f"first: {path}:11: tools or tool call not understood"
    )


def test_undrawn_rows_do_not_hide_unusable_ones(build, tmp_path):
    path = tool_rows(tmp_path, good=30, bad=20)
    with pytest.raises(DataError, match=r"of 10 rows are unusable"):
        build([path], columns=CALL_COLUMNS, max_rows=10, max_bad_fraction=0.25, seed=1, **CALLS)


def test_rows_that_encoding_finds_unusable_are_in_the_statistics(build, tmp_path):
    path = tool_rows(tmp_path, good=10, bad=2)
    built = build([path], columns=CALL_COLUMNS, max_bad_fraction=0.5, **CALLS)
    rows = built.stats["rows"]
    assert (rows["bad"], rows["dropped"], rows["kept"]) == ({"tools or tool call not understood": 2}, {}, 10)
    assert built.stats["named_rows"][0] == f"{path}:11: tools or tool call not understood"
    assert built.progress[-1] == (12, 12)


def test_no_row_left_is_an_error_that_names_the_reason(build, tmp_path):
    message = r"no training row is left \(2 × tools or tool call not understood\); first: .*calls\.jsonl:1"
    with pytest.raises(DataError, match=message):
        build([tool_rows(tmp_path, good=0, bad=2)], columns=CALL_COLUMNS, max_bad_fraction=1.0, **CALLS)


# -- plain text --------------------------------------------------------------------------------------------------


def pt(build, lines, **fields):
    return build([{"text": line} for line in lines], objective="pt", formatting="text", template=None, **fields)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("cutoff_len", [8, 13, 64])
def test_every_token_of_a_text_is_predicted_exactly_once(build, tokenizer, packing, cutoff_len):
    lines = [f"Line {i}: " + "ab " * (7 * i % 31) for i in range(20)]
    expected = [[*tokenizer.encode(line, add_special_tokens=False), tokenizer.eos_token_id] for line in lines]
    store = pt(build, lines, packing=packing, cutoff_len=cutoff_len).store()
    labels = np.concatenate([row.labels[row.labels != IGNORE_INDEX] for row in store])
    assert sorted(labels.tolist()) == sorted(token for ids in expected for token in ids[1:])
    assert store.row_lengths.max() <= cutoff_len


def test_control_tokens_in_plain_text_stay_text(build, tokenizer):
    store = pt(build, ["a<|endoftext|>b <|im_start|>c"]).store()
    ((tokens, _),) = documents(store)
    assert tokens.count(0) == tokens.count(1) == 0
    assert tokens.count(2) == 1
    assert tokenizer.decode(list(tokens)) == "a<|endoftext|>b <|im_start|>c<|im_end|>"


def test_plain_text_needs_no_llamafactory(tmp_path, tokenizer_dir):
    spec = {"files": [str(write_json(tmp_path / "rows.json", [{"text": "hello"}]))], "formatting": "text"}
    spec |= {"objective": "pt", "tokenizer_dir": str(tokenizer_dir), "vocab_size": VOCAB_SIZE}
    spec |= {"output": str(tmp_path / "out"), "eval_fraction": 0.0}
    program = (
        f"import sys\nfrom mca_lib.data.prepare import dataset\ndataset({spec!r}, lambda *a, **k: None)\n"
        "assert 'llamafactory' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# -- held-out rows -----------------------------------------------------------------------------------------------


def test_equal_rows_are_never_in_train_and_eval(build):
    rows = alpaca_rows(20) * 3 + alpaca_rows(40)
    built = build(rows, eval_fraction=0.2, packing=False)
    train, held_out = ({t for t, _ in documents(built.store(name))} for name in ("train", "eval"))
    assert held_out
    assert not train & held_out
    assert built.store().num_documents + built.store("eval").num_documents == 100


def test_rows_that_are_equal_after_truncation_are_equal(build):
    rows = [{"instruction": "Q", "output": "word " * 100 + str(i)} for i in range(3)] + alpaca_rows(3)
    built = build(rows, eval_fraction=0.3, packing=False, cutoff_len=64)
    train, held_out = ({t for t, _ in documents(built.store(name))} for name in ("train", "eval"))
    assert not train & held_out


def test_eval_files_are_the_held_out_rows_and_are_not_trained_on(build, tmp_path):
    train = write_json(tmp_path / "train.json", alpaca_rows(10))
    held_out = write_json(tmp_path / "eval.json", alpaca_rows(13)[7:])
    built = build([train], eval_files=[str(held_out)], packing=False, eval_fraction=0.9)
    assert built.store().num_documents == 7
    assert built.store("eval").num_documents == 6
    assert built.stats["rows"]["dropped"] == {"equal to a row of the eval files": 3}


def test_eval_files_without_a_usable_row_are_refused(build, tmp_path):
    held_out = write_json(tmp_path / "eval.json", [{"instruction": "word " * 300, "output": "lost"}])
    with pytest.raises(DataError, match=r"no row of dataset\.eval_files is left; first: .*eval\.json"):
        build(alpaca_rows(5), eval_files=[str(held_out)], cutoff_len=64)


def test_no_eval_split_without_held_out_rows(build):
    built = build(alpaca_rows(5), eval_fraction=0.0)
    assert list(built.result["parts"]) == ["train"]
    assert not (built.output / "eval").exists()


def test_max_rows_draws_rows_by_the_seed(build):
    one, again, other = (build(alpaca_rows(50), max_rows=10, seed=seed) for seed in (1, 1, 2))
    assert documents(one.store()) == documents(again.store())
    assert documents(one.store()) != documents(other.store())
    assert one.store().num_documents == 10
    assert one.stats["rows"]["not_drawn"] == 40
    assert set(documents(one.store())) < set(documents(build(alpaca_rows(50)).store()))


# -- the digest --------------------------------------------------------------------------------------------------


def test_the_digest_changes_with_one_row_and_with_the_mask(build):
    rows = alpaca_rows(20)
    base = build(rows).result["digest"]
    assert build(rows).result["digest"] == base
    assert build([*rows[:-1], {**rows[-1], "output": "other"}]).result["digest"] != base
    assert build(rows, train_on_prompt=True).result["digest"] != base
    assert build(rows, packing=False).result["digest"] != base


def test_the_digest_of_the_eval_split_stays_when_a_training_row_changes(build):
    rows = alpaca_rows(30)
    first = build(rows, eval_fraction=0.1, packing=False)
    held_out = first.store("eval").num_documents
    changed = build([*rows, {"instruction": "one", "output": "more"}], eval_fraction=0.1, packing=False)
    assert held_out == 3
    assert changed.result["parts"]["train"] != first.result["parts"]["train"]
    assert changed.result["parts"]["eval"] == first.result["parts"]["eval"]


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bytes_do_not_depend_on_the_number_of_workers(build, workers):
    rows = alpaca_rows(900)  # several chunks
    one = build(rows, eval_fraction=0.1)
    many = build(rows, eval_fraction=0.1, num_workers=workers)
    assert many.result == one.result
    for split in ("train", "eval"):
        assert store_bytes(many, split) == store_bytes(one, split)


def test_the_bytes_do_not_depend_on_the_process(build, tmp_path):
    """As the stage runs it: `python -m mca_lib.job`, with string hashes randomized differently from this process."""
    rows = write_json(tmp_path / "rows.json", alpaca_rows(300))
    here = build([rows], eval_fraction=0.1)
    spec = {**here.spec, "output": str(tmp_path / "child"), "num_workers": 2}
    write_json(tmp_path / "spec.json", spec)
    argv = [sys.executable, "-m", "mca_lib.job", "dataset", tmp_path / "spec.json", tmp_path / "result.json"]
    subprocess.run(argv, env={**os.environ, "PYTHONHASHSEED": "1"}, check=True, timeout=240)
    assert json.loads((tmp_path / "result.json").read_text())["result"] == here.result
    files = [path.relative_to(here.output) for path in here.output.rglob("*") if path.is_file()]
    assert len(files) == 2 * len(ARRAYS) + 3
    for name in files:
        assert (here.output / name).read_bytes() == (tmp_path / "child" / name).read_bytes()


# -- refusals ----------------------------------------------------------------------------------------------------


def test_ids_beyond_the_models_vocabulary_are_refused(build):
    with pytest.raises(DataError, match=r"\(row \d+\): token id \d+ is not in the model's vocabulary of 300"):
        build(alpaca_rows(20), vocab_size=300)


def test_ids_beyond_the_vocabulary_are_accepted_where_the_model_gets_rows_for_them(build, tokenizer):
    built = build(alpaca_rows(20), vocab_size=300, resize_vocabulary=True)
    meta = json.loads((built.output / "meta.json").read_text())
    assert meta["vocab_size"] == built.stats["vocab_size"] == max(tokenizer.get_vocab().values()) + 1 > 300


def test_ids_beyond_the_vocabulary_are_refused_in_workers_too(build):
    with pytest.raises(DataError, match="vocabulary of 300"):
        build(alpaca_rows(600), vocab_size=300, num_workers=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: not a JSON object"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: cannot be read as JSON"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}', r"no tokenizer can be loaded from it: AttributeError"),
        ("tokenizer.json", None, r"no tokenizer can be loaded from it: there is no tokenizer\.json"),
        ("tokenizer.json", "garbage", r"tokenizer\.json: cannot be read as JSON"),
        ("tokenizer.json", "[]", r"tokenizer\.json: not a JSON object"),
        ("tokenizer.json", "{}", r"no tokenizer can be loaded from it: KeyError"),
        ("tokenizer.json", '{"added_tokens": []}', r"no tokenizer can be loaded from it: "),
    ],
)
def test_a_damaged_tokenizer_is_named_in_one_line(build, tmp_path, tokenizer_dir, name, content, message):
    damaged = tmp_path / "damaged"
    shutil.copytree(tokenizer_dir, damaged)
    if content is None:
        (damaged / name).unlink()
    else:
        (damaged / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        build(alpaca_rows(3), tokenizer_dir=str(damaged))
    assert str(caught.value).startswith(str(damaged))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_named(build, tmp_path):
    with pytest.raises(ModelError, match=f"{tmp_path}: no tokenizer can be loaded"):
        build(alpaca_rows(3), tokenizer_dir=str(tmp_path))


def test_an_unknown_field_of_the_spec_is_refused(build):
    with pytest.raises(ConfigError, match=r"unknown field 'cutof_len'; did you mean 'cutoff_len'"):
        build(alpaca_rows(3), cutof_len=3)


def test_user_data_is_never_printed(build, capfd):
    secret = "zebra crossing 4711"
    build([{"instruction": secret, "output": secret}, {"instruction": secret, "output": None}], max_bad_fraction=0.9)
    printed = capfd.readouterr()
    assert secret not in printed.out + printed.err


def test_a_vocabulary_that_spells_a_control_token_is_a_dropped_row(tokenizer):
    """Some models' vocabularies contain the control token as an ordinary piece; it must not come out."""

    class Leaky:
        added_tokens_decoder = tokenizer.added_tokens_decoder

        def encode(self, text, **_):
            return [2]

    with pytest.raises(UnusableRow) as caught:
        GuardedTokenizer(Leaky()).encode_plain("<|im_end|>")
    assert caught.value.reason == "control token in the text"
