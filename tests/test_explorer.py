"The explorer: what was recorded reaches the browser unchanged; every panel follows; nothing comes from elsewhere."
import base64
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from conftest import visit
from PIL import Image
from test_lab import lab  # noqa: F401  a fixture

from fedinterp.autopsy import Autopsy
from fedinterp.core import InputError, RunError
from fedinterp.explorer import PANELS, Explorer, State, _script, choices, first_state, found_in
from fedinterp.run import create
from fedinterp.table import table
from fedinterp.trace import SHOWN, calls, example, newest, read_found, trace_of, unpack_trace

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">&\"'"


@pytest.fixture(scope="module")
def found(): return example()

def kept(found): return Autopsy(found.tables, found.verdict, found.pairs, found.settings, found.thumbnails)


def test_a_trace_gives_back_every_table_value_for_value(found):
    trace = trace_of(found)
    again = unpack_trace(trace.pack())
    assert set(again.tables) == set(found.tables) & set(SHOWN)
    for name, frame in again.tables.items():
        assert list(frame) == list(trace.tables[name])
        for column in set(found.tables[name]): assert frame[column].equals(found.tables[name][column].astype(frame[column].dtype)), (name, column)
    assert np.array_equal(again.pictures, found.thumbnails) and again.meta == json.loads(json.dumps(trace.meta))


def test_equal_autopsies_give_equal_bytes_and_texts_that_are_missing_become_empty():
    assert trace_of(example()).pack() == trace_of(example()).pack()
    frame = table([dict(cls="a", metric="m", value=1., note="x"), dict(cls="b", metric="m", value=np.nan)])
    again = unpack_trace(trace_of(SimpleNamespace(tables=dict(heads=frame), verdict="", pairs=[("r", None)], settings={}, thumbnails=None)).pack())
    assert again.tables["heads"].note.tolist() == ["x", ""] and np.isnan(again.tables["heads"].value[1])


def test_a_foreign_a_damaged_and_a_newer_trace_are_refused_in_a_sentence(found, monkeypatch):
    content = trace_of(found).pack()
    for wrong, words in ((b"PK\3\4", "not a trace"), (content[:-20], "damaged")):
        with pytest.raises(InputError, match=words): unpack_trace(wrong)
    monkeypatch.setattr("fedinterp.trace.SCHEMA", 0)
    with pytest.raises(InputError, match="update fedinterp"): unpack_trace(content)


def test_a_kept_autopsy_is_read_as_it_was_saved_and_the_newest_of_a_run_is_taken(found, tmp_path):
    for i, name in enumerate(("one", "two")): kept(found).save(tmp_path/"run"/"autopsies"/name)
    (tmp_path/"run/autopsies/broken.partial").mkdir()
    os.utime(tmp_path/"run/autopsies/one/autopsy.json", (1, 1))
    assert newest(tmp_path/"run").name == "two" and newest(tmp_path/"run", "other") is None
    again = read_found(newest(tmp_path/"run", "iid"))
    assert trace_of(again).pack() == trace_of(found).pack()
    with pytest.raises(RunError, match="no autopsy that can be read"): read_found(tmp_path)


def test_a_run_without_an_autopsy_shows_its_rounds_and_the_calls_that_are_missing(tmp_path, config):
    run = create(tmp_path/"skewed", config, [np.arange(3)])
    run.metrics = lambda: table([dict(run="skewed", round=r, client="server", cls=c, metric="accuracy", value=.5, n=10) for r in range(3) for c in ("all", "a")])
    ex = Explorer(run)
    assert set(ex.recorded.tables) == {"metrics"} and ex.state == State(cls="a", round=2, metric="accuracy")
    assert repr(ex).startswith(f"Explorer(Run.open({str(tmp_path/'skewed')!r}), state=State(")
    assert ex.recorded.meta["calls"]["heads"] == f"autopsy(Run.open({str(tmp_path/'skewed')!r}), diagnostics='head')"
    assert set(calls(example())) >= {"circuits", "channels", "heads", "concepts", "probes", "overlap"}
    ex.close()


def test_what_is_no_run_or_another_reference_is_refused(found):
    with pytest.raises(InputError, match="list is neither a Run"): Explorer([1])
    with pytest.raises(InputError, match="compares with iid, not with x"): found_in(found, "x")


def test_the_state_goes_round_and_a_wrong_one_is_refused_and_changes_nothing(found):
    ex = Explorer(found)
    whole = State(client="reference", cls="boot", round=2, compare="server", ablation="mean", size="0.5", metric="J, calibrated", concept=7, image=3, channel="conv1:2")
    ex.state = whole
    assert ex.state == whole and eval(repr(ex)[len("Explorer(found, state="):-1]) == whole
    assert Explorer(found, state=ex.state).state == whole
    for wrong, words in ((dict(cls="boots"), "unknown class 'boots'.*did you mean 'boot'"), (dict(client="client 9"), "unknown model"), (dict(round=77), "round 77 was not examined"),
                         (dict(concept=40), "no concept 40: they are numbered from 0 to 23"), (dict(colour=1), "unknown field of the state 'colour'"), (3, "a state is a State")):
        with pytest.raises(InputError, match=words): ex.state = wrong
    assert ex.state == whole
    ex.state = dict(round=1)
    assert ex.state == replace(whole, round=1)


def test_a_view_begins_at_the_class_that_lost_most_beside_the_reference(found):
    lost = found.tables["decomposition"].query("metric == 'loss' and cls != 'all'").set_index("cls").value
    assert first_state(trace_of(found)) == State(cls=lost.idxmax(), round=4, compare="reference", ablation="mean", size="0.25")
    assert set(asdict(State())) > set(choices(trace_of(found)))


def test_the_plain_table_beside_the_widget_has_the_random_circuits_and_no_markup_of_names(found):
    ex = Explorer(example(names=(HOSTILE, "b")))
    bundle, _ = ex._repr_mimebundle_()
    assert bundle["text/html"].count("random circuits") >= 2 and "<img" not in bundle["text/html"] and "<script" not in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle and bundle["text/plain"].startswith("Explorer(found, state=State(")


def test_views_and_traces_load_without_torch_and_without_a_network_address():
    code = ("import sys\nfrom fedinterp.explorer import Explorer\nfrom fedinterp.trace import example\nExplorer(example())\n"
            "assert 'torch' not in sys.modules and 'altair' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|\bimport\b.*from|innerHTML|\beval\b", _script())


# ---------------------------------------------------------------- in a browser

@pytest.fixture(scope="module")
def page_file(found, tmp_path_factory): return Explorer(found).to_html(tmp_path_factory.mktemp("page")/"explorer.html")


class Visit:
    "A page that was opened; what it asked for outside of itself, and what it said."
    def __init__(self, chromium, path, link="", **options):
        address = SimpleNamespace(as_uri=lambda: path.as_uri() + link)
        self.tab, self.asked, self.said = visit(chromium, address, **{"viewport": dict(width=1300, height=900), **options})
        self.tab.wait_for_selector("html[data-drawn]", timeout=60_000)

    def __enter__(self): return self
    def __exit__(self, *error):
        self.tab.context.close()
        if not any(error): assert (self.asked, self.said) == ([], [])  # nothing from elsewhere, and not even a warning

    def __call__(self, selector): return self.tab.locator(selector)
    def value(self, key): return self.tab.eval_on_selector(f"[data-key={key}]", "node => node.value")
    def after(self, act):
        "Act, and wait for the next drawing."
        before = self.tab.evaluate("document.documentElement.dataset.drawn")
        act()
        self.tab.wait_for_function("before => document.documentElement.dataset.drawn !== before", arg=before)
    def press(self, *keys):
        for key in keys: self.after(lambda: self.tab.keyboard.press(key))
    def rows(self, panel):
        "What the panel's CSV holds."
        with self.tab.expect_download() as download: self(f"[data-panel={panel}] [data-do=csv]").click()
        return pd.read_csv(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8")), dtype=dict(client=str, budget=str))


def figures(found, run="skewed", client="server", cls="boot", size="0.25"):
    rows = found.tables["circuits"].query("run == @run and client == @client and cls == @cls and budget == @size and of == 'circuit'").set_index("metric")
    return {name: "{} [{}, {}]".format(*(f"{rows.loc[metric, c]:.2f}" for c in ("value", "lo", "hi"))) for name, metric in (("AUROC", "AUROC"), ("TPR", "TPR, calibrated"), ("FPR", "FPR, calibrated"))}


def test_a_click_on_a_cell_is_followed_by_every_panel(chromium, page_file, found):
    with Visit(chromium, page_file) as view:
        for client, run, cls in (("reference", "iid", "boot"), ("server", "skewed", "shirt")):
            view.after(view(f"[data-panel=matrix] [data-client='{client}'][data-cls={cls}]").click)
            assert (view.value("client"), view.value("cls")) == (client, cls)
            for name, text in figures(found, run, cls=cls).items(): assert view(f"[data-figure={name}]").inner_text() == text
            kept = found.tables["channels"].query("run == @run and cls == @cls and budget == .25 and kept")
            assert f"kept: {len(kept)}" in view("[data-panel=circuit] .fi-legend").inner_text()
            for panel in ("sizes", "rounds", "concepts"): assert cls in view(f"[data-panel={panel}] .fi-axis").inner_text()
            assert view("[data-panel=head] .fi-on").text_content() == cls
            assert cls in view(".fi-live").inner_text()


def test_what_was_not_measured_is_hatched_and_named_and_never_zero(chromium, page_file):
    with Visit(chromium, page_file) as view:
        cell = view("[data-panel=matrix] [data-client='client 1'][data-cls=coat]")
        assert "not measured" in cell.get_attribute("data-tip") and "trained on" in cell.get_attribute("data-tip") and cell.locator("text").count() == 0
        view.after(cell.click)
        for panel in ("verdict", "circuit", "sizes", "head"): assert "Nothing of this kind was computed for client 1" in view(f"[data-panel={panel}]").inner_text()
        assert "diagnostics='circuits'" in view("[data-panel=verdict] pre").inner_text()


def test_sufficiency_is_drawn_with_false_positives_and_with_random_circuits(chromium, page_file):
    with Visit(chromium, page_file) as view:
        tips = view("[data-panel=verdict] svg[role=img]").first.evaluate("svg => [...svg.querySelectorAll('[data-tip]')].map(n => n.dataset.tip).join('|')")
        assert {"TPR", "FPR"} <= set(re.findall("TPR|FPR", tips)) and tips.count("random circuits") == 2
        rows = view.rows("sizes")
        assert {"circuit", "random"} <= set(rows["of"]) and len(rows[rows["of"] == "random"]) == 3


def test_everything_can_be_done_by_keyboard_and_the_keys_stay_in_the_view(chromium, page_file):
    with Visit(chromium, page_file) as view:
        view.tab.evaluate("window.leaked = []; document.addEventListener('keydown', e => leaked.push(e.key))")
        view("[data-panel=matrix]").focus()
        view.after(view("[data-panel=matrix] [data-client=server][data-cls=boot]").click)
        view("[data-panel=matrix]").focus()
        view.press("ArrowRight", "ArrowDown", "[", "[")
        assert [view.value(k) for k in ("cls", "client", "round")] == ["coat", "reference", "2"]
        view.press("]", "3")
        assert view.value("round") == "3" and view.tab.evaluate("document.activeElement.dataset.panel") == "circuit"
        view.press("Enter")
        first = view("[data-focus]").get_attribute("data-focus")
        view.press("ArrowDown")
        assert first.startswith("conv1:") and view("[data-focus]").get_attribute("data-focus") != first
        view.press("ArrowRight")
        assert view("[data-focus]").get_attribute("data-focus").startswith("conv2:")
        view.press("Escape")
        assert view("[data-focus]").count() == 0
        view.press("4", "ArrowRight")
        assert view.value("size") == "0.5"
        assert view.tab.evaluate("leaked") == []


def test_lists_of_a_channel_hold_its_edges_strongest_first(chromium, page_file, found):
    edges = found.tables["edges"].query("run == 'skewed' and cls == 'boot' and site == 'conv2'")
    channel = int(edges.channel.iloc[0])
    with Visit(chromium, page_file, f"#cls=boot&channel=conv2:{channel}") as view:
        shown = view("[data-panel=circuit] ol").first.locator(".fi-num").all_inner_texts()
        assert shown == [f"{v:.2f}" for v in edges[edges.channel == channel].value.sort_values(ascending=False)]
        assert "logit of boot" in view("[data-panel=circuit] ol").last.inner_text()


def test_thumbnails_belong_to_their_concept_after_a_search_a_step_and_a_brush(chromium, page_file, found):
    gallery = found.tables["gallery"]
    with Visit(chromium, page_file) as view:
        def holds():
            concept = int(view("[data-concept]").get_attribute("data-concept"))
            for run in ("run", "reference"):
                want = gallery.query("run == @run and concept == @concept and metric == 'top'").sort_values("rank").image.tolist()
                strip = view(f".fi-strip[data-run={run}][data-kind=top] canvas")
                assert [int(c.get_attribute("data-image")) for c in strip.all()] == want
                picture = Image.open(io.BytesIO(base64.b64decode(strip.first.evaluate("c => c.toDataURL().split(',')[1]"))))
                assert np.array_equal(np.asarray(picture)[..., 0], found.thumbnails[want[0]])
            return concept
        holds()
        view("[data-panel=concepts] input[type=search]").fill("17")
        view.after(lambda: view("[data-panel=concepts] input[type=search]").press("Enter"))
        assert holds() == 17
        box = view(".fi-map").bounding_box()
        view("[data-panel=concepts]").scroll_into_view_if_needed()
        box = view(".fi-map").bounding_box()
        view.tab.mouse.move(box["x"] + 2, box["y"] + 2)
        view.tab.mouse.down()
        view.tab.mouse.move(box["x"] + box["width"] * .5, box["y"] + box["height"] * .8)
        view.after(view.tab.mouse.up)
        text = view(".fi-pickers").inner_text()
        inside = int(re.search(r"(\d+) brushed", text)[1])
        seen = {holds()}
        for _ in range(inside):
            if len(seen) < inside: view.after(view("[data-do=next]").click)
            seen.add(holds())
        assert 0 < inside < 24 and len(seen) == inside


def test_the_csv_is_exactly_the_rows_of_the_table_and_the_table_shows_them(chromium, page_file, found):
    with Visit(chromium, page_file) as view:
        view.after(view("[data-panel=matrix] [data-client=reference][data-cls=dress]").click)
        rows, heads = view.rows("head"), found.tables["heads"].query("run == 'iid'")
        pd.testing.assert_frame_equal(rows.sort_values(["cls", "metric"], ignore_index=True), heads.sort_values(["cls", "metric"], ignore_index=True), check_dtype=False, rtol=0, atol=0)
        trials = view.rows("verdict")
        want = found.tables["circuits"].query("cls == 'dress' and budget == '0.25'")
        keys = ["run", "metric", "of"]
        merged = trials.merge(want, on=keys, suffixes=("", "_want"))
        assert len(merged) == len(trials) == len(trials.drop_duplicates(keys)) and (merged.value == merged.value_want).all() and (merged.lo == merged.lo_want).all()
        view("[data-panel=verdict] [data-do=table]").click()
        assert view("[data-panel=verdict] tbody tr").count() == len(trials)
        view.after(view("[data-panel=matrix] [data-client=reference][data-cls=coat]").click)  # an open table follows as well
        assert "coat" in view("[data-panel=verdict] tbody").inner_text() and "dress" not in view("[data-panel=verdict] tbody").inner_text()


def test_a_drawing_is_saved_as_a_picture_that_stands_by_itself(chromium, page_file, tmp_path):
    with Visit(chromium, page_file) as view:
        for panel, kind in (("verdict", "svg"), ("circuit", "png")):
            with view.tab.expect_download() as download: view(f"[data-panel={panel}] [data-do=picture]").click()
            assert download.value.suggested_filename == f"{panel}-server-{view.value('cls')}.{kind}"
            download.value.save_as(tmp_path/f"p.{kind}")
        text = (tmp_path/"p.svg").read_text(encoding="utf-8")
        assert "AUROC" in text and "class=" not in text and "var(" not in text and ElementTree.fromstring(text).tag.endswith("svg")
        assert len(np.unique(np.asarray(Image.open(tmp_path/"p.png"))[..., :3].reshape(-1, 3), axis=0)) > 10


def test_the_link_keeps_the_state_and_what_it_cannot_hold_is_passed_over(chromium, page_file):
    with Visit(chromium, page_file, "#cls=coat&client=reference&round=1&concept=5&size=9&compare=nobody") as view:
        assert [view.value(k) for k in ("cls", "client", "round", "size", "compare")] == ["coat", "reference", "1", "0.25", "reference"]
        assert view("[data-concept]").get_attribute("data-concept") == "5"
        view.after(lambda: view("[data-key=cls]").select_option("shirt"))
        view.tab.wait_for_function("() => location.hash.includes('cls=shirt')")
        assert "client=reference" in view.tab.evaluate("location.hash")


def test_names_with_markup_stay_text(chromium, tmp_path):
    names = HOSTILE, "b", "ملابس", "c" * 80
    path = Explorer(example(names=names)).to_html(tmp_path/"h.html", title=HOSTILE)
    with Visit(chromium, path) as view:
        assert view.tab.title() == HOSTILE and view("img").count() == 0
        view.after(lambda: view("[data-key=cls]").select_option(HOSTILE))
        assert HOSTILE in view(".fi-word").inner_text() and view("img").count() == 0
        assert view.rows("head").cls.unique().tolist() == ["all", *names]


def test_sixty_classes_scroll_in_their_panel_and_a_narrow_page_does_not(chromium, tmp_path):
    path = Explorer(example(names=tuple(f"class number {i}" for i in range(60)), rounds=2)).to_html(tmp_path/"m.html")
    with Visit(chromium, path, viewport=dict(width=380, height=800)) as view:
        assert view.tab.evaluate("document.documentElement.scrollWidth") <= 380
        assert view("[data-panel=matrix] .fi-scroll").evaluate("n => n.scrollWidth > n.clientWidth")


def test_dark_and_light_follow_the_page_and_the_canvas_is_drawn_again(chromium, page_file):
    with Visit(chromium, page_file, color_scheme="light") as view:
        shot = lambda: view("[data-panel=circuit] canvas").evaluate("c => c.toDataURL()")
        light = shot()
        view.after(lambda: view.tab.emulate_media(color_scheme="dark"))
        assert view(".fi").get_attribute("data-theme") == "dark" and shot() != light
        view.after(lambda: view.tab.evaluate("document.body.dataset.jpThemeLight = 'true'"))  # JupyterLab's word counts for more than the system's
        assert view(".fi").get_attribute("data-theme") == "light" and shot() == light


def test_the_projector_shows_one_panel_in_large_type_and_play_goes_through_the_rounds(chromium, page_file):
    with Visit(chromium, page_file) as view:
        view.after(view("[data-do=projector]").click)
        view("[data-panel=matrix]").focus()
        view.press("5")
        shown = [p for p in PANELS if view(f"[data-panel={p}]").is_visible()]
        assert shown == ["head"] and view(".fi").evaluate("n => getComputedStyle(n).fontSize") == "22px"
        view("[data-do=play]").click()
        view.tab.wait_for_function("() => document.querySelector('[data-key=round]').value === '1'")
        view("[data-do=play]").click()
        assert view("[data-do=play]").get_attribute("aria-label") == "play"


def test_without_scripts_the_page_still_has_its_figures(chromium, page_file, found):
    tab = chromium.new_context(java_script_enabled=False).new_page()
    tab.goto(page_file.as_uri())
    assert tab.locator("main tr").count() == 5 and found.verdict in tab.inner_text("main")
    tab.context.close()
    assert page_file.stat().st_size < 5_000_000 and "default-src 'none'" in page_file.read_text(encoding="utf-8")


# ---------------------------------------------------------------- in JupyterLab

CELLS = ("from fedinterp.explorer import Explorer\nfrom fedinterp.trace import example\nfrom ipywidgets import IntSlider, jslink\n"
         "ex, slider = Explorer(example()), IntSlider(4, 0, 4)\nlink = jslink((slider, 'value'), (ex, 'round'))\ndisplay(slider)\nex", "print('now', ex.state)\nex.state = dict(size='0.5')")

def test_in_jupyterlab_the_kernel_follows_the_view_the_keys_stay_in_it_and_it_outlives_the_kernel(chromium, lab):  # noqa: F811
    (address, work), foreign, said = lab, [], []
    cell = lambda i, source: dict(cell_type="code", id=f"c{i}", source=source, metadata={}, outputs=[], execution_count=None)
    kernel = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
    (work/"first.ipynb").write_text(json.dumps(dict(cells=[cell(i, s) for i, s in enumerate(CELLS)], metadata=kernel, nbformat=4, nbformat_minor=5)))
    tab = chromium.new_context(viewport=dict(width=1500, height=1000)).new_page()
    def guard(route):
        if route.request.url.startswith((address, "data:", "blob:")): return route.continue_()
        foreign.append(route.request.url)
        route.abort()
    tab.route(re.compile(".*"), guard)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(f"{address}/lab/workspaces/auto-e/tree/first.ipynb?token=t&reset")
    tab.wait_for_selector(".jp-Toolbar-kernelName:has-text('Python 3')", timeout=90_000)
    for _ in range(6):  # a kernel has its name before it is there, and what is asked of it too early is lost
        tab.click("text=Run >> nth=0")
        tab.click("[data-command='runmenu:run-all']")
        try: tab.wait_for_selector(".fi-word", timeout=10_000); break
        except Exception: pass
    tab.wait_for_selector(".jp-OutputArea-output:has-text('now State')", timeout=60_000)
    tab.wait_for_selector(".fi-badge[data-word=live]", timeout=20_000)
    tab.locator("[data-panel=matrix] [data-client=reference][data-cls=coat]").click()
    tab.locator("[data-panel=matrix]").focus()
    for key in ("[", "b", "d", "d"): tab.keyboard.press(key)
    assert tab.locator(".jp-CodeCell").count() == 2
    if os.environ.get("FEDINTERP_SHOTS"): tab.screenshot(path=os.environ["FEDINTERP_SHOTS"] + "/explorer-lab.png")
    tab.locator(".jp-CodeCell .jp-InputArea-editor").nth(1).click()
    tab.keyboard.press("Control+Enter")
    tab.wait_for_selector(".jp-OutputArea-output:has-text(\"client='reference', cls='coat', round=3\")", timeout=30_000)
    tab.wait_for_function("() => document.querySelector('.fi [data-key=size]').value === '0.5'")  # set by the cell
    assert tab.inner_text(".widget-readout") == "3"  # joined to the round
    tab.click("text=Kernel >> nth=0")
    tab.click("[data-command='kernelmenu:shutdown']")
    tab.locator("[data-panel=matrix] [data-client=server][data-cls=dress]").click()
    tab.wait_for_function("() => document.querySelector('.fi-word').textContent.includes('dress, server')")
    tab.context.close()
    assert (foreign, said) == ([], [])
