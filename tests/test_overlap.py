"Overlap of circuits: its chance level is exact, its undefined cases say so, and the names of channels and models do not matter."
from itertools import combinations
import numpy as np, pytest
from fedinterp.core import InputError, rng_for
from fedinterp.overlap import adjusted_iou, chance_iou, iou, moving_average, null_servers, over_rounds, overlaps, recut, rediscover, soft_chance, soft_overlap

rng = rng_for(0, "test overlap")


def mask(n, kept, rng=rng): return rng.permutation(n) < kept


def pick(frame, **keys):
    for key, value in keys.items(): frame = frame[frame[key] == value]
    assert len(frame) == 1
    return frame.iloc[0]


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_the_chance_level_equals_brute_force_enumeration(n):
    sets = {k: [set(c) for c in combinations(range(n), k)] for k in range(n + 1)}
    for a in range(n + 1):
        for b in range(n + 1):
            first = set(range(a))
            values = [len(first & s) / len(first | s) for s in sets[b] if first | s]
            assert np.isnan(chance_iou(a, b, n)) if a == b == 0 else chance_iou(a, b, n) == pytest.approx(np.mean(values), abs=1e-14)


@pytest.mark.parametrize("n, a, b", [(32, 1, 1), (64, 6, 13), (224, 139, 139), (128, 40, 120)])
def test_random_sets_meet_the_chance_level(n, a, b):
    found = np.mean([iou(mask(n, a), mask(n, b)) for _ in range(4000)])
    assert abs(found - chance_iou(a, b, n)) < 0.01


def test_random_circuits_over_several_sites_meet_the_chance_level_on_average():
    sizes = {"conv1": (32, 30), "conv2": (64, 6), "conv3": (128, 13)}
    draw = lambda: {s: mask(n, k) for s, (n, k) in sizes.items()}
    assert abs(np.mean([adjusted_iou(draw(), draw()) for _ in range(3000)])) < 0.01


def test_closed_forms_and_large_sizes():
    assert chance_iou(1, 1, 32) == 1/32
    assert chance_iou(3, 8, 8) == pytest.approx(3/8, abs=1e-15)
    assert chance_iou(2048, 2048, 4096) == pytest.approx(1/3, abs=1e-3)
    assert chance_iou(8, 8, 8) == 1 and chance_iou(0, 4, 8) == 0
    assert chance_iou([[1], [2]], [1, 2, 3], 4).shape == (2, 3)


def test_what_is_not_defined_is_nan_and_never_one():
    none, every, some = np.zeros(6, bool), np.ones(6, bool), np.arange(6) < 2
    assert np.isnan(iou(none, none)) and np.isnan(chance_iou(0, 0, 6)) and np.isnan(adjusted_iou(none, none))
    assert iou(every, every) == 1 and np.isnan(adjusted_iou(every, every))
    assert iou(none, some) == 0 and adjusted_iou(none, some) == 0 and adjusted_iou(some, some) == 1
    found = overlaps({"a": {"x": {"s": none, "t": some}}, "b": {"x": {"s": none, "t": some}}}, published=True)
    assert pick(found, cls="x", site="s", metric="adjusted").note == "not defined: both empty" and np.isnan(pick(found, cls="x", site="s", metric="iou").value)
    assert pick(found, cls="x", site="s", metric="published").value == 1
    assert pick(found, cls="all", site="all", metric="iou").undefined == 0 and pick(found, cls="all", site="s", metric="iou").undefined == 1


def test_overlap_is_symmetric_and_blind_to_the_order_of_channels():
    a, b = ({"s": mask(32, 9), "t": mask(64, 20)} for _ in "ab")
    perms = {"s": rng.permutation(32), "t": rng.permutation(64)}
    renamed = [{s: c[s][perms[s]] for s in c} for c in (a, b)]
    for measure in (iou, adjusted_iou): assert measure(a, b) == measure(b, a) == measure(*renamed)
    assert chance_iou(9, 20, 32) == pytest.approx(chance_iou(20, 9, 32), abs=1e-15)
    scores = [{s: np.abs(rng.normal(size=len(v))) for s, v in a.items()} for _ in "ab"]
    assert soft_overlap(*scores) == pytest.approx(soft_overlap(*({s: v[s][perms[s]] for s in v} for v in scores[::-1])), abs=1e-14)


def test_soft_overlap_of_masks_is_the_iou_and_its_chance_the_exact_one():
    a, b = mask(40, 10), mask(40, 25)
    assert soft_overlap(a.astype(float), b.astype(float)) == iou(a, b)
    assert abs(soft_chance(a.astype(float), b.astype(float), draws=2000) - chance_iou(10, 25, 40)) < 0.01


def test_recut_keeps_the_best_and_breaks_ties_at_random_but_repeatably():
    scores = {"s": np.array([.1, .9, .5, .7])}
    assert recut(scores, 0.5)["s"].tolist() == [False, True, False, True]
    assert recut(scores, {"s": 3})["s"].sum() == 3
    ties = {"s": np.zeros(200)}
    first, again, other = recut(ties, 0.5, 1), recut(ties, 0.5, 1), recut(ties, 0.5, 2)
    assert (first["s"] == again["s"]).all() and abs(adjusted_iou(first, other)) < 0.2
    with pytest.raises(InputError, match="not all finite"): recut({"s": np.array([np.nan, 1])}, 0.5)


@pytest.mark.parametrize("a, b, says", [
    (np.array([1, 0]), np.array([0, 1]), "give booleans"), (np.ones(3, bool), np.ones(4, bool), "3 and 4 channels"),
    ({"s": np.ones(3, bool)}, {"t": np.ones(3, bool)}, "same sites")])
def test_masks_that_cannot_be_compared_are_refused(a, b, says):
    with pytest.raises(InputError, match=says): iou(a, b)


def test_intervals_exist_where_something_was_searched_twice_and_hold_the_estimate():
    base = mask(200, 60)
    def search(): return {"x": {"s": base ^ (rng.random(200) < 0.05)}}
    found = overlaps({"a": [search() for _ in range(5)], "b": [search() for _ in range(5)], "c": search(), "d": search()})
    both = pick(found, client="a & b", cls="x", site="all", metric="adjusted")
    floor = pick(found, client="a & a", cls="x", site="all", metric="adjusted")
    once = pick(found, client="c & d", cls="x", site="all", metric="adjusted")
    assert both.lo <= both.value <= both.hi and both.lo < both.hi and np.isnan(once.lo)
    assert abs(both.value - floor.value) < 0.1 and floor.value < 1


def planted(rounds=(1, 2), clients=3, times=2, noise=0.02, empty=()):
    "Clients that keep their own circuit over the rounds; a server that keeps the first client's."
    own = {str(k): mask(100, 30, rng_for(k, "planted")) for k in range(clients)}
    own["server"] = own["0"]
    draw = lambda k, *name: {"x": {"s": own[k] & False if k in empty else own[k] ^ (rng_for(0, k, *name).random(100) < noise)}}
    return {(r, k): [draw(k, r, i) for i in range(times)] for r in rounds for k in own}


def test_the_three_quantities_find_what_was_planted():
    found = over_rounds(planted())
    at = lambda metric: pick(found, round=1, cls="all", site="all", metric=metric)
    assert at("stability adjusted").value > 0.8 and abs(at("noise floor - stability adjusted").value) < 0.05
    assert abs(at("consistency adjusted").value) < 0.15 and at("noise floor - consistency adjusted").lo > 0.5
    assert 0.2 < at("preservation adjusted").value < 0.5 and at("preservation iou").n == 3
    assert not len(found[found.metric.str.startswith("stability") & (found["round"] == 2)])


def test_pairs_of_empty_circuits_are_left_out_of_means_and_counted():
    found = over_rounds(planted(empty=("1", "2")), published=True)
    row = pick(found, round=1, cls="all", site="all", metric="consistency iou")
    assert (row.n, row.undefined, row.value) == (2, 1, 0)
    assert pick(found, round=1, cls="all", site="all", metric="consistency published").value == pytest.approx(1/3)


def test_tables_repeat_bit_for_bit_and_do_not_touch_global_random_state():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    circuits = planted()
    assert over_rounds(circuits).equals(over_rounds(circuits))
    assert (np.random.get_state()[1] == before).all()


def test_the_moving_average_is_the_mean_of_seven_rounds_with_repeated_edges():
    values = np.arange(12.)**2
    assert moving_average(values)[5] == pytest.approx(values[2:9].mean())
    assert moving_average(values)[0] == pytest.approx((0*4 + 1 + 4 + 9) / 7) and len(moving_average([2.])) == 1


def test_null_servers_keep_what_they_should_and_break_what_they_should(tiny, config, tmp_path):
    import torch
    from fedinterp.train import train
    run = train(config.replace(rounds=1), root=tmp_path, data=tiny, progress=False)
    nulls = null_servers(run, 1, draws=2, seed=1)
    assert list(nulls) == ["null permuted 0", "null mixture 0", "null permuted 1", "null mixture 1"]
    server, clients = run.server(1), [run.client(1, k) for k in run.clients(1)]
    for name, state in nulls.items():
        assert state.keys() == server.keys()
        assert not state["conv1.weight"].equal(server["conv1.weight"])
    stacked = torch.stack([c["conv1.weight"] for c in clients])
    mixture = nulls["null mixture 0"]["conv1.weight"]
    assert (mixture >= stacked.amin(0) - 1e-6).all() and (mixture <= stacked.amax(0) + 1e-6).all()
    assert nulls["null permuted 0"]["conv1.weight"].mean() == pytest.approx(server["conv1.weight"].mean().item(), abs=1e-5)
    again = null_servers(run, 1, draws=2, seed=1)
    assert all(nulls[n][k].equal(again[n][k]) for n in nulls for k in server)


def test_every_model_of_a_round_is_searched_with_seeds_of_its_own(tiny, config, tmp_path):
    from fedinterp.train import train
    run, seen = train(config.replace(rounds=2), root=tmp_path, data=tiny, progress=False), []
    def discover(model, seed):
        seen.append(seed)
        return {"a": {"conv1": model.conv1.weight.flatten(1).norm(dim=1).detach().numpy()}}
    found = rediscover(run, discover, rounds=[2], times=2, progress=False)
    assert list(found) == [(2, k) for k in ("0", "1", "2", "3", "server", "null permuted 0", "null mixture 0")]
    assert len(set(seen)) == len(seen) == 14
    whole = over_rounds(found, size=0.5).query("cls == 'all' and site == 'all'").set_index("metric").value
    assert whole["noise floor adjusted"] == 1  # this search has no chance in it
