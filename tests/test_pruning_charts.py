"Figures of pruning: means over seeds; nothing lost from a bill."

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from fedinterp.charts import ROWS
from fedinterp.pruning_charts import LINES, fig_bill, fig_guidance, fig_pareto, fig_survival, over_seeds, undominated
from fedinterp.table import TableError, table


def history(rounds=6, tensors=("conv1.weight", "conv1.bias", "fc.weight"), run="autoflip"):
    rows = [dict(round=r, site=s, metric=m, value=.9 ** r if m == "kept" else .1)
            for r in range(rounds) for s in tensors for m in ("guidance", "agreement", "kept", "changed") if r or m != "agreement"]
    return table(rows, run=run)

def points(methods=("dense", "magnitude", "AutoFLIP"), seeds=3):
    rng = np.random.default_rng(0)
    rows = [dict(run=m, seed=s, metric=metric, value=v + .01 * rng.random()) for i, m in enumerate(methods) for s in range(seeds)
            for metric, v in (("accuracy", .6 - .02 * i), ("FLOPs", 1 - .2 * i), ("bytes", .9 - .1 * i))]
    return over_seeds(table(rows))

def bill(runs=("dense", "AutoFLIP"), rounds=4):
    rows = [dict(run=run, round=r, metric=m, value=v * (r > 0 or i)) for i, run in enumerate(runs) for r in range(rounds)
            for m, v in (("FLOPs", 5e9), ("FLOPs dense", 9e9), ("FLOPs sparse", 3e9), ("bytes down", 2e6), ("bytes up", 1e6), ("bytes", 3e6))]
    return table(rows)

FIGURES = [(fig_guidance, history()), (fig_survival, history()), (fig_pareto, points()), (fig_bill, bill())]

def drawn(chart): return [row for rows in chart.to_dict()["datasets"].values() for row in rows]


@pytest.mark.parametrize("figure", [fig_guidance, fig_survival])
def test_two_runs_in_one_history_are_refused(figure):
    import pandas as pd
    with pytest.raises(TableError, match="choose first among run"): figure(pd.concat([history(), history(run="other")]))


@pytest.mark.parametrize("figure", [fig_guidance, fig_survival])
def test_a_long_history_of_a_deep_network_stays_small_and_says_so(figure):
    chart = figure(history(200, [f"block{i}.conv.weight" for i in range(20)]))
    assert len(drawn(chart)) <= ROWS
    assert "shown" in chart.title["subtitle"]


def test_no_more_layers_than_colours_unless_asked_for():
    deep = history(2, [f"block{i}.conv.{kind}" for i in range(20) for kind in ("weight", "bias")])
    shown = {row["site"] for row in drawn(fig_guidance(deep))}
    assert len(shown) == LINES and all(s.endswith("weight") for s in shown)
    assert {row["site"] for row in drawn(fig_guidance(deep, sites=["block3.conv.bias"]))} == {"block3.conv.bias"}


def test_means_over_seeds_have_the_interval_of_student_s_t():
    values = [.41, .46, .52, .4]
    found = over_seeds(table([dict(run="a", seed=s, metric="accuracy", value=v, kind="x") for s, v in enumerate(values)])).iloc[0]
    low, high = ttest_1samp(values, 0).confidence_interval(.95)
    assert (found.value, found.lo, found.hi) == pytest.approx((np.mean(values), low, high))
    assert (found.seeds, found.kind) == (4, "x")


def test_one_seed_has_no_interval_and_a_seed_that_never_got_there_leaves_no_mean():
    one = over_seeds(table([dict(run="a", seed=0, metric="rounds", value=3)]))
    assert one.value[0] == 3 and one.lo.isna()[0] and one.hi.isna()[0]
    assert over_seeds(table([dict(run="a", seed=s, metric="rounds", value=v) for s, v in enumerate((3, np.nan, 4))])).value.isna()[0]


def test_undominated_is_what_comparing_all_pairs_says():
    rng = np.random.default_rng(0)
    for _ in range(50):
        costs, scores = rng.integers(0, 5, (2, 8)).tolist()
        beaten = [any((c < cost and s >= score) or (c <= cost and s > score) for c, s in zip(costs, scores)) for cost, score in zip(costs, scores)]
        assert undominated(costs, scores) == [not b for b in beaten]


def test_pareto_draws_each_method_once_a_cost_and_the_dense_model_as_a_rule():
    rows = drawn(fig_pareto(points(), ("FLOPs", "bytes")))
    assert sorted((r["run"], r["of"]) for r in rows) == sorted((m, c) for m in ("dense", "magnitude", "AutoFLIP") for c in ("FLOPs", "bytes"))
    ruled = lambda chart: "'floor'" in str({k: v for k, v in chart.to_dict().items() if k != "config"})
    assert ruled(fig_pareto(points())) and not ruled(fig_pareto(points(), dense=None))
    with pytest.raises(TableError, match="whose run is full"): fig_pareto(points(), dense="full")


def test_an_interval_wider_than_0_to_1_is_cut_there():
    rows = drawn(fig_pareto(points().assign(lo=lambda f: f.value - 2, hi=lambda f: f.value + 2)))
    assert {(r["lo"], r["hi"]) for r in rows} == {(0, 1)}


def test_a_bill_loses_nothing_and_counts_nothing_twice():
    frame = bill()
    shown, own = drawn(fig_bill(frame)), frame.groupby(["run", "metric"]).value.sum()
    total = lambda run, panel, items: sum(r["value"] for r in shown if (r["run"], r["panel"]) == (run, panel) and r["metric"] in items)
    for run in ("dense", "AutoFLIP"):
        assert total(run, "FLOPs", ("exploration", "training")) == own[run, "FLOPs"]
        assert total(run, "bytes", ("exploration", "bytes down", "bytes up")) == own[run, "bytes"]
        assert total(run, "FLOPs", ("in theory",)) == own[run, "FLOPs sparse"]
    assert total("dense", "FLOPs", ("exploration",)) == 0 < total("AutoFLIP", "FLOPs", ("exploration",)) == 5e9
