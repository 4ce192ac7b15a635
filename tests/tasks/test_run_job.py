"""Jobs of `mca_lib.job`, as real child processes: result, mistakes of the user, defects, silence."""

import json
from pathlib import Path

import pytest

from mca_lib.errors import DataError, ModelError
from tasks.errors import StageFailed, UserError
from tasks.jobs import run_job
from tasks.process import CommandFailed

UNREACHABLE = {"source": "huggingface", "repo": "maker/tiny", "revision": "main"}


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def job(name: str, spec: dict, folder: Path) -> dict:
    return run_job(name, spec, folder=folder, tag=f"test-{folder}")


def test_result_comes_back_and_spec_and_log_stay(tmp_path: Path) -> None:
    result = job("resolve_model", UNREACHABLE, tmp_path)
    assert "refused" in result["unreachable"]
    assert json.loads((tmp_path / "resolve_model.spec.json").read_text()) == UNREACHABLE
    assert (tmp_path / "resolve_model.log").exists()


def test_mistake_of_the_user_is_raised_as_its_own_class_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a name is neither") as caught:
        job("resolve_model", UNREACHABLE | {"repo": "not a name"}, tmp_path)
    assert "\n" not in str(caught.value)


def test_defect_comes_with_the_end_of_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"resolve_model: KeyError: 'source'; log: ") as caught:
        job("resolve_model", {}, tmp_path)
    assert "in resolve_model" in str(caught.value)


def test_secret_in_a_spec_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    with pytest.raises(StageFailed, match="HF_TOKEN") as caught:
        job("resolve_model", UNREACHABLE | {"header": "Bearer hf_0123456789abcdef"}, tmp_path)
    assert "0123456789" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def answer(outcome: object, failing: bool = False):
    """A stand-in for the child that writes this outcome."""

    def run(argv: list[str], *, log_path: Path, **options: object) -> None:
        if outcome is not None:
            Path(argv[-1]).write_text(json.dumps(outcome))
        if failing:
            raise CommandFailed("python", 137, log_path)

    return run


@pytest.mark.parametrize(
    ("outcome", "failing", "error", "words"),
    [
        (None, True, StageFailed, "killed by SIGKILL"),
        (None, False, StageFailed, "ended without a result"),
        ([], False, StageFailed, "ended without a result"),
        ({"ok": False, "kind": "user", "type": "DataError", "message": "row 3"}, True, DataError, "^row 3$"),
        ({"ok": False, "kind": "user", "type": "Exception", "message": "odd"}, True, UserError, "^odd$"),
        ({"ok": False, "kind": "internal", "type": "OSError", "message": "m"}, True, StageFailed, "j: OSError: m"),
        ({"ok": True, "result": {"a": 1}}, True, StageFailed, "killed by SIGKILL"),
    ],
)
def test_every_ending_is_told_apart(tmp_path: Path, outcome, failing: bool, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        run_job("j", {}, folder=tmp_path, run=answer(outcome, failing))


def test_result_of_an_earlier_attempt_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "j.result.json").write_text('{"ok": true, "result": {}}')
    with pytest.raises(StageFailed, match="ended without a result"):
        run_job("j", {}, folder=tmp_path, run=answer(None))
