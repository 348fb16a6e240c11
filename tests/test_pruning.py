"The pruning baselines: one budget, exact masks, rules by other means."
import numpy as np, pytest, torch
from fedinterp.core import InputError, clone, register
from fedinterp.masks import masks_in
from fedinterp.models import build_model
from fedinterp.pruning import FedMask, Magnitude, PruneFL, RandomMask, squares_sent, worth_keeping
from fedinterp.shrink import shrink
from fedinterp.strategy import Upload
from fedinterp.train import train
from test_autoflip import explorer, state

METHODS = {"random_mask": {}, "magnitude": dict(explore_epochs=0.5), "eflprune_standin": dict(ramp=2), "prunefl": dict(adaptive=False, every=2), "fedmask": dict(spread=0.01)}


@pytest.mark.parametrize("strategy", METHODS)
@pytest.mark.parametrize("changes", [dict(weight_decay=0.01), dict(optimizer="sgd", momentum=0.9, lr=0.05, weight_decay=0.01, participation=0.5)])
def test_every_method_ends_at_the_same_budget_with_zeros_in_every_file(tiny, config, tmp_path, strategy, changes):
    run = train(config.replace(strategy=strategy, strategy_args=METHODS[strategy] | dict(pruned=0.6), rounds=4, **changes), tmp_path, data=tiny, progress=False)
    masks = masks_in(state(run))
    size, gone = sum(m.numel() for m in masks.values()), sum(int((~m).sum()) for m in masks.values())
    assert gone == round(0.6 * size)
    for n, m in masks.items(): assert int(run.server()[n][~m].count_nonzero()) == 0 and m.any()
    for r in (3, 4):  # the schedule is over, or the mask was never changed in between
        for k in run.clients(r):
            zeros = {n: run.client(r, k)[n] == 0 for n in masks}
            assert sum(int(z.sum()) for z in zeros.values()) >= gone
            if strategy in ("random_mask", "magnitude"): assert all(bool(z[~masks[n]].all()) for n, z in zeros.items())


def test_a_random_mask_follows_the_first_weights_and_is_random_by_unit_too():
    masks = []
    for seed in (0, 0, 1):
        w0, visit = explorer(build_model("simple_cnn", seed=seed))
        masks.append(masks_in(RandomMask(pruned=0.5).explore(w0, {}, visit)[1]))
    same = [all(masks[0][n].equal(m[n]) for n in m) for m in masks[1:]]
    assert same == [True, False]
    model = build_model("simple_cnn")
    w0, visit = explorer(model)
    weights, server = RandomMask(pruned=0.5, unit="mean").explore(w0, {}, visit)
    model.load_state_dict(weights)
    left = {n: len(k) / (32, 64, 128)[i] for i, (n, k) in enumerate(shrink(model, masks=masks_in(server)).shrunk.kept.items())}
    assert all(0.3 < share < 0.7 for share in left.values())


def test_magnitude_ranks_explored_sizes_and_starts_from_the_first_weights():
    model = build_model("simple_cnn", channels=(4, 8, 8))
    w0, visit = explorer(model)
    weights, server = Magnitude(pruned=0.5).explore(w0, {}, visit)
    masks, explored = masks_in(server), visit(w0)
    size = {n: sum(u.weights[n].abs() for u in explored) for n in masks}
    assert min(size[n][m].min() for n, m in masks.items() if m.any()) > np.median(torch.cat([s.flatten() for s in size.values()])) * 0.9
    for n, m in masks.items(): assert weights[n].equal(w0[n] * m)


def test_prunefls_rule_equals_the_greedy_loop():
    rng = np.random.default_rng(0)
    for _ in range(50):
        s, kept, time = rng.exponential(size=30), rng.uniform(0, 20), rng.uniform(1, 30)
        count, total, spent = 0, kept, time
        for x in sorted(s, reverse=True):
            if not x > total / spent: break
            count, total, spent = count + 1, total + x, spent + 1
        assert worth_keeping(torch.tensor(s), kept, time) == count


def test_adaptive_prunefl_decides_for_itself_and_moves_both_ways(tiny, config, tmp_path):
    run = train(config.replace(strategy="prunefl", strategy_args=dict(every=1, trial=0.4, overhead=0.2), rounds=5, lr=5e-3), tmp_path, data=tiny, progress=False)
    masks = masks_in(state(run))
    kept = sum(int(m.sum()) for m in masks.values()) / sum(m.numel() for m in masks.values())
    zero = [{n: run.server(r)[n] == 0 for n in masks} for r in run.rounds]
    gone, back = (sum(int((b[n] & ~a[n]).sum()) for a, b in pairs for n in masks) for pairs in (list(zip(zero, zero[1:])), [(b, a) for a, b in zip(zero, zero[1:])]))
    assert 0.05 < kept < 0.95 and gone > 0 and back > 0


def test_fedmask_never_changes_a_weight_and_learns_the_mask(tiny, config, tmp_path):
    run = train(config.replace(strategy="fedmask", strategy_args=dict(pruned=0.5, spread=0.01), rounds=3, lr=0.01, weight_decay=0.01), tmp_path, data=tiny, progress=False)
    first = train(config.replace(lr=0.01, weight_decay=0.01, rounds=3), tmp_path, data=tiny, progress=False).server(0)
    kept = state(run)
    for weights in [run.server(r) for r in run.rounds] + [run.client(r, k) for r in (1, 3) for k in run.clients(r)]:
        for n, v in weights.items(): assert bool(((v == first[n]) | (v == 0)).all())
    assert all(kept[f"frozen/{n}"].equal(v) for n, v in first.items())
    moved = sum(int((run.server(0)[n] != run.server(3)[n]).sum()) for n in first)
    assert moved > 20 and all(bool(((kept[f"votes/{n}"] >= 0) & (kept[f"votes/{n}"] <= 1)).all()) for n in masks_in(kept))


def test_fedmasks_scores_of_unshared_entries_stay_with_their_client():
    rule, w0 = FedMask(pruned=0.5, exempt=False, floor=0.0), {"w": torch.tensor([4.0, 3.0, 2.0, 1.0])}
    start, server = rule.explore(w0, {}, None)
    bits = [torch.tensor(b) for b in ([True, True, False, False], [True, False, False, True])]
    after, server = rule.aggregate(start, [Upload(k, 1, 1, clone(start), {"bit/w": b}) for k, b in enumerate(bits)], server)
    assert server["shared/w"].tolist() == [True, False, False, False] and server["votes/w"].tolist() == [1.0, 0.5, 0.0, 0.5]
    mine = rule.own_scores(server, {"score/w": torch.tensor([9.0, 0.0, 7.0, 5.0])})["w"]
    assert mine.tolist() == pytest.approx([0.2, 0.0, 7.0, 5.0]) and after["w"].tolist() == [4.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("strategy, args", [("prunefl", dict(unit="mean")), ("prunefl", dict(intent="flops -40%")), ("prunefl", dict(every=0)), ("prunefl", dict(trial=1.0)),
                                            ("eflprune_standin", dict(ramp=0)), ("eflprune_standin", dict(intent="flops -40%")), ("fedmask", dict(spread=0.0)),
                                            ("prunefl", dict(every=2.5)), ("prunefl", dict(adaptive="no")), ("prunefl", dict(first_steps=True)), ("eflprune_standin", dict(ramp="5")),
                                            ("fedmask", dict(intent="bytes -40%")), ("magnitude", dict(explore_epochs=0.0)), ("random_mask", dict(pruned=1.0))])
def test_wrong_settings_are_refused_in_one_sentence(tiny, config, tmp_path, strategy, args):
    with pytest.raises(InputError) as error: train(config.replace(strategy=strategy, strategy_args=args), tmp_path, data=tiny, progress=False)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("strategy", ["fedmask", "eflprune_standin", "random_mask", "magnitude"])
@pytest.mark.parametrize("model, kw", [("resnet10", dict(channels_in=1, channels=(8, 8, 12, 12))), ("char_lstm", dict(hidden=16))])
def test_methods_prune_whole_units_of_residual_nets_and_lstms_over_rounds(strategy, model, kw):
    from fedinterp.core import lookup
    net = build_model(model, **kw)
    w0, visit = explorer(net)
    rule = lookup("strategy", strategy)(pruned=0.5, unit="mean")
    weights, server = rule.explore(w0, {}, visit)
    for r in range(5):
        extra = {f"bit/{n}": m for n, m in masks_in(server).items()} if strategy == "fedmask" else {}
        weights, server = rule.aggregate(weights, [Upload(k, 1, 1, weights, extra) for k in range(2)], server)
    net.load_state_dict(weights)
    small = shrink(net, masks=masks_in(server)).shrunk
    removed, channels = sum(small.channels.values()) - sum(map(len, small.kept.values())), sum(small.channels.values())
    assert removed == round(0.5 * channels)


def test_masked_strategies_show_prunefls_squares_only_when_they_are_due():
    rule = PruneFL(every=3)
    assert [rule.due({"history/w": torch.zeros(n, 4)}) for n in range(1, 7)] == [False, False, True, False, False, True] and rule.due({})


@pytest.mark.parametrize("changes", [{}, dict(clients=40, partition="dirichlet:0.01", min_samples=0, participation=0.03, rounds=9)])
def test_prunefls_squares_are_charged_in_the_rounds_that_ask_for_them(tiny, config, tmp_path, changes):
    from fedinterp.cost import account
    asked = []
    class Watched(PruneFL):
        def upload(self, trained, local): got = super().upload(trained, local); asked.append(sum(v.numel() for v in got[0].values())); return got
        def aggregate(self, weights, uploads, server): asked.append("aggregated"); return super().aggregate(weights, uploads, server)
    register("strategy", "watched", Watched)
    run = train(config.replace(strategy="watched", strategy_args=dict(every=3, adaptive=False, pruned=0.5), **dict(rounds=7) | changes), tmp_path, data=tiny, progress=False, workers=1)
    skipped = set(run.metrics().query("client == 'server' and metric == 'skipped'")["round"])
    sent = squares_sent(run)
    rounds = [r for r in range(1, run.config.rounds + 1) if r not in skipped]
    told, at = [], iter(asked[run.config.clients:])  # what was sent before round 1 stands first
    for r in rounds:
        got = []
        while (x := next(at)) != "aggregated": got.append(x)
        told.append(max(got))
    assert [sent(r) for r in rounds] == [4 * n for n in told] and sum(map(bool, told)) == len(rounds) // 3 and sent(0) == 0
    with_it, without = (account(run, **kw).query("metric == 'bytes up'").set_index("round").value for kw in (dict(beside=sent), {}))
    clients = run.metrics().query("metric == 'samples'").groupby("round").client.nunique()
    assert all(with_it[r] - without[r] == clients[r] * sent(r) for r in range(1, run.config.rounds + 1))
    if changes: assert skipped


@pytest.mark.parametrize("strategy, args", [("prunefl", dict(adaptive=False, every=2, trial=0.4)), ("autoflip", dict(regrow=True, normalise="none", explore_epochs=0.5)),
                                            ("fedmask", dict(spread=0.01)),
                                            ("eflprune_standin", dict(ramp=3))])
def test_the_account_charges_masks_that_come_and_go_as_they_were_in_force(tiny, config, tmp_path, strategy, args):
    from fedinterp.cost import account, payload
    seen, config = [], config.replace(strategy=strategy, strategy_args=dict(pruned=0.5) | args, rounds=5, lr=5e-3)
    run = train(config, tmp_path, data=tiny, progress=False, workers=1, observe=lambda at: at.rows and seen.append(masks_in(state(at.run, at.round))))
    down, up = (account(run).query("metric == @way and round > 0").value.tolist() for way in ("bytes down", "bytes up"))
    news = [True] + [any(not b[n].equal(m) for n, m in a.items()) for a, b in zip(seen, seen[1:-1])]
    floats = sum(v.numel() for v in run.server().values() if v.is_floating_point())
    assert [d - u for d, u in zip(down, up)] == [min(4 * -(-floats // 8), 4 * payload(run.server()) - u) * new for new, u in zip(news, up)]
    assert up == [4 * payload(run.server(r), masks, bitmap=False) for r, masks in enumerate(seen[:-1])]
    if strategy != "eflprune_standin": assert any(bool((b[n] & ~a[n]).any()) for a, b in zip(seen, seen[1:]) for n in a)  # something did come back
