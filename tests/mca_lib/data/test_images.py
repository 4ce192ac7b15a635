"""Rows with images: as many tokens as features, the files kept by content, and every mistake on one line."""

import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mca_lib.data.prepare import dataset
from mca_lib.data.token_store import TokenStore
from mca_lib.demo_vision import make_tiny_vision_model
from mca_lib.errors import ConfigError, DataError, ModelError
from mca_lib.models.vision.images import features, shares
from mca_lib.models.vision.positions import document_positions

COLUMNS = {"prompt": "instruction", "response": "output", "images": "images"}
ROW = {"instruction": "<image>What is <image> it?", "output": "Shapes.", "images": ["a.png", "sub/b.png"]}
SIZES = {"a.png": (56, 84), "sub/b.png": (200, 28)}


@pytest.fixture(scope="module")
def model(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    ranks(1, make_tiny_vision_model, folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`data.json` and its images."""
    from PIL import Image

    for number, (name, size) in enumerate(SIZES.items()):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", size, (40 * number, 99, 200)).save(path)
    return tmp_path


def build(folder: Path, model: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The token store `folder/store` of these rows."""
    (folder / "data.json").write_text(json.dumps(rows))
    spec = {
        "files": [str(folder / "data.json")],
        "columns": COLUMNS,
        "template": "qwen2_vl",
        "cutoff_len": 256,
        "eval_fraction": 0.0,
        "tokenizer_dir": str(model),
        "vocab_size": json.loads((model / "config.json").read_text())["text_config"]["vocab_size"],
        "output": str(folder / f"store{len(list(folder.glob('store*')))}"),
        **options,
    }
    return dataset(spec, lambda *_, **__: None) | {"path": Path(spec["output"])}


def test_marks_become_the_tokens_that_llama_factory_writes(folder: Path, model: Path) -> None:
    from llamafactory.data.mm_plugin import get_mm_plugin

    from mca_lib.models.vision.processor import load_processor
    from mca_lib.tokenizer import load_tokenizer

    row = TokenStore.open(build(folder, model, [ROW])["path"] / "train")[0]
    plugin = get_mm_plugin(name="qwen2_vl", image_token="<|image_pad|>", video_token="<|video_pad|>")
    limits = {"image_max_pixels": 10**6, "image_min_pixels": 1}
    processor = SimpleNamespace(image_processor=load_processor(model), **limits)
    messages = [{"role": "user", "content": ROW["instruction"]}, {"role": "assistant", "content": ROW["output"]}]
    paths = [str(folder / name) for name in ROW["images"]]
    (question, _) = plugin.process_messages(messages, paths, [], [], processor)
    text = load_tokenizer(model).decode(row.input_ids)
    assert f"<|im_start|>user\n{question['content']}<|im_end|>" in text
    assert [image.grid for image in row.images[0]] == [(1, 6, 4), (1, 2, 14)]
    assert (row.input_ids == 705).sum() == sum(features(image.grid, 2) for image in row.images[0]) == 6 + 7


def test_sharegpt_rows_are_the_same(folder: Path, model: Path) -> None:
    turns = [{"from": "human", "value": ROW["instruction"]}, {"from": "gpt", "value": ROW["output"]}]
    rows = [{"conversations": turns, "images": ROW["images"]}]
    columns = {"messages": "conversations", "images": "images"}
    other = build(folder, model, rows, formatting="sharegpt", columns=columns)
    assert other["parts"] == build(folder, model, [ROW])["parts"]


def test_paths_are_relative_to_the_media_folder(folder: Path, model: Path) -> None:
    rows = [{**ROW, "images": ["../a.png", "b.png"]}]
    assert build(folder, model, rows, media_dir=str(folder / "sub"))["parts"] == build(folder, model, [ROW])["parts"]


def test_files_are_kept_once_by_content(folder: Path, model: Path) -> None:
    rows = [ROW, {**ROW, "instruction": "<image>And <image>?"}, {"instruction": "No picture.", "output": "None."}]
    built = build(folder, model, rows)
    store = TokenStore.open(built["path"] / "train")
    assert built["stats"]["splits"]["train"]["images"] == 4
    assert len(store.images.arrays["image_offsets"]) - 1 == 2
    kept = {bytes(image.data) for row in store for images in row.images for image in images}
    assert kept == {(folder / name).read_bytes() for name in SIZES}
    assert sorted(len(images) for row in store for images in row.images) == [0, 2, 2]


def test_another_picture_under_the_same_name_is_another_data_set(folder: Path, model: Path) -> None:
    before = build(folder, model, [ROW])["parts"]["train"]
    assert build(folder, model, [ROW])["parts"]["train"] == before
    (folder / "a.png").write_bytes((folder / "a.png").read_bytes() + b"\0")
    assert build(folder, model, [ROW])["parts"]["train"] != before


def test_a_document_is_cut_before_an_image_and_not_within(folder: Path, model: Path) -> None:
    row = {"instruction": "<image>What?", "output": "It is <image>", "images": ["a.png", "sub/b.png"]}
    whole = TokenStore.open(build(folder, model, [row])["path"] / "train")[0]
    at = np.flatnonzero(whole.input_ids == 705)
    second = at[-7]
    for cut in (at[-2] + 1, second + 1, second):  # within the second image, and just before it
        short = TokenStore.open(build(folder, model, [row], cutoff_len=int(cut))["path"] / "train")[0]
        assert len(short.input_ids) == second - 1  # the token that begins the image goes too
        assert len(short.images[0]) == 1
        np.testing.assert_array_equal(short.input_ids, whole.input_ids[: len(short.input_ids)])


def test_pixels_bound_the_tokens(folder: Path, model: Path) -> None:
    """By transformers' rule, which keeps a side that is the smallest there is."""
    row = TokenStore.open(build(folder, model, [ROW], max_pixels=28 * 28 * 2)["path"] / "train")[0]
    assert [features(image.grid, 2) for image in row.images[0]] == [1, 3]


def test_no_loss_on_an_image_of_an_answer(folder: Path, model: Path) -> None:
    row = {"instruction": "<image>Again?", "output": "<image> so", "images": ["a.png", "a.png"]}
    store = TokenStore.open(build(folder, model, [row], train_on_prompt=True)["path"] / "train")
    assert 705 in store[0].input_ids
    assert 705 not in store[0].labels


BAD = [
    ({"images": ["gone.png", "a.png"]}, r"data\.json:1 .*image is not there: 'gone\.png'"),
    ({"images": ["\ud800\n" + "x" * 300, "a.png"]}, r"image is not there: '\\ud800\\nxxx"),
    ({"images": ["a.png"]}, "images and marks differ in number: 1 images and 2 x <image>"),
    ({"images": None}, "images and marks differ in number: 0 images and 2 x <image>"),
    ({"images": ["data:image/png;base64,AAAA", "a.png"]}, "image is not a path: data is no file"),
    ({"images": [{"bytes": "x"}, "a.png"]}, "image is not a path: a JSON object; write it to a file"),
    ({"images": {"a": 1}}, "column 'images' is not a list of paths"),
    ({"images": ["data.json", "a.png"]}, r"image cannot be used: .*data\.json: no image can be read from it"),
    ({"images": ["thin.png", "a.png"]}, "image cannot be used: absolute aspect ratio must be smaller than 200"),
    ({"images": ["deep.png", "a.png"]}, r"deep\.png: more than 8 bits a sample \(mode I;16\); write it with 8"),
    ({"images": ["bomb.png", "a.png"]}, r"bomb\.png: Image size \(400000000 pixels\) exceeds limit"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_what_is_wrong_with_an_image_is_said_on_one_line(
    folder: Path, model: Path, change: dict[str, Any], message: str
) -> None:
    from PIL import Image

    Image.new("RGB", (900, 4)).save(folder / "thin.png")
    Image.new("I;16", (56, 56), 3000).save(folder / "deep.png")
    bomb = bytearray((folder / "thin.png").read_bytes())
    bomb[16:24] = struct.pack(">II", 20000, 20000)  # width and height of the header, and its checksum
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    (folder / "bomb.png").write_bytes(bomb)
    with pytest.raises(DataError, match=message) as error:
        build(folder, model, [{**ROW, **change}])
    assert "\n" not in str(error.value)


def test_what_goes_with_no_images_is_refused(folder: Path, model: Path, tmp_path: Path) -> None:
    columns = {"prompt": "instruction", "images": "images"}
    with pytest.raises(ConfigError, match=r"columns\.images: pairs of answers about images are not supported"):
        build(folder, model, [ROW], ranking=True, objective="dpo", columns=columns)
    with pytest.raises(ConfigError, match=r"columns\.videos is not supported"):
        build(folder, model, [ROW], columns={**COLUMNS, "videos": "videos"})
    with pytest.raises(ConfigError, match=r"media_dir: .*/nowhere is no folder"):
        build(folder, model, [ROW], media_dir=str(folder / "nowhere"))
    with pytest.raises(ConfigError, match=r"min_pixels: images would have at least 20000 and at most 12544 pixels"):
        build(folder, model, [ROW], min_pixels=20000)
    (tmp_path / "bare").mkdir()
    for path in model.glob("*"):
        if "preprocessor" not in path.name and "processor_config" not in path.name:
            (tmp_path / "bare" / path.name).symlink_to(path)
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        build(folder, tmp_path / "bare", [ROW])


def test_positions_are_those_of_transformers() -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    from mca_lib.verification.tiny import tiny_config

    values = tiny_config("qwen2_vl")
    network = AutoModelForImageTextToText.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).model
    import torch

    image, grids = values["image_token_id"], [(1, 4, 6), (1, 2, 4)]
    ids = np.array([1, *[image] * 6, 2, 3, *[image] * 2, 4, 5])
    expected, _ = network.get_rope_index(
        torch.from_numpy(ids)[None], torch.from_numpy(ids == image).int()[None], torch.tensor(grids)
    )
    np.testing.assert_array_equal(document_positions(ids, grids, image, 2), expected[:, 0])
    with pytest.raises(DataError, match="8 tokens of images, and its 1 images"):
        document_positions(ids, grids[:1], image, 2)


def test_images_are_dealt_out_evenly() -> None:
    grids = [(1, 2, 2), (1, 8, 8), (1, 4, 8), (1, 4, 8), (1, 2, 2)]
    assert shares(grids, 2) == [[1, 0], [2, 3, 4]]
    assert shares(grids[:1], 3) == [[0], [], []]
    assert shares([], 2) == [[], []]
