"Figures of dictionaries, patching and the autopsy draw what their tables say, beside its nulls, or refuse in one sentence."
import subprocess, sys
import pytest
from fedinterp.charts import ROWS
from fedinterp.concept_charts import (
    BESIDE, FAMILIES, fig_dose, fig_evidence, fig_map, fig_r2, fig_r2_matrix, fig_sharing, fig_similarity, fig_stitch)
from fedinterp.table import TableError, table

NAN = float("nan")
CASES = {"models": .6, "another seed": .8, "untrained": .3, "shuffled": .35, "re-paired": .1, "noise": -.05}


def around(value): return dict(value=value, lo=value - .03, hi=value + .03, n=500)
def partner(of, model): return model if of == "models" else of
def study(models=("B",), rates=(0, 1e-3, 1e-1)):
    return table([dict(of=of, metric="shared", client=f"A & {m}", a="A", b=m, rate=r, value=max(v, 0) * (1 - r), n=200) for of, v in CASES.items()
                  for m in ([*models] if of == "models" else [of]) for r in rates])
def rebuilt(models=("B",)):
    rows = [dict(of=of, metric="R2", a=a, b=b, **around(.9 if a == b else v)) for of, v in CASES.items() for m in ([*models] if of == "models" else [of])
            for a, b in (("A", m), (m, "A"), (m, m))]
    own = [dict(of=of, metric="R2", a="A", b="A", **around(.9)) for of in CASES]
    return table([*rows, *own, dict(of="models", metric="position", a="A", b="B", **around(.6)), dict(of="models", metric="cross R2", a="all", b="all", **around(.6))])
def stitched(models=("A", "B")):
    return table([dict(a=a, b=b, input=i, concepts=7, metric="accuracy", **around(.5 + .01 * len(i))) for a in models for b in models
                  for i in (("own activations", "mean", "all concepts") if a == b else ("all concepts", "shared", "only a", "only b", "linear map"))])
def alike(models=("A", "B"), sites=("conv1", "conv2")):
    return table([dict(cls="all", site=s, metric=m, model=a, other=b, of=of, **around(v)) for i, a in enumerate(models) for b in models[i+1:] for s in sites
                  for m in ("cka", "svcca") for of, v in (("pair", .7), ("re-paired", .0), ("untrained", .4))])
def patched(ways=("into A",), doses=(0, .5, 1)):
    return table([dict(into=w, cls="all", site=s, metric="accuracy", of=of, dose=d, aligned=False, **around(.8 - .1 * i * d)) for w in ways for s in ("conv1", "conv2")
                  for i, of in enumerate(("donor", "same class", "re-paired", "mean", "untrained")) for d in doses])
def places(n=20, how="pca"): return table([dict(concept=i, metric=how, value=1., x=i % 7, y=i // 7) for i in range(n)])
def cards(n=20):
    whole = [dict(run=run, cls="all", concept=i, metric=m, value=v) for i in range(n) for run in "AB" for m, v in (("rate", .1 * (i % 2 or run == "A")), ("energy", float(i)))]
    classes = [dict(run="A", cls=c, concept=i, metric="activation", value=float(i % 3 == j)) for i in range(n) for j, c in enumerate(("cat", "dog", "owl"))]
    return table([*whole, *classes, *(dict(run="all", cls="all", concept=i, metric="correlation", value=i / n) for i in range(n))])
def mapped(n=20): return places(n), cards(n)
def evidence(runs=("r",)):
    rows = [("probe", "is it there?", .8, "preserved"), ("circuits", "is it there?", .5, "not decided"), ("dictionary", "is it there?", .2, "erased"),
            ("stitch", "is it there?", NAN, "not decided"), ("head", "is it misread?", .9, "misrouted")]
    return table([dict(run=run, metric=m, asks=a, verdict=w, note="…", **around(v)) for run in runs for m, a, v, w in rows])


FIGURES = [(fig_sharing, study), (fig_r2, rebuilt), (fig_r2_matrix, rebuilt), (fig_stitch, stitched), (fig_similarity, alike), (fig_dose, patched),
           (fig_map, mapped), (fig_evidence, evidence)]


def draw(figure, frames, **kw): return figure(*frames, **kw) if isinstance(frames, tuple) else figure(frames, **kw)
def rows_of(chart): return [row for rows in chart.to_dict()["datasets"].values() for row in rows]
def values(rows): return sorted(round(r["value"], 9) for r in rows if r["value"] is not None)
def said(frame): return sorted(frame.value.dropna().round(9))


@pytest.mark.parametrize("figure, frame, column", [
    (fig_sharing, study, "rate"), (fig_r2, rebuilt, "of"), (fig_r2_matrix, rebuilt, "b"), (fig_stitch, stitched, "input"), (fig_similarity, alike, "model"),
    (fig_dose, patched, "dose"), (fig_evidence, evidence, "verdict"), (fig_sharing, study, "metric")])
def test_a_table_that_lacks_a_column_is_refused_in_one_sentence(figure, frame, column):
    with pytest.raises(TableError, match=f"needs the column '{column}'") as error: figure(frame().drop(columns=column))
    assert figure.__name__ in str(error.value) and "\n" not in str(error.value)


def test_a_map_without_places_or_energy_is_refused_in_one_sentence():
    with pytest.raises(TableError, match="fig_map needs the column 'x'"): fig_map(places().drop(columns="x"), cards())
    with pytest.raises(TableError, match="whose metric is energy"): fig_map(places(), cards()[lambda t: t.metric != "energy"])
    with pytest.raises(TableError, match="whose metric is umap; here it is pca"): fig_map(places(), cards(), how="umap")


@pytest.mark.parametrize("figure, frame, shown", [
    (fig_sharing, study, lambda t: t), (fig_r2, rebuilt, lambda t: t[(t.metric == "R2") & (t.a != t.b)]), (fig_r2_matrix, rebuilt, lambda t: t[t.metric == "R2"]),
    (fig_similarity, alike, lambda t: t), (fig_dose, patched, lambda t: t), (fig_evidence, evidence, lambda t: t)], ids=lambda f: f.__name__)
def test_a_figure_draws_the_values_of_its_table_each_once(figure, frame, shown):
    assert values(rows_of(figure(frame()))) == said(shown(frame()))


@pytest.mark.parametrize("figure, several", [
    (fig_sharing, study(("B", "C"))), (fig_r2, rebuilt(("B", "C"))), (fig_r2_matrix, rebuilt(("B", "C"))), (fig_stitch, stitched(("A", "B", "C"))),
    (fig_similarity, alike(("A", "B", "C"))), (fig_dose, patched(("into A", "into B"))), (fig_evidence, evidence(("r", "s")))], ids=lambda f: getattr(f, "__name__", ""))
def test_several_pairs_are_drawn_in_one_figure(figure, several):
    import vl_convert
    names = {str(row.get(key)) for row in rows_of(figure(several)) for key in ("name", "panel", "way", "run", "b")}
    assert {"B", "A & B", "A → B", "into B", "s"} & names and {"C", "A & C", "A → C", "into A", "r"} & names
    assert vl_convert.vegalite_to_svg(figure(several).to_dict(), vl_version="6.4").count("<path") > 10


def test_nulls_are_grey_and_the_models_are_coloured():
    for row in rows_of(fig_sharing(study())): assert row["null"] == (row["of"] != "models") and row["name"] == ("A & B" if row["of"] == "models" else row["of"])
    spec = fig_sharing(study()).to_dict()
    coloured = [layer for layer in spec["layer"] if "color" in layer["encoding"]]
    assert coloured and all(layer["encoding"]["color"]["scale"]["domain"] == ["A & B"] for layer in coloured)


def test_a_table_without_nulls_is_drawn_and_the_figure_says_so():
    for figure, frame in ((fig_sharing, study()), (fig_similarity, alike()), (fig_dose, patched())):
        alone = figure(frame[frame["of"].isin(("models", "pair", "donor"))]).to_dict()["title"]["subtitle"]
        assert "no nulls" in alone or "no controls" in alone
        assert "in this table" not in figure(frame).to_dict()["title"]["subtitle"]


def test_floor_and_ceiling_are_rules_and_the_position_is_written():
    spec = fig_r2(rebuilt()).to_dict()
    rules = [layer["transform"][0]["filter"]["oneOf"] for layer in spec["spec"]["layer"] if layer["mark"].get("style") == "floor"]
    assert rules == [["untrained"], ["another seed", "copy"]]
    assert spec["title"]["subtitle"][1] == "from floor (0) to ceiling (1): A → B 0.60 [0.57, 0.63]"
    undecided = rebuilt().assign(value=lambda t: t.value.where(t.metric != "position"))
    assert "not decided" in fig_r2(undecided).to_dict()["title"]["subtitle"][1]


def test_own_codes_stand_beside_every_cross_r2():
    assert all(row["own"] == .9 for row in rows_of(fig_r2(rebuilt())))


def test_a_stitch_shows_every_family_its_bounds_and_the_native_accuracy():
    rows = rows_of(fig_stitch(stitched()))
    assert {row["name"] for row in rows} == {*FAMILIES.values(), *BESIDE.values()}
    native = stitched().query("input == 'own activations'").value.iloc[0]
    assert all(row["native"] == native for row in rows)
    with pytest.raises(TableError, match="own activations"): fig_stitch(stitched().query("input != 'own activations'"))
    with pytest.raises(TableError, match="none"): fig_stitch(stitched(("A",)))


def test_patchings_with_and_without_alignment_are_not_drawn_on_top_of_each_other():
    both = table([*patched().to_dict("records"), *patched().assign(aligned=True, value=.5).to_dict("records")])
    with pytest.raises(TableError, match="choose first among aligned"): fig_dose(both)
    assert values(rows_of(fig_dose(both, aligned=False))) == said(patched())
    assert {row["value"] for row in rows_of(fig_dose(both, aligned=True))} == {.5}


def test_verdicts_that_are_not_decided_or_not_defined_have_marks_of_their_own():
    kinds = {row["metric"]: row["kind"] for row in rows_of(fig_evidence(evidence()))}
    assert kinds == {"probe": "above", "circuits": "open", "dictionary": "below", "stitch": "none", "head": "above"}
    words = {row["metric"]: row["text"] for row in rows_of(fig_evidence(evidence()))}
    assert words["stitch"] == "not defined" and words["probe"] == "0.80  [0.77, 0.83]"


def test_an_interval_that_leaves_the_axis_is_cut_in_the_drawing_and_whole_in_words():
    wide = table([dict(metric="probe", asks="is it there?", value=.4, lo=-3., hi=4., verdict="not decided")])
    row, = rows_of(fig_evidence(wide))
    assert (row["low"], row["high"], row["text"]) == (-.25, 1.25, "0.40  [−3.00, 4.00]")


def test_a_map_is_coloured_by_model_by_class_or_by_a_number():
    by = {row["concept"]: row["model"] for row in rows_of(fig_map(*mapped()))}
    assert (by[0], by[1]) == ("A", "A & B")
    assert {row["concept"]: row["class"] for row in rows_of(fig_map(*mapped(), by="class"))}[4] == "dog"
    assert {row["concept"]: row["correlation"] for row in rows_of(fig_map(*mapped(), by="correlation"))}[10] == .5
    seldom = fig_map(*mapped(), rate=.5)
    assert {row["model"] for row in rows_of(seldom)} == {"too seldom"}


def test_no_figure_draws_more_rows_than_a_page_can_carry():
    for chart in (fig_sharing(study(rates=[i / 1000 for i in range(400)])), fig_dose(patched(doses=[i / 200 for i in range(201)])),
                  fig_similarity(alike(sites=[f"s{i}" for i in range(200)]))):
        assert len(rows_of(chart)) <= ROWS and "shown" in chart.to_dict()["title"]["subtitle"]
    large = fig_map(*mapped(700))
    assert len(rows_of(large)) == ROWS and "500 of 700 concepts, those with the most energy" in large.to_dict()["title"]["subtitle"]
    assert min(row["energy"] for row in rows_of(large)) == 200
    with pytest.raises(TableError, match="choose fewer models"): fig_r2_matrix(rebuilt([f"m{i}" for i in range(200)]))


def test_the_module_imports_and_draws_without_torch_and_loads_altair_late():
    code = ("import sys\nfrom fedinterp.concept_charts import fig_evidence\nfrom fedinterp.table import table\nassert 'altair' not in sys.modules\n"
            "fig_evidence(table([dict(metric='probe', value=.7, lo=.6, hi=.8, verdict='preserved')])).to_dict()\nassert 'torch' not in sys.modules\n")
    subprocess.run([sys.executable, "-c", code], check=True)
