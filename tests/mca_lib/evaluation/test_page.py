"""The report as an HTML file."""

import re
from html.parser import HTMLParser

from mca_lib.evaluation.page import Report, html_page
from tests.mca_lib.evaluation.test_report import METRICS, SAMPLE

EVIL = "</pre></title><script>alert(1)</script><img src=x onerror=alert(1)>'\"&"


class Page(HTMLParser):
    """Names of the tags, the attributes, and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def evil_page() -> str:
    sample = {"prompt": EVIL, "reference": EVIL, "answers": {EVIL: EVIL}}
    return html_page(
        Report(
            title=EVIL,
            metrics=METRICS | {"models": {EVIL: METRICS["models"]["base"], "trained": METRICS["models"]["trained"]}},
            samples=[sample],
            facts={EVIL: EVIL},
            training={EVIL: EVIL},
            data={EVIL: EVIL},
            stages=[[EVIL], [EVIL]],
            lineage=[[EVIL], [EVIL]],
            recipe={EVIL: {EVIL: [EVIL]}},
        )
    )


def test_no_text_becomes_markup():
    page = Page(evil_page())
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    # Everything but in JSON, where quotes have a backslash.
    assert page.text.count(EVIL) == 18
    assert page.text.count("<script>alert(1)</script>") == 20


def test_the_file_needs_nothing_from_elsewhere():
    text = html_page(Report("title", METRICS, [SAMPLE], charts=["<svg></svg>"]))
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text


def test_figures_samples_and_charts_are_shown_and_empty_parts_are_not():
    text = html_page(Report("demo", METRICS, [SAMPLE], charts=["<svg>a curve</svg>"], data={"train": "9 rows"}))
    page = Page(text)
    for shown in ("−6.8386 ± 0.0421", "99.8%", "46 held-out documents", "Say ```hi```", "a curve", "9 rows"):
        assert shown in page.text
    assert re.findall("<h2>(.*)</h2>", text) == ["Evaluation", "Training", "Data", "Samples"]


def test_an_evaluation_without_rows_says_so():
    nothing = {"documents": 0, "tokens": 0, "note": "no held-out rows", "models": {}, "difference": {}}
    text = html_page(Report("demo", nothing))
    assert "No held-out rows." in text
    assert "<table" not in text
