"""A dataset section that contradicts itself is refused in one line that names the field."""

import json

import pytest

from mca_lib.data.formats import build_format, resolve_sources
from mca_lib.errors import ConfigError, DataError, UserError
from tests.mca_lib.data.conftest import alpaca_rows, section, write_json

GOOD_ENTRY = {"file_name": "rows.json"}


@pytest.fixture
def rows(tmp_path):
    return write_json(tmp_path / "rows.json", alpaca_rows(3))


def resolve_entry(tmp_path, entry, objective="sft"):
    write_json(tmp_path / "dataset_info.json", {"demo": entry})
    return resolve_sources(section(dataset_dir=str(tmp_path), names=["demo"]), objective)


@pytest.mark.parametrize(
    ("fields", "objective", "message"),
    [
        ({"columns": {"promt": "q"}}, "sft", r"dataset: columns has no key 'promt'.*did you mean 'prompt'"),
        ({"columns": {"videos": "q"}}, "sft", r"columns\.videos is not supported: images are"),
        ({"columns": {"messages": "q"}}, "sft", r"columns has no key 'messages' for formatting alpaca"),
        ({"tags": {"roletag": "q"}}, "sft", r"tags has no key 'roletag'.*did you mean 'role_tag'"),
        ({"formatting": "sharegtp"}, "sft", r"unknown formatting 'sharegtp'; did you mean 'sharegpt'"),
        ({"formatting": "openai"}, "sft", r"formatting openai is not supported; use sharegpt"),
        ({"formatting": "text"}, "sft", r"formatting text does not go with training\.stage sft"),
        ({}, "pt", r"formatting alpaca does not go with training\.stage pt; set formatting: text"),
        ({"ranking": True}, "sft", r"ranking: true holds pairs of answers, which training\.stage sft cannot use"),
        ({"formatting": "text", "ranking": True}, "pt", r"which training\.stage pt cannot use"),
        ({}, "dpo", r"dataset: training\.stage dpo needs pairs of answers; set ranking: true"),
        ({"columns": {"chosen": "c"}}, "sft", r"columns\.chosen is for rows with ranking: true"),
        (
            {"columns": {"response": "c"}, "ranking": True},
            "dpo",
            r"columns\.response is not for .* chosen and rejected",
        ),
        ({"columns": {"kto_tag": "c"}, "ranking": True}, "dpo", r"columns\.kto_tag is not supported: KTO"),
        ({"formatting": "text", "ranking": True}, "dpo", r"formatting text does not go with training\.stage dpo"),
        ({"names": ["demo"]}, "sft", r"dataset\.files: name data files there, or else entries"),
        ({"files": []}, "sft", r"dataset\.files: name data files there, or else entries"),
    ],
)
def test_a_wrong_field_is_named(rows, fields, objective, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_sources(section(**{"files": [str(rows)], **fields}), objective)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**GOOD_ENTRY, "colums": {}}, r"dataset_info\.json: demo: unknown key 'colums'; did you mean 'columns'"),
        ({**GOOD_ENTRY, "formating": "alpaca"}, r"unknown key 'formating'; did you mean 'formatting'"),
        ({**GOOD_ENTRY, "columns": {"respons": "x"}}, r"demo: columns has no key 'respons'.*'response'"),
        ({**GOOD_ENTRY, "num_samples": 5}, r"num_samples is not supported; use dataset\.max_rows"),
        ({**GOOD_ENTRY, "ranking": "yes"}, r"demo: ranking must be true or false"),
        ({**GOOD_ENTRY, "ranking": True}, r"demo: ranking: true holds pairs of answers"),
        ({"hf_hub_url": "a/b"}, r"hf_hub_url is not supported; download"),
        ({}, r"demo: file_name is missing"),
        ({"file_name": ""}, r"demo: file_name is missing"),
        ({"file_name": "."}, r"demo: file_name '\.' is not below dataset_dir"),
        ({"file_name": "../rows.json"}, r"demo: file_name '\.\./rows\.json' is not below dataset_dir"),
        ({"file_name": "a/../../rows.json"}, r"demo: file_name .* is not below dataset_dir"),
        ({"file_name": "/rows.json"}, r"demo: file_name '/rows\.json' is not below dataset_dir"),
        ({**GOOD_ENTRY, "formatting": ["alpaca"]}, r"demo: formatting must be a string"),
        ({"file_name": "nope.json"}, r"demo: there is no file .*nope\.json"),
        ("rows.json", r"demo: must be an object"),
    ],
)
def test_a_wrong_entry_of_dataset_info_is_named(tmp_path, rows, entry, message):
    with pytest.raises(UserError, match=message):
        resolve_entry(tmp_path, entry)


def test_an_unknown_entry_is_refused_with_the_nearest_name(tmp_path, rows):
    write_json(tmp_path / "dataset_info.json", {"alpaca_demo": GOOD_ENTRY})
    with pytest.raises(ConfigError, match=r"dataset\.names: 'alpaca_dmo' .*did you mean 'alpaca_demo'"):
        resolve_sources(section(dataset_dir=str(tmp_path), names=["alpaca_dmo"]), "sft")


@pytest.mark.parametrize("content", [None, "{\n 'a'", "[]"])
def test_a_dataset_info_that_cannot_be_read_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "dataset_info.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset_info\.json"):
        resolve_sources(section(dataset_dir=str(tmp_path), names=["a"]), "sft")


@pytest.mark.parametrize(("name", "message"), [("nope.json", "there is no file"), (".", "is not a file")])
def test_a_missing_file_is_named_by_its_field(tmp_path, name, message):
    with pytest.raises(DataError, match=rf"dataset\.files\[0\]: .*{message}"):
        resolve_sources(section(tmp_path / name), "sft")


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    (tmp_path / "rows.xlsx").write_bytes(b"x")
    with pytest.raises(DataError, match=r"rows\.xlsx is of an unknown kind; use one of \.json, \.jsonl"):
        resolve_sources(section(tmp_path / "rows.xlsx"), "sft")


def test_entries_give_their_files_in_the_order_of_names(tmp_path):
    for name in ("b.json", "many/2.json", "many/1.json", "many/notes.md"):
        write_json(tmp_path / name, alpaca_rows(1))
    info = {"one": {"file_name": "b.json"}, "many": {"file_name": "many", "columns": {"prompt": "instruction"}}}
    write_json(tmp_path / "dataset_info.json", info)
    sources = resolve_sources(section(dataset_dir=str(tmp_path), names=["many", "one"]), "sft")
    assert [(s.entry, s.path.name) for s in sources] == [("many", "1.json"), ("many", "2.json"), ("one", "b.json")]


def test_pretraining_text_can_be_declared_as_llamafactory_does(tmp_path, rows):
    source = resolve_entry(tmp_path, {**GOOD_ENTRY, "columns": {"prompt": "output"}}, objective="pt")[0]
    assert (source.format.layout, source.format.columns["prompt"]) == ("text", "output")
    with pytest.raises(ConfigError, match="name the text column"):
        resolve_entry(tmp_path, GOOD_ENTRY, objective="pt")


def test_naming_a_column_unsets_the_optional_ones():
    default = build_format("alpaca", {}, {}, ranking=False, objective="sft", at="dataset")
    named = build_format("alpaca", {"prompt": "q"}, {}, ranking=False, objective="sft", at="dataset")
    assert (default.columns["prompt"], default.columns["query"]) == ("instruction", "input")
    assert (named.columns["prompt"], named.columns["query"], named.columns["response"]) == ("q", None, "output")


def test_a_dataset_info_with_a_byte_order_mark_is_read(tmp_path, rows):
    text = json.dumps({"demo": GOOD_ENTRY})
    (tmp_path / "dataset_info.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert len(resolve_sources(section(dataset_dir=str(tmp_path), names=["demo"]), "sft")) == 1
