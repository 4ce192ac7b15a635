"""The key of the dataset stage holds what decides the tokens, and the stage publishes what the job makes."""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import tasks.dataset
from mca_lib.data.spec import DatasetSpec
from mca_lib.data.token_store import TokenStore
from mca_lib.errors import ConfigError, DataError, ModelError
from mca_lib.tiny_models import make_tokenizer
from tasks.dataset import DatasetConfig, DatasetStage, ExecutorConfig
from tasks.digests import digest_file
from tasks.report import LogReporter
from tasks.stage import Miss, Produced, Stage, ensure, probe
from tasks.store import ArtifactStore

pytestmark = pytest.mark.usefixtures("forked_jobs")
ROWS = [{"instruction": f"Name {i}", "input": "", "output": f"The number is {i}."} for i in range(40)]


@dataclass(frozen=True)
class ModelStage(Stage):
    """Stands for the download stage: a tokenizer and a config.json."""

    source: Path
    name = "download"
    version = 1

    def identity(self):
        return {"files": {path.name: digest_file(path) for path in sorted(self.source.iterdir())}}

    def produce(self, ctx):
        shutil.copytree(self.source, ctx.staging, dirs_exist_ok=True)
        return Produced(parts={"tokenizer": digest_file(self.source / "tokenizer.json")})


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    make_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text('{"vocab_size": 1024}')
    return directory


@pytest.fixture
def model(store, model_dir):
    return ensure(store, ModelStage(model_dir)).artifact


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data" / "rows.json"
    path.parent.mkdir()
    path.write_text(json.dumps(ROWS))
    return path


def stage(model, *files, **fields):
    config = {"files": [str(path) for path in files], "template": "chatml", "cutoff_len": 128, **fields}
    return DatasetStage(DatasetConfig(**config), "sft", model)


def identity_of(store, dataset):
    """As `ensure` and `probe` see it."""
    return dataset.resolve(store, LogReporter("dataset")).identity()


@pytest.fixture
def identity(store, model):
    return lambda *files, **fields: identity_of(store, stage(model, *files, **fields))


def test_the_artifact_holds_both_splits_is_found_again_and_a_changed_row_is_named(store, model, data, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps([{**row, "instruction": "Again"} for row in ROWS[:3]]))
    first = ensure(store, stage(model, data, other, eval_fraction=0.1))
    artifact = first.artifact
    assert not first.cached
    assert {path.name for path in artifact.path.iterdir()} >= {"train", "eval", "meta.json", "stats.json", "preview.md"}
    train, held_out = (TokenStore.open(artifact.path / split) for split in ("train", "eval"))
    assert train.num_documents + held_out.num_documents == len(ROWS) + 3
    assert set(artifact.parts) == {"train", "eval"}
    assert artifact.stats["rows"]["kept"] == len(ROWS) + 3

    again = ensure(store, stage(model, data, other, eval_fraction=0.1, num_workers=2))
    assert again.cached
    assert again.artifact.key == artifact.key

    other.write_text(json.dumps(ROWS[:2]))
    answer = probe(store, stage(model, data, other, eval_fraction=0.1))
    assert isinstance(answer, Miss)
    assert [change.field for change in answer.changed] == ["identity.files.2 other.json"]


def test_of_a_column_map_only_the_columns_are_named(store, model, data):
    columns = {"prompt": "instruction", "response": "output"}
    ensure(store, stage(model, data))
    answer = probe(store, stage(model, data, columns=columns))
    assert isinstance(answer, Miss)
    assert [change.field for change in answer.changed] == ["identity.columns.prompt", "identity.columns.response"]


def test_a_bad_row_is_named_by_the_stages_error_and_nothing_is_published(store, model, data):
    data.write_text(json.dumps([*ROWS, {"instruction": "x"}]))
    with pytest.raises(DataError, match=rf"{data}:1 \(row 41\): missing column 'output'"):
        ensure(store, stage(model, data))
    assert not store.ls("dataset")


def test_left_out_and_truncated_rows_are_told_in_one_warning(store, model, data, caplog):
    long = "word " * 300
    rows = [
        *ROWS,
        {"instruction": "x", "output": ""},
        {"instruction": long, "output": "lost"},
        {"instruction": "y", "output": long},
    ]
    data.write_text(json.dumps(rows))
    ensure(store, stage(model, data, max_bad_fraction=0.5))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        "of 43 rows, 1 unusable (1 × empty output), 1 dropped (1 × all tokens with loss lie beyond "
        "cutoff_len), 1 truncated to dataset.cutoff_len 128; "
        f"first: {data}:1 (row 41): empty output; {data}:1 (row 42): all tokens with loss lie beyond "
        "cutoff_len"
    )


def test_a_data_set_that_has_all_rows_warns_of_nothing(store, model, data, caplog):
    ensure(store, stage(model, data))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_job_knows_every_field_of_the_section_with_the_same_default():
    known = {field.name for field in dataclasses.fields(DatasetSpec)}
    for name, default in DatasetConfig().model_dump(mode="json").items():
        assert getattr(DatasetSpec(), name) == default
    assert known - set(DatasetConfig.model_fields) == {
        *("objective", "tokenizer_dir", "vocab_size", "resize_vocabulary", "output", "work"),
        "file_digests",
    }


def test_touching_or_moving_a_file_changes_nothing(identity, data, tmp_path):
    before = identity(data)
    os.utime(data, (1, 1))
    assert identity(data) == before
    moved = tmp_path / "elsewhere" / "rows.json"
    moved.parent.mkdir()
    shutil.move(data, moved)
    assert identity(moved) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 7),
        ("cutoff_len", 64),
        ("packing", False),
        ("template", "qwen"),
        ("mask_history", True),
        ("max_rows", 5),
    ],
)
def test_a_field_that_decides_the_tokens_is_in_the_key(identity, data, field, value):
    before, after = identity(data), identity(data, **{field: value})
    assert {name for name in before if before[name] != after[name]} == {field}


def test_the_number_of_workers_is_not_in_the_key(identity, data):
    assert identity(data, num_workers=8) == identity(data)


def test_no_path_is_in_the_key(identity, data, tmp_path):
    assert str(tmp_path) not in json.dumps(identity(data))


def test_the_order_of_files_is_in_the_key(identity, data, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(ROWS[:3]))
    assert identity(data, other) != identity(other, data)


def test_what_dataset_info_says_about_the_rows_is_in_the_key(identity, data):
    info = data.parent / "dataset_info.json"
    fields = {"dataset_dir": str(data.parent), "names": ["demo"]}

    def with_entry(**entry):
        info.write_text(json.dumps({"demo": {"file_name": "rows.json", **entry}, "unused": {"file_name": "x.json"}}))
        return identity(**fields)

    before = with_entry()
    assert before["files"].keys() == {"1 demo/rows.json"}
    assert with_entry() == before
    assert with_entry(columns={"prompt": "input", "response": "output"})["entries"] != before["entries"]


def test_the_content_of_images_is_in_the_key_and_their_place_is_not(identity, tmp_path):
    columns = {"prompt": "instruction", "response": "output", "images": "images"}
    rows = [{"instruction": "<image>?", "output": f"{i}", "images": [f"{i % 2}.png"]} for i in range(4)]
    keys = []
    for place, second in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "rows.json").write_text(json.dumps(rows))
        (folder / "0.png").write_bytes(b"0")
        (folder / "1.png").write_bytes(second)
        keys.append(identity(folder / "rows.json", columns=columns))
    assert keys[0] == keys[1] != keys[2]
    assert "images" in keys[0]


def test_a_data_set_of_text_has_no_field_of_images_in_its_key(identity, data):
    assert not {"images", "min_pixels", "max_pixels", "media_dir"} & identity(data).keys()
    assert identity(data, max_pixels=9999)["max_pixels"] == 9999


def test_the_versions_of_the_tokenizing_libraries_are_in_the_key(identity, data, monkeypatch):
    before = identity(data)
    assert set(before["libraries"]) == {"transformers", "tokenizers", "llamafactory"}
    monkeypatch.setattr(tasks.dataset, "version", lambda name: "0.0.1")
    assert identity(data)["libraries"] != before["libraries"]


def test_of_the_model_only_tokenizer_and_vocabulary_are_in_the_key(store, model, model_dir, data):
    (model_dir / "model.safetensors").write_bytes(b"weights")
    other = ensure(store, ModelStage(model_dir)).artifact
    one, two = stage(model, data), stage(other, data)
    assert other.digest != model.digest
    assert identity_of(store, one) == identity_of(store, two)
    assert one.inputs()["tokenizer"].digest == two.inputs()["tokenizer"].digest


def test_a_model_without_a_vocabulary_size_is_refused(store, model_dir, data):
    (model_dir / "config.json").write_text("{}")
    model = ensure(store, ModelStage(model_dir)).artifact
    with pytest.raises(ModelError, match=r"config\.json: vocab_size is None"):
        identity_of(store, stage(model, data))


def test_a_missing_file_is_named_before_anything_runs(store, model, tmp_path):
    with pytest.raises(DataError, match=r"dataset\.files\[0\]: there is no file"):
        probe(store, stage(model, tmp_path / "nope.json"))


def test_a_field_that_contradicts_another_is_named_before_anything_runs(store, model, data):
    with pytest.raises(ConfigError, match="formatting text does not go with training"):
        probe(store, stage(model, data, formatting="text"))


def test_data_that_changes_while_it_is_read_is_not_published(store, model, data, tmp_path):
    """Else its tokens would lie under the key of other data."""

    def run_job(name, spec):
        data.write_text(json.dumps(ROWS[:1]))
        return {"digest": "d", "parts": {}, "stats": {}}

    context = SimpleNamespace(staging=tmp_path / "staging", run_job=run_job, store=store, report=LogReporter("dataset"))
    resolved = stage(model, data).resolve(store, context.report)
    with pytest.raises(DataError, match="changed while they were read"):
        resolved.produce(context)


# -- pretraining ---------------------------------------------------------------------------------------------------


@pytest.fixture
def text_identity(store, model):
    """Identity of a pretraining data set of these files."""

    def identity(*files, **fields):
        config = DatasetConfig(
            files=[str(path) for path in files], **{"formatting": "text", "cutoff_len": 64, **fields}
        )
        return identity_of(store, DatasetStage(config, "pt", model))

    return identity


def test_the_storage_that_auto_takes_is_in_the_key_and_where_it_is_tokenized_is_not(
    text_identity, tmp_path, monkeypatch
):
    text = tmp_path / "text.txt"
    text.write_text("one\ntwo\n")
    small = text_identity(text)
    assert small == text_identity(text, storage="rows")
    assert small != text_identity(text, storage="indexed")
    monkeypatch.setattr("mca_lib.data.storage.INDEXED_FROM_BYTES", 8)
    assert text_identity(text) == text_identity(text, storage="indexed")
    elsewhere = ExecutorConfig(kind="slurm", partition="cpu")
    assert text_identity(text, executor=elsewhere, num_workers=8) == text_identity(text)
    with pytest.raises(ConfigError, match=r"dataset\.executor: slurm needs storage: indexed"):
        text_identity(text, executor=elsewhere, storage="rows")


def test_of_a_corpus_that_is_used_in_place_both_files_and_the_path_are_in_the_key(text_identity, tmp_path):
    """The artifact names the path; so another place is another artifact, with the same digest."""
    corpus = tmp_path / "mine.bin"
    corpus.write_bytes(b"tokens")
    corpus.with_suffix(".idx").write_bytes(b"index")
    before = text_identity(corpus, formatting="indexed")
    assert before["storage"] == "indexed"
    corpus.with_suffix(".idx").write_bytes(b"other")
    assert text_identity(corpus, formatting="indexed")["files"] != before["files"]
    moved = tmp_path / "moved" / "mine.bin"
    moved.parent.mkdir()
    for suffix, content in ((".bin", b"tokens"), (".idx", b"index")):
        moved.with_suffix(suffix).write_bytes(content)
    assert text_identity(moved, formatting="indexed")["files"] != before["files"]


def test_slurm_needs_a_partition():
    with pytest.raises(ValueError, match="partition is required with kind slurm"):
        ExecutorConfig(kind="slurm")
