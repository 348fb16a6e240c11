"Every panel has its figure: the same rows as the panel selects, with the controls beside the claim; what is not measured is not zero."
import json, re, subprocess, sys
from types import SimpleNamespace
import numpy as np, pandas as pd, pytest
from fedinterp.charts import DARK, LIGHT, fig_rounds, with_intervals
from fedinterp.circuit_charts import fig_circuit, fig_size_curve
from fedinterp.core import InputError
from fedinterp.model_charts import CELLS, fig_heads, fig_matrix, fig_verdict, of_models
from fedinterp.panel_charts import PANELS, fig_concept, fig_images, figure_call
from fedinterp.table import TableError
from fedinterp.trace import example, subjects

FIGURES = dict(fig_rounds=fig_rounds, with_intervals=with_intervals, fig_circuit=fig_circuit, fig_size_curve=fig_size_curve, fig_heads=fig_heads,
               fig_matrix=fig_matrix, fig_verdict=fig_verdict, of_models=of_models, fig_concept=fig_concept, fig_images=fig_images)


@pytest.fixture(scope="module")
def found(): return example(clients=4, deep=True)


@pytest.fixture(scope="module")
def models(found): return {s["name"]: (s["run"], s["client"]) for s in subjects(found)}


def at(**fields):  # what an explorer shows
    return SimpleNamespace(**dict(client="server", cls="coat", round=2, compare="reference", ablation="mean", size="0.25", metric="AUROC", concept=-1) | fields)
def rows_of(chart): return pd.DataFrame([row for rows in chart.to_dict(validate=False)["datasets"].values() for row in rows])
def run(call, found): return eval(call, dict(FIGURES, found=found))
def values(frame): return sorted(round(v, 12) for v in frame.value.dropna())


def picked(found, name, who, round=None, **where):
    "What a panel selects, written down apart: rows of these models, in this round where the table has rounds."
    rows = found.tables[name]
    rows = rows[[pair in who for pair in zip(rows.run, rows.get("client", pd.Series("server", rows.index)))]]
    if round is not None: rows = rows[rows["round"] == round]
    for column, wanted in where.items(): rows = rows[rows[column].isin(wanted if isinstance(wanted, (list, tuple)) else [wanted])]
    return rows


@pytest.mark.parametrize("state", [at(), at(client="client 3", compare="server", cls="boot", round=4, size="0.5"), at(compare="", round=0),
                                   at(compare="client 1 @ 3", metric="J, calibrated", ablation="")], ids=["server", "client", "alone", "pinned"])
def test_the_call_of_a_panel_of_circuits_draws_the_rows_that_the_panel_selects(found, models, state):
    name, _, pinned = state.compare.partition(" @ ")
    draw = lambda panel, **fields: rows_of(run(figure_call(panel, SimpleNamespace(**vars(state) | fields), models), found))
    select = lambda table, key, r, **where: picked(found, table, [models[key]], r, cls=state.cls, **where)
    both = lambda table, **where: pd.concat([select(table, state.client, state.round, **where), *([select(table, name, int(pinned or state.round), **where)] if name else [])])

    trials = both("circuits", budget=state.size, of=["circuit", "random", "full model"])
    shown = draw("verdict")
    assert values(shown) == values(trials) and set(shown.cls) == {state.cls} and set(shown.budget) == {state.size}
    assert set(zip(shown.run, shown.client, shown["round"])) == set(zip(trials.run, trials.client, trials["round"]))

    metric = "AUROC" if state.metric == "accuracy" else state.metric
    lines = both("circuits", metric=metric, of="circuit")
    under = select("circuits", state.client, state.round, metric=metric, of=["random", "full model"])
    assert values(draw("sizes")) == values(pd.concat([lines, under]))

    channels = select("channels", state.client, state.round, budget=float(state.size))
    edges = select("edges", state.client, state.round)
    kept = set(zip(channels.site[channels.kept], channels.channel[channels.kept]))
    inside = [e for e in edges.itertuples() if (e.from_site, e.from_channel) in kept and ((e.site, e.channel) in kept or e.site == "logits")]
    shown = draw("circuit")
    wires, dots = shown[shown.x2.notna()] if "x2" in shown else shown[:0], shown[shown.pinned.notna()].drop_duplicates(["site", "channel"])
    assert values(wires) == sorted(round(e.value, 12) for e in inside)
    assert set(map(tuple, dots[(dots.kept == True) & (dots.site != "logits")][["site", "channel"]].values)) == kept  # noqa: E712
    if name:
        other = select("channels", name, int(pinned or state.round), budget=float(state.size))
        assert set(map(tuple, dots[dots.pinned == True][["site", "channel"]].values)) == set(zip(other.site[other.kept], other.channel[other.kept]))  # noqa: E712


@pytest.mark.parametrize("state", [at(), at(metric="J, calibrated", size="0.1", round=3), at(metric="accuracy", round=1)], ids=["AUROC", "J", "accuracy"])
def test_the_call_of_the_matrix_draws_every_model_and_class_and_what_the_clients_hold(found, models, state):
    shown = rows_of(run(figure_call("matrix", state, models), found))
    name, where = ("metrics", {}) if state.metric == "accuracy" else ("circuits", dict(budget=state.size, of="circuit"))
    chosen = picked(found, name, list(models.values()), state.round, metric=state.metric, cls=["boot", "coat", "dress", "shirt"], **where)
    assert len(shown) == len(models) * 4 and values(shown) == values(chosen)
    held = picked(found, "counts", [pair for pair in models.values() if pair[1] != "server"])
    assert sorted(shown.held.dropna()) == sorted(held.value)
    if name == "circuits":
        random = picked(found, "circuits", list(models.values()), state.round, metric=state.metric, budget=state.size, of="random")
        best = {(r.run, r.client, r.cls): r.hi for r in random.itertuples()}
        assert shown.weak.tolist() == [not r.lo > best[r.run, r.client, r.cls] for r in shown.itertuples()]


@pytest.mark.parametrize("state", [at(), at(client="client 2", compare="")], ids=["server", "client"])
def test_the_calls_of_rounds_head_images_and_concepts_draw_the_rows_that_the_panels_select(found, models, state):
    draw = lambda panel, **fields: rows_of(run(figure_call(panel, SimpleNamespace(**vars(state) | fields), models), found))
    ever = [models[n] for n in {state.client, "server", "reference"}]
    assert values(draw("rounds")) == values(picked(found, "metrics", ever, cls="coat", metric="accuracy"))
    if state.client == "server": assert values(draw("head")) == values(picked(found, "heads", [models["server"]], 4))
    who = [models[n] for n in (state.client, state.compare) if n]
    said = picked(found, "answers", who, 4, cls="coat", of="circuit", budget="0.25")
    shown = draw("images")  # of round 4, the only one with answers
    assert values(shown) == values(said[(said.truth == "coat") | (said.value > 0)])
    concepts, card = found.tables["concepts"], draw("concepts")
    fires = concepts[(concepts.run == "run") & (concepts.cls == "coat") & (concepts.metric == "activation")]
    strongest = int(fires.concept[fires.value.idxmax()])
    assert set(card[card.metric.notna()].concept) == {strongest}
    assert set(draw("concepts", concept=7).query("metric == metric").concept) == {7}
    assert values(card[card.metric.notna()]) == values(pd.concat([f[f.concept == strongest] for f in (concepts, found.tables["gallery"])]))


@pytest.mark.parametrize("panel", PANELS)
def test_every_call_is_one_expression_and_text_in_it_stays_text(found, models, panel):
    compile(figure_call(panel, at(), models), "call", "eval")
    call = figure_call(panel, at(cls="'); __import__('os').abort(); ('"), models)
    compile(call, "call", "eval")
    if panel not in ("matrix", "head"):  # these draw every class
        with pytest.raises(TableError): run(call, found)


def test_an_unknown_panel_or_model_is_refused(models):
    with pytest.raises(InputError, match="did you mean 'verdict'"): figure_call("verdic", at(), models)
    with pytest.raises(InputError, match="unknown model 'client 9'"): figure_call("verdict", at(client="client 9"), models)


def test_what_was_not_measured_is_empty_and_hatched_and_never_zero(found, models):
    less = found.tables["circuits"].query("client != '1'")
    chart = fig_matrix(less, found.tables["counts"], models, size=".25")
    cells = rows_of(chart).query("model == 'client 1'")
    assert len(cells) == 4 and cells.value.isna().all() and "hatched" in chart.title["subtitle"]
    hatched = chart.layer[0].to_dict(validate=False, context={"data": None})
    assert hatched["transform"] == [{"filter": "!isValid(datum.value)"}] and hatched["mark"]["fill"]["gradient"] == "linear"


@pytest.mark.parametrize("lost", ["of != 'random'", "metric != 'FPR, calibrated'", "not (of == 'random' and metric == 'AUROC')"])
def test_a_verdict_without_its_controls_is_refused(found, models, lost):
    with pytest.raises(TableError, match="without its controls"): fig_verdict(found.tables["circuits"].query(lost), "coat", {"server": models["server"]}, .25)


def test_a_matrix_of_circuits_without_random_ones_is_refused(found, models):
    with pytest.raises(TableError, match="without random circuits"): fig_matrix(found.tables["circuits"].query("of == 'circuit'"), models=models, size=.25)


def test_hits_are_never_drawn_without_false_alarms(found, models):
    chart = fig_images(found.tables["answers"], found.thumbnails, "coat", {"server": models["server"]}, size=.25, most=2)
    heads = chart.vconcat[0].layer[0].to_dict(validate=False, context={"data": None})["encoding"]["y"]["sort"]
    said = picked(found, "answers", [models["server"]], 4, cls="coat", of="circuit", budget="0.25")
    mine, yes = said.truth == "coat", said.value > 0
    assert heads == [f"hits: {(mine & yes).sum()} of {mine.sum()}", f"misses: {(mine & ~yes).sum()} of {mine.sum()}", f"false alarms: {(~mine & yes).sum()} of {(~mine).sum()} others"]
    shown = rows_of(chart)
    assert shown.groupby("kind").size().max() <= 2
    assert all(p.value.is_monotonic_increasing if kind == "misses" else p.value.is_monotonic_decreasing for kind, p in shown.groupby("kind"))


def test_pictures_travel_inside_the_figure_in_grey_or_in_colour(found, models):
    colour = np.repeat(found.thumbnails[..., None], 3, -1)
    for pictures in (found.thumbnails, colour):
        shown = rows_of(fig_images(found.tables["answers"], pictures, "coat", {"server": models["server"]}, size=.25))
        assert shown.picture.str.startswith("data:image/png;base64,").all()
    with pytest.raises(TableError, match="24|thumbnails"): fig_images(found.tables["answers"], found.thumbnails[:2], "coat", models, size=.25)


def test_the_nearest_examined_round_is_taken_and_named(found, models):
    chart = fig_verdict(found.tables["circuits"].query("round in (0, 4)"), "coat", {"server": models["server"]}, .25, round=3)
    assert set(rows_of(chart)["round"]) == {4} and "of round 4, the nearest examined" in chart.title["subtitle"]


def test_sixty_classes_and_names_of_any_kind_are_drawn():
    names = [f"<class {i}> \"of\" many's" for i in range(62)]
    many = example(clients=12, names=names, rounds=1)
    models = {s["name"]: (s["run"], s["client"]) for s in subjects(many)}
    pictured = run(figure_call("concepts", at(cls=names[3], round=1), models), many)
    assert rows_of(pictured).query("metric == 'effect'").cls.nunique() == 15
    for panel in ("matrix", "verdict", "images", "head", "sizes", "rounds"):
        chart = run(figure_call(panel, at(cls=names[3], round=1, compare=""), models), many)
        assert 0 < len(rows_of(chart)) <= CELLS and json.loads(chart.to_json())
    assert len(rows_of(run(figure_call("matrix", at(round=1), models), many))) == len(models) * 62


def test_figures_repeat_byte_for_byte_and_name_no_colour(found, models):
    for panel in ("matrix", "verdict", "circuit", "images", "concepts", "head"):
        call = figure_call(panel, at(), models)
        chart, again = run(call, found), run(call, found)
        assert chart.to_json() == again.to_json() and chart.title["text"] and chart.description
        body = json.dumps({k: v for k, v in chart.to_dict(validate=False).items() if k != "config"})
        assert not [c for c in (*LIGHT, *DARK) if c in re.sub(r"data:image[^\"]+", "", body)]


def test_a_table_without_clients_speaks_of_servers(found, models):
    edges = found.tables["edges"].query("client == 'server' and round == 4").drop(columns=["client", "round"])
    assert len(of_models(edges, {"server": models["server"]}, 2, cls="coat")) and not len(of_models(edges, {"client 1": models["client 1"]}, 2, cls="coat"))
    chart = fig_circuit(of_models(found.tables["channels"], {"client 1": models["client 1"]}, 4, .25, cls="coat"), of_models(edges, {"client 1": models["client 1"]}))
    assert "0 connections" in chart.title["subtitle"]


@pytest.mark.parametrize("module", ["model_charts", "panel_charts"])
def test_the_modules_import_without_torch_and_without_altair(module):
    code = f"import sys, fedinterp.{module}; print('torch' in sys.modules, 'altair' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "False"]
