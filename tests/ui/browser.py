"""The Prefect UI in Debian's chromium, by what a person reads and presses: pages as objects.

It is the UI that opens at `/` (V2 of Prefect 3.9), not the older one that a person can switch to. Every step waits for
what it needs to see; `RUN_MS` bounds what a run takes, `PAGE_MS` what a page takes.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Locator, Page, Response, expect, sync_playwright
from playwright.sync_api import TimeoutError as PageTimeout

PAGE_MS = 60_000
RUN_MS = 600_000
_LOOK_MS = 10_000
_FINAL = re.compile(r"^(Completed|Failed|Crashed|Cancelled)$")
_PRESSES = 3
"""How often Submit is pressed where a busy server says that it could not (SQLite: "database is locked")."""


def missing() -> str | None:
    """What this machine lacks for these tests; None when nothing."""
    return None if shutil.which("chromium") else "chromium (Debian's package of that name)"


@contextmanager
def chromium(url: str, pictures: Path | None = None, credentials: str | None = None) -> Iterator["Browser"]:
    """A browser with one tab, at the server's UI; `credentials` are those that it asks for."""
    with sync_playwright() as playwright:
        # Without a sandbox of its own, for containers and root; it sees pages of this server alone.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(base_url=url, viewport={"width": 1400, "height": 1100})
        page.set_default_timeout(PAGE_MS)
        expect.set_options(timeout=PAGE_MS)
        try:
            yield Browser(page, pictures, credentials)
        finally:
            browser.close()


@dataclass(frozen=True)
class Browser:
    page: Page
    pictures: Path | None
    credentials: str | None = None

    def picture(self, name: str, whole: bool = False) -> None:
        """Save what is on the screen, where somebody wants pictures."""
        if self.pictures is not None:
            self.pictures.mkdir(parents=True, exist_ok=True)
            # What a page draws after its text has no text to wait for.
            self.page.wait_for_load_state("networkidle")
            self.page.screenshot(path=self.pictures / f"{name}.png", full_page=whole)

    def log_in(self, credentials: str) -> None:
        """Fill in the form that a server with a password shows."""
        self.page.goto("/")
        self._fill_in(credentials)

    def ask(self, path: str) -> str:
        """The answer of the API to a filter that lets everything through, as the browser gets it."""
        script = """async path => {
            const client = 'tests', headers = {'Content-Type': 'application/json', 'Prefect-Csrf-Client': client}
            const token = await fetch(`/api/csrf-token?client=${client}`)
            headers['Prefect-Csrf-Token'] = (await token.json()).token
            const answer = await fetch(path, {method: 'POST', headers, body: '{}'})
            if (!answer.ok) throw new Error(await answer.text())
            return await answer.text()
        }"""
        return self.page.evaluate(script, path)

    def deployment(self, name: str) -> "Deployment":
        self._open("/v2/deployments")
        self.page.get_by_role("link", name=name, exact=True).click()
        return Deployment(self)

    def run(self, run_id: str) -> "RunPage":
        self._open(f"/v2/runs/flow-run/{run_id}")
        return RunPage(self, run_id)

    def _open(self, path: str) -> None:
        """Load a page. Where the server is slow to confirm the password, the UI asks for it again, as of a person."""
        self.page.goto(path)
        form, inside = self.page.get_by_placeholder("admin:pass"), self.page.get_by_role("link", name="Deployments")
        expect(form.or_(inside).first).to_be_visible()
        if self.credentials is not None and form.is_visible():
            self._fill_in(self.credentials)
            expect(inside.first).to_be_visible()
            self.page.goto(path)

    def _fill_in(self, credentials: str) -> None:
        self.page.get_by_placeholder("admin:pass").fill(credentials)
        self.page.get_by_role("button", name="Login").click()


@dataclass(frozen=True)
class Deployment:
    browser: Browser

    def custom_run(self) -> "Form":
        """The form with the parameters of a run."""
        self.browser.page.get_by_role("button", name="Run", exact=True).click()
        self.browser.page.get_by_role("menuitem", name="Custom run").click()
        expect(self.browser.page.get_by_label("Run Name")).not_to_have_value("")
        return Form(self.browser)


@dataclass(frozen=True)
class Form:
    """The parameters of a run, each below its title."""

    browser: Browser

    def fill(self, title: str, value: str) -> None:
        """Change a text or a number."""
        field = self.browser.page.get_by_label(f"{title} (Optional)", exact=True).first
        field.fill(value)
        expect(field).to_have_value(value)

    def choose(self, title: str, kind: str, option: str) -> None:
        """Select an option of a parameter that may be absent, whose `kind` is the tab beside None."""
        page = self.browser.page
        label = page.get_by_text(f"{title} (Optional)", exact=True)
        label.locator(f'xpath=following::*[@role="tab"][normalize-space()="{kind}"][1]').click()
        label.locator('xpath=following::*[@role="tabpanel"][1]').get_by_role("button").last.click()
        page.get_by_role("option", name=option, exact=True).click()
        page.keyboard.press("Escape")

    def submit(self) -> "RunPage":
        """Start the run and open its page, by the link of the message that says so."""
        page = self.browser.page
        for _ in range(_PRESSES):
            with page.expect_response(_is_verdict) as created:
                page.get_by_role("button", name="Submit").click()
            if created.value.ok:
                break
        assert created.value.ok, created.value.text()
        run_id = created.value.json()["id"]
        page.locator(f'a[href$="/runs/flow-run/{run_id}"]').first.click()
        return RunPage(self.browser, run_id)


def _is_verdict(answer: Response) -> bool:
    """Whether the server has taken or refused a run; after 403, an expired CSRF token, the UI asks again by itself."""
    return answer.url.endswith("/create_flow_run") and answer.status != 403


@dataclass(frozen=True)
class RunPage:
    browser: Browser
    run_id: str

    def expect_name(self, pattern: str) -> None:
        expect(self._main.get_by_role("navigation", name="breadcrumb").first).to_contain_text(re.compile(pattern))

    def expect_end(self, state: str) -> None:
        """Wait for the end of the run, which must be this state."""
        self._tab("Logs")  # the other tabs show states of tasks
        final = self._main.get_by_text(_FINAL).first
        expect(final).to_be_visible(timeout=RUN_MS)
        expect(final).to_have_text(state, timeout=1000)

    def expect_running(self) -> None:
        self._tab("Logs")
        expect(self._main.get_by_text("Running", exact=True).first).to_be_visible(timeout=RUN_MS)

    def expect_tasks(self, states: Mapping[str, str]) -> None:
        """The newest task of each stage, with its state; names of finished ones tell the artifact and its size."""
        panel = self._tab("Task Runs")
        for stage, state in states.items():
            link = self.browser.page.get_by_role("link", name=re.compile(rf"^{stage}\b"))
            row = panel.get_by_role("listitem").filter(has=link).first
            expect(row).to_contain_text(state)
            if state in ("Cached", "Completed"):
                name = re.compile(rf"^{stage} [0-9a-f]{{8}}, [\d.]+ \w?B$")
                expect(row.get_by_role("link", name=name).first).to_be_visible()

    def expect_log(self, text: str) -> None:
        expect(self._tab("Logs").get_by_text(text).first).to_be_visible()

    def open_artifact(self, description: str) -> Locator:
        """The page of an artifact of this run; `back` returns.

        Prefect's list is as it was when the page was loaded, and an artifact gets its description as the run goes on.
        """
        for _ in range(RUN_MS // _LOOK_MS):
            link = self._tab("Artifacts").get_by_role("link").filter(has_text=description).first
            try:
                link.click(timeout=_LOOK_MS)
                break
            except PageTimeout:
                self.back()
        expect(self.browser.page).to_have_url(re.compile("/artifacts/artifact/"))
        return self._main

    def back(self) -> None:
        self.browser.run(self.run_id)

    def retry(self) -> None:
        """Press Retry, confirm, and see the run leave its final state."""
        self._menu("Retry")
        self.browser.page.get_by_role("alertdialog").get_by_role("button", name="Retry").click()
        expect(self._main.get_by_text(_FINAL)).to_have_count(0)

    def cancel(self) -> None:
        self._menu("Cancel")
        self.browser.page.get_by_role("alertdialog").get_by_role("button", name="Cancel Flow Run").click()

    def copy(self) -> Form:
        """The form for another run, with the parameters of this one."""
        self._menu("Copy to new run")
        return Form(self.browser)

    @property
    def _main(self) -> Locator:
        return self.browser.page.get_by_role("main")

    def _menu(self, item: str) -> None:
        self._tab("Logs")
        self._main.get_by_role("button", name="Open menu").first.click()
        self.browser.page.get_by_role("menuitem", name=item).click()

    def _tab(self, name: str) -> Locator:
        self.browser.page.get_by_role("tab", name=name, exact=True).click()
        return self.browser.page.get_by_role("tabpanel", name=name)
