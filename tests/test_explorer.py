"The explorer: what was recorded reaches the browser unchanged; every panel follows; nothing comes from elsewhere."
import base64
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from conftest import end, visit
from PIL import Image
from test_lab import READY, lab  # noqa: F401  the latter is a fixture

from fedinterp.autopsy import Autopsy
from fedinterp.core import InputError, RunError
from fedinterp.explorer import PANELS, STATIC, Explorer, State, _script, choices, first_state, found_in
from fedinterp.run import create
from fedinterp.table import table
from fedinterp.trace import SHOWN, calls, example, newest, read_found, together, trace_of, unpack_trace

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
    with pytest.raises(InputError, match="int is neither a Run"): Explorer([1])
    with pytest.raises(InputError, match="compares with iid, not with x"): found_in(found, "x")


def test_the_folder_of_a_run_is_refused_with_the_call_that_opens_it(tmp_path):
    (tmp_path/"config.json").write_text("{}")
    with pytest.raises(InputError, match="folder of a run, not of an autopsy: give Explorer Run.open"): Explorer(str(tmp_path))
    with pytest.raises(InputError, match="should be text"): Explorer(example()).to_html(None)


def without_rounds():
    "What an autopsy of plain models gives: no rounds, no clients."
    found = example(clients=1)
    found.tables = {k: table(f.drop(columns=["round", "client"], errors="ignore")) for k, f in found.tables.items() if k not in ("metrics", "counts")}
    return found


def test_the_table_beside_the_widget_is_of_the_state_s_round():
    found = example(clients=1, deep=True)
    found.tables["circuits"] = table(found.tables["circuits"].query("run != 'iid' or round == 4").sort_values("round", ascending=False))
    ex = Explorer(found, state=dict(round=2))
    rows = found.tables["circuits"].query("metric == 'AUROC' and of == 'circuit' and budget == '0.25' and cls == 'boot' and client == 'server'")
    said = {r: "{:.2f} [{:.2f}, {:.2f}]".format(*rows.query("run == @run and round == @r")[["value", "lo", "hi"]].iloc[0]) for run, r in (("skewed", 2), ("iid", 4))}
    shown = ex._repr_mimebundle_()[0]["text/html"]
    assert all(text in shown for text in said.values()) and "nearest to 2" in shown


def test_pictures_are_those_of_the_first_autopsy_that_has_some_and_answers_on_others_are_left_out(found):
    bare, other = example(seed=1), example(seed=2)
    for f, name in ((bare, "bare"), (other, "prox")):
        f.tables["answers"] = table(f.tables["answers"].assign(run=name))
        f.pairs = [(name, "iid")]
    bare.thumbnails, bare.tables = None, {k: t for k, t in bare.tables.items() if k != "answers"}
    both = together([bare, found, other])
    assert np.array_equal(both.thumbnails, found.thumbnails) and set(both.tables["answers"].run) == {"skewed", "iid"}


def test_two_strategies_lie_side_by_side_and_what_belongs_to_one_pair_stays_with_the_first(found):
    other = example(seed=3)
    for name, frame in other.tables.items():
        if "run" in frame and name not in ("concepts", "gallery"): other.tables[name] = table(frame.assign(run=frame.run.replace("skewed", "prox")))
    other.pairs, other.settings = [("prox", "iid")], dict(configs=dict(prox=dict(seed=0, strategy="fedprox"), iid=dict(seed=0, strategy="fedavg")))
    ex = Explorer([found, other])
    assert [s["name"] for s in ex.recorded.meta["subjects"]][:3] == ["server", "reference", "server of prox"] and "client 3 of prox" in choices(ex.recorded)["client"]
    trials = ex.recorded.tables["circuits"]
    assert set(trials.run) == {"skewed", "iid", "prox"} and len(ex.recorded.tables["concepts"]) == len(found.tables["concepts"])
    assert set(ex.recorded.tables["answers"].run) == {"skewed", "iid"}  # its pictures are others, under the same numbers
    assert repr(ex).startswith("Explorer([found, found], state=")
    with pytest.raises(InputError, match="an empty list shows nothing"): Explorer([])


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_is_a_figure_of_the_rows_that_it_shows_and_its_call_is_written_down(panel):
    import altair as alt
    ex = Explorer(example(clients=2, deep=True), state=State(client="server", cls="coat", round=3, compare="client 1 @ 2", size="0.25", ablation="mean"))
    chart = ex.figure(panel)
    assert isinstance(chart, alt.TopLevelMixin) and ex.code(panel).startswith("fig_") and "found.tables" in ex.code(panel)
    assert chart.to_dict()["datasets"] if hasattr(chart, "datasets") else chart.to_dict()
    with pytest.raises(InputError, match="did you mean 'verdict'"): ex.figure("verdicts")


def test_a_question_of_the_view_is_answered_or_refused_in_a_sentence(found, monkeypatch, tmp_path):
    ex, asked = Explorer(found), []
    assert ex._reply("noise") == ex._reply(dict(alive="?")) == dict(alive="yes")
    for run in (["skewed"], {}, None, 3): assert "not at hand" in ex._reply(dict(ask=dict(run=run)))["answer"]["error"]
    assert "open the explorer on the run" in ex._reply(dict(ask=dict(run="skewed"), number=1))["answer"]["error"]
    (tmp_path/"skewed").mkdir()
    ex.homes["skewed"] = tmp_path
    monkeypatch.setattr("fedinterp.explorer.lookup", lambda *name: lambda question, home: asked.append((question, home)) or dict(rows=[]))
    assert ex._reply(dict(ask=dict(run="skewed", what="head"), number=2)) == dict(answer=dict(rows=[]), number=2) and asked == [(dict(run="skewed", what="head"), tmp_path)]
    monkeypatch.setattr("fedinterp.explorer.lookup", lambda *name: lambda *args: 1 / 0)
    assert ex._reply(dict(ask=dict(run="skewed"), number=3))["answer"]["error"].startswith("ZeroDivisionError")
    assert "not at hand" in ex._reply(dict(ask=dict(run="../elsewhere")))["answer"]["error"]  # only runs that are shown are opened


def test_the_state_goes_round_and_a_wrong_one_is_refused_and_changes_nothing(found):
    ex = Explorer(found)
    whole = State(client="reference", cls="boot", round=2, compare="server", ablation="mean", size="0.5", metric="J, calibrated", concept=7, image=3, channel="conv1:2")
    ex.state = whole
    assert ex.state == whole and eval(repr(ex)[len("Explorer(found, state="):-1]) == whole
    assert Explorer(found, state=ex.state).state == whole
    for wrong, words in ((dict(cls="boots"), "unknown class 'boots'.*did you mean 'boot'"), (dict(client="client 9"), "unknown model"), (dict(round=77), "round 77 was not examined"),
                         (dict(concept=40), "no concept 40: they are numbered from 0 to 23"), (dict(colour=1), "unknown field of the state 'colour'"), (3, "a state is a State"),
                         (dict(image="7"), "image = '7' should be a whole number"), (dict(image=10**30), "should be a whole number"), (dict(round=True), "round = True should be"),
                         (dict(channel=5), "channel = 5 should be text"), (dict(compare="reference @ 9"), "choose from reference @ 0"),
                         (dict(compare="nobody @ 1"), "unknown model 'nobody @ 1': choose from client 0")):
        with pytest.raises(InputError, match=words): ex.state = wrong
    assert ex.state == whole
    ex.state = dict(round=np.int64(1))  # as a table gives it
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
        assert "diagnostics='circuits'" in view("[data-panel=verdict] .fi-missing pre").inner_text()


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


def test_images_are_hits_misses_and_false_alarms_of_the_chosen_circuit(chromium, page_file, found):
    rows = found.tables["answers"].query("run == 'skewed' and cls == 'boot' and budget == '0.5' and of == 'circuit'")
    own, yes = rows.truth == "boot", rows.value > 0
    want = {"hits": rows[own & yes].sort_values("value", ascending=False), "misses": rows[own & ~yes].sort_values("value"), "false alarms": rows[~own & yes].sort_values("value", ascending=False)}
    with Visit(chromium, page_file, "#cls=boot&size=0.5&client=server&compare=reference") as view:
        for kind, group in want.items():
            part = view(f"[data-kind='{kind}']")
            assert [int(n) for n in part.locator("[data-image]").evaluate_all("nodes => nodes.map(n => n.dataset.image)")] == group.image.tolist()
            assert f"{len(group)} of {(own if kind != 'false alarms' else ~own).sum()}" in part.inner_text()
        beside = found.tables["answers"].query("run == 'iid' and cls == 'boot' and budget == '0.5' and of == 'circuit'").set_index("image").value
        differs = {i for i, v in zip(rows.image, rows.value) if (v > 0) != (beside[i] > 0)}
        shown = set(pd.concat(want.values()).image)
        assert {int(n) for n in view(".fi-differs").evaluate_all("nodes => nodes.map(n => n.dataset.image)")} == differs & shown
        image = int(want["hits"].image.iloc[0])
        view.after(view(f"[data-kind=hits] [data-image='{image}']").click)
        assert view("[data-image-card]").get_attribute("data-image-card") == str(image)
        assert view("[data-margin=circuit]").inner_text() == f"{want['hits'].value.iloc[0]:.2f}"
        assert view("[data-margin=beside]").inner_text().replace("−", "-") == f"{beside[image]:.2f}"
        assert "need" in view("[data-panel=head] .fi-extra").inner_text()  # no kernel: it says so, and has no dead controls
        assert view(".fi-extra input, .fi-extra button").count() == 0


def test_what_is_pinned_stays_while_client_and_round_move_on(chromium, tmp_path):
    found = example(clients=2, deep=True)
    with Visit(chromium, Explorer(found).to_html(tmp_path/"deep.html"), "#cls=coat&client=client%201&round=2") as view:
        view.after(view("[data-do=pin]").click)
        assert view.value("compare") == "client 1 @ 2" and "client 1, round 2" in view("[data-key=compare]").inner_text()
        view("[data-panel=matrix]").focus()
        view.press("]", "]")
        view.after(lambda: view("[data-key=client]").select_option("server"))
        all_kept = found.tables["channels"].query("run == 'skewed' and cls == 'coat' and budget == .25 and kept")
        kept = lambda client, round: set(all_kept.query("client == @client and round == @round")[["site", "channel"]].apply(tuple, axis=1))
        now, pinned = kept("server", 4), kept("1", 2)
        assert f"kept: {len(now)}" in view("[data-panel=circuit] .fi-legend").inner_text()
        assert f"kept in client 1, round 2 ({len(now & pinned)} of {len(pinned)} in both)" in view("[data-panel=circuit] .fi-legend").inner_text()
        rows = view.rows("verdict").query("metric == 'AUROC' and of == 'circuit'")
        assert set(zip(rows.client, rows["round"])) == {("server", 4), ("1", 2)}


def test_overlap_over_the_rounds_is_drawn_adjusted_for_chance_with_its_bands(chromium, tmp_path):
    found, kinds = example(), ("stability", "consistency", "preservation", "noise floor")
    found.tables["overlap"] = table([dict(run="skewed", round=r, cls="coat", site="all", metric=f"{k} {form}", value=v, lo=v - .1, hi=v + .1, n=9)
                                     for r in range(1, 5) for k in kinds for form, v in (("adjusted", .1 * r), ("IoU", .9))])
    with Visit(chromium, Explorer(found).to_html(tmp_path/"o.html"), "#cls=coat") as view:
        assert "adjusted for chance" in view("[data-panel=rounds]").inner_text()
        rows = view.rows("rounds").query("table == 'overlap'")
        assert len(rows) == 16 and set(rows.metric) == {f"{k} adjusted" for k in kinds}
        tips = view("[data-panel=rounds] svg").last.evaluate("svg => svg.closest('.fi-body').innerHTML.includes('noise floor, round 4: 0.40 [0.30, 0.50]')")
        assert tips


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
        view("[data-panel=verdict] .fi-rows").focus()
        view.tab.keyboard.press("ArrowDown")  # scrolls the table, and chooses nothing
        assert view.value("size") == "0.25"
        view.after(view("[data-panel=matrix] [data-client=reference][data-cls=coat]").click)  # an open table follows as well
        assert "coat" in view("[data-panel=verdict] tbody").inner_text() and "dress" not in view("[data-panel=verdict] tbody").inner_text()


def test_the_code_of_a_panel_makes_the_same_view_again(chromium, page_file, found):
    with Visit(chromium, page_file, "#cls=shirt&client=reference&round=2") as view:
        view("[data-panel=verdict] [data-do=code]").click()
        lines = view("[data-panel=verdict] .fi-code").inner_text().splitlines()
        names = dict(found=found)
        exec("\n".join(lines[:2]), names)
        assert names["ex"].state == State(client="reference", cls="shirt", round=2, compare="reference", ablation="mean", size="0.25") and lines[2].startswith("ex.figure('verdict')")
        view.after(lambda: view("[data-key=cls]").select_option("boot"))
        assert "cls='boot'" in view("[data-panel=verdict] .fi-code").inner_text()


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


def test_a_button_keeps_the_focus_when_its_panel_is_drawn_anew_and_arrows_choose_images(chromium, page_file):
    with Visit(chromium, page_file) as view:
        active = "document.activeElement.dataset.do || document.activeElement.dataset.panel"
        view("[data-do=next]").focus()
        view.press("Enter", "Enter")
        assert view.tab.evaluate(active) == "next"
        view("[data-panel=images]").focus()
        drawn = [int(n) for n in view(".fi-answer").evaluate_all("nodes => nodes.map(n => n.dataset.image)")]
        view.press("ArrowRight", "ArrowRight")
        assert view("[data-image-card]").get_attribute("data-image-card") == str(drawn[1])
        view.press("ArrowLeft")
        assert view("[data-image-card]").get_attribute("data-image-card") == str(drawn[0]) and view.tab.evaluate(active) == "images"
        with view.tab.expect_download() as download: view("[data-panel=images] [data-do=picture]").click()
        assert download.value.suggested_filename.endswith(".png")


def test_a_caption_names_the_round_of_each_model_and_what_is_missing_beside_it(chromium, tmp_path):
    found = example(clients=2, deep=True)
    for name in ("circuits", "channels", "edges"): found.tables[name] = table(found.tables[name].query("run != 'iid' or round == 4"))
    found.tables["circuits"] = table(found.tables["circuits"].query("client != '1'"))
    deep = found.tables["circuits"].query("budget == '0.25' or run == 'iid'")
    found.tables["circuits"] = table(deep)
    with Visit(chromium, Explorer(found).to_html(tmp_path/"d.html"), "#client=client%200&round=2&compare=reference%20@%201") as view:
        for panel in ("verdict", "circuit", "sizes"): assert "reference: of round 4, the nearest examined" in view(f"[data-panel={panel}] .fi-caption").inner_text()
        assert "reference (round 4)" in view("[data-panel=matrix] .fi-caption").inner_text()
        box = view("[data-panel=sizes] .fi-body svg").first.bounding_box()
        marks = view("[data-panel=sizes] svg[role=img]").evaluate("svg => [...svg.querySelectorAll('path, circle')].map(n => n.getBoundingClientRect()).map(r => [r.left, r.right])")
        assert all(box["x"] <= left and right <= box["x"] + box["width"] for left, right in marks)  # three sizes beside one: all inside
        view.after(lambda: view("[data-key=compare]").select_option("client 1"))
        assert "Nothing of this kind was computed for client 1" in view("[data-panel=verdict] .fi-caption").inner_text()
        assert "client 1" not in view("[data-panel=sizes] .fi-legend").inner_text()
        view.after(lambda: view("[data-key=client]").select_option("client 1"))
        assert "deep=True)" in view("[data-panel=verdict] .fi-missing pre").inner_text() and not view("[data-panel=verdict] [data-do=csv]").is_visible()


def test_figures_without_intervals_or_values_leave_no_mark_and_no_error(chromium, tmp_path):
    found = example(clients=1)
    for name, where, lost in (("circuits", "metric == 'TPR, calibrated'", ["value", "lo", "hi"]), ("circuits", "of == 'random'", ["lo", "hi"]), ("heads", "cls == 'coat'", ["value", "lo", "hi"]),
                              ("heads", "cls == 'boot'", ["lo", "hi"]), ("metrics", "cls == 'coat'", ["value"])):
        found.tables[name].loc[found.tables[name].query(where).index, lost] = np.nan
    for link in ("#cls=coat", "#cls=boot"):
        with Visit(chromium, Explorer(found).to_html(tmp_path/"n.html"), link) as view:
            assert not view.tab.evaluate("[...document.querySelectorAll('svg *')].some(n => [...n.attributes].some(a => a.value.includes('NaN')))")


def test_an_autopsy_of_models_without_rounds_clients_or_pictures_is_shown(chromium, tmp_path):
    found = without_rounds()
    found.thumbnails = None
    with Visit(chromium, Explorer(found).to_html(tmp_path/"m.html"), "#image=1e99&concept=999") as view:
        assert view("[data-key=round]").count() == 0 and view("[data-figure=AUROC]").count() == 1
        assert int(view("[data-concept]").get_attribute("data-concept")) < 24  # a link to a concept that is not there is passed over
        view.after(view("[data-panel=images] .fi-answer").first.click)
        assert view("[data-image-card]").count() == 1


def test_a_name_from_right_to_left_leaves_the_numbers_in_their_order_and_two_views_share_no_name(chromium, tmp_path):
    path = Explorer(example(names=("ملابس", "b"))).to_html(tmp_path/"r.html")
    ids = []
    for _ in range(2):
        with Visit(chromium, path, "#cls=ملابس") as view:
            assert view("[data-kind=hits] h4 bdi").inner_text() == "ملابس"
            ids.append(view("pattern").get_attribute("id"))
    assert ids[0] != ids[1]


def test_a_view_that_is_closed_before_its_trace_is_read_leaves_nothing_behind(chromium, found):
    tab = chromium.new_context().new_page()
    tab.add_script_tag(type="module", content=(STATIC/"explorer.js").read_text(encoding="utf-8").replace("export default {render}", "window.render = render"))
    tab.wait_for_function("() => !!window.render")
    left = """async trace => {
      let left = 0
      window.setInterval = () => { left++ }
      const bytes = new DataView(Uint8Array.from(atob(trace), c => c.charCodeAt(0)).buffer), model = {get: () => bytes, on() { left++ }, off() { left-- }, send() {}}
      render({model, el: document.body})()
      await new Promise(done => setTimeout(done, 400))
      return [left, document.querySelectorAll(".fi").length]
    }"""
    assert tab.evaluate(left, base64.b64encode(Explorer(found).trace).decode()) == [0, 0]
    tab.context.close()


def test_the_code_of_a_view_of_runs_imports_what_it_names(chromium, tmp_path, config):
    run = create(tmp_path/"it's", config, [np.arange(3)])
    run.metrics = lambda: table([dict(run="skewed", round=r, client="server", cls=c, metric="accuracy", value=.5, n=10) for r in range(2) for c in ("all", "a\r\"'\\")])
    with Visit(chromium, Explorer(run).to_html(tmp_path/"c.html")) as view:
        view("[data-panel=rounds] [data-do=code]").click()
        code = view("[data-panel=rounds] .fi-code").text_content()
    names = {}
    exec(code.splitlines()[1], names)
    assert names["Run"] and eval(re.search(r"cls=(.*), round=", code)[1]) == "a\r\"'\\"
    compile(code, "code", "exec")


# ---------------------------------------------------------------- in JupyterLab and Voila

def notebook(*sources):
    cell = lambda i, source: dict(cell_type="code", id=f"c{i}", source=source, metadata={}, outputs=[], execution_count=None)
    kernel = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
    return json.dumps(dict(cells=[cell(i, s) for i, s in enumerate(sources)], metadata=kernel, nbformat=4, nbformat_minor=5))


class Lab:
    "A notebook in a real JupyterLab, offline: what it asked for elsewhere, and what went wrong in it."
    def __init__(self, chromium, server, *sources):
        (self.address, self.work), self.foreign, self.said = server, [], []
        (self.work/"first.ipynb").write_text(notebook(*sources))
        self.tab = chromium.new_context(viewport=dict(width=1500, height=1000), accept_downloads=True).new_page()
        self.tab.route(re.compile(".*"), self.guard)
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("console", lambda message: message.type == "error" and "fi-" in message.text and self.said.append(message.text))
        self.open()

    def guard(self, route):
        if route.request.url.startswith((self.address, self.address.replace("http", "ws"), "data:", "blob:")): return route.continue_()
        self.foreign.append(route.request.url)
        route.abort()

    def open(self):
        self.tab.goto(f"{self.address}/lab/workspaces/auto-e/tree/first.ipynb?token=t&reset")
        self.tab.wait_for_selector(".jp-Toolbar-kernelName:has-text('Python 3')", timeout=90_000)

    def menu(self, menu, command):
        self.tab.click(f".lm-MenuBar-item:has-text('{menu}') >> nth=0")
        self.tab.click(f"[data-command='{command}']")

    def run_all(self, until=".fi-word"):
        self.tab.wait_for_selector(READY, timeout=90_000)
        for _ in range(8):  # what is asked of a kernel too early is lost
            self.menu("Run", "runmenu:run-all")
            try: return self.tab.wait_for_selector(".jp-InputArea-prompt:not(:has-text('[ ]'))", timeout=8_000) and self.tab.wait_for_selector(until, timeout=120_000)
            except Exception as e:
                if "120000" in str(e): raise

    def shot(self, name):
        if os.environ.get("FEDINTERP_SHOTS"): self.tab.screenshot(path=f"{os.environ['FEDINTERP_SHOTS']}/{name}.png", full_page=True)

    def __enter__(self): return self
    def __exit__(self, *error):
        if any(error): self.shot("failed")
        self.tab.context.close()
        if not any(error): assert (self.foreign, self.said) == ([], [])


CELLS = ("from fedinterp.explorer import Explorer\nfrom fedinterp.trace import example\nfrom ipywidgets import IntSlider, jslink\n"
         "ex, slider = Explorer(example()), IntSlider(4, 0, 4)\nlink = jslink((slider, 'value'), (ex, 'round'))\ndisplay(slider)\nex", "print('now', ex.state)\nex.state = dict(size='0.5')")

def test_in_jupyterlab_the_kernel_follows_the_view_the_keys_stay_in_it_and_it_outlives_the_kernel(chromium, lab):  # noqa: F811
    with Lab(chromium, lab, *CELLS) as page:
        tab = page.tab
        page.run_all()
        tab.wait_for_selector(".jp-OutputArea-output:has-text('now State')", timeout=60_000)
        tab.wait_for_selector(".fi-badge[data-word=live]", timeout=20_000)
        tab.locator("[data-panel=matrix] [data-client=reference][data-cls=coat]").click()
        tab.locator("[data-panel=matrix]").focus()
        for key in ("[", "b", "d", "d"): tab.keyboard.press(key)
        assert tab.locator(".jp-CodeCell").count() == 2
        tab.locator(".jp-CodeCell .jp-InputArea-editor").nth(1).click()
        tab.keyboard.press("Control+Enter")
        tab.wait_for_selector(".jp-OutputArea-output:has-text(\"client='reference', cls='coat', round=3\")", timeout=30_000)
        tab.wait_for_function("() => document.querySelector('.fi [data-key=size]').value === '0.5'")  # set by the cell
        assert tab.inner_text(".widget-readout") == "3"  # joined to the round
        light = tab.locator(".fi").evaluate("n => getComputedStyle(n).backgroundColor")
        tab.click(".lm-MenuBar-item:has-text('Settings')")
        tab.hover(".lm-Menu-itemLabel:text-is('Theme')")
        tab.click(".lm-Menu-itemLabel:text-is('JupyterLab Dark')")
        tab.wait_for_selector(".fi[data-theme=dark]")
        tab.wait_for_function("light => getComputedStyle(document.querySelector('.fi')).backgroundColor !== light", arg=light)
        tab.wait_for_timeout(1500)
        page.shot("explorer-lab-dark")
        page.menu("Kernel", "kernelmenu:shutdown")
        tab.locator("[data-panel=matrix] [data-client=server][data-cls=dress]").click()
        tab.wait_for_function("() => document.querySelector('.fi-word').textContent.includes('dress, server')")


LIVE = """from fedinterp.core import Config
from fedinterp.train import train
from fedinterp.autopsy import autopsy
from fedinterp.explorer import Explorer
config = Config(dataset="tiny.npz", model_args=dict(channels=[4, 4, 8]), clients=3, rounds=2, batch_size=16)
runs = [train(config.replace(partition=p), workers=1, progress=False) for p in ("dirichlet:0.1", "iid")]
autopsy(*runs, diagnostics=("head", "circuits"), budget=20, draws=3, sizes=(.25, .5), circuits=dict(steps=4), progress=False)
ex = Explorer(*runs)
ex"""

def test_a_head_is_refitted_and_an_image_attributed_live_and_a_restarted_kernel_leaves_what_was_recorded(chromium, lab):  # noqa: F811
    with Lab(chromium, lab, LIVE) as page:
        tab = page.tab
        page.run_all()
        tab.wait_for_selector(".fi-badge[data-word=live]", timeout=60_000)
        took = tab.locator("[data-reading=took]")
        tab.locator("[data-live=how]").select_option("head")
        tab.wait_for_selector("[data-reading=took]:has-text('ask for 1 to 160')", timeout=60_000)  # more labels than there are: a sentence
        tab.locator("[data-live=labels]").focus()
        legend = "text => document.querySelector('[data-panel=head] .fi-legend').textContent.includes(text)"
        tab.keyboard.press("ArrowLeft")
        tab.wait_for_function(legend, arg="live: head, 150 labels", timeout=60_000)
        assert tab.locator("[data-live=labels]").get_attribute("aria-valuetext") == "150"
        first = tab.locator("[data-panel=head] svg").first.evaluate("n => n.outerHTML")
        for _ in range(4): tab.keyboard.press("ArrowLeft")
        tab.wait_for_function(legend, arg="live: head, 30 labels", timeout=60_000)
        assert tab.locator("[data-panel=head] svg").first.evaluate("n => n.outerHTML") != first and "live" in took.inner_text()
        tab.locator("[data-live=how]").select_option("head, by steps")
        tab.locator("[data-live=lr]").focus()
        tab.keyboard.press("ArrowRight")
        tab.wait_for_function(legend, arg="by steps", timeout=60_000)
        assert tab.locator("[data-do=attribute]").is_disabled()  # until there is an image to ask about
        tab.locator("[data-panel=images] .fi-thumb").first.click()
        tab.wait_for_selector("[data-image-card]")
        tab.click("[data-do=attribute]")
        tab.wait_for_selector("[data-attributed]", timeout=60_000)
        assert "Rank correlation" in tab.inner_text("[data-attributed]") and tab.locator(".fi-heat").count() == 2
        tab.locator("[data-panel=images]").focus()
        tab.keyboard.press("[")  # answers are of the last round only: card and map stay of the same model
        tab.wait_for_selector("[data-panel=images] .fi-note:has-text('Of round 2')")
        assert tab.locator("[data-attributed]").count() == 1
        tab.locator("[data-live=method]").select_option("saliency")
        tab.click("[data-do=attribute]")
        tab.wait_for_selector("[data-attributed]:has-text('reacts to the pixel, for or against')", timeout=60_000)  # absolute values speak for nothing
        page.shot("explorer-live")
        with tab.expect_download() as download: tab.click("[data-panel=head] [data-do=csv]")
        rows = pd.read_csv(download.value.path())
        kept = read_found(newest(next((page.work/"runs").glob("*dirichlet*")))).tables["heads"]
        shown = rows.merge(kept, on=["run", "cls", "metric"], suffixes=("", "_kept"))
        assert len(shown) == len(rows) > 0 and (shown.value == shown.value_kept).all()
        page.menu("Kernel", "kernelmenu:restart")
        tab.click(".jp-Dialog .jp-mod-accept")
        tab.wait_for_timeout(2500)
        tab.locator("[data-panel=matrix] [data-client=reference][data-cls='1']").click()
        tab.wait_for_function("() => document.querySelector('.fi-word').textContent.includes('1, reference')")


def test_a_saved_notebook_shows_its_view_again_without_a_kernel_and_its_table_where_the_view_was_not_saved(chromium, lab):  # noqa: F811
    with Lab(chromium, lab, CELLS[0]) as page:
        tab, path = page.tab, page.work/"first.ipynb"
        def save(done):
            tab.click(".jp-Toolbar [data-command='docmanager:save']")
            for _ in range(40):
                if done(path.read_text()): return
                tab.wait_for_timeout(250)
            raise AssertionError("not saved")
        page.run_all()
        tab.wait_for_selector(".fi-badge[data-word=live]", timeout=20_000)
        assert tab.locator(".fi-still").count() == 1 and not tab.locator(".fi-still").is_visible()
        save(lambda text: "random circuits" in text)
        page.menu("Kernel", "kernelmenu:shutdown")
        page.open()
        tab.wait_for_selector(".fi-still table")  # no view, and no empty page
        assert tab.locator(".fi-still tr").count() == 5 and tab.locator(".fi").count() == 0
        page.shot("reopened-unsaved")
        tab.click(".lm-MenuBar-item:has-text('Settings')")
        tab.click(".lm-Menu-itemLabel:has-text('Save Widget State Automatically')")
        page.run_all()
        tab.locator("[data-panel=matrix] [data-client=reference][data-cls=coat]").click()
        tab.wait_for_selector(".fi-badge[data-word=live]", timeout=20_000)
        save(lambda text: "application/vnd.jupyter.widget-state+json" in text)
        page.menu("Kernel", "kernelmenu:shutdown")
        page.open()
        tab.wait_for_selector(".fi-word:has-text('coat, reference')", timeout=60_000)
        tab.locator("[data-panel=matrix] [data-client=server][data-cls=boot]").click()
        tab.wait_for_selector(".fi-word:has-text('boot, server')")
        page.shot("reopened-saved")


def test_voila_shows_it_too(chromium, tmp_path):
    pytest.importorskip("voila")
    (tmp_path/"page.ipynb").write_text(notebook(CELLS[0]))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, **{f"JUPYTER_{k}_DIR": str(tmp_path/k.lower()) for k in ("CONFIG", "DATA", "RUNTIME")}}
    command = [sys.executable, "-m", "voila", str(tmp_path/"page.ipynb"), "--no-browser", f"--port={port}"]
    server = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    address, foreign, tab = f"http://127.0.0.1:{port}", [], chromium.new_context().new_page()
    def guard(route):
        if route.request.url.startswith((address, "data:", "blob:")): return route.continue_()
        foreign.append(route.request.url)
        route.abort()
    tab.route(re.compile(".*"), guard)
    try:
        for _ in range(300):
            try: urllib.request.urlopen(f"{address}/voila/static/"); break
            except urllib.error.HTTPError: break
            except OSError: time.sleep(.1)
        tab.goto(address, timeout=90_000)
        tab.wait_for_selector(".fi-word", timeout=90_000)
        tab.locator("[data-panel=matrix] [data-client=reference][data-cls=coat]").click()
        tab.wait_for_selector(".fi-word:has-text('coat, reference')")
    finally:
        tab.context.close()
        end(server)
    assert [url for url in foreign if "fontawesome" not in url] == []  # Voila's own page asks for that, and does without
