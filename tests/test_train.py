"Contracts of training: equal bytes whatever happens, honest weights, loud failures."
import itertools, os, random, signal, subprocess, sys, threading, time
from dataclasses import dataclass, replace
from pathlib import Path
import numpy as np, pytest, torch
from conftest import ROOT, bands, digest, gone_on_with, real_data
from fedinterp.core import ClientError, Config, DivergedError, InputError, RunError, StorageError, names, norm, register, weighted_mean
from fedinterp.run import Run
from fedinterp.strategy import Strategy
from fedinterp.train import train

EXTRA = {name: dict(optimizer="sgd", lr=0.05) for name in ("scaffold", "pflalign")}
FACTORS = {"fedsa_lora", "ffa_lora", "frlora"}  # these need a model with LoRA factors: test_lora.py proves the same of them


def value(run, metric, client="server", cls="all", round=None):
    found = run.metrics().query("metric == @metric and client == @client and cls == @cls")
    return (found if round is None else found[found["round"] == round]).value.iloc[-1]


@pytest.mark.parametrize("strategy", [s for s in names("strategy") if s not in FACTORS])
@pytest.mark.parametrize("changes", [dict(), dict(participation=0.5, sparsity=0.8, augment="flip_shift", eval_clients_every=2)])
def test_every_strategy_gives_equal_bytes_on_one_and_on_two_workers_and_after_a_resume(tiny, config, tmp_path, strategy, changes):
    config = config.replace(strategy=strategy, **EXTRA.get(strategy, {}), **changes)
    one = train(config, tmp_path/"1", workers=1, data=tiny, progress=False)
    two = train(config, tmp_path/"2", workers=2, data=tiny, progress=False)
    assert digest(one) == digest(two)
    assert digest(gone_on_with(one, tiny, tmp_path, rounds=2)) == digest(one)


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from conftest import bands
from fedinterp.core import Config
from fedinterp.data import dataset_from_arrays
from fedinterp.train import train
tiny = dataset_from_arrays(*bands(160, 0), *bands(80, 1), classes=("a", "b", "c", "d"), name="tiny")
print("ready", flush=True)
train(Config(**{config!r}), {root!r}, data=tiny, progress=False, workers={workers})
print("done", flush=True)
"""


def forked(work):
    "Work in a process of its own, which leads a process group; its number."
    if pid := os.fork(): return pid
    os.setsid()
    try: work()
    finally: os._exit(0)

def gone(group):
    try: os.killpg(group, 0)
    except ProcessLookupError: return True


def killed(events, seconds):
    "An observer that kills its process some time after so many events: when training begins, and at the end of every client and round."
    seen = itertools.count(1)
    def observe(progress):
        if next(seen) == events: threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return observe


@pytest.mark.parametrize("trace, strategy, workers", [("all", "scaffold", 2), ("last", "fedavg", 1)])
def test_a_run_killed_at_random_moments_and_resumed_ends_with_the_bytes_of_one_never_killed(tiny, config, tmp_path, trace, strategy, workers):
    config = config.replace(strategy=strategy, rounds=20, eval_clients_every=2, participation=0.5, **EXTRA.get(strategy, {}))
    whole = train(config, tmp_path/"whole", data=tiny, progress=False, trace=trace)
    chance, kills = random.Random(0), 0
    for _ in range(7):
        moment = killed(chance.randrange(1, 10), chance.random() * 0.02)
        pid = forked(lambda: train(config, tmp_path/"killed", data=tiny, progress=False, trace=trace, workers=workers, observe=moment))
        kills += os.waitpid(pid, 0)[1] == signal.SIGKILL
        while not gone(pid): time.sleep(0.01)  # its workers leave when they see that it is dead
    run = train(config, tmp_path/"killed", data=tiny, progress=False, trace=trace)
    assert kills >= 3 and digest(run) == digest(whole)


def test_workers_leave_when_their_parent_is_killed(tiny, config, tmp_path):
    script = KILLED.format(tests=str(ROOT/"tests"), config=config.replace(rounds=500).changed(), root=str(tmp_path), workers=2)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    children = lambda: [p for p in os.listdir("/proc") if p.isdigit() and _parent(p) == process.pid]
    while len(kids := children()) < 2: time.sleep(0.05)
    process.kill(), process.wait(), process.stdout.close()
    alive = lambda: [k for k in kids if os.path.exists(f"/proc/{k}") and _state(k) != "Z"]
    for _ in range(200):
        if not alive(): break
        time.sleep(0.05)
    assert alive() == []


def _stat(pid):
    try: return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError: return ["gone", "0"]
def _parent(pid): return int(_stat(pid)[1])
def _state(pid): return _stat(pid)[0]


def test_the_cell_run_twice_gives_equal_bytes_and_touches_no_global_state(tiny, config, tmp_path):
    before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()
    runs = [train(config, tmp_path/k, data=tiny, progress=False, workers=w) for k, w in (("a", 1), ("b", 2))]
    assert digest(runs[0]) == digest(runs[1])
    assert before == (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads())


def test_a_finished_run_is_returned_without_its_data(tiny, config, tmp_path, monkeypatch):
    first = train(config, tmp_path, data=tiny, progress=False)
    monkeypatch.setattr("fedinterp.train.load_dataset", lambda name: pytest.fail("the data were loaded"))
    assert digest(train(config, tmp_path)) == digest(first)


def test_fedprox_with_mu_zero_is_fedavg_bit_for_bit_and_with_mu_it_is_not(tiny, config, tmp_path):
    servers = [train(config.replace(strategy=s, strategy_args=a), tmp_path, data=tiny, progress=False).server()
               for s, a in (("fedavg", {}), ("fedprox", {"mu": 0.0}), ("fedprox", {"mu": 1.0}))]
    same = [all(servers[0][k].equal(s[k]) for k in s) for s in servers[1:]]
    assert same == [True, False]


def test_the_server_is_the_weighted_mean_of_the_clients_that_were_kept(tiny, config, tmp_path):
    for weighting in ("samples", "uniform"):
        run = train(config.replace(weighting=weighting), tmp_path, data=tiny, progress=False)
        sizes = [len(p) if weighting == "samples" else 1 for p in run.partition]
        mean = weighted_mean([run.client(2, k) for k in range(4)], sizes)
        assert all(mean[k].equal(v) for k, v in run.server(2).items())
        assert [value(run, "weight", str(k)) for k in range(4)] == pytest.approx(np.array(sizes) / sum(sizes))


@dataclass(frozen=True)
class Tagged(Strategy):
    "Each client keeps its own number and the rounds it took part in."
    def init_client(self, weights, client): return {"who": torch.tensor(client), "times": torch.tensor(0)}
    def upload(self, trained, local): return {"who": local.client["who"]}, {**local.client, "times": local.client["times"] + 1}
    def aggregate(self, weights, uploads, server):
        assert [int(u.extra["who"]) for u in uploads] == [u.client for u in uploads]
        return super().aggregate(weights, uploads, server)


def test_a_clients_own_tensors_follow_it_under_partial_participation(tiny, config, tmp_path):
    from fedinterp.train import _parse_state, cohort
    from fedinterp.run import unpack
    register("strategy", "tagged", Tagged)
    config = config.replace(strategy="tagged", rounds=6, participation=0.5)
    run = train(config, tmp_path, data=tiny, progress=False, workers=2)
    server, own = _parse_state(unpack((run.path/"rounds/0006/strategy.safetensors").read_bytes()))
    took_part = {k: sum(k in cohort(config, r) for r in range(1, 7)) for k in range(4)}
    assert {k: int(v["times"]) for k, v in own.items()} == {k: n for k, n in took_part.items() if n}
    assert all(int(own[k]["who"]) == k for k in own) and len(set(took_part.values())) > 1


def test_scaffolds_server_variate_is_the_mean_of_all_clients_variates(tiny, config, tmp_path):
    from fedinterp.train import _parse_state
    from fedinterp.run import unpack
    run = train(config.replace(strategy="scaffold", participation=0.5, rounds=5, **EXTRA["scaffold"]), tmp_path, data=tiny, progress=False)
    server, own = _parse_state(unpack((run.path/"rounds/0005/strategy.safetensors").read_bytes()))
    for name in ("conv1.weight", "fc.bias"):
        mean = sum(c.get(name, torch.zeros_like(server[name])) for c in own.values()) / 4
        assert torch.allclose(mean, server[name], atol=1e-5) and norm({name: mean}) > 0


@pytest.mark.parametrize("policy", ["average", "local", "freeze"])
def test_batchnorm_policies_do_what_they_say_on_resnet10(tmp_path, policy):
    from fedinterp.data import dataset_from_arrays
    data = dataset_from_arrays(*bands(48, 0, size=32), *bands(16, 1, size=32), classes=tuple("abcd"), name="small")
    config = Config(dataset="small", model="resnet10", clients=2, rounds=2, local_epochs=1, batch_size=8, partition="quantity:1", batchnorm=policy)
    run = train(config, tmp_path, data=data, progress=False)
    first, server, clients = run.server(0), run.server(2), [run.client(2, k) for k in range(2)]
    means, counters = [k for k in server if k.endswith("running_mean")], [k for k in server if k.endswith("num_batches_tracked")]
    sizes = [len(p) for p in run.partition]
    assert all(server[k].dtype == torch.int64 for k in counters)
    if policy == "freeze":
        assert all(s[k].equal(first[k]) for s in (server, *clients) for k in means + counters)
        assert not server["bn1.weight"].equal(first["bn1.weight"])
        return
    mean = weighted_mean(clients, sizes)
    assert all(server[k].equal(mean[k]) for k in means)
    assert all(int(server[k]) == max(int(c[k]) for c in clients) for k in counters)
    steps = [int(value(run, "steps", str(k), round=1)) for k in range(2)]
    counted = [int(c["bn1.num_batches_tracked"]) for c in clients]
    # averaged: the second round counts on from the larger counter; local: each client counts on from its own
    assert counted == ([s + max(steps) for s in steps] if policy == "average" else [2 * s for s in steps])


@pytest.mark.parametrize("model", ["simple_cnn", "resnet10"])
def test_clients_of_every_awkward_size_train_or_are_skipped_with_weight_zero_and_say_so(tmp_path, model):
    from fedinterp.data import dataset_from_arrays
    x, y = bands(41, 0, size=32)
    data = dataset_from_arrays(x, y, *bands(16, 1, size=32), classes=tuple("abcd"), name="odd", groups=np.repeat([1, 2, 3, 4], [1, 7, 9, 24]))
    config = Config(dataset="odd", model=model, clients=4, rounds=1, local_epochs=1, batch_size=8, partition="groups")
    run = train(config, tmp_path, data=data, progress=False)
    sizes = sorted(len(p) for p in run.partition)
    assert sizes == [1, 7, 9, 24] and all(np.isfinite(v.numpy()).all() for v in run.server().values() if v.is_floating_point())
    assert sorted(value(run, "steps", str(k)) for k in range(4)) == [1, 1, 2, 3]
    few = config.replace(partition="dirichlet:0.01", clients=12, min_samples=0, batchnorm="average")
    run = train(few, tmp_path, data=data, progress=False)
    empty = [k for k, p in enumerate(run.partition) if len(p) == 0]
    assert empty
    for k in empty:
        assert value(run, "samples", str(k)) == 0 and value(run, "skipped", str(k)) == 1
        assert len(run.metrics().query(f"client == '{k}' and metric == 'weight'")) == 0


def test_a_cohort_without_any_sample_leaves_the_server_as_it_was(tiny, config, tmp_path):
    config = config.replace(clients=40, partition="dirichlet:0.01", min_samples=0, participation=0.03, rounds=30)
    run = train(config, tmp_path, data=tiny, progress=False)
    skipped = run.metrics().query("client == 'server' and metric == 'skipped'")["round"].tolist()
    assert skipped and all(run.server(r)["fc.weight"].equal(run.server(r - 1)["fc.weight"]) for r in skipped)


@dataclass(frozen=True)
class Faulty(Strategy):
    "The clients in `who` fail in round `round`, in the way `how`."
    how: str = "raise"
    who: int = 1
    everybody: bool = False
    def init_client(self, weights, client): return {"who": torch.tensor(client), "round": torch.tensor(0)}
    def upload(self, trained, local):
        now = int(local.client["round"]) + 1
        if now == 2 and (self.everybody or int(local.client["who"]) == self.who):
            if self.how == "raise": raise KeyError("a lost key")
            if self.how == "die": os.kill(os.getpid(), signal.SIGKILL)
        return {}, {**local.client, "round": torch.tensor(now)}
    def local_grad(self, grads, local):
        if self.how == "nan" and int(local.client["round"]) == 1 and (self.everybody or int(local.client["who"]) == self.who):
            return {n: g * float("nan") for n, g in grads.items()}
        return grads


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how, words", [("raise", "a lost key"), ("die", "exit code -9"), ("nan", "not finite")])
def test_a_client_that_fails_is_named_with_its_round_and_nothing_written_is_lost(tiny, config, tmp_path, how, words, workers):
    if how == "die" and workers == 1: pytest.skip("without workers a client's death is the program's")
    register("strategy", "faulty", Faulty)
    config = config.replace(strategy="faulty", strategy_args=dict(how=how))
    with pytest.raises(DivergedError if how == "nan" else ClientError) as error: train(config, tmp_path, data=tiny, progress=False, workers=workers)
    assert (error.value.client, error.value.round) == (1, 2) and words in error.value.args[0] and "client 1" in error.value.args[0]
    if how == "raise": assert 'raise KeyError("a lost key")' in str(error.value)
    assert Run.open(tmp_path/config.id).done == 1
    skip = train(config.replace(on_failure="skip"), tmp_path, data=tiny, progress=False, workers=workers)
    assert skip.clients(2) == [0, 2, 3] and skip.done == 3 and value(skip, "failed", "1") == 1
    with pytest.raises(ClientError, match="all 4 clients failed in round 2"):
        train(config.replace(on_failure="skip", strategy_args=dict(how=how, everybody=True)), tmp_path, data=tiny, progress=False, workers=workers)


@pytest.mark.parametrize("fields", [
    dict(dataset="tiny", model="simplecnn"), dict(strategy="fedagv"), dict(strategy="fedprox", strategy_args=dict(nu=1)),
    dict(strategy="fedprox", strategy_args=dict(mu=-1)), dict(strategy="fedprox", strategy_args=dict(mu="big")),
    dict(partition="dirichlet:-1"), dict(partition="dirichlet:0"), dict(partition="dirichelt:1"), dict(partition="classes:9"), dict(partition="groups"),
    dict(clients=161), dict(min_samples=80), dict(strategy="scaffold"), dict(strategy="scaffold", optimizer="sgd", momentum=0.9),
    dict(model_args=dict(chanels=[4, 4, 4])), dict(model_args=dict(head="mean")), dict(strategy="fedper", strategy_args=dict(head="fx")), dict(strategy="fedsa_lora"),
])
def test_a_wrong_experiment_is_refused_before_anything_is_written(tiny, config, tmp_path, fields):
    with pytest.raises(InputError) as error: train(config.replace(**fields), tmp_path/"runs", data=tiny, progress=False)
    assert "\n" not in str(error.value) and not (tmp_path/"runs").exists()


def test_wrong_arguments_of_train_are_refused(tiny, config, tmp_path):
    for wrong in (dict(workers=0), dict(workers=1.5), dict(trace="some"), dict(engine="ray"), dict(model=torch.nn.Linear(2, 2)), dict(model="simple_cnn"), dict(data="tiny")):
        with pytest.raises(InputError): train(config, tmp_path, **{"data": tiny, "progress": False, **wrong})
    with pytest.raises(InputError, match="tiny"): train(config.replace(dataset="other"), tmp_path, data=tiny)
    assert list(tmp_path.iterdir()) == []


def test_another_trace_other_data_or_other_weights_on_an_existing_run_are_refused(tiny, config, tmp_path):
    from fedinterp.data import dataset_from_arrays
    train(config, tmp_path, data=tiny, progress=False)
    with pytest.raises(RunError, match="trace"): train(config, tmp_path, data=tiny, progress=False, trace="last")
    other = dataset_from_arrays(*bands(160, 7), *bands(80, 1), classes=("a", "b", "c", "d"), name="tiny")
    with pytest.raises(RunError, match="other data"): train(config, tmp_path, data=other, progress=False)
    net = lambda: torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 4))
    one, two = net(), net()
    train(config.replace(model="mine", model_args={}), tmp_path, data=tiny, model=one, progress=False)
    with pytest.raises(RunError, match="weights to start from"): train(config.replace(model="mine", model_args={}), tmp_path, data=tiny, model=two, progress=False)


def test_a_module_of_the_users_trains_and_is_left_as_it_was(tiny, config, tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 4))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    run = train(config.replace(model="mine", model_args={}), tmp_path, data=tiny, model=net, progress=False)
    assert all(v.equal(before[k]) for k, v in net.state_dict().items()) and not run.server()["0.weight"].equal(before["0.weight"])
    with pytest.raises(RunError, match="template"): run.model()
    assert run.model(template=net).training is False


def test_a_root_that_cannot_be_written_is_a_sentence(tiny, config, tmp_path):
    (tmp_path/"file").write_text("")
    with pytest.raises(StorageError, match="could not write"): train(config, tmp_path/"file", data=tiny, progress=False)


def test_the_sparse_schedule_reaches_its_target_on_clients_and_the_server_is_their_union(tiny, config, tmp_path):
    run = train(config.replace(sparsity=0.8, min_alive=0), tmp_path, data=tiny, progress=False)
    rows = run.metrics().query("metric == 'sparsity' and site == 'conv2.weight' and round == 3")
    by = dict(zip(rows.client, rows.value))
    assert all(by[str(k)] >= 0.79 for k in range(4)) and by["server"] < 0.8
    assert by["server"] == pytest.approx(float((run.server()["conv2.weight"] == 0).double().mean()))


def test_fixed_steps_fractional_epochs_and_participation_are_honoured(tiny, config, tmp_path):
    run = train(config.replace(local_steps=7), tmp_path, data=tiny, progress=False)
    assert {value(run, "steps", str(k)) for k in range(4)} == {7}
    run = train(config.replace(local_epochs=0.5, partition="iid", batch_size=5), tmp_path, data=tiny, progress=False)
    assert {value(run, "steps", str(k)) for k in range(4)} == {4}
    run = train(config.replace(participation=0.5), tmp_path, data=tiny, progress=False)
    assert [len(run.clients(r)) for r in (1, 2, 3)] == [2, 2, 2]


def test_clients_are_scored_at_the_period_that_was_asked_for(tiny, config, tmp_path):
    run = train(config.replace(rounds=4, eval_clients_every=2, eval_every=3), tmp_path, data=tiny, progress=False)
    rows = run.metrics().query("metric == 'accuracy' and cls == 'all'")
    assert sorted(set(rows.query("client != 'server'")["round"])) == [2, 4] and sorted(set(rows.query("client == 'server'")["round"])) == [0, 3, 4]
    model = run.model(2, client=1)
    right = (model(tiny.x_test).argmax(1) == tiny.y_test).double().mean()
    assert rows.query("client == '1' and round == 2").value.item() == pytest.approx(float(right))


@pytest.fixture(scope="module")
def cifar10():
    "A third of the training images and a tenth of the test images, more than a few rounds of three clients see."
    from fedinterp.data import load_dataset
    data = load_dataset(str(real_data("cifar10")))
    return replace(data, x_train=data.x_train[::3], y_train=data.y_train[::3], x_test=data.x_test[::10], y_test=data.y_test[::10])


@pytest.mark.parametrize("model, steps", [("simple_cnn", 40), ("resnet10", 20)])
def test_cifar10_is_learned_within_a_few_rounds(tmp_path, cifar10, model, steps):
    config = Config(dataset=cifar10.name, model=model, clients=3, rounds=2, local_steps=steps, batch_size=64, partition="iid", seed=0)
    run = train(config, tmp_path, data=cifar10, progress=False)
    scores = run.metrics().query("client == 'server' and cls == 'all' and metric == 'accuracy'").value.tolist()
    assert scores[0] < 0.2 and scores[-1] > 0.3
