"Contracts of optimisers on the server: hand recursions, statistics that are averaged, and nothing that a resume loses."
import math
from dataclasses import dataclass
import numpy as np, pytest, torch
from conftest import bands, digest
from fedinterp.core import Config, InputError, nonfinite, register, seeded, weighted_mean
from fedinterp.data import dataset_from_arrays
from fedinterp.run import unpack
from fedinterp.serveropt import FedAdam, FedAvgM, FedYogi
from fedinterp.strategy import FedAvg, Upload, get_strategy
from fedinterp.train import train


def two(rng, names=("a", "b"), shape=(3, 2)):
    "Two clients' uploads with 10 and 30 samples: parameters, a floating buffer and an integer one."
    states = [{**{n: torch.randn(shape, generator=rng) for n in names}, "var": torch.rand(4, generator=rng), "count": torch.tensor(k + 1)} for k in range(2)]
    return [Upload(k, n, n, s, {}, names) for k, (n, s) in enumerate(zip((10, 30), states))]


def rounds(strategy, n=12, seed=0):
    "n rounds with random uploads: (server states, the mean changes of each round, server tensors)."
    rng = torch.Generator().manual_seed(seed)
    w, server, states, changes = two(rng)[0].weights, {}, [], []
    for _ in range(n):
        ups = two(rng)
        before = {k: v.double().numpy() for k, v in w.items()}
        changes.append({p: 0.25 * ups[0].weights[p].double().numpy() + 0.75 * ups[1].weights[p].double().numpy() - before[p] for p in ("a", "b")})
        w, server = strategy.aggregate(w, ups, server)
        states.append((before, w, ups))
    return states, changes, server


def adam(m, v, d, lr, b1, b2, tau): m, v = b1*m + (1 - b1)*d, b2*v + (1 - b2)*d*d; return lr*m/(np.sqrt(v) + tau), m, v
def yogi(m, v, d, lr, b1, b2, tau): m, v = b1*m + (1 - b1)*d, v - (1 - b2)*d*d*np.sign(v - d*d); return lr*m/(np.sqrt(v) + tau), m, v


@pytest.mark.parametrize("rule, by_hand", [(FedAdam, adam), (FedYogi, yogi)])
def test_adam_and_yogi_match_a_double_precision_recursion_on_two_clients(rule, by_hand):
    states, changes, server = rounds(rule(server_lr=0.1, beta1=0.8, beta2=0.95, tau=0.01))
    for p in ("a", "b"):
        m, v = np.zeros((3, 2)), np.full((3, 2), 0.01**2)
        for (before, after, _), d in zip(states, changes):
            step, m, v = by_hand(m, v, d[p], 0.1, 0.8, 0.95, 0.01)
            assert np.allclose(after[p].numpy(), before[p] + step, atol=2e-6)
        assert np.allclose(server[f"m/{p}"], m, atol=1e-6) and np.allclose(server[f"v/{p}"], v, atol=1e-6)
    assert sorted(server) == ["m/a", "m/b", "v/a", "v/b"]


def test_avgm_matches_its_recursion_and_the_buffers_are_the_plain_mean():
    states, changes, server = rounds(FedAvgM(beta=0.7, server_lr=0.5))
    v = np.zeros((3, 2))
    for (before, after, ups), d in zip(states, changes):
        v = 0.7 * v + d["b"]
        assert np.allclose(after["b"].numpy(), before["b"] + 0.5 * v, atol=2e-6)
        assert after["var"].equal(weighted_mean([u.weights for u in ups], [10, 30])["var"]) and int(after["count"]) == 2
    assert np.allclose(server["v/b"], v, atol=2e-6) and sorted(server) == ["v/a", "v/b"]


def test_avgm_without_momentum_at_rate_one_is_fedavg_to_the_bit(tiny, config, tmp_path):
    states = rounds(FedAvgM(beta=0.0, server_lr=1.0))[0]
    for _, after, ups in states:
        plain = FedAvg().aggregate({}, ups, {})[0]
        assert all(after[n].numpy().tobytes() == plain[n].numpy().tobytes() for n in plain)
    runs = [train(config.replace(strategy=s, strategy_args=a), tmp_path, data=tiny, progress=False, workers=1)
            for s, a in (("fedavg", {}), ("fedavgm", dict(beta=0.0, server_lr=1.0)), ("fedavgm", {}))]
    files = [(r.path/"rounds/0003/server.safetensors").read_bytes() for r in runs]
    assert files[0] == files[1] != files[2]


def test_a_server_step_leaves_what_it_was_given_as_it_was():
    ups = two(torch.Generator().manual_seed(1))
    w, server = {k: v.clone() for k, v in ups[0].weights.items()}, {}
    for rule in (FedAvgM(), FedAdam(), FedYogi()):
        kept = rule.aggregate(w, ups, server)[1]
        again = {k: v.clone() for k, v in kept.items()}
        rule.aggregate(w, ups, kept)
        assert server == {} and all(kept[k].equal(v) for k, v in again.items()) and all(w[k].equal(ups[0].weights[k]) for k in w)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 4)
    def forward(self, x): return self.fc(self.bn(self.conv(x)).relu().mean((2, 3)))


@pytest.fixture(scope="module")
def quiet():
    "Dim images, so that the running variances have far to fall from 1."
    parts = [(0.1 * x, y) for x, y in (bands(96, 0), bands(40, 1))]
    return dataset_from_arrays(*parts[0], *parts[1], classes=tuple("abcd"), name="quiet")


@pytest.mark.parametrize("strategy, settings", [("fedavgm", {}), ("fedadam", dict(server_lr=0.1)), ("fedyogi", dict(server_lr=0.1))])
def test_with_batchnorm_the_server_stays_finite_and_its_variances_positive_over_rounds(quiet, tmp_path, strategy, settings):
    with seeded(0, "normed"): net = Normed()
    config = Config(dataset="quiet", model="mine", clients=2, rounds=10, batch_size=16, lr=5e-3, local_epochs=2, partition="iid", strategy=strategy, strategy_args=settings)
    run = train(config, tmp_path, data=quiet, model=net, progress=False, workers=1)
    losses = run.metrics().query("client == 'server' and metric == 'loss'").value
    assert np.isfinite(losses).all() and len(losses) == 11
    for r in range(1, 11):
        state, mean = run.server(r), weighted_mean([run.client(r, k) for k in range(2)], [len(p) for p in run.partition])
        assert not nonfinite(state) and float(state["bn.running_var"].min()) > 0
        assert all(state[n].equal(mean[n]) for n in state if "running" in n or "tracked" in n)
        assert r == 1 or not state["bn.weight"].equal(mean["bn.weight"])  # a first velocity is the mean change itself
    kept = unpack((run.path/"rounds/0010/strategy.safetensors").read_bytes())
    assert {k.split("/", 2)[2] for k in kept} == {n for n, _ in net.named_parameters()}


def test_the_same_step_over_the_whole_state_does_drive_a_variance_below_zero(quiet, tmp_path):
    @dataclass(frozen=True)
    class Naive(FedAvgM):
        def aggregate(self, weights, uploads, server):
            for u in uploads: u.params = tuple(n for n, v in u.weights.items() if v.is_floating_point())
            return super().aggregate(weights, uploads, server)
    register("strategy", "naive_avgm", Naive)
    with seeded(0, "normed"): net = Normed()
    config = Config(dataset="quiet", model="mine", clients=2, rounds=10, batch_size=16, lr=5e-3, local_epochs=2, partition="iid", strategy="naive_avgm")
    run = train(config, tmp_path, data=quiet, model=net, progress=False, workers=1)
    assert min(float(run.server(r)["bn.running_var"].min()) for r in range(11)) < 0
    assert run.metrics().query("client == 'server' and metric == 'loss'").value.isna().any()


@pytest.mark.parametrize("strategy", ["fedavgm", "fedadam", "fedyogi"])
def test_resume_partial_participation_and_workers_change_no_byte(tiny, config, tmp_path, strategy):
    config = config.replace(strategy=strategy, participation=0.5, rounds=4)
    one, two = (train(config, tmp_path/str(w), workers=w, data=tiny, progress=False) for w in (1, 2))
    half = train(config.replace(rounds=2), tmp_path/"short", workers=1, data=tiny, progress=False)
    resumed = tmp_path/"3"/config.id
    resumed.parent.mkdir()
    half.path.rename(resumed)
    (resumed/"config.json").write_text((one.path/"config.json").read_text())
    assert digest(one) == digest(two) == digest(train(config, tmp_path/"3", workers=1, data=tiny, progress=False))


@pytest.mark.parametrize("name, settings, words", [
    ("fedavgm", dict(beta=1.0), "fedavgm: beta = 1.0 should be at least 0 and below 1"), ("fedavgm", dict(server_lr=0), "fedavgm: server_lr = 0 should be > 0"),
    ("fedadam", dict(beta2=-0.1), "fedadam: beta2 = -0.1"), ("fedadam", dict(tau=0.0), "fedadam: tau = 0.0 should be > 0"),
    ("fedyogi", dict(server_lr=-1), "fedyogi: server_lr = -1"), ("fedyogi", dict(tau=math.nan), "should be a finite number"),
    ("fedyogi", dict(beta1="half"), "should be a finite number"), ("fedadam", dict(beta3=0.9), "did you mean 'beta")])
def test_wrong_settings_are_refused_in_one_sentence(name, settings, words):
    with pytest.raises(InputError) as error: get_strategy(name, **settings)
    assert words in str(error.value) and "\n" not in str(error.value)
