"""A sealed directory is read whole or not at all."""

import contextlib
import errno
import os
from pathlib import Path

import pytest
import torch

from mca_lib.checkpoint.sealed import RECORD_NAME, find_damage, naming, new_staging, remove, remove_leftovers, seal


@pytest.fixture
def sealed(tmp_path) -> Path:
    staging = new_staging(tmp_path)
    (staging / "state").mkdir()
    for name in ("state/tensors", "trainer.json"):
        (staging / name).write_bytes(os.urandom(64))
    seal(staging, tmp_path / "checkpoint-2", {"step": 2})
    return tmp_path / "checkpoint-2"


@pytest.mark.parametrize("name", ["state/tensors", "trainer.json", RECORD_NAME])
@pytest.mark.parametrize("kind", ["flipped", "cut", "gone"])
def test_damage_to_any_file_is_found(sealed, name, kind):
    assert find_damage(sealed) is None
    path = sealed / name
    data = path.read_bytes()
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if kind == "cut" else bytes([data[0] ^ 1]) + data[1:])
    assert name in find_damage(sealed)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"files": null}', '{"files": {}}', '{"files": {"a": {}}}'])
def test_a_record_of_another_form_is_damage(sealed, text):
    (sealed / RECORD_NAME).write_text(text)
    assert RECORD_NAME in find_damage(sealed)


def test_what_is_removed_has_lost_its_name_before_its_files(sealed, monkeypatch):
    monkeypatch.setattr("mca_lib.checkpoint.sealed.shutil.rmtree", lambda path: None)  # killed there
    remove(sealed)
    assert not sealed.exists()
    monkeypatch.undo()
    remove_leftovers(sealed.parent)
    assert not list(sealed.parent.iterdir())


@pytest.mark.parametrize("put", [Path.touch, lambda path: path.symlink_to("/nowhere")], ids=["file", "link"])
def test_what_stands_in_the_place_of_a_directory_is_removed_too(tmp_path, put):
    put(tmp_path / "checkpoint-2")
    put(tmp_path / ".staging-1")
    remove(tmp_path / "checkpoint-2")
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_the_file_whatever_a_library_made_of_it(tmp_path):
    path = tmp_path / "tensors"
    closing = contextlib.suppress(OSError)  # that fails too
    with closing, open("/dev/full", "wb") as file, pytest.raises(RuntimeError, match="unexpected pos") as lost:
        torch.save(torch.zeros(10**5), file)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), naming(path):
        raise lost.value
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"), naming(path):
        raise OSError(errno.EIO, "Input/output error")
    for other in (RuntimeError("a defect"), OSError("of a library"), FileNotFoundError(2, "No such file", "its own")):
        with pytest.raises(type(other)) as same, naming(path):
            raise other
        assert same.value is other
