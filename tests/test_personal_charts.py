"Figures of persons: every client, every floor, nothing undefined."
import numpy as np, pytest
from fedinterp.charts import ROWS
from fedinterp.personal_charts import PANELS, chart_drift, chart_gsnr, chart_personal
from fedinterp.table import TableError, table

MODELS = ("after local training", "global + offset", "global", "somebody else's")


def scores(runs=("FedAvg", "alone"), rounds=(1, 2), clients=("0", "1", "2", "all")):
    return table([dict(run=run, round=r, client=k, metric=m, model=name, value=.1 * i + .01 * r, lo=.1 * i, hi=.1 * i + .1, n=40)
                  for run in runs for r in rounds for k in clients for i, name in enumerate(MODELS)
                  for m in ("accuracy", "loss", *["accuracy gain"] * (name != "global"))])

def moves(runs=("FedAvg", "alone"), rounds=(1, 2, 3), clients=3):
    null = {"consistency": .5, "angle": 90., "norm": np.nan, "GSNR mean": .2, "GSNR median": .1, "KL": np.nan}
    return table([dict(run=run, round=r, client=k, metric=m, model=name, value=np.nan if run == "alone" and m == "consistency" else 1. + k + r, null=v, n=9)
                  for run in runs for r in rounds for k in range(clients) for m, v in null.items() for name in (*MODELS, "random signs")])

FIGURES = [(chart_personal, scores()), (chart_drift, moves()), (chart_gsnr, moves())]
each_figure = pytest.mark.parametrize("figure, frame", FIGURES, ids=[f.__name__ for f, _ in FIGURES])

def drawn(chart): return [row for rows in chart.to_dict()["datasets"].values() for row in rows]


@each_figure
def test_twice_the_same_rows_are_refused(figure, frame):
    import pandas as pd
    with pytest.raises(TableError, match="draws one row for each run"): figure(pd.concat([frame, frame]))


def test_every_client_and_model_is_drawn_in_the_last_round_or_the_given_one():
    rows = drawn(chart_personal(scores()))
    assert sorted((r["run"], r["client"], r["model"]) for r in rows) == sorted((run, k, m) for run in ("FedAvg", "alone") for k in ("0", "1", "2", "mean") for m in MODELS)
    assert {r["round"] for r in rows} == {2} and {r["round"] for r in drawn(chart_personal(scores(), round=1))} == {1}
    with pytest.raises(TableError, match="whose round is 7; here it is 1, 2"): chart_personal(scores(), round=7)
    assert {r["model"] for r in drawn(chart_personal(scores(), "accuracy gain"))} == set(MODELS) - {"global"}


def test_without_intervals_there_are_points_and_no_word_of_intervals():
    chart = chart_personal(scores().drop(columns=["lo", "hi"]))
    assert len(chart.hconcat[0].layer) == 1 and "intervals" not in chart.title["subtitle"]
    assert len(chart_personal(scores()).hconcat[0].layer) == 2


def test_what_is_undefined_is_left_out_and_its_panel_with_it():
    rows = drawn(chart_drift(moves()))
    assert not [r for r in rows if r["run"] == "alone" and r["panel"] == PANELS["consistency", MODELS[0]]]
    assert {r["panel"] for r in drawn(chart_drift(moves(runs=["alone"])))} == set(PANELS.values()) - {PANELS["consistency", MODELS[0]]}
    with pytest.raises(TableError, match="all of these are undefined"): chart_drift(moves().assign(value=np.nan))


def test_thick_lines_are_the_means_over_clients_and_floors_those_of_the_table():
    mean = [r for r in drawn(chart_drift(moves())) if r["run"] == "FedAvg" and "client" not in r]
    assert {(r["round"], r["value"]) for r in mean} == {(r, 2. + r) for r in (1, 2, 3)}
    assert {r["panel"]: r["null"] for r in mean}[PANELS["consistency", MODELS[0]]] == .5
    assert {r["panel"]: r["null"] for r in mean}[PANELS["norm", MODELS[0]]] is None


def test_a_logarithmic_scale_gets_no_zero():
    frame = moves()
    assert all(r["value"] > 0 for r in drawn(chart_gsnr(frame.assign(value=frame.value.where(frame.client != "0", 0.)))))


@pytest.mark.parametrize("figure, frame", [(chart_personal, scores(clients=[*map(str, range(300)), "all"])), (chart_drift, moves(rounds=range(1, 200))),
                                           (chart_gsnr, moves(rounds=range(1, 200)))], ids=["clients", "rounds", "rounds of noise"])
def test_a_large_table_stays_small_and_says_so(figure, frame):
    chart = figure(frame)
    assert len([r for r in drawn(chart) if "client" in r]) <= ROWS and "shown" in chart.title["subtitle"]
