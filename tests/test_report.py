"The report: one file that loads nothing, whatever the names in it; seen in a real browser."
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import visit

from fedinterp.charts import STEPS, fig_rounds
from fedinterp.core import InputError, StorageError
from fedinterp.autopsy_report import FIGURES, autopsy_report, headline
from fedinterp.report import Figure, Grid, Section, _bundle, page, write_report
from fedinterp.table import table

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">&\"'"


def around(value, half=.02, n=500): return dict(value=value, lo=value - half, hi=value + half, n=n)

def autopsy_of(skewed="skewed", hostile="a", verdict="v"):
    "A small autopsy, as far as a report reads it."
    runs, classes = ("iid", skewed), (hostile, "b", "c")
    metrics = [dict(run=run, round=r, cls=c, value=.2 * r, n=500) for run in runs for r in range(4) for c in ("all", *classes)]
    counts = [dict(run=run, client=k, cls=c, value=k * len(c)) for run in runs for k in range(3) for c in classes]
    heads = [dict(run=run, metric=m, **around(.6)) for run in runs for m in STEPS[:-1]]
    probes = [dict(run=run, metric=m, **around(v)) for run in runs
              for m, v in {"native": .6, "probe": .7, "floor untrained": .5, "floor pixels": .4, "above floor": .2}.items()]
    split = {"reference accuracy": .7, "accuracy": .6, "loss": .1, "backbone loss": .01, "read-out loss": .09, "preservation": float("nan")}
    evidence = [dict(metric="probe", asks="is it there?", verdict=hostile, note=hostile, **around(.8))]
    tables = dict(metrics=table(metrics, client="server", metric="accuracy"), evidence=table(evidence),
                  counts=table(counts, metric="samples"), probes=table(probes, cls="all", budget=200), heads=table(heads, cls="all", budget=200),
                  decomposition=table([dict(run=skewed, metric=m, **around(v)) for m, v in split.items()], cls="all"))
    configs = {run: dict(dataset="tiny", clients=3, seed=7) for run in runs}
    return SimpleNamespace(tables=tables, verdict=verdict, pairs=[(skewed, "iid")], settings=dict(configs=configs, budget=200), thumbnails=None)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    "A report whose verdict, run and class names try to break out of the page."
    return autopsy_report(autopsy_of(HOSTILE, HOSTILE, HOSTILE), tmp_path_factory.mktemp("report")/"report.html")

def own(path): return path.read_text(encoding="utf-8").replace(_bundle(), "")


def test_nothing_on_the_page_points_out_of_it(hostile):
    tags = re.findall(r"<(?:a|img|link|script|iframe|object|source)\b[^>]*>", own(hostile))
    assert tags and not [t for t in tags if re.search(r"(?:src|href)=\"(?!#|data:image/svg\+xml;base64,)", t)]
    assert "default-src 'none'" in own(hostile)


def test_hostile_text_stays_text(hostile):
    assert "<img src=x" not in own(hostile) and "<script>document" not in own(hostile)
    assert own(hostile).count("</script>") == own(hostile).count("<script")


def test_the_drawing_code_is_there_once_and_the_page_is_small(hostile):
    text = hostile.read_text(encoding="utf-8")
    assert text.count("window.vegaEmbed=") == 1 and text.count("<figure") == 7
    assert len(text) < 1_600_000


def test_every_caption_says_setting_and_seed(hostile):
    captions = re.findall("<figcaption>(.*?)</figcaption>", own(hostile))
    assert len(captions) == 7 and all("tiny" in c and "3 clients" in c and "seed 7" in c for c in captions)


def test_the_first_table_has_floors_and_the_bias_only_row_beside_the_accuracy():
    frame = headline(autopsy_of()).set_index("")
    assert frame.loc["native head"].tolist() == ["60.0 % [58.0, 62.0]"] * 2
    assert frame.loc["floor: untrained backbone", "skewed"] == "50.0 % [48.0, 52.0]"
    assert "bias only refitted" in frame.index
    assert frame.loc["lost in the backbone", "skewed"].endswith("not decided") and frame.loc["preservation", "skewed"] == "not decided"


def test_every_figure_carries_the_call_that_makes_it_and_what_was_not_asked_is_left_out(hostile):
    text = own(hostile)
    assert text.count("Show the call") == 7 and "fig_ladder(pd.concat(" in text and "fig_stitch" not in text
    assert [s for s, *_ in FIGURES if s == "Do they speak one language?"] and "Do they speak one language?" not in text


def test_the_same_tables_give_the_same_bytes(tmp_path):
    for name in "12": (tmp_path/name).mkdir()
    one, two = (autopsy_report(autopsy_of(), tmp_path/name).read_bytes() for name in ("1/r.html", "2/r.html"))
    assert one == two


def test_a_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    path = write_report(tmp_path/"r.html", "old", "v", [])
    before = path.read_bytes()
    def full(*args, **kwargs): raise OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match="No space left"): write_report(path, "new", "v", [])
    assert path.read_bytes() == before


def test_a_missing_folder_is_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(InputError, match="does not exist"): write_report(tmp_path/"no"/"r.html", "t", "v", [Section("s", (Figure(None, ""),))])


def test_tables_have_captions_and_headers_for_screen_readers():
    text = page("t", "v", [Section("s", (Grid(table([dict(run="a", metric="m", value=.5)]), "A caption"),))])
    assert "<caption>A caption</caption>" in text and text.count('scope="col"') == 3 and text.count('scope="row"') == 1


def test_reports_are_written_without_torch(tmp_path):
    code = f"import sys\nimport fedinterp.report as r\nassert 'pandas' not in sys.modules\nr.write_report({str(tmp_path/'r.html')!r}, 't', 'v', [])\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_charts_draw_offline_in_light_and_dark_and_follow_a_change(chromium, hostile):
    tab, asked, said = visit(chromium, hostile, color_scheme="light")
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        tab.wait_for_selector(f"html[data-drawn={scheme}]", timeout=60_000)
        assert tab.locator("figure svg.marks").count() == 7
        assert all(tab.locator(f"#figure-{i} svg.marks path").count() > 5 for i in range(1, 8))
        assert not tab.locator("img.still").first.is_visible()
    assert (asked, said) == ([], [])  # not even a warning
    assert tab.title() == "Erased, or misrouted?"
    tab.context.close()


def test_a_point_answers_to_the_pointer(chromium, hostile):
    tab, asked, _ = visit(chromium, hostile)
    tab.wait_for_selector("html[data-drawn]", timeout=60_000)
    tab.locator("#figure-3 svg.marks .mark-symbol.role-mark path").last.hover()
    tab.wait_for_selector("#vg-tooltip-element.visible", timeout=10_000)
    assert "95 % from" in tab.locator("#vg-tooltip-element").inner_text() and asked == []
    tab.context.close()


def test_figures_are_pictures_on_paper_and_where_scripts_do_not_run(chromium, hostile):
    tab, asked, _ = visit(chromium, hostile, java_script_enabled=False)
    assert tab.locator("img.still").count() == 7 and tab.locator("img.still").first.is_visible() and asked == []
    tab.context.close()
    tab, _, _ = visit(chromium, hostile)
    tab.wait_for_selector("html[data-drawn]", timeout=60_000)
    tab.emulate_media(media="print")
    assert tab.locator("img.still").first.is_visible() and not tab.locator("figure .live").first.is_visible()
    tab.context.close()


def test_a_page_too_narrow_for_a_chart_scrolls_the_chart_and_not_the_page(chromium, tmp_path):
    chart = fig_rounds(table([dict(run="a", round=r, metric="accuracy", value=r / 4) for r in range(4)]))
    tab, _, _ = visit(chromium, write_report(tmp_path/"r.html", "t", "v", [Section("s", (Figure(chart, "c"),))]), viewport=dict(width=360, height=700))
    tab.wait_for_selector("html[data-drawn]", timeout=60_000)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.context.close()
