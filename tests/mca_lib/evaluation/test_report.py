"""The report as a person reads it."""

from mca_lib.evaluation.report import comparison, markdown, with_production

METRICS = {
    "documents": 46,
    "tokens": 612,
    "note": "",
    "models": {
        "base": {"loss": 6.88, "perplexity": 972.626, "accuracy": 0.0, "tokens": 612},
        "trained": {"loss": 0.0414, "perplexity": 1.04227, "accuracy": 0.998, "tokens": 612},
    },
    "difference": {"loss": -6.8386, "loss_stderr": 0.0421, "accuracy": 0.998},
}
SAMPLE = {"prompt": "Say ```hi```", "reference": "hi", "answers": {"base": "…", "trained": "hi"}}


def test_table_sets_the_models_side_by_side():
    assert markdown(METRICS, []).splitlines()[2:] == [
        "| measure | base | trained | change |",
        "| --- | ---: | ---: | ---: |",
        "| held-out loss | 6.8800 | 0.0414 | −6.8386 ± 0.0421 |",
        "| perplexity | 972.6 | 1.042 |  |",
        "| next-token accuracy | 0.0% | 99.8% | +99.8 points |",
        "",
        "46 held-out documents, 612 tokens with loss. ± is one standard error of the paired differences.",
    ]


def test_pairs_have_rows_of_their_own():
    preference = {
        "pairs": 46,
        "likelier": {"base": 0.5, "trained": 0.25},
        "reward_accuracy": 0.957,
        "reward_margin": -0.25,
        "reward_margin_stderr": 0.125,
    }
    assert markdown(METRICS | {"preference": preference}, []).splitlines()[7:] == [
        "| chosen answer likelier | 50.0% | 25.0% | −25.0 points |",
        "| reward accuracy |  | 95.7% |  |",
        "| reward margin |  | −0.250 ± 0.125 |  |",
        "",
        "46 held-out pairs, 612 tokens with loss in chosen answers. ± is one standard error of the paired differences.",
    ]


def test_single_document_has_no_error_to_show():
    difference = METRICS["difference"] | {"loss_stderr": None}
    assert "±" not in markdown(METRICS | {"documents": 1, "difference": difference}, [])


def test_perplexity_without_a_double_is_said_in_words():
    models = {name: figures | {"perplexity": None} for name, figures in METRICS["models"].items()}
    assert "| perplexity | too large | too large |" in markdown(METRICS | {"models": models}, [])


def test_fence_is_longer_than_any_in_the_sample():
    report = markdown(METRICS, [SAMPLE])
    assert "prompt\n\n````text\nSay ```hi```\n````\n" in report
    assert "trained\n\n```text\nhi\n```" in report
    assert "reference\n\n```text\nhi\n```" in report


def test_no_rows_is_a_sentence():
    metrics = {"documents": 0, "tokens": 0, "note": "no held-out rows", "models": {}, "difference": {}}
    assert markdown(metrics, []) == "# Evaluation\n\nNo held-out rows: loss and accuracy were not measured.\n"


def test_the_model_in_production_has_a_column_between_the_others():
    rewards = {"reward_accuracy": 0.5, "reward_margin": 0.25, "reward_margin_stderr": None}
    ours = METRICS | {"preference": rewards | {"pairs": 2, "likelier": {"base": 0.5, "trained": 1.0}}}
    theirs = {
        "models": {"base": METRICS["models"]["base"], "trained": METRICS["models"]["base"] | {"loss": 2.5}},
        "preference": rewards | {"reward_accuracy": 0.25, "likelier": {"base": 0.5, "trained": 0.75}},
    }
    heading, loss, _, _, likelier, accuracy, _ = comparison(with_production(ours, theirs))
    assert heading == ["measure", "base", "production", "trained", "change"]
    assert loss[1:4] == ["6.8800", "2.5000", "0.0414"]
    assert likelier == ["chosen answer likelier", "50.0%", "75.0%", "100.0%", "+50.0 points"]
    assert accuracy == ["reward accuracy", "", "25.0%", "50.0%", ""]


def test_tasks_have_rows_with_their_errors():
    figures = {"base": {"value": 0.25, "stderr": 0.01}, "trained": {"value": 0.2, "stderr": None}}
    ours = METRICS | {"tasks": {"arc.acc": figures}}
    assert comparison(ours)[-1] == ["arc.acc", "0.2500 ± 0.0100", "0.2000", "−0.0500"]
    theirs = METRICS | {"tasks": {"arc.acc": figures | {"trained": {"value": 0.375, "stderr": 0.125}}}}
    assert comparison(with_production(ours, theirs))[-1] == [
        "arc.acc", "0.2500 ± 0.0100", "0.3750 ± 0.1250", "0.2000", "−0.0500",
    ]  # fmt: skip


def test_tasks_need_no_held_out_rows():
    figures = {"base": {"value": 0.25, "stderr": None}, "trained": {"value": 0.5, "stderr": None}}
    nothing = {"documents": 0, "tokens": 0, "note": "no held-out rows", "models": {}, "difference": {}}
    report = markdown(nothing | {"tasks": {"arc.acc": figures}}, [])
    assert "| measure | base | trained | change |\n" in report
    assert "| arc.acc | 0.2500 | 0.5000 | +0.2500 |\n" in report
    assert "No held-out rows" in report
