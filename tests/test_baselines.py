"Contracts of the client-side baselines that the tests of training do not state: FedSAM."
import numpy as np, pytest, torch
from conftest import bands, digest
from fedinterp.baselines import FedSAM
from fedinterp.core import Config, InputError, clone, seeded
from fedinterp.data import dataset_from_arrays
from fedinterp.local import train_client
from fedinterp.strategy import FedAvg, Local, get_strategy
from fedinterp.train import train
from torch.nn import functional as F


def net(norm=False):
    "Four classes from 4 × 4 pixels; the same weights every time."
    with seeded(0, "net"):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 8), *([torch.nn.BatchNorm1d(8)] if norm else []), torch.nn.Tanh(), torch.nn.Linear(8, 4))


@pytest.fixture
def batch():
    rng = torch.Generator().manual_seed(0)
    return torch.randn(24, 1, 4, 4, generator=rng), torch.arange(24) % 4


def test_fedsam_with_rho_zero_is_fedavg_to_the_byte_and_with_rho_it_is_not(tiny, config, tmp_path):
    runs = [train(config.replace(strategy=s, strategy_args=a), tmp_path, data=tiny, progress=False, workers=1)
            for s, a in (("fedavg", {}), ("fedsam", dict(rho=0.0)), ("fedsam", {}))]
    files = [{str(p.relative_to(r.path)): p.read_bytes() for p in r.path.rglob("*.safetensors") if p.name != "strategy.safetensors"} for r in runs]
    assert files[0] == files[1] and files[0]["rounds/0003/server.safetensors"] != files[2]["rounds/0003/server.safetensors"]


def test_fedsam_matches_a_hand_computation_in_double_precision(batch):
    model, (x, y) = net(), batch
    start = clone(model.state_dict())
    config = Config(optimizer="sgd", lr=0.3, local_steps=3, batch_size=24)
    got = train_client(model, x, y, np.arange(24), start, config, FedSAM(rho=0.2), 1, 0).weights
    twin = net().double()
    for _ in range(3):  # one batch of everything, so the order of samples does not matter
        params = list(twin.parameters())
        def gradient(): return torch.autograd.grad(F.cross_entropy(twin(x.double()), y), params)
        g = gradient()
        size = torch.cat([p.flatten() for p in g]).norm()
        with torch.no_grad():
            for p, d in zip(params, g): p += 0.2 * d / size
        there = gradient()
        with torch.no_grad():
            for p, d, s in zip(params, g, there): p += -0.2 * d / size - 0.3 * s
    assert all(torch.allclose(got[n].double(), v, atol=1e-6) for n, v in twin.state_dict().items())
    plain = train_client(model, x, y, np.arange(24), start, config, FedAvg(), 1, 0).weights
    assert not torch.allclose(plain["3.weight"], got["3.weight"], atol=1e-4)


def test_the_step_is_taken_from_where_the_parameters_were_to_the_bit():
    theta = {"w": torch.tensor([0.1, 1e-8, -3.0, 1e6])}
    before, seen = theta["w"].clone(), []
    def closure():
        seen.append(theta["w"].clone())
        return {"w": torch.zeros(4)}
    FedSAM(rho=0.3).local_grad({"w": torch.tensor([1.0, 2.0, -2.0, 4.0])}, Local({}, {}, {}, {}, 0.1, 1, theta=theta, closure=closure))
    assert theta["w"].numpy().tobytes() == before.numpy().tobytes() and not seen[0].equal(before)
    assert (before + 0.06 - 0.06)[1] != before[1]  # what subtracting again would have left


def test_fedsam_leaves_parameters_alone_that_get_no_gradient(batch):
    model, (x, y) = net(), batch
    model[1].requires_grad_(False)
    start = clone(model.state_dict())
    got = train_client(model, x, y, np.arange(24), start, Config(local_steps=2, batch_size=8, lr=0.01), FedSAM(), 1, 0).weights
    assert got["1.weight"].equal(start["1.weight"]) and not got["3.weight"].equal(start["3.weight"])


def test_fedsams_second_pass_leaves_batchnorms_statistics_alone(batch):
    model, (x, y) = net(norm=True), batch
    start = clone(model.state_dict())
    config = Config(local_steps=2, batch_size=12, lr=0.01)
    once, twice = (train_client(model, x, y, np.arange(24), start, config, s, 1, 0).weights for s in (FedAvg(), FedSAM()))
    assert (int(once["2.num_batches_tracked"]), int(twice["2.num_batches_tracked"])) == (2, 2)
    kept = train_client(model, x, y, np.arange(24), start, config.replace(batchnorm="freeze"), FedSAM(), 1, 0).weights
    assert all(kept[n].equal(start[n]) for n in start if "running" in n or "tracked" in n)


def test_fedsam_asks_for_one_more_gradient_a_step_and_for_none_where_the_gradient_is_zero():
    asked = []
    local = Local({}, {}, {}, {}, 0.1, 1, theta={"w": torch.ones(2)}, closure=lambda: asked.append(1) or {"w": torch.ones(2)})
    flat = {"w": torch.zeros(2)}
    assert FedSAM().local_grad(flat, local) is flat and asked == []
    FedSAM().local_grad({"w": torch.ones(2)}, local)
    assert asked == [1]


def test_fedsam_changes_no_byte_with_workers_or_partial_participation_and_batchnorm(tmp_path):
    data = dataset_from_arrays(*bands(60, 0, size=4), *bands(20, 1, size=4), classes=tuple("abcd"), name="small")
    config = Config(dataset="small", model="mine", clients=4, rounds=3, local_epochs=1, batch_size=8, partition="iid", strategy="fedsam", participation=0.5)
    runs = [train(config, tmp_path/str(w), data=data, model=net(norm=True), progress=False, workers=w) for w in (1, 2)]
    assert digest(runs[0]) == digest(runs[1])


@pytest.mark.parametrize("settings, words", [(dict(rho=-0.1), "rho = -0.1 should be >= 0"), (dict(rho="wide"), "should be a finite number"), (dict(rh=0.1), "did you mean 'rho'?")])
def test_wrong_settings_of_fedsam_are_refused_in_one_sentence(settings, words):
    with pytest.raises(InputError) as error: get_strategy("fedsam", **settings)
    assert words in str(error.value) and "\n" not in str(error.value)
