"""The page in a real browser: charts drawn, tables sorted and filtered, nothing asked of any network."""

import json
import shutil
from pathlib import Path

import pytest

from archlab.report import html
from archlab.report.charts import against_context, pareto, slices
from archlab.report.comparison import read
from archlab.report.files import write
from archlab.report.group import Group, styles

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


def leave(folder: Path, attn: str, seed: int, loss: float, **more) -> None:
    folder.mkdir(parents=True)
    record = {
        "status": "ok", "seed": seed, "variant/attn": attn, "variant/ffn": "swiglu", "variant/name": f"{attn}+swiglu",
        "variant/hash": attn, "config_hash": f"{attn}-{seed}", "overrides": "", "data/fingerprint": "f" * 64,
        "data/name": "stdlib", "quality/val_loss": loss, "quality/test_loss": loss, "params/total": 1000,
        "cache/bytes_at/1024": 512, "cache/bytes_at/8192": 4096 if attn == "gqa" else 512,
        "latency/decode_ms_per_token_p50/1024": 1.0, "latency/decode_ms_per_token_p50/8192": 2.0,
    } | more  # fmt: skip
    (folder / "result.json").write_text(json.dumps(record), encoding="utf-8")
    rows = [{"step": s, "train/loss": loss + 1 / (s + 1), "model/router_load": 0.5} for s in range(300)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.fixture
def page(tmp_path):
    for i, (attn, seed, loss) in enumerate(
        [("gqa", 0, 2.0), ("gqa", 1, 2.1), ("<script>alert(1)</script>", 0, 1.5), ("=cmd()", 0, 9.0)]
    ):
        leave(tmp_path / "runs" / str(i), attn, seed, loss)
    write(read([tmp_path / "runs"]), tmp_path / "out")
    return tmp_path / "out" / "report.html"


@pytest.fixture
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield chromium
        chromium.close()


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_works_in_a_browser(page, browser, width, scheme):
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, asked = [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.as_uri())
    for chart in tab.query_selector_all(".chart"):
        chart.scroll_into_view_if_needed()
        tab.wait_for_function("el => el.dataset.drawn === '1'", arg=chart)
    assert len(tab.query_selector_all(".chart .main-svg")) >= 5
    assert tab.evaluate("document.documentElement.dataset.theme") == scheme
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "the page itself never scrolls sideways"
    )

    at = [th.inner_text() for th in tab.query_selector_all("th")].index("val loss")
    column = (
        "[...document.querySelector('table').tBodies[0].rows].filter(r => !r.hidden).map(r => r.cells[%d].textContent)"
    )
    tab.locator("th button").nth(at).focus()
    tab.keyboard.press("Enter")
    ascending = [float(text.split("±")[0]) for text in tab.evaluate(column % at)]
    assert ascending == sorted(ascending)
    tab.keyboard.press("Enter")
    assert [float(t.split("±")[0]) for t in tab.evaluate(column % at)] == sorted(ascending, reverse=True)

    tab.fill("input[type=search]", "SCRIPT")
    assert tab.evaluate(column % 0) == ["<script>alert(1)</script>+swiglu"], "a name is text"
    tab.fill("input[type=search]", "")
    tab.locator("summary").first.click()
    tab.locator("input[type=checkbox]").nth(at - 1).uncheck()
    assert not tab.locator("th").nth(at).is_visible()

    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") != scheme
    assert said == []
    assert all(url.startswith(("file:", "blob:", "data:")) for url in asked), asked


def test_a_formula_is_text_in_the_tables(page):
    for name in ("report.csv", "records.csv"):
        cells = (page.parent / name).read_text(encoding="utf-8")
        assert "'=cmd()" in cells
        assert ",=cmd()" not in cells
        assert not cells.startswith("=")


def test_the_parquet_file_holds_every_record(page):
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(page.parent / "records.parquet")
    assert table.num_rows == 4
    assert sorted(table["quality/val_loss"].to_pylist()) == [1.5, 2.0, 2.1, 9.0]


def test_a_name_cannot_end_the_script(tmp_path):
    chart = against_context(
        [Group("</script><b>", [{"cache/bytes_at/1": 1, "cache/bytes_at/2": 2}], [tmp_path], 1)],
        "cache/bytes_at",
        "t",
        "y",
    )
    out = html.write(
        tmp_path / "page.html", title="</title>", says="&", sections=[html.Section("s", figures=[chart])], sources=[]
    ).read_text(encoding="utf-8")
    assert "</script><b>" not in out
    assert "<title>&lt;/title&gt;</title>" in out


def test_the_front_is_what_none_beats_in_both():
    points = [(1.0, 5.0), (2.0, 3.0), (3.0, 4.0), (4.0, 1.0), (2.0, 9.0)]
    assert pareto(points, lower_is_better=True) == [(1.0, 5.0), (2.0, 3.0), (4.0, 1.0)]
    assert pareto(points, lower_is_better=False) == [(1.0, 5.0), (2.0, 9.0)]


def test_a_variant_keeps_its_style_and_no_two_share_one():
    many = [f"v{i}" for i in range(40)]
    found = styles(many)
    assert found["v0"] == styles(["v0", "other"])["v0"]
    assert len({(s.colour, s.symbol, s.dash) for s in found.values()}) == 40


def test_slices_are_a_row_a_variant(tmp_path):
    records = [{"quality/test_accuracy_at/distance/4": 0.5, "quality/test_accuracy_at/distance/8": 1.0}]
    (chart,) = slices([Group("a", records, [tmp_path], 1), Group("b", [], [], 1)])
    assert list(chart.data[0].z[0]) == [0.5, 1.0]
    assert list(chart.data[0].y) == ["a"]
