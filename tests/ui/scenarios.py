"""What people do in the UI with a deployed recipe, step by step, each step checked by what the page shows.

All take a server whose limit `mcaflow-gpu` has one slot, and a deployment of two ranks. `train` therefore fails, with a
reason that a person mends either outside of the recipe (another slot) or in it (one rank). Too high a learning
rate, with weight decay, makes it fail in the rank itself.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import psutil
from playwright.sync_api import expect

from tests.ui.browser import Browser, RunPage
from tests.ui.service import Service, processes_of

BEFORE_TRAIN = ("download", "dataset", "convert")
COMPUTED = dict.fromkeys(("train", "export", "evaluate"), "Completed")
REASON = "train: launcher.nproc_per_node: 2 ranks, but the server's limit mcaflow-gpu has 1 slots"
DIVERGED = re.compile(r"training diverged:\s(loss|grad_norm)\sis\s\S+\sat\sstep\s\d+;\slower")
LIMIT = "mcaflow-gpu"
_REMEDY = f"prefect gcl update {LIMIT} --limit 2"


def fails_then_is_retried(service: Service, browser: Browser, name: str) -> RunPage:
    """Started with the form; `train` fails; the cause is mended; Retry computes what is missing."""
    form = browser.deployment(name).custom_run()
    form.fill("Max Steps", "5")
    browser.picture("form", whole=True)
    run = form.submit()
    run.expect_end("Failed")
    browser.picture("failed-run")
    run.expect_tasks({"train": "Failed"})
    run.expect_log(REASON)
    page = run.open_artifact("Why this run ended")
    for text in (REASON, _REMEDY, f"prefect flow-run retry {run.run_id}"):
        expect(page.get_by_text(text).first).to_be_visible()
    browser.picture("failure")
    run.back()
    service.prefect("gcl", "update", LIMIT, "--limit", "2")
    run.retry()
    run.expect_end("Completed")
    run.expect_tasks(dict.fromkeys(BEFORE_TRAIN, "Cached") | COMPUTED)
    browser.picture("retried-tasks")
    return run


def form_to_completed(browser: Browser, name: str, states: Mapping[str, str]) -> RunPage:
    """Started with the form under another name, which is part of no key; the page says what came from the store."""
    form = browser.deployment(name).custom_run()
    form.fill("Name", "from-the-form")
    run = form.submit()
    run.expect_end("Completed")
    run.expect_name(r"from-the-form · \d{4}-\d\d-\d\d \d\d:\d\d")
    run.expect_tasks(states)
    browser.picture("tasks")
    check_report(browser, run, states)
    return run


def check_report(browser: Browser, run: RunPage, states: Mapping[str, str]) -> None:
    """The page and the table that a finished run leaves."""
    page = run.open_artifact("Stages, model and samples")
    for stage, state in states.items():
        word = "cached" if state == "Cached" else "computed"
        expect(page.get_by_role("row").filter(has_text=stage).first).to_contain_text(word)
    expect(page.get_by_role("heading", name="Evaluation")).to_be_visible()
    browser.picture("report", whole=True)
    run.back()
    page = run.open_artifact("held-out documents")
    expect(page.get_by_role("row").filter(has_text="held-out loss")).to_be_visible()
    browser.picture("evaluation")
    run.back()


def copied_with_one_rank(service: Service, browser: Browser, failed: RunPage) -> RunPage:
    """A run that failed for its recipe is copied, changed in the form, and completes; `train` is computed anew."""
    service.prefect("gcl", "update", LIMIT, "--limit", "1")
    failed.back()
    form = failed.copy()
    form.fill("Nproc Per Node", "1")
    form.choose("refresh", "list", "train")
    browser.picture("copy", whole=True)
    run = form.submit()
    run.expect_end("Completed")
    run.expect_tasks(dict.fromkeys(BEFORE_TRAIN, "Cached") | {"train": "Completed"})
    return run


def diverges_and_is_copied(browser: Browser, name: str) -> RunPage:
    """A rank ends the training, and says why; with another learning rate a copy of the run completes."""
    form = browser.deployment(name).custom_run()
    form.fill("Nproc Per Node", "1")
    # Each step multiplies the weights by 1 - 1 · 10, until they are none.
    for title, value in {"Learning Rate": "1", "Weight Decay": "10", "Max Steps": "100"}.items():
        form.fill(title, value)
    form.choose("until", "str", "train")
    run = form.submit()
    run.expect_end("Failed")
    run.expect_tasks(dict.fromkeys(BEFORE_TRAIN, "Cached") | {"train": "Failed"})
    run.expect_log(DIVERGED)
    page = run.open_artifact("Why this run ended")
    expect(page.get_by_role("heading", name=": Failed")).to_be_visible()
    expect(page.get_by_text(DIVERGED).first).to_be_visible()
    browser.picture("diverged")
    run.back()
    form = run.copy()
    for title, value in {"Learning Rate": "0.002", "Weight Decay": "0", "Max Steps": "4"}.items():
        form.fill(title, value)
    run = form.submit()
    run.expect_end("Completed")
    run.expect_tasks(dict.fromkeys(BEFORE_TRAIN, "Cached") | {"train": "Completed"})
    return run


def cancelled(browser: Browser, name: str) -> RunPage:
    """Cancelled in the middle of training: no process of the run is left."""
    form = browser.deployment(name).custom_run()
    form.fill("Nproc Per Node", "1")
    form.fill("Max Steps", "100000")
    run = form.submit()
    run.expect_running()
    run.open_artifact("loss")  # progress of `train`, which has made a step
    browser.picture("progress")
    run.back()
    assert processes_of(run.run_id), "the run's processes are found by its id"
    run.cancel()
    run.expect_end("Cancelled")
    _, left = psutil.wait_procs(processes_of(run.run_id), timeout=10)
    assert not left, f"still there: {left}"
    run.open_artifact("Why this run ended")
    browser.picture("cancelled")
    run.back()
    return run


def logs_in(browser: Browser, credentials: str) -> None:
    """With a password the UI shows a form first; wrong ones do not get in."""
    browser.log_in("ops:guess")
    page = browser.page
    expect(page.get_by_text("Invalid credentials")).to_be_visible()
    browser.log_in(credentials)
    page.get_by_role("link", name="Deployments").click()
    expect(page.get_by_role("link", name="tiny", exact=True)).to_be_visible()


def all_of(service: Service, browser: Browser, name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """The scenarios in their order: title, and what to call."""
    failed: list[RunPage] = []

    def first() -> None:
        service.prefect("gcl", "update", LIMIT, "--limit", "2")
        form_to_completed(browser, name, dict.fromkeys(BEFORE_TRAIN, "Completed") | COMPUTED)
        service.prefect("gcl", "update", LIMIT, "--limit", "1")

    def fails() -> None:
        failed.append(fails_then_is_retried(service, browser, name))
        check_report(browser, failed[0], dict.fromkeys(BEFORE_TRAIN, "Cached") | COMPUTED)

    yield "the form, a parameter changed: Completed", first
    yield "train fails, is mended, Retry: 3 Cached, 3 computed", fails
    yield "Copy to new run, one rank, refresh train", lambda: copied_with_one_rank(service, browser, failed[0])
    yield "train diverges in its rank, Copy to new run, mended", lambda: diverges_and_is_copied(browser, name)
    yield "Cancel while it trains: Cancelled, no process left", lambda: cancelled(browser, name)
