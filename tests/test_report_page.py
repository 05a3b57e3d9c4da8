"""The HTML report: self-contained, safe with any name, and working in a real browser where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from attrs import evolve
from click.testing import CliRunner
from forgery import with_digests
from plans import Scenario, Sizes, make_plan

from rdtplan.cli import main
from rdtplan.ir.file import PlanFile, write_plan
from rdtplan.ir.plan import FleetPlan
from rdtplan.ir.topology import InferenceTopology
from rdtplan.report.page import pull_matrix, render_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = Sizes(layers=3, dense_layers=1, experts=4, heads=8, kv_heads=4, head_dim=2, intermediate=8, vocab=16)


@pytest.fixture(scope="module")
def plan() -> FleetPlan:
    plan = make_plan(Scenario(sizes=SIZES, topology=InferenceTopology(2, replicas=2), trainer_ranks=4))
    return with_digests(evolve(plan, notes=("</script><script>alert(1)</script> & <b>note</b>",)))


@pytest.fixture(scope="module")
def page(plan: FleetPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("page")
    write_plan(plan, directory / "p")
    done = CliRunner().invoke(main, ["report", str(directory / "p"), "-o", str(directory / "report.html")])
    assert done.exit_code == 0, done.output
    return directory / "report.html"


class Elements(HTMLParser):
    """Counts elements, and keeps what could reach out."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.add(value or "")
            if name in ("src", "href", "action", "data", "srcset", "poster"):
                self.references.append(value or "")


def test_the_page_loads_nothing(page: Path) -> None:
    text = page.read_text()
    elements = Elements()
    elements.feed(text)
    assert elements.references == [] and elements.tags.count("script") == 1
    assert "default-src 'none'" in text and "@import" not in text and "url(" not in text
    assert not re.search(r"https?://", text)
    assert {
        "matrix",
        "load-bars",
        "chunk-bars",
        "pool-bars",
        "ring-bars",
        "strips",
        "search",
        "finding-list",
    } <= elements.ids


def test_names_cannot_break_out(page: Path) -> None:
    text = page.read_text()
    assert text.count("</script>") == 1 and "alert(1)" in text
    data = json.loads(re.search(r"const data = (.*);\n", text)[1])  # type: ignore[index]
    assert data["summary"]["notes"] == ["</script><script>alert(1)</script> & <b>note</b>"]
    assert "\u2028" not in render_page({"name": "a\u2028b"})


def test_the_matrix_is_the_traffic(page: Path, plan: FleetPlan) -> None:
    with PlanFile(page.with_name("p")) as file:
        matrix = pull_matrix(file)
    assert [sum(row) for row in matrix] == list(plan.overview.served_nbytes)
    assert [sum(column) for column in zip(*matrix, strict=True)] == list(plan.overview.pulled_nbytes)


def test_an_unwritable_place_is_named(page: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(page.with_name("p")), "-o", str(page / "x" / "r.html")])
    assert done.exit_code == 1 and "RDT108" in done.output


def test_a_report_never_replaces_its_plan(page: Path, tmp_path: Path) -> None:
    plan = page.with_name("p")
    before = plan.read_bytes()
    (tmp_path / "link").symlink_to(plan)
    for output in (plan, tmp_path / "link"):
        done = CliRunner().invoke(main, ["report", str(plan), "-o", str(output)])
        assert done.exit_code == 1 and "RDT108" in done.output and "which this command reads" in done.output
    assert plan.read_bytes() == before


def test_an_unsound_plan_is_said_to_be_one(plan: FleetPlan, tmp_path: Path) -> None:
    write_plan(evolve(plan, manifest_digest="0" * 64), tmp_path / "p")
    done = CliRunner().invoke(main, ["report", str(tmp_path / "p"), "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0 and "unsound, 1 finding: run `rdtplan verify" in done.output, done.output


# -- in a browser ----------------------------------------------------------------------------------------------------

PROBE = """
<script>
window.addEventListener("error", e => { (window.failures = window.failures || []).push(e.message); });
</script>
"""
DRIVE = """
<script>
const result = { failures: window.failures || [], widths: [document.documentElement.scrollWidth, innerWidth] };
const visible = () => [...document.querySelectorAll("#weight-list details")].filter(d => !d.hidden).length;
const type = text => {
  const s = document.getElementById("search");
  s.value = text;
  s.dispatchEvent(new Event("input"));
  return [visible(), document.getElementById("matches").textContent];
};
const bars = ["load", "chunk", "pool", "ring"].map(x => `#${x}-bars .track`);
const queries = ["#tiles .tile", "#matrix .cell", ...bars, "#strips .strip", "#finding-list li"];
result.counts = Object.fromEntries(queries.map(q => [q, document.querySelectorAll(q).length]));
result.all = visible();
result.up = type("up_proj");
result.exact = type("model.layers.2.mlp.experts.3.up_proj.weight");
result.absent = type("model.layers.9.mlp.experts.3.up_proj.weight");
result.parameter = type("w13_weight");
result.none = type("no such weight");
type("");
document.querySelector("#weight-list details").open = true;
result.table = document.querySelector("#weight-list details table").rows.length;
result.scripts = document.querySelectorAll("script").length;
result.title = document.title;
result.background = getComputedStyle(document.body).backgroundColor;
const out = document.createElement("pre");
out.id = "result";
out.textContent = JSON.stringify(result);
document.body.append(out);
</script>
"""


FRAME = """<!doctype html><html><body><iframe id=f style="width:WIDTHpx;height:900px;border:0"></iframe><script>
const f = document.getElementById("f");
f.onload = () => {
  const r = document.createElement("pre");
  r.id = "outer";
  r.textContent = f.contentDocument.getElementById("result").textContent;
  document.body.append(r);
};
f.srcdoc = PAGE;
</script></body></html>"""


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")], ids=lambda p: f"{p[0]}-{p[1]}")
def driven(request: pytest.FixtureRequest, page: Path, tmp_path: Path) -> Iterator[tuple[int, str, dict[str, object]]]:
    """What the page shows and does in headless Chromium. Windows have a least width, so it is shown in a frame."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    width, scheme = request.param
    inner = page.read_text().replace("<body>", "<body>" + PROBE).replace("</body>", DRIVE + "</body>")
    frame = FRAME.replace("WIDTH", str(width)).replace("PAGE", json.dumps(inner).replace("<", "\\u003c"))
    (tmp_path / "frame.html").write_text(frame)
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--window-size=1400,1000", "--virtual-time-budget=4000", "--dump-dom"]
    command += ["--blink-settings=preferredColorScheme=" + ("0" if scheme == "dark" else "1")]
    done = subprocess.run([*command, f"file://{tmp_path}/frame.html"], capture_output=True, text=True, timeout=200)
    found = re.search(r'<pre id="outer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    yield width, scheme, json.loads(html.unescape(found[1]))


def test_the_page_works_in_a_browser(driven: tuple[int, str, dict[str, object]], plan: FleetPlan) -> None:
    """Elements are there, the search finds, nothing throws, and the page is no wider than its window."""
    width, scheme, result = driven
    assert result["failures"] == []
    assert result["widths"][0] <= width == result["widths"][1]  # type: ignore[index]
    counts = result["counts"]
    assert counts["#tiles .tile"] == 6 and counts["#matrix .cell"] == 4 * 4  # type: ignore[index]
    assert all(n for n in counts.values()), counts  # type: ignore[attr-defined]
    assert result["up"] == [3, "3 forms, 10 names."], "two by their names, one by the parameter gate_up_proj"
    assert result["exact"] == [1, "1 form, 8 names."] and result["parameter"][0] == 2  # type: ignore[index]
    assert result["absent"][0] == 0 and result["none"] == [0, "No weight matches."]  # type: ignore[index]
    assert result["all"] > 10 and result["table"] >= 2  # type: ignore[operator]
    dark = result["background"] == "rgb(18, 23, 28)"
    assert dark == (scheme == "dark"), result["background"]
