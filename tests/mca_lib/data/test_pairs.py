"""Rows with two answers: what of them is kept, how they are cut, and that a pair is never torn."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from llamafactory.data.converter import AlpacaDatasetConverter, SharegptDatasetConverter
from llamafactory.data.parser import DatasetAttr
from llamafactory.data.processor import PairwiseDatasetProcessor
from llamafactory.data.template import get_template_and_fix_tokenizer

from mca_lib.data.alignment import Message, Sample, parse_row
from mca_lib.data.formats import build_format
from mca_lib.data.llamafactory import ChatEncoder, ChatOptions, PairEncoder
from mca_lib.data.rows import validate_sources
from mca_lib.errors import ConfigError, DataError
from tests.mca_lib.data.conftest import section


def pairs(n):
    """n different alpaca rows with two answers."""
    return [
        {
            "instruction": f"Count to {i}.",
            "input": "Please." * (i % 2),
            "chosen": " ".join(map(str, range(1 + i % 17))),
            "rejected": f"No, not to {i}!" * (1 + i % 5),
        }
        for i in range(n)
    ]


TALK = {
    "conversations": [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "human", "value": "How are you?"},
    ],
    "chosen": {"from": "gpt", "value": "Fine, thanks."},
    "rejected": {"from": "gpt", "value": "No."},
}


def build_pairs(build, rows, **fields):
    return build(rows, **{"objective": "dpo", "ranking": True, **fields})


def documents(store, row):
    """(tokens, mask) of each document of a row."""
    first, last = store.row_offsets[row], store.row_offsets[row + 1]
    return [store.document(i) for i in range(first, last)]


def text(tokenizer, document):
    return tokenizer.decode(document[0].tolist())


# -- rows ----------------------------------------------------------------------------------------------------------

BAD = [
    ("alpaca", {**pairs(1)[0], "chosen": None}, "column 'chosen' is null"),
    ("alpaca", {"instruction": "a", "rejected": "b"}, "missing column 'chosen'"),
    ("alpaca", {"instruction": "a", "chosen": "b"}, "missing column 'rejected'"),
    ("alpaca", {**pairs(1)[0], "chosen": ""}, "empty chosen answer"),
    ("alpaca", {**pairs(1)[0], "rejected": ""}, "empty rejected answer"),
    ("alpaca", {**pairs(1)[0], "rejected": pairs(1)[0]["chosen"]}, "chosen and rejected are equal"),
    ("alpaca", {**pairs(1)[0], "rejected": "\ud800"}, "not encodable as UTF-8"),
    ("sharegpt", {**TALK, "chosen": "text"}, "column 'chosen' is not a turn"),
    ("sharegpt", {**TALK, "rejected": {"from": "human", "value": "x"}}, "bad role order"),
    ("sharegpt", {**TALK, "rejected": {"from": "gtp", "value": "x"}}, "bad role"),
    ("sharegpt", {**TALK, "rejected": {"from": "gpt", "value": 3}}, "column 'value' is not a string"),
    ("sharegpt", {**TALK, "conversations": TALK["conversations"][:3]}, "even number of turns"),
    ("sharegpt", {**TALK, "rejected": TALK["chosen"]}, "chosen and rejected are equal"),
]


@pytest.mark.parametrize(("layout", "bad", "reason"), BAD)
def test_a_bad_pair_is_counted_by_reason_and_named_by_line(tmp_path, layout, bad, reason):
    good = TALK if layout == "sharegpt" else pairs(1)[0]
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")  # escapes, for the lone surrogate
    fields = {"formatting": layout, "ranking": True, "max_bad_fraction": 0.5}
    summary = validate_sources(section(path, **fields), "dpo")
    assert summary.bad == {reason: 1}
    assert summary.named[0].startswith(f"{path}:2: {reason}")
    with pytest.raises(DataError, match="1 of 2 rows are unusable"):
        validate_sources(section(path, **{**fields, "max_bad_fraction": 0.01}), "dpo")


@pytest.mark.parametrize(
    ("layout", "row", "names", "converter"),
    [
        ("alpaca", {**pairs(2)[1], "output": "x"}, {"prompt": "instruction", "query": "input"}, AlpacaDatasetConverter),
        ("sharegpt", TALK, {"messages": "conversations"}, SharegptDatasetConverter),
    ],
)
def test_good_rows_are_aligned_as_llamafactory_does(layout, row, names, converter):
    columns = {**names, "chosen": "chosen", "rejected": "rejected"}
    ours = parse_row(row, build_format(layout, columns, {}, ranking=True, objective="dpo", at="dataset"))
    attributes = DatasetAttr("file", "x")
    attributes.join({"formatting": layout, "ranking": True, "columns": columns})
    theirs = converter(dataset_attr=attributes, data_args=SimpleNamespace(media_dir=None))(row)
    assert [m._asdict() for m in ours.messages[:-1]] == theirs["_prompt"]
    assert [ours.messages[-1]._asdict(), ours.rejected._asdict()] == theirs["_response"]
    assert ours.system == (theirs["_system"] or "")


def test_a_column_of_rows_without_pairs_is_named():
    with pytest.raises(ConfigError, match=r"columns has no key 'chosn'.*did you mean 'chosen'"):
        build_format("alpaca", {"chosn": "x"}, {}, ranking=True, objective="dpo", at="dataset")


def test_loss_on_the_prompt_is_refused(build):
    with pytest.raises(ConfigError, match=r"dataset\.train_on_prompt: pairs are compared by their answers alone"):
        build_pairs(build, pairs(4), train_on_prompt=True)


# -- tokens --------------------------------------------------------------------------------------------------------

PAIR = Sample(
    (Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Name?"), Message("assistant", "Ada.")),
    "Be kind.",
    rejected=Message("assistant", "I will not say."),
)


@pytest.mark.parametrize("template", ["chatml", "qwen", "llama2"])
def test_both_documents_are_what_a_conversation_with_that_answer_is(tokenizer, template):
    """Same tokens as the sft encoding of each; loss on the last answer and its end alone, and one bos."""
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    options = ChatOptions(template, mask_history=True)
    chosen, rejected = PairEncoder(tokenizer, options).encode(PAIR)
    alone = ChatEncoder(tokenizer, ChatOptions(template))
    (whole,) = alone.encode(PAIR._replace(rejected=None))
    (other,) = alone.encode(PAIR._replace(messages=(*PAIR.messages[:-1], PAIR.rejected), rejected=None))
    assert (chosen[0], rejected[0]) == (whole[0], other[0])
    for (ids, mask), answer in ((chosen, "Ada."), (rejected, "I will not say.")):
        first = mask.index(True)
        assert all(mask[first:]), "one run of loss tokens, to the end"
        assert tokenizer.decode(ids[first:]).strip().removesuffix("<|im_end|>").strip() == answer
    prompt = chosen[1].index(True)
    assert chosen[0][:prompt] == rejected[0][:prompt]
    assert rejected[1].index(True) == prompt


def test_tokens_are_llamafactorys_where_nothing_is_cut(tokenizer):
    ours = PairEncoder(tokenizer, ChatOptions("chatml")).encode(PAIR)
    arguments = SimpleNamespace(
        template="chatml",
        train_on_prompt=False,
        tool_format=None,
        default_system=None,
        enable_thinking=True,
        preserve_thinking=False,
        cutoff_len=10_000,
    )
    template = get_template_and_fix_tokenizer(tokenizer, arguments)
    theirs = PairwiseDatasetProcessor(template, tokenizer, None, arguments)._encode_data_example(
        [m._asdict() for m in PAIR.messages[:-1]],
        [PAIR.messages[-1]._asdict(), PAIR.rejected._asdict()],
        PAIR.system,
        "",
        [],
        [],
        [],
    )
    for (ids, mask), (their_ids, their_labels) in zip(ours, (theirs[:2], theirs[2:]), strict=True):
        assert ids == their_ids
        assert [i if m else -100 for i, m in zip(ids, mask, strict=True)] == their_labels


def test_control_tokens_in_either_answer_stay_text(tokenizer):
    sample = PAIR._replace(rejected=Message("assistant", "a <|im_end|> b"))
    _, (ids, _) = PairEncoder(tokenizer, ChatOptions("chatml")).encode(sample)
    plain = tokenizer.encode("a <|im_end|> b", add_special_tokens=False, split_special_tokens=True)
    assert any(ids[i : i + len(plain)] == plain for i in range(len(ids)))


# -- the store -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_a_pair_is_two_neighbours_of_one_row(build, tokenizer, packing):
    rows = pairs(60)
    built = build_pairs(build, rows, packing=packing, cutoff_len=128)
    store, found = built.store(), set()
    for row in range(len(store)):
        of_row = documents(store, row)
        assert len(of_row) % 2 == 0
        for chosen, rejected in zip(of_row[::2], of_row[1::2], strict=True):
            start = int(np.argmax(chosen[1]))
            assert chosen[0][:start].tolist() == rejected[0][:start].tolist()
            assert max(len(chosen[0]), len(rejected[0])) <= 128
            found.add((text(tokenizer, chosen), text(tokenizer, rejected)))
    assert len(found) == len(rows)
    for row in rows:
        assert any(row["chosen"] + "<|im_end|>" in c and row["rejected"] + "<|im_end|>" in r for c, r in found)
    assert store.row_lengths.max() <= 2 * 128
    assert (len(store) < 60) == packing
    split = built.stats["splits"]["train"]
    assert (split["pairs"], split["documents"]) == (60, 120)
    assert split["fill"] == pytest.approx(store.num_tokens / (len(store) * 256), abs=1e-6)


def test_both_answers_are_cut_after_cutoff_len_tokens_and_keep_the_same_prompt(build, tokenizer):
    row = {"instruction": "Q", "chosen": "good " * 100, "rejected": "bad " * 100}
    built = build_pairs(build, [row, *pairs(4)], cutoff_len=64, packing=False)
    whole = build_pairs(build, [row, *pairs(4)], cutoff_len=1024, packing=False)
    (cut,) = [d for r in range(5) if len((d := documents(built.store(), r))[0][0]) == 64]
    (full,) = [d for r in range(5) if len((d := documents(whole.store(), r))[0][0]) > 64]
    for side in (0, 1):
        assert cut[side][0].tolist() == full[side][0][:64].tolist()
        assert cut[side][1].tolist() == full[side][1][:64].tolist()
    assert built.stats["rows"]["truncated"] == 1


def test_a_pair_of_which_the_cut_leaves_no_answer_or_no_difference_is_dropped_and_counted(build):
    long_prompt = {"instruction": "word " * 100, "chosen": "a", "rejected": "b"}
    late = {"instruction": "Q", "chosen": "word " * 100 + "a", "rejected": "word " * 100 + "b"}
    built = build_pairs(build, [long_prompt, late, *pairs(4)], cutoff_len=64)
    assert built.stats["rows"]["dropped"] == {
        "all tokens with loss lie beyond cutoff_len": 1,
        "chosen and rejected are equal up to cutoff_len": 1,
    }
    assert built.stats["rows"]["kept"] == built.stats["splits"]["train"]["pairs"] == 4
    message = r"dataset\.cutoff_len: 64 cuts off what tells the answers apart of 2 of 3 rows"
    with pytest.raises(DataError, match=message):
        build_pairs(build, [long_prompt, late, *pairs(1)], cutoff_len=64)


def test_whole_pairs_are_held_out_and_equal_pairs_stay_together(build, tokenizer):
    rows = [*pairs(40), *pairs(40)[:10]]
    built = build_pairs(build, rows, eval_fraction=0.2, packing=False)
    sides = {
        name: [
            tuple(text(tokenizer, d) for d in documents(built.store(name), r)) for r in range(len(built.store(name)))
        ]
        for name in ("train", "eval")
    }
    assert len(sides["train"]) + len(sides["eval"]) == 50
    assert not set(sides["train"]) & set(sides["eval"])
    assert built.stats["splits"]["eval"]["pairs"] == len(sides["eval"]) > 0


def test_workers_and_order_change_nothing(build):
    rows = pairs(600)
    one, two = (build_pairs(build, rows, num_workers=n) for n in (1, 2))
    assert one.result["digest"] == two.result["digest"]


def test_the_preview_shows_pairs(build):
    page = (build_pairs(build, pairs(20)).output / "preview.md").read_text()
    assert "### Pair 1, chosen: " in page
    assert "### Pair 1, rejected: " in page
    assert "The first 6 of the training split. The model learns to prefer" in page
