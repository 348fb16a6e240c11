"Figures of a training and its verdict: honest about what is not decided, and small; what all figures keep to is in test_every_figure."
import subprocess
import sys

import pytest

from fedinterp.charts import (
    PARTS,
    ROWS,
    STEPS,
    fig_classes,
    fig_decompose,
    fig_ladder,
    fig_partition,
    fig_rounds,
    fig_swings,
    with_intervals,
)
from fedinterp.table import TableError, table


def around(value, half=.02): return dict(value=value, lo=value - half, hi=value + half, n=500)

def metrics(runs=("iid", "skewed"), rounds=4, classes=5):
    rows = [dict(run=run, round=r, cls=c, **around(.5)) for run in runs for r in range(rounds)
            for c in ("all", *(f"class {i}" for i in range(classes)))]
    return table(rows, client="server", metric="accuracy")

def counts(clients=6, classes=5, run="skewed"):
    return table([dict(run=run, client=k, cls=f"class {c}", value=(k * c) % 7) for k in range(clients) for c in range(classes)], metric="samples")

def ladder(runs=("iid", "skewed")):
    rows = [dict(run=run, metric=m, **around(.6)) for run in runs for m in STEPS]
    return table([*rows, dict(run="iid", metric="floor untrained", **around(.4))], cls="all", budget=200)

def split(run="skewed", **values):
    given = {"reference accuracy": .8, "accuracy": .66, "backbone loss": .04, "read-out loss": .1, "preservation": .8, **values}
    return table([dict(run=run, metric=m, **around(v)) for m, v in given.items()])

FIGURES = [(fig_rounds, metrics()), (fig_classes, metrics()), (fig_swings, metrics()), (fig_partition, counts()), (fig_ladder, ladder()),
           (fig_decompose, split())]

def drawn(chart): return sum(len(rows) for rows in chart.to_dict()["datasets"].values())


def test_long_tables_are_thinned_to_500_rows_and_say_so():
    for chart in (fig_rounds(metrics(rounds=1000, classes=0)), fig_partition(counts(200, 40)), fig_swings(metrics(rounds=200, classes=30)),
                  fig_classes(metrics(rounds=1, classes=600))):
        assert drawn(chart) <= ROWS
        assert "shown" in chart.title["subtitle"]


def test_two_numbers_for_one_place_are_refused_by_the_key_that_tells_them_apart():
    with pytest.raises(TableError, match="choose first among client"): fig_rounds(table([
        dict(run="a", round=1, client=k, metric="loss", value=1.) for k in range(3)]), metric="loss", client=None)


def test_runs_keep_their_colours_in_the_order_of_the_table():
    spec = fig_rounds(metrics(("zebra", "ant"))).to_dict()
    assert spec["layer"][1]["encoding"]["color"]["scale"]["domain"] == ["zebra", "ant"]


def test_a_loss_whose_interval_holds_zero_is_not_decided():
    decided, undecided = fig_decompose(split()), fig_decompose(split(**{"backbone loss": .01, "read-out loss": .13}))
    assert "not decided" not in str(decided.to_dict()["datasets"])
    assert "not decided" in str(undecided.to_dict()["datasets"])


def test_the_waterfall_of_several_runs_has_a_row_for_each():
    import pandas as pd
    chart = fig_decompose(pd.concat([split("a"), split("b")]))
    assert [panel["facet"]["row"]["sort"] for panel in chart.to_dict()["vconcat"]] == [["a", "b"]] * 2
    assert len(PARTS) == 5


def test_rows_of_single_classes_do_not_widen_the_ladder():
    import pandas as pd
    classes = table([dict(run="iid", metric=m, **around(v)) for m, v in (("native", .02), ("floor untrained", .99))], cls="shirt", budget=200)
    assert fig_ladder(pd.concat([ladder(), classes])).to_dict()["layer"] == fig_ladder(ladder()).to_dict()["layer"]


def test_empty_cells_of_a_partition_are_outlined_and_not_coloured():
    frame = table([dict(client=0, cls="a", value=0), dict(client=0, cls="b", value=9)], metric="samples")
    outlines, cells, numbers = fig_partition(frame).to_dict()["layer"]
    assert outlines["mark"]["fillOpacity"] == 0
    assert all(layer["transform"] == [{"filter": "datum.value > 0"}] for layer in (cells, numbers))


def test_intervals_of_accuracies_stay_between_0_and_1():
    filled = with_intervals(table([dict(cls=str(v), metric="accuracy", value=v, n=20) for v in (0., .5, 1.)]))
    assert (filled.lo >= 0).all() and (filled.hi <= 1).all() and (filled.lo <= filled.value).all()


def test_the_figures_import_and_draw_without_torch():
    code = ("import sys\nfrom fedinterp.charts import fig_rounds\nfrom fedinterp.table import table\n"
            "assert 'altair' not in sys.modules and 'pandas' not in sys.modules\n"
            "fig_rounds(table([dict(run='a', round=r, metric='accuracy', value=r) for r in (0, 1)])).to_dict()\nassert 'torch' not in sys.modules\n")
    subprocess.run([sys.executable, "-c", code], check=True)
