"Personal scores and drift from a run's folder: closed forms, direct counting, chance, partial participation, refusals."
import hashlib, math
import numpy as np, pytest, torch
from torch import nn
from fedinterp.core import Config, InputError, RunError, rng_for
from fedinterp.data import Dataset
from fedinterp.models import predict
from fedinterp.personal import MODELS, bound_term, consistency, drift, gaussian_kl, gradient_moments, gsnr_null, label_shares, personal, with_offset
from fedinterp.run import Run
from fedinterp.train import train


class Tilt(nn.Module):
    "Loss θ·x: the gradient of a batch is its mean input, whatever θ. Right where θ·x is negative."
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(3))
    def loss(self, x, y): return (x @ self.theta).mean()
    def outcomes(self, x, y): return (x @ self.theta < 0).double(), x @ self.theta


class Normed(Tilt):
    "The same with a buffer that clients have of their own."
    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(3))


def world():
    "Inputs for two clients of eight rows, in two classes, and test rows of unequal number."
    x = torch.from_numpy(rng_for(0, "x").normal(size=(16, 3)))
    y = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1] + [1] * 8)
    x_test = torch.from_numpy(rng_for(0, "test").normal(size=(9, 3)))
    return Dataset(x, y, x_test, torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 1]), ("a", "b"), name="tilted")

OLD, NEW, CLIENTS = [1., 0., 0.], [1., 1.5, .5], {0: [1., 3., 0.], 1: [1., 0., 1.]}
state = lambda v: {"theta": torch.tensor(v)}

@pytest.fixture
def tilted(tmp_path):
    return Run.from_checkpoints(tmp_path/"run", Config(clients=2, dataset="tilted", weighting="uniform", batch_size=4), {0: state(OLD), 1: state(NEW)},
                                {(1, k): state(v) for k, v in CLIENTS.items()}, [np.arange(8), np.arange(8, 16)], classes=["a", "b"])

@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    config = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=2, local_epochs=1, batch_size=16, partition="dirichlet:0.5")
    return train(config, tmp_path_factory.mktemp("runs"), data=tiny, progress=False, workers=1)

def value(frame, metric, model, client="0", **more):
    rows = frame[(frame.metric == metric) & (frame.model == model) & (frame.client == client)]
    for k, v in more.items(): rows = rows[rows[k] == v]
    return rows.value.item()


def test_scores_are_the_classes_scores_weighted_by_the_clients_shares(tilted):
    data, double = world(), Tilt().double()
    found = personal(tilted, data, template=double, resamples=50)
    offset = {k: [n + c - o for n, c, o in zip(NEW, CLIENTS[k], OLD)] for k in CLIENTS}
    for k, shares in ((0, (.75, .25)), (1, (0., 1.))):
        for name, theta in ((MODELS[0], CLIENTS[k]), (MODELS[1], offset[k]), (MODELS[2], NEW), (MODELS[3], CLIENTS[1 - k])):
            out = (data.x_test @ torch.tensor(theta).double()).numpy()
            by_class = [(out[:2] < 0).mean(), (out[2:] < 0).mean()], [out[:2].mean(), out[2:].mean()]
            for metric, s in zip(("accuracy", "loss"), by_class):
                assert value(found, metric, name, str(k)) == pytest.approx(np.dot(shares, s), abs=1e-6)
    assert set(found[found.client == "1"]["n"]) == {7} and set(found[found.client == "0"]["n"]) == {9}


def test_gains_and_means_are_differences_and_means_of_the_rows_and_paired(trained, tiny):
    found = personal(trained, tiny, resamples=300)
    for name in (MODELS[0], MODELS[1], MODELS[3]):
        assert value(found, "accuracy gain", name) == pytest.approx(value(found, "accuracy", name) - value(found, "accuracy", "global"))
    assert value(found, "personalisation", MODELS[0]) == pytest.approx(value(found, "accuracy", MODELS[0]) - value(found, "accuracy", MODELS[3]))
    for metric, name in (("accuracy", "global"), ("loss", MODELS[1]), ("personalisation", MODELS[0])):
        each = [value(found, metric, name, str(k)) for k in range(4)]
        assert value(found, metric, name, "all") == pytest.approx(np.mean(each))
    assert ((found.lo <= found.value + 1e-12) & (found.value <= found.hi + 1e-12)).all()
    width = lambda rows: (rows.hi - rows.lo).sum()
    plain, own, gain = (found[(found.metric == m) & (found.model == n) & (found.client != "all")] for m, n in
                        (("accuracy", "global"), ("accuracy", MODELS[0]), ("accuracy gain", MODELS[0])))
    assert 0 < width(gain) < width(plain) + width(own)


def test_shares_are_what_counting_says(trained, tiny):
    q = label_shares(trained, tiny)
    for k, part in enumerate(trained.partition):
        for c in range(4): assert q[k, c] == pytest.approx(sum(int(tiny.y_train[i]) == c for i in part) / len(part))


def test_the_global_rows_equal_the_runs_own_metrics_where_the_mixture_is_that_of_the_test_set(tiny, tmp_path):
    config = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=1, rounds=1, local_epochs=1, batch_size=16, partition="iid", eval_clients_every=1)
    run = train(config, tmp_path, data=tiny, progress=False, workers=1)
    found, own = personal(run, tiny, resamples=10), run.metrics()
    for metric in ("accuracy", "loss"):
        for client, name in (("server", "global"), ("0", MODELS[0])):
            recorded = own[(own.client == client) & (own.cls == "all") & (own["round"] == 1) & (own.metric == metric)].value.item()
            assert value(found, metric, name) == pytest.approx(recorded, abs=1e-6)
    assert MODELS[3] not in set(found.model)  # nobody else is there


def test_leaving_the_others_out_changes_nothing_else(trained, tiny):
    whole, less = (personal(trained, tiny, others=o, resamples=20) for o in (True, False))
    kept = whole[(whole.model != MODELS[3]) & (whole.metric != "personalisation")].reset_index(drop=True)
    assert kept.equals(less)


def test_repeated_calls_and_rounds_asked_together_or_alone_give_the_same_rows(trained, tiny):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    both, ask = personal(trained, tiny, rounds=[1, 2], resamples=20), dict(steps=2, batches=3, batch_size=4)
    assert both.equals(personal(trained, tiny, rounds=[2, 1, 2], resamples=20))
    assert both[both["round"] == 2].reset_index(drop=True).equals(personal(trained, tiny, resamples=20))
    drifts = drift(trained, tiny, rounds=[1, 2], **ask)
    assert drifts[drifts["round"] == 2].reset_index(drop=True).equals(drift(trained, tiny, **ask))
    assert torch.get_rng_state().equal(before[0]) and np.random.get_state()[1].tolist() == before[1]


def test_a_client_that_was_not_drawn_keeps_the_model_of_its_last_visit(tiny, tmp_path):
    config = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=4, local_steps=2, batch_size=8, partition="dirichlet:1", participation=.5)
    run = train(config, tmp_path, data=tiny, progress=False, workers=1)
    found = personal(run, tiny, rounds=[1, 4], resamples=10)
    assert set(found[found["round"] == 1].client) == {*map(str, run.clients(1)), "all"}
    last = {str(k): r for r in range(1, 5) for k in run.clients(r)}
    late = found[(found["round"] == 4) & (found.client != "all")]
    assert dict(zip(late.client, late.visit)) == last and min(last.values()) < 4
    k, at = min(last.items(), key=lambda item: item[1])
    template, q = run.model(4), label_shares(run, tiny)[int(k)]
    template.load_state_dict(with_offset(run.server(4), run.client(at, int(k)), run.server(at - 1)))
    right = (predict(template, tiny.x_test).argmax(-1) == tiny.y_test).double().numpy()
    expected = sum(q[c] * right[tiny.y_test.numpy() == c].mean() for c in range(4))
    assert value(found, "accuracy", MODELS[1], k, round=4) == pytest.approx(expected)
    assert set(drift(run, tiny, rounds=4, steps=1, batches=2, batch_size=4).client) == set(map(str, run.clients(4)))


def test_classes_without_test_rows_are_left_out_and_said_to_be(tilted):
    data = world()
    blind = Dataset(data.x_train, data.y_train, data.x_test[:2], data.y_test[:2], data.classes, name="tilted")
    found = personal(tilted, blind, template=Tilt().double(), resamples=10)
    assert set(found.client) == {"0", "all"} and found[found.client == "0"].tested.unique().tolist() == [.75]
    out = (data.x_test[:2] @ torch.tensor(CLIENTS[0]).double()).numpy()
    assert value(found, "loss", MODELS[0]) == pytest.approx(out.mean())


def test_buffers_are_the_clients_own_and_parameters_are_offset():
    made = with_offset({"theta": torch.tensor([5.]), "running": torch.tensor([.1]), "count": torch.tensor(7)},
                       {"theta": torch.tensor([3.]), "running": torch.tensor([.2]), "count": torch.tensor(9)},
                       {"theta": torch.tensor([2.]), "running": torch.tensor([.9]), "count": torch.tensor(0)}, {"running", "count"})
    assert {k: v.tolist() for k, v in made.items()} == {"theta": [6.], "running": [pytest.approx(.2)], "count": 9}
    assert [n for n, _ in Normed().named_buffers()] == ["running"]


def test_gradient_moments_are_those_of_the_batches_mean_inputs():
    data = world()
    batches = [torch.arange(i, i + 4) for i in range(0, 16, 4)]
    mean, var = gradient_moments(Tilt().double(), data.x_train, data.y_train, batches)
    g = data.x_train.view(4, 4, 3).mean(1).numpy()
    assert mean.numpy() == pytest.approx(g.mean(0), abs=1e-12) and var.numpy() == pytest.approx(g.var(0, ddof=1), abs=1e-12)
    with pytest.raises(InputError, match="at least two"): gradient_moments(Tilt(), data.x_train, data.y_train, batches[:1])


def test_the_ratio_is_that_of_the_alignment_room():
    from fedinterp.pflalign import gsnr
    data = world()
    mean, var = gradient_moments(Tilt().double(), data.x_train, data.y_train, [torch.arange(i, i + 4) for i in range(0, 16, 4)])
    assert (mean ** 2 / var).numpy() == pytest.approx(gsnr(data.x_train.view(4, 4, 3).mean(1)).numpy(), rel=1e-9)


def test_a_parameter_that_the_loss_never_meets_has_no_gradient_and_no_ratio(tilted):
    class Idle(Tilt):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))
    mean, var = gradient_moments(Idle().double(), world().x_train, world().y_train, [torch.tensor([0]), torch.tensor([1])])
    assert mean[3:].tolist() == var[3:].tolist() == [0., 0.]


def test_drift_of_a_linear_loss_is_known_in_closed_form(tilted):
    data = world()
    goals = {0: state([1., 0., 4.]), 1: state([1., 0., 3.])}
    found = drift(tilted, data, batch_size=2, batches=4, optimum=goals, posterior_std=.5, prior_std=2., delta=.1, template=Tilt().double())
    u, step = {k: np.subtract(v, OLD) for k, v in CLIENTS.items()}, np.subtract(NEW, OLD)  # (0, 3, 0), (0, 0, 1) and (0, 1.5, .5)
    cos = lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    for k in (0, 1):
        assert value(found, "consistency", MODELS[0], str(k)) == pytest.approx(cos(u[k], step), abs=1e-6)
        assert value(found, "consistency with others", MODELS[0], str(k)) == pytest.approx(0, abs=1e-6)
        for name, way in ((MODELS[0], u[k]), (MODELS[1], step + u[k]), (MODELS[2], step), (MODELS[3], u[1 - k])):
            angle = math.degrees(math.acos(cos(way, np.array([0., 0., 1.]))))
            assert value(found, "angle", name, str(k)) == pytest.approx(angle, abs=1e-6)
        norm, n = np.linalg.norm(u[k]), 8
        kl = .5 * (3 * (1 / 16 - 1 + math.log(16)) + norm ** 2 / 4)
        assert value(found, "norm", MODELS[0], str(k)) == pytest.approx(norm, abs=1e-6)
        assert value(found, "norm", "global", str(k)) == pytest.approx(np.linalg.norm(step), abs=1e-6)
        assert value(found, "KL", MODELS[0], str(k)) == pytest.approx(kl, abs=1e-6)
        assert value(found, "bound term", MODELS[0], str(k)) == pytest.approx(math.sqrt((kl + math.log(2 * math.sqrt(n) / .1)) / (2 * n)), abs=1e-6)
        rows = data.x_train[8 * k:8 * k + 8].numpy()
        for name, theta in ((MODELS[0], CLIENTS[k]), (MODELS[2], OLD)):
            assert value(found, "training loss", name, str(k)) == pytest.approx((rows @ theta).mean(), abs=1e-6)
            assert value(found, "training error", name, str(k)) == pytest.approx((rows @ theta >= 0).mean(), abs=1e-6)
        order = rng_for(0, "gradients", k).permutation(np.arange(8 * k, 8 * k + 8))
        g = data.x_train.numpy()[order].reshape(4, 2, 3).mean(1)
        ratio = g.mean(0) ** 2 / g.var(0, ddof=1)
        for name in (MODELS[0], MODELS[2]):  # a linear loss has one gradient everywhere
            assert value(found, "GSNR mean", name, str(k)) == pytest.approx(ratio.mean(), abs=1e-6)
            assert value(found, "GSNR median", name, str(k)) == pytest.approx(np.median(ratio), abs=1e-6)
    floor = found[(found.metric == "consistency") & (found.model == MODELS[0])].set_index("client")["null"]
    assert floor["0"] == pytest.approx(3 / math.sqrt(10), abs=1e-6) and floor["1"] == pytest.approx(1 / math.sqrt(10), abs=1e-6)


def test_bounds_have_their_closed_forms_and_order():
    assert gaussian_kl(0, 5, .1, .1) == 0 and gaussian_kl(2, 5, .1, .1) == pytest.approx(200)
    assert bound_term(0, 100, .05) == pytest.approx(math.sqrt(math.log(400) / 200))
    assert bound_term(5, 100) < bound_term(6, 100) and bound_term(5, 200) < bound_term(5, 100)


def test_unrelated_updates_have_the_consistency_that_chance_gives():
    updates = dict(enumerate(torch.from_numpy(rng_for(3, "u").normal(size=(4, 100_000)))))
    found = consistency(updates, {0: 5, 1: 1, 2: 1, 3: 1})
    for cos, floor, rest in found.values(): assert cos == pytest.approx(floor, abs=.02) and rest == pytest.approx(0, abs=.02)
    assert found[0][1] == pytest.approx(5 / math.sqrt(28), abs=.01)


def test_agreeing_updates_agree_beyond_chance_and_random_signs_take_that_away(tmp_path):
    d, rng = 4000, rng_for(1, "agree")
    common, own = rng.normal(size=d), rng.normal(size=(4, d))
    long = Tilt()
    long.theta = nn.Parameter(torch.zeros(d).double())
    data = Dataset(torch.from_numpy(rng.normal(size=(8, d))), torch.zeros(8).long(), torch.zeros(2, d).double(), torch.zeros(2).long(), ("a",), name="long")
    clients = {(1, k): {"theta": torch.from_numpy(common + u)} for k, u in enumerate(own)}
    servers = {0: {"theta": torch.zeros(d).double()}, 1: {"theta": torch.from_numpy(common + own.mean(0))}}
    run = Run.from_checkpoints(tmp_path/"run", Config(clients=4, dataset="long"), servers, clients, list(np.arange(8).reshape(4, 2)), classes=["a"])
    found = drift(run, data, steps=0, batches=2, template=long)
    of = lambda name, metric: found[(found.metric == metric) & (found.model == name)]
    agree = 1 / math.sqrt(2 * (1 + 1 / 3))  # cosine of common + u with common + the mean of three others
    assert of(MODELS[0], "consistency with others").value.to_numpy() == pytest.approx(agree, abs=.05)
    assert of("random signs", "consistency with others").value.to_numpy() == pytest.approx(0, abs=.06)
    signs = of("random signs", "consistency")
    assert signs.value.to_numpy() == pytest.approx(.5, abs=.05) and signs["null"].to_numpy() == pytest.approx(.5, abs=.02)


def test_noise_has_the_gsnr_that_chance_gives():
    g = rng_for(0, "noise").normal(size=(6, 200_000))
    ratio, chance = g.mean(0) ** 2 / g.var(0, ddof=1), gsnr_null(6)
    assert np.median(ratio) == pytest.approx(chance["median"], abs=.003) and ratio.mean() == pytest.approx(chance["mean"], abs=.02)
    assert gsnr_null(3)["mean"] == math.inf


def test_everybody_alone_has_an_offset_that_gives_back_the_client_and_no_consistency(tiny, tmp_path):
    config = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=3, rounds=2, local_steps=3, batch_size=8, partition="dirichlet:1", strategy="local")
    run = train(config, tmp_path, data=tiny, progress=False, workers=1)
    scores, moves = personal(run, tiny, resamples=10), drift(run, tiny, steps=2, batches=2, batch_size=4)
    for k in "012": assert value(scores, "loss", MODELS[1], k) == pytest.approx(value(scores, "loss", MODELS[0], k), abs=1e-5)
    assert moves[moves.metric.str.startswith("consistency")].value.isna().all()
    assert moves[(moves.metric == "angle") & (moves.model == "global")].value.isna().all()
    away = drift(run, tiny, optimum=run, batches=2, batch_size=4)
    assert value(away, "angle", MODELS[0]) == pytest.approx(0, abs=1e-3)


def test_a_head_that_stays_with_its_client_does_not_enter_the_consistency(tiny, tmp_path):
    config = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=3, rounds=1, local_steps=3, batch_size=8, partition="dirichlet:1", strategy="fedper")
    run = train(config, tmp_path, data=tiny, progress=False, workers=1)
    found = drift(run, tiny, steps=0, batches=2, batch_size=4)
    sizes = {n: p.numel() for n, p in run.model().named_parameters()}
    assert set(found[found.metric == "consistency"]["n"]) == {sum(v for n, v in sizes.items() if not n.startswith("fc"))}
    assert set(found[found.metric == "norm"]["n"]) == {sum(sizes.values())}


def test_what_cannot_be_answered_is_refused_in_one_sentence(trained, tilted, tiny, tmp_path):
    config = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=2, rounds=2, local_steps=1, batch_size=8, partition="iid")
    blind, last = (train(config, tmp_path/t[:2], data=tiny, progress=False, workers=1, trace=t) for t in ("all/server", "last"))
    for ask in (personal, drift):
        with pytest.raises(RunError, match="keeps no client's weights"): ask(blind, tiny)
        for wrong in (9, [], [1, 9]):
            with pytest.raises(InputError, match=r"keeps clients of rounds \[1, 2\]"): ask(trained, tiny, rounds=wrong)
    with pytest.raises(RunError, match="lacks the server of round 1"): drift(last, tiny)
    assert MODELS[1] not in set(personal(last, tiny, resamples=10).model)
    for wrong, words in ((dict(batches=1), "from 2"), (dict(batch_size=0), "from 1"), (dict(steps=-1), "from 0"), (dict(prior_std=0.), "above 0"), (dict(delta=1), "between 0 and 1"),
                         (dict(optimum={0: {"fc.weight": torch.zeros(2)}}), "the optimum of client 0 has no")):
        with pytest.raises(InputError, match=words): drift(trained, tiny, **wrong)
    few = Dataset(*(getattr(world(), part)[:5] for part in ("x_train", "y_train", "x_test", "y_test")), ("a", "b"))
    with pytest.raises(InputError, match="give the data that it was trained on"): personal(tilted, few, template=Tilt())
    nobody = Run.from_checkpoints(tmp_path/"nobody", Config(clients=1), {0: state(OLD), 1: state(NEW)}, {(1, 0): state(OLD)}, classes=["a", "b"])
    with pytest.raises(RunError, match="does not know who holds"): personal(nobody, world(), template=Tilt())


def test_nothing_is_written_into_the_run(trained, tiny):
    digest = lambda: {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(trained.path.rglob("*")) if p.is_file()}
    before = digest()
    personal(trained, tiny, resamples=10)
    drift(trained, tiny, steps=1, batches=2, batch_size=4)
    assert digest() == before
