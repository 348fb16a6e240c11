"Contracts of entries that stay with their client: nobody else's state depends on them, and they come back to whom they belong."
from dataclasses import dataclass
import pytest, torch
from conftest import bands, digest
from fedinterp.core import Config, InputError, nbytes, register, weighted_mean
from fedinterp.cost import account, payload
from fedinterp.data import dataset_from_arrays
from fedinterp.models import build_model
from fedinterp.private import FedPer, Private, travelling
from fedinterp.run import unpack
from fedinterp.serveropt import FedAdam
from fedinterp.strategy import Strategy, Upload, get_strategy
from fedinterp.train import _parse_state, cohort, train

HEAD = ("fc.weight", "fc.bias")


@pytest.fixture
def run(tiny, config, tmp_path):
    "One call trains a strategy on the tiny data."
    return lambda strategy, where="a", workers=1, data=None, **changes: train(
        config.replace(strategy=strategy, **changes), tmp_path/where, data=data or tiny, progress=False, workers=workers)


def tensors(run, round=None):
    return _parse_state(unpack((run.path/f"rounds/{run.done if round is None else round:04d}/strategy.safetensors").read_bytes()))


def test_the_body_is_the_mean_of_the_clients_and_the_servers_head_is_that_of_round_zero(run):
    made = run("fedper")
    sizes = [len(p) for p in made.partition]
    for r in (1, 2, 3):
        server, mean = made.server(r), weighted_mean([made.client(r, k) for k in range(4)], sizes)
        assert all(server[n].equal(made.server(0)[n] if n in HEAD else mean[n]) for n in server)
        assert set(server) == set(made.server(0))
    heads = [made.client(3, k)["fc.weight"] for k in range(4)]
    assert all(not a.equal(b) for i, a in enumerate(heads) for b in heads[:i])


def test_a_client_starts_with_the_body_of_the_server_and_the_head_it_had_last(run):
    starts = []
    @dataclass(frozen=True)
    class Watched(FedPer):
        def upload(self, trained, local):
            starts.append(local.start)
            return super().upload(trained, local)
    register("strategy", "watched", Watched)
    made = run("watched", participation=0.5, rounds=6)
    last, at = {}, iter(starts)
    for r in range(1, 7):
        order = sorted(cohort(made.config, r), key=lambda k: (-len(made.partition[k]), k))  # the longest first: as the work is handed out
        for k in order:
            start, server = next(at), made.server(r - 1)
            assert all(start[n].equal(last.get(k, server)[n] if n in HEAD else server[n]) for n in server)
            last[k] = made.client(r, k)
    _, own = tensors(made)
    assert sorted(own) == sorted(last) and all(own[k][f"own/{n}"].equal(last[k][n]) for k in last for n in HEAD)


def test_no_server_and_no_other_client_depends_on_a_private_entry(tiny, config, tmp_path):
    "One client's head is overwritten when it comes back: everything else keeps its bytes, its own later starts excepted."
    @dataclass(frozen=True)
    class Spoiled(FedPer):
        bad: bool = False
        def init_client(self, weights, client): return {"who": torch.tensor(client)}
        def upload(self, trained, local):
            extra, kept = super().upload(trained, local)
            if self.bad and int(local.client["who"]) == 2: trained.update({n: torch.full_like(trained[n], 7.0) for n in HEAD})
            return extra, kept
    register("strategy", "spoiled", Spoiled)
    good, bad = (train(config.replace(strategy="spoiled", strategy_args=dict(bad=b)), tmp_path, data=tiny, progress=False, workers=1) for b in (False, True))
    assert bad.client(1, 2)["fc.bias"].eq(7).all() and not good.client(1, 2)["fc.bias"].eq(7).any()
    for r in (1, 2, 3):
        assert all(good.server(r)[n].equal(v) for n, v in bad.server(r).items())
        assert all(good.client(r, k)[n].equal(v) for k in (0, 1, 3) for n, v in bad.client(r, k).items())


def test_nan_in_private_entries_never_gets_into_the_mean():
    w = {"body": torch.zeros(2), "head.weight": torch.zeros(2)}
    ups = [Upload(k, 1, 1, {"body": torch.full((2,), float(k)), "head.weight": torch.full((2,), float("nan"))}, {}, tuple(w)) for k in range(2)]
    after, _ = Private("head").aggregate(w, ups, {})
    assert after["body"].tolist() == [0.5, 0.5] and after["head.weight"].equal(w["head.weight"])
    assert ups[0].params == tuple(w) and "head.weight" in ups[0].weights  # what was given is as it was


def test_babus_head_never_moves_whatever_the_optimiser_and_its_body_learns(run):
    for changes in (dict(optimizer="adamw", weight_decay=0.1), dict(optimizer="sgd", lr=0.05, momentum=0.9, clip_grad=1.0)):
        made = run("fedbabu", **changes)
        states = [made.server(3), *(made.client(3, k) for k in range(4))]
        assert all(s[n].equal(made.server(0)[n]) for s in states for n in HEAD)
        assert all(not s["conv1.weight"].equal(made.server(0)["conv1.weight"]) for s in states)


def test_babus_heads_are_fitted_afterwards_by_realigning_them(tmp_path):
    from fedinterp.heads import realign_head
    data = dataset_from_arrays(*bands(200, 0), *bands(120, 1), classes=("a", "b", "c", "d"), name="tiny")
    config = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=2, rounds=3, local_epochs=2, batch_size=16, partition="classes:2", strategy="fedbabu", lr=1e-2)
    made = train(config, tmp_path, data=data, progress=False, workers=1)
    table = realign_head(made, data, samples=40, draws=3, fine_tune=False).query("cls == 'all'").set_index("metric").value
    assert table["head"] > table["native"] + 0.1


def test_alone_the_server_stays_as_it_began_and_a_client_trains_as_if_there_were_no_other(run):
    made = run("local")
    assert all(made.server(r)[n].equal(v) for r in (1, 2, 3) for n, v in made.server(0).items())
    accuracy = made.metrics().query("client == 'server' and metric == 'accuracy' and cls == 'all'").value
    assert accuracy.nunique() == 1
    some = run("local", where="b", participation=0.5, rounds=5)
    _, own = tensors(some)
    assert sum(k in cohort(some.config, r) for r in range(1, 6) for k in own) == 10 and {n[4:] for n in own[max(own)]} == set(some.server(0))


def test_with_batchnorm_every_buffer_may_stay_too(tmp_path):
    @dataclass(frozen=True)
    class FedBN(Private):
        private: str = "*bn*"
    register("strategy", "fedbn", FedBN)
    data = dataset_from_arrays(*bands(48, 0, size=32), *bands(16, 1, size=32), classes=tuple("abcd"), name="small")
    config = Config(dataset="small", model="resnet10", model_args=dict(channels=[4, 4, 8, 8]), clients=2, rounds=2, local_epochs=1, batch_size=8, partition="quantity:1", strategy="fedbn")
    made = train(config, tmp_path, data=data, progress=False, workers=1)
    norms = [n for n in made.server(0) if "bn" in n]
    assert len(norms) >= 45 and all(made.server(2)[n].equal(made.server(0)[n]) for n in norms)
    steps = made.metrics().query("metric == 'steps'").groupby("client").value.sum()
    assert [int(made.client(2, k)["bn1.num_batches_tracked"]) for k in range(2)] == [int(steps[str(k)]) for k in range(2)]


def test_it_combines_with_a_server_optimiser_which_then_sees_only_what_travels(run):
    @dataclass(frozen=True)
    class Both(FedPer, FedAdam): pass
    register("strategy", "fedper_adam", Both)
    server, own = tensors(made := run("fedper_adam", strategy_args=dict(server_lr=0.01)))
    assert {k[2:] for k in server} == {n for n in made.server() if n not in HEAD}
    assert set(own[0]) == {f"own/{n}" for n in HEAD} and made.server()["fc.bias"].equal(made.server(0)["fc.bias"])


@pytest.mark.parametrize("strategy", ["fedper", "fedbabu", "local"])
def test_resume_partial_participation_and_workers_change_no_byte(run, tmp_path, strategy):
    made = [run(strategy, where=str(w), workers=w, participation=0.5, rounds=5) for w in (1, 2)]
    half = run(strategy, where="short", participation=0.5, rounds=2)
    resumed = tmp_path/"3"/made[0].path.name
    resumed.parent.mkdir()
    half.path.rename(resumed)
    (resumed/"config.json").write_text((made[0].path/"config.json").read_text())
    assert digest(made[0]) == digest(made[1]) == digest(run(strategy, where="3", participation=0.5, rounds=5))


def test_what_stays_costs_nothing_on_the_wire_and_what_travels_costs_what_it_did(run):
    state = run("fedavg").server(0)
    head = nbytes({n: state[n] for n in HEAD})
    sizes = {s: travelling(run(s))(state) for s in ("fedavg", "fedper", "fedbabu", "local")}
    assert sizes == {"fedavg": nbytes(state), "fedper": nbytes(state) - head, "fedbabu": nbytes(state) - head, "local": 0}
    bills = {s: account(run(s), sends=travelling(run(s))).query("metric == 'bytes'").total.iloc[-1] for s in sizes}
    assert bills == {s: 2 * 4 * 3 * n for s, n in sizes.items()}


def test_any_strategy_may_say_what_travels_and_masks_are_counted_as_they_are_elsewhere(run):
    @dataclass(frozen=True)
    class Halves(Strategy):
        "Sends convolutions alone; stands for a method that freezes half of its adapters."
        def travels(self, name): return name.startswith("conv")
    register("strategy", "halves", Halves)
    state = run("fedavg").server(0)
    masks = {n: torch.arange(v.numel()).view(v.shape) % 4 == 0 for n, v in state.items()}
    convs = lambda d: {n: v for n, v in d.items() if n.startswith("conv")}
    for bitmap in (True, False):
        assert travelling(run("halves"))(state, masks, bitmap) == payload(convs(state), convs(masks), bitmap)
        assert travelling(run("fedavg"))(state, masks, bitmap) == payload(state, masks, bitmap)


@pytest.mark.parametrize("given, kept", [
    ("fc", {"fc.weight", "fc.bias"}), ("*.bias", {"conv1.bias", "conv2.bias", "conv3.bias", "fc.bias"}), (["fc", "conv1.weight"], {"fc.weight", "fc.bias", "conv1.weight"}),
    ("conv", set()), ((), set()), ("conv?", {f"conv{i}.{p}" for i in (1, 2, 3) for p in ("weight", "bias")})])
def test_a_pattern_names_entries_or_whole_modules_and_never_parts_of_a_name(given, kept):
    state = build_model("simple_cnn", channels=(4, 4, 8)).state_dict()
    assert {n for n in state if not Private(given).travels(n)} == kept


@pytest.mark.parametrize("strategy", ["fedper", "fedbabu"])
def test_a_head_that_the_model_does_not_have_is_refused_by_naming_its_modules(run, strategy):
    with pytest.raises(InputError) as error: run(strategy, strategy_args=dict(head="classifier"))
    assert str(error.value).startswith(f"{get_strategy(strategy).__class__.__name__}: this model has nothing called 'classifier'; its modules are ")
    assert all(m in str(error.value) for m in ("conv1", "conv2", "conv3", "fc")) and "\n" not in str(error.value)


def test_the_refusal_of_a_deep_model_names_the_nearest_dozen():
    state = {f"layers.{i}.attention.query.weight": torch.zeros(1) for i in range(40)} | {"lm_head.weight": torch.zeros(1)}
    with pytest.raises(InputError, match="its modules are lm_head, .* and 29 more$"): FedPer("head").init_server(state, 2)


@pytest.mark.parametrize("strategy, settings, words", [
    ("fedper", dict(head=3), "FedPer: 3 should be the name of a module"), ("fedbabu", dict(head=""), "FedBABU: '' should be"), ("fedper", dict(head=None), "FedPer: None"),
    ("fedper", dict(private="fc"), "unknown setting of fedper 'private'"), ("local", dict(head="fc"), "has no settings")])
def test_wrong_settings_are_refused_in_one_sentence(strategy, settings, words):
    with pytest.raises(InputError) as error: get_strategy(strategy, **settings)
    assert words in str(error.value) and "\n" not in str(error.value)
