"""Task files as they are read before anything runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from mca_lib.errors import ConfigError
from mca_lib.evaluation.task_checks import check_engine, check_hub, find_tasks, hub_datasets, measures
from mca_lib.evaluation.task_files import DEFAULT_METRICS, measure_name
from tests.mca_lib.evaluation.tiny_tasks import COMMON, write_tasks


def find(folder: Path | None, *names: str, trusted: bool = False) -> list:
    return find_tasks(list(names), folder and str(folder), trusted=trusted)


def test_what_tasks_measure_is_known_by_their_files(tmp_path: Path):
    folder = write_tasks(tmp_path / "tasks")
    assert measures(find(folder, "choices")) == {"choices.acc", "choices.acc_norm"}
    assert measures(find(folder, "tiny")) == {"choices.acc", "choices.acc_norm", "answers.exact_match.strict_match"}
    group = {"all.acc", "choices.acc", "choices.acc_norm", "likely.acc", "likely.perplexity"}
    assert measures(find(folder, "all")) == group
    assert measure_name("mmlu-pro", "f1", "get response") == "mmlu_pro.f1.get_response"


def test_those_of_lm_eval_are_found_behind_them(tmp_path: Path):
    arc = find(write_tasks(tmp_path / "tasks"), "ai2_arc", "choices")
    assert measures(arc) >= {"arc_easy.acc", "arc_challenge.acc_norm", "choices.acc"}
    assert hub_datasets(arc) == {"allenai/ai2_arc"}
    strict = "gsm8k.exact_match.strict_match"
    assert strict in measures(find(None, "gsm8k")), "what lm-eval has runs without being asked about"


def test_the_tables_are_those_of_lm_eval():
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, metric_registry

    import mca_lib.evaluation.task_checks as checks

    assert {kind: tuple(names) for kind, names in DEFAULT_METRIC_REGISTRY.items()} == DEFAULT_METRICS
    __import__("lm_eval.api.metrics")
    assert checks._known_metrics() == set(metric_registry)


def test_reading_imports_neither_lm_eval_nor_torch(tmp_path: Path):
    folder = write_tasks(tmp_path / "tasks", code=f"{COMMON}task: code\nprocess_docs: !function evil.run\n")
    (folder / "evil.py").write_text("raise SystemExit('was run')")
    script = (
        "import sys; from mca_lib.evaluation.task_checks import find_tasks\n"
        f"find_tasks(['arc_easy', 'code'], {str(folder)!r}, trusted=True)\n"
        "sys.exit(bool({'lm_eval', 'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("process_docs: !function utils.docs", "runs the function utils.docs for process_docs"),
        ("metric_list: [{metric: !function utils.score}]", "runs the function utils.score for metric_list.metric"),
        ("class: !function utils.Task", "runs the function utils.Task for class"),
        ("metric_list: [{metric: frugalscore}]", "has the metric frugalscore, which lm-eval would fetch"),
        ("metric_list: [{metric: exact_match, hf_evaluate: true}]", "has the metric exact_match, which lm-eval would"),
        ("unsafe_code: true", "executes what the model writes"),
        ("use_prompt: promptsource:x", "takes its prompt from elsewhere"),
        ("dataset_path: pandas", "has its data in the format pandas, which is none of json, csv"),
    ],
)
def test_code_is_refused_unless_it_is_trusted(tmp_path: Path, lines: str, said: str):
    folder = write_tasks(tmp_path / "tasks", mine=f"include: common\ntask: mine\n{lines}\n")
    with pytest.raises(
        ConfigError, match=r"^eval\.tasks: mine \(.*mine\.yaml\) .*eval\.trust_task_code: true"
    ) as refused:
        find(folder, "choices", "mine")
    assert said in str(refused.value)
    assert find(folder, "choices"), "what is not asked for is not judged"
    assert find(folder, "mine", trusted=True)


def test_programs_that_a_model_writes_run_for_those_who_say_so():
    with pytest.raises(ConfigError, match=r"humaneval .* executes what the model writes"):
        find(None, "humaneval")
    assert find(None, "humaneval", trusted=True)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ("include: ../outside\ntask: mine", "which is outside of"),
        ("include: mine.yaml\ntask: mine", "includes itself by mine.yaml"),
        ("task: [mine", "cannot be read: while parsing"),
        ("include: common\ntask: choices", "'choices' stands in .*choices.yaml and in .*mine.yaml"),
        ("include: common\ntask: mine\noutput_type: prose", "output_type prose is none of loglikelihood"),
        ("include: common\ntask: mine\nmetric_list: acc", "metric_list is no list of `metric: name`"),
        ("include: common\ntask: mine\ndataset_kwargs: {}", "names no dataset_kwargs.data_files"),
        ("include: common\ntask: mine\ndataset_kwargs: {data_files: gone.jsonl}", "gone.jsonl does not exist"),
        ("include: common\ntask: mine\ndataset_kwargs: {data_files: ../x.jsonl}", "lies outside of"),
        ("include: common\ntask: mine\ndataset_path: ./data", "dataset_path ./data is a path; give the format"),
        ("group: mine\ntask: [choices, mine]", "the group mine holds itself"),
        ("group: mine\ntask: [choices, nothing]", "'nothing' is no task, neither in .* nor in lm-eval"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_line(tmp_path: Path, mine: str, said: str):
    folder = write_tasks(tmp_path / "tasks", mine=f"{mine}\n")
    (tmp_path / "outside").write_text("output_type: multiple_choice\n")
    with pytest.raises(ConfigError, match=said) as refused:
        find(folder, "mine")
    assert "\n" not in str(refused.value)


def test_names_folders_and_packages_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"'choices' is no task, neither in lm-eval; is eval.task_path missing\?"):
        find(None, "choices")
    with pytest.raises(ConfigError, match="'arc_easy' stands there twice"):
        find(None, "arc_easy", "arc_easy")
    with pytest.raises(ConfigError, match="gone is no folder"):
        find(tmp_path / "gone", "arc_easy")
    with pytest.raises(ConfigError, match="package vllm is not installed"):
        check_engine("vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"package lm-eval is not installed; install mcaflow\[eval\]"):
        find(None, "arc_easy")


def test_a_hub_that_cannot_be_asked_is_found_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(ConfigError, match="allenai/ai2_arc is on a hub, and HF_HUB_OFFLINE forbids to fetch it"):
            check_hub({"allenai/ai2_arc"})
    with pytest.raises(ConfigError, match="allenai/ai2_arc is on a hub that does not answer"):
        check_hub({"allenai/ai2_arc"}, endpoint="http://127.0.0.1:9")
    (tmp_path / "allenai___ai2_arc").mkdir()
    check_hub({"allenai/ai2_arc"})
