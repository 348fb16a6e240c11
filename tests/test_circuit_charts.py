"Figures of circuits draw the control beside the claim, or refuse."
import pytest
from fedinterp.charts import ROWS
from fedinterp.circuit_charts import EDGES, QUANTITIES, fig_circuit_graph, fig_overlap, fig_overlap_rounds, fig_size_curve, fig_tpr_fpr
from fedinterp.table import TableError, table

NAN = float("nan")


def heat(n=4): return table([dict(a=str(i), b=str(j), client=f"{i} & {j}", cls="all", site="all", metric=m, value=NAN if i == 0 else v)
                             for i in range(n) for j in range(i, n) for m, v in (("iou", .5), ("chance", .4), ("adjusted", 1/6))])
def followed(rounds=3): return table([dict(round=r, cls="all", site="all", metric=f"{q} {k}", value=.5, lo=.4, hi=.6, n=6)
                                      for r in range(rounds) for q in QUANTITIES for k in ("iou", "chance", "adjusted", "published")])
def curve(): return table([dict(cls=c, method="path", share=s, of=of, metric="AUROC", value=.8, lo=.7, hi=.9) for c in "ab" for s in (.1, .5) for of in ("circuit", "random", "full model")])
def rates(): return table([dict(cls=c, objective="faithful", of=of, metric=m, value=.5) for c in "ab" for of in ("circuit", "full model") for m in ("TPR", "FPR")])
def edges(n=5): return table([dict(site="b", channel=i, from_site="a", from_channel=j, metric="strength", value=i + j + 1) for i in range(n) for j in range(n)])


FIGURES = [(fig_overlap, heat), (fig_overlap_rounds, followed), (fig_size_curve, curve), (fig_tpr_fpr, rates), (fig_circuit_graph, edges)]


def rows_of(chart): return [row for rows in chart.to_dict()["datasets"].values() for row in rows]


@pytest.mark.parametrize("figure, frame, half", [
    (fig_overlap, heat, lambda f: f[f.metric != "chance"]), (fig_overlap_rounds, followed, lambda f: f[~f.metric.str.endswith("chance")]),
    (fig_size_curve, curve, lambda f: f[f.of != "random"]), (fig_tpr_fpr, rates, lambda f: f[f.metric == "TPR"])], ids=lambda f: getattr(f, "__name__", ""))
def test_a_claim_without_its_control_is_refused(figure, frame, half):
    with pytest.raises(TableError): figure(half(frame()))


def test_a_pair_that_is_not_defined_is_written_so_and_is_neither_zero_nor_one():
    cells = [row for row in rows_of(fig_overlap(heat())) if "0" in (row["a"], row["b"])]
    assert cells and all(row["text"] == "n. d." and row["value"] is None for row in cells)


def test_no_figure_draws_more_rows_than_a_page_can_carry():
    assert len(rows_of(fig_overlap_rounds(followed(100)))) <= ROWS
    assert len(rows_of(fig_circuit_graph(edges(60)))) <= EDGES + 2 * 60 + 2
    with pytest.raises(TableError, match="choose fewer models"): fig_overlap(heat(20))


def test_several_sizes_of_one_recipe_are_not_drawn_on_top_of_each_other():
    two = table([*rates().to_dict("records"), *(dict(row, value=.7) for row in rates().to_dict("records"))])
    with pytest.raises(TableError, match="one row for each"): fig_tpr_fpr(two)
