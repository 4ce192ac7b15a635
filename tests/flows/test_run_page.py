"""The page of a run, as a file and as Prefect's artifact."""

import base64
import re
import shutil
from xml.etree import ElementTree

from flows.report import evaluation_metrics
from flows.run_page import report_path, run_markdown, write_run_page
from mca_lib.evaluation.report import with_production
from tasks.aliases import Decision
from tasks.promote import Verdict
from tests.flows.finished import Run

EVIL = "<script>alert(1)</script>`"


def test_the_page_has_what_the_artifact_says_and_what_belongs_to_the_run(run: Run):
    outcomes, store = run.result.outcomes, run.config.store.open()
    metrics = evaluation_metrics(outcomes["evaluate"].artifact)
    refused = Verdict("chat", "production", Decision(None, None, ("loss < 1",)), metrics)
    config = run.with_fields(model={"name_or_path": EVIL})
    page = write_run_page(config, outcomes, refused, with_production(metrics, metrics))
    assert page == store.root / ".runs" / f"evaluate-{outcomes['evaluate'].artifact.key}" / "report.html"
    text = page.read_text()
    assert "<th>production</th>" in text
    assert "chat/production not promoted: loss &lt; 1" in text
    assert f"<td>{outcomes['train'].seconds:.1f}</td>" in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;`" in text
    assert re.findall('aria-label="(.*?)"', text) == ["loss: training", "learning rate: training"]
    assert report_path(store, outcomes["evaluate"].artifact) == page
    own = outcomes["evaluate"].artifact.path / "report.html"
    assert "Stages of this run" not in own.read_text()
    page.unlink()
    assert report_path(store, outcomes["evaluate"].artifact) == own


def test_prefects_page_has_the_curves_as_pictures(run: Run):
    outcomes = run.result.outcomes
    metrics = evaluation_metrics(outcomes["evaluate"].artifact)
    text = run_markdown(run.with_fields(model={"name_or_path": EVIL}), outcomes, None, metrics, run.folder / "r.html")
    pictures = re.findall(r"!\[(.*)\]\(data:image/svg\+xml;base64,(.*)\)", text)
    assert [title for title, _ in pictures] == ["loss", "learning rate"]
    for _, picture in pictures:
        ElementTree.fromstring(base64.b64decode(picture))
    assert f"`` {EVIL} ``" in text, "as code, which renders no markup"
    assert f"Report: `{run.folder / 'r.html'}`" in text
    assert f"| train | computed | {outcomes['train'].seconds:.1f} | `{outcomes['train'].artifact.key[:12]}` |" in text
    assert f"| held-out loss | {metrics['models']['base']['loss']:.4f} |" in text


def test_a_store_that_cannot_be_written_costs_the_page_alone(run: Run):
    folder = run.config.store.open().root / ".runs"
    shutil.rmtree(folder)
    folder.write_text("")
    metrics = evaluation_metrics(run.result.outcomes["evaluate"].artifact)
    assert write_run_page(run.config, run.result.outcomes, None, metrics) is None
