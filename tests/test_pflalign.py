"Contracts of pFLAlign: the published step, its identities, and equal numbers from strategy, optimiser and pure function."
import copy, math
from dataclasses import dataclass
import numpy as np, pytest, torch
from conftest import bands, digest
from fedinterp import pflalign
from fedinterp.core import Config, InputError, clone, register, weighted_mean
from fedinterp.local import train_client
from fedinterp.models import build_model
from fedinterp.pflalign import Aligned, PFLAlign, alignment_step, gsnr
from fedinterp.run import unpack
from fedinterp.strategy import FedAvg, Local, get_strategy
from fedinterp.train import _parse_state, train

SGD = dict(strategy="pflalign", optimizer="sgd", lr=0.1)


def rng(seed=0): return torch.Generator().manual_seed(seed)


def reference(theta, g, state, delta, lr, steps, beta=0.9, eps=1e-12, gate="erf", gamma=0.5, precondition=True):
    "The step as printed, a number at a time, in 64 bits."
    theta, g, delta = (x.double().flatten().tolist() for x in (theta, g, delta))
    state = {k: state[k].double().flatten().tolist() if k in state else [0.0]*len(g) for k in ("m", "v", "P")}
    out, new = [], dict(m=[], v=[], P=[])
    for i in range(len(g)):
        m, v = beta*state["m"][i] + (1 - beta)*g[i], beta*state["v"][i] + (1 - beta)*g[i]**2
        P = (1 - (1 - beta)*g[i]**2/(v + eps))*state["P"][i] + (1 - beta)*m*m/(v + eps)
        sign = (-m*delta[i] > 0) - (-m*delta[i] < 0)
        if gate == "constant": y = gamma
        else: y = 0.5 - 0.5*(1 if gate == "hard" else math.erf(abs(m)/math.sqrt(2*max(v - m*m, 0) + eps)))*sign
        out.append(theta[i] - lr*(P if precondition else 1)*g[i] - y*delta[i]/steps)
        for k, x in (("m", m), ("v", v), ("P", P)): new[k].append(x)
    return torch.tensor(out, dtype=torch.float64), {k: torch.tensor(x, dtype=torch.float64) for k, x in new.items()}


def close(a, b, tolerance=1e-6): return float((a.double().flatten() - b.double().flatten()).abs().max()) <= tolerance


def test_the_published_test_vector_is_met():
    theta, delta = torch.tensor(1.0), torch.tensor(0.4)
    theta, state = alignment_step(theta, torch.tensor(2.0), {}, delta, lr=0.2, steps=5)
    assert [float(state[k]) for k in ("m", "v", "P")] + [float(theta)] == pytest.approx([0.2, 0.4, 0.01, 0.945555], abs=1e-6)
    assert 5*(1 - 0.2*0.01*2 - float(theta))/0.4 == pytest.approx(0.630559, abs=5e-6)  # γ, from the move
    theta, state = alignment_step(theta, torch.tensor(-1.0), state, delta, lr=0.2, steps=5)
    assert [float(state[k]) for k in ("m", "v", "P")] + [float(theta)] == pytest.approx([0.08, 0.46, 0.0092174, 0.903617], abs=1e-6)


@pytest.mark.parametrize("settings", [dict(), dict(beta=0.5), dict(gate="hard"), dict(gate="constant", gamma=0.25), dict(precondition=False), dict(eps=1e-3)])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-6])
def test_a_step_equals_an_independent_computation_in_64_bits_and_changes_nothing_that_was_given(settings, size):
    theta, delta, state = 0.3*torch.randn(7, 5, generator=rng(1)), torch.randn(7, 5, generator=rng(2)), {}
    delta[0] = 0
    expected, wide = theta, {}
    for t in range(12):
        g = size*torch.randn(7, 5, generator=rng(10 + t))
        given = [x.clone() for x in (theta, g, delta, *state.values())]
        after, new = alignment_step(theta, g, state, delta, 0.3, 12, **settings)
        assert all(a.equal(b) for a, b in zip(given, (theta, g, delta, *state.values())))
        expected, wide = reference(expected, g, wide, delta, 0.3, 12, **settings)
        theta, state = after, new
        assert theta.shape == (7, 5) and close(theta, expected)
        assert all(close(state[k], wide[k]) for k in ("m", "v") + (("P",) if settings.get("precondition", True) else ()))


def test_in_64_bits_a_step_equals_the_reference_far_below_rounding_in_32():
    theta, g, delta = (torch.randn(50, generator=rng(i), dtype=torch.float64) for i in range(3))
    for after, expected in zip(alignment_step(theta, g, {}, delta, 0.1, 3)[:1], reference(theta, g, {}, delta, 0.1, 3)[:1]): assert close(after, expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gamma_one_removes_the_offset_over_the_round_and_gamma_zero_keeps_it(dtype):
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    w, delta = (0.3*torch.randn(100, generator=rng(i), dtype=dtype) for i in (1, 2))
    for gamma, end in ((1.0, w), (0.0, w + delta), (0.5, w + delta/2)):
        theta, state = w + delta, {}
        for _ in range(20): theta, state = alignment_step(theta, torch.zeros_like(w), state, delta, 0.1, 20, gate="constant", gamma=gamma)
        assert close(theta, end, tolerance)
    noise, sum_ = torch.randn(20, 100, generator=rng(3), dtype=dtype), torch.zeros_like(w)
    theta, state = w + delta, {}
    for g in noise:
        theta, state = alignment_step(theta, g, state, delta, 0.1, 20, gate="constant", gamma=1.0)
        sum_ += 0.1*state["P"]*g
    assert close(theta, w - sum_, tolerance)


@pytest.mark.parametrize("mean, expected, tolerance", [(0.0, 0.054, 0.005), (1.0, 0.54, 0.02)])
def test_p_in_the_steady_state_has_its_measured_value(mean, expected, tolerance):
    theta, state = torch.zeros(20_000), {}
    for t in range(120): theta, state = alignment_step(theta, mean + torch.randn(20_000, generator=rng(t)), state, torch.zeros(20_000), 0.1, 120)
    assert float(state["P"].mean()) == pytest.approx(expected, abs=tolerance) and float(state["P"].min()) >= 0


@pytest.fixture
def machine_code(monkeypatch):
    "numba at work, which the suite otherwise switches off."
    numba = pytest.importorskip("numba", reason="numba is not installed")
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    pflalign._compiled.cache_clear()
    yield
    pflalign._compiled.cache_clear()


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_compiled_loop_equals_the_operations_one_by_one_and_the_reference(machine_code, decay):
    start = {"a": torch.randn(600, 1000, generator=rng(3)), "b": torch.randn(7, generator=rng(4)), "without a gradient": torch.ones(3)}
    rounds = [pflalign._Round(PFLAlign(), clone(start)) for _ in range(2)]
    assert all(r.compiled for r in rounds)
    rounds[1].compiled = False
    delta = {n: torch.randn(p.shape, generator=rng(5)) for n, p in start.items()}
    wide, expected, kept = {}, start["b"], 1 - 0.1*decay
    for t in range(8):
        grads = {"a": torch.randn(600, 1000, generator=rng(t))*10.0**-(t % 4), "b": torch.randn(7, generator=rng(100 + t))}
        if t == 2:
            for r in rounds: r.withdraw(6, delta)  # before it, there is nothing to withdraw
        for r in rounds: r.move(clone(grads), 0.1, decay)
        expected, wide = reference(kept*expected.double(), grads["b"], wide, delta["b"]*(t >= 2), 0.1, 6)
        assert all(close(rounds[0].theta[n], rounds[1].theta[n], 2e-6) for n in start) and close(rounds[0].theta["b"], expected)
    assert all(close(a[n], b[n], 2e-6) for a, b in zip(rounds[0].close().values(), rounds[1].close().values()) for n in start)


def test_parameters_that_do_not_lie_in_one_piece_are_moved_as_well(machine_code):
    theta = torch.randn(1000, 600, generator=rng(1)).T
    g, delta = torch.randn(600, 1000, generator=rng(2)), torch.randn(600, 1000, generator=rng(3))
    round, expected = pflalign._Round(PFLAlign(), {"a": theta.clone()}), alignment_step(theta, g, {}, delta, 0.1, 5)[0]
    round.withdraw(5, {"a": delta})
    round.move({"a": g}, 0.1)
    assert not round.compiled and close(round.theta["a"], expected)


def test_numba_that_is_told_not_to_compile_is_not_asked_to(machine_code, monkeypatch):
    import numba
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert pflalign._compiled() is None and not pflalign._Round(PFLAlign(), {"a": torch.zeros(pflalign.LARGE)}).compiled


@pytest.mark.parametrize("settings", [dict(), dict(corrected=True), dict(svag=True), dict(gate="hard"), dict(precondition=False), dict(offset=False)])
def test_strategy_optimiser_and_pure_function_agree_over_two_rounds(settings):
    w, T, lr, strategy = {"a": torch.randn(4, 3, generator=rng(1)), "b": torch.randn(2, generator=rng(2))}, 6, 0.2, PFLAlign(**settings)
    params = {n: torch.nn.Parameter(x.clone()) for n, x in w.items()}
    opt, own = Aligned(params.values(), lr=lr, steps=T, **settings), {}
    pure = {n: dict(delta=torch.zeros_like(x), state={}) for n, x in w.items()}
    options = {k: v for k, v in settings.items() if k != "offset"}
    for r in range(2):
        start = strategy.broadcast(w, {}, own)
        theta = {n: x.clone() for n, x in start.items()}
        local = Local(w, start, {}, own, lr, T, theta=theta)
        for n, p in params.items(): p.data.copy_(w[n])
        opt.begin()
        here = {n: w[n] + pure[n]["delta"] for n in w}
        for n in w: pure[n]["state"] = {} if settings.get("svag") else {k: v for k, v in pure[n]["state"].items() if k != "m"}
        for t in range(T):
            grads = {n: torch.randn(x.shape, generator=rng(100*r + 10*t + i)) + 0.5 for i, (n, x) in enumerate(w.items())}
            for n, p in params.items(): p.grad = grads[n].clone()
            opt.step()
            assert set(strategy.local_grad(clone(grads), local).values()) == {None}  # they are moved already
            for n in w: here[n], pure[n]["state"] = alignment_step(here[n], grads[n], pure[n]["state"], pure[n]["delta"], lr, T, step=t, **options)
        _, own = strategy.upload(theta, local)
        offsets = opt.end()
        for n, offset in zip(w, offsets):
            assert close(theta[n], here[n], 2e-6) and close(params[n].detach(), here[n], 2e-6)
            assert close(offset, here[n] - w[n], 2e-6)
            if strategy.offset:
                assert close(own[f"delta/{n}"], offset, 2e-6)
                pure[n]["delta"] = here[n] - w[n]


@dataclass(frozen=True)
class Recording(PFLAlign):
    "pFLAlign that also sends the sum of its raw gradients, and checks the recursion on the server in every round."
    def local_grad(self, grads, local):
        for n, g in grads.items(): local.work[n] = local.work.get(n, 0) + g.double()
        return super().local_grad(grads, local)
    def upload(self, trained, local):
        return {n: -local.lr*local.work[n] for n in local.theta}, super().upload(trained, local)[1]
    def aggregate(self, weights, uploads, server):
        progress = weighted_mean([u.extra for u in uploads], [u.weight for u in uploads])
        D = {n: (1 - self.gamma)*server.get(n, torch.zeros_like(u)) + u for n, u in progress.items()}
        new, _ = super().aggregate(weights, uploads, server)
        for n, d in D.items(): assert close(new[n] - weights[n], d), f"the recursion D ← (1 − γ)D + ū is broken at {n}"
        return new, D


def test_with_constant_gamma_the_mean_offset_is_a_heavy_ball_on_any_loss(tiny, config, tmp_path):
    register("strategy", "recording", Recording)
    config = config.replace(**{**SGD, "strategy": "recording"}, strategy_args=dict(gate="constant", gamma=0.3, precondition=False), rounds=5)
    assert train(config, tmp_path, data=tiny, progress=False, workers=1).done == 5


class Linear(torch.nn.Module):
    "A model whose loss is linear in its weights: gradients do not depend on them."
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(64, 4, bias=False)
        torch.nn.init.zeros_(self.head.weight)
    def forward(self, x): return self.head(x.flatten(1))
    def loss(self, x, y): return -self(x).gather(1, y[:, None]).mean()


def test_on_a_linear_loss_pflalign_is_server_momentum(tiny, config, tmp_path):
    gamma = 0.3
    config = config.replace(**SGD, strategy_args=dict(gate="constant", gamma=gamma, precondition=False), model="mine", model_args={}, rounds=5, local_epochs=3, batch_size=160)
    run = train(config, tmp_path, data=tiny, model=Linear(), progress=False, workers=1)
    w, velocity, total = torch.zeros(4, 64, dtype=torch.float64), torch.zeros(4, 64, dtype=torch.float64), sum(map(len, run.partition))
    for r in range(1, 6):
        move = torch.zeros_like(w)
        for part in run.partition:
            x, y = tiny.x_train[part].double().flatten(1), tiny.y_train[part]
            g = -torch.nn.functional.one_hot(y, 4).double().T @ x / len(part)
            move -= len(part)/total * 3*0.1*g  # three full-batch steps
        velocity = (1 - gamma)*velocity + move
        w = w + velocity
        assert close(run.server(r)["head.weight"], w)


def assert_equal_bytes(config, data, folder):
    one = train(config, folder/"1", workers=1, data=data, progress=False)
    assert digest(one) == digest(train(config, folder/"2", workers=2, data=data, progress=False))
    half = train(config.replace(rounds=config.rounds - 1), folder/"short", workers=2, data=data, progress=False)
    resumed = folder/"3"/config.id
    resumed.parent.mkdir()
    half.path.rename(resumed)
    (resumed/"config.json").write_text((one.path/"config.json").read_text())
    assert digest(train(config, folder/"3", workers=1, data=data, progress=False)) == digest(one)


@pytest.mark.parametrize("settings", [dict(), dict(svag=True)])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_resume_partial_participation_and_workers_change_no_byte(tiny, config, tmp_path, settings, participation):
    assert_equal_bytes(config.replace(**SGD, rounds=4, participation=participation, strategy_args=settings), tiny, tmp_path)


def test_nor_do_they_with_the_compiled_loop_and_private_batchnorm(config, tmp_path, monkeypatch, machine_code):
    from fedinterp.data import dataset_from_arrays
    if loop := pflalign._compiled(): loop(*np.zeros((6, 8), np.float32), *pflalign._numbers(PFLAlign(), 1, 1, 1))  # before the workers, so that they inherit it
    monkeypatch.setattr(pflalign, "LARGE", 1)
    data = dataset_from_arrays(*bands(16, 0, size=16), *bands(8, 1, size=16), classes=tuple("abcd"), name="tiny")
    assert_equal_bytes(config.replace(**SGD, model="resnet10", model_args=dict(channels=[4, 4, 8, 8]), clients=2, rounds=3, local_steps=2, batchnorm="local", partition="iid"), data, tmp_path)


def own_tensors(run): return _parse_state(unpack((run.path/f"rounds/{run.done:04d}/strategy.safetensors").read_bytes()))[1]


def test_each_client_keeps_its_own_offset_v_and_p_through_rounds_without_it(tiny, config, tmp_path):
    run = train(config.replace(**SGD, participation=0.5, rounds=5), tmp_path, data=tiny, progress=False, workers=1)
    last = {k: max(r for r in range(1, 6) if k in run.clients(r)) for k in range(4) if any(k in run.clients(r) for r in range(1, 6))}
    own = own_tensors(run)
    assert set(last) == {k for k, v in own.items() if v} and min(last.values()) < 5
    names = ("conv1.weight", "fc.bias")
    for k, r in last.items():
        assert {n.split("/")[0] for n in own[k]} == {"delta", "v", "P"}
        assert all(own[k][f"delta/{n}"].equal(run.client(r, k)[n] - run.server(r - 1)[n]) for n in names)
        assert all(float(own[k][f"{kind}/{n}"].min()) >= 0 for kind in ("v", "P") for n in names)


def client(strategy, own={}, model="simple_cnn", batchnorm="average", **changes):
    size = dict(size=8, channels=(4, 4, 8)) if model == "simple_cnn" else dict(size=16, channels=(4, 4, 8, 8))
    net = build_model(model, classes=4, **size)
    x, y = bands(24, 0, size=size["size"])
    config = Config(optimizer="sgd", lr=0.1, batch_size=8, local_epochs=2, batchnorm=batchnorm, **changes)
    weights = clone(net.state_dict())
    return weights, train_client(net, torch.from_numpy(x), torch.from_numpy(y), np.arange(24), weights, config, strategy, 1, 0, {}, own)


def test_with_every_part_off_it_is_fedavg_bit_for_bit():
    _, bare = client(PFLAlign(precondition=False, offset=False))
    _, plain = client(FedAvg())
    assert all(bare.weights[n].equal(x) for n, x in plain.weights.items())


def test_weight_decay_is_that_of_sgd():
    bare, plain, without = (client(rule, weight_decay=decay)[1].weights["fc.weight"] for rule, decay in
                            ((PFLAlign(precondition=False, offset=False), 0.1), (FedAvg(), 0.1), (FedAvg(), 0.0)))
    assert close(bare, plain) and not close(plain, without, 1e-4)


def test_the_ablation_switches_switch_what_they_say():
    rules = dict(paper=PFLAlign(), hard=PFLAlign(gate="hard"), zero=PFLAlign(gate="constant", gamma=0.0), half=PFLAlign(gate="constant"), one=PFLAlign(gate="constant", gamma=1.0),
                 corrected=PFLAlign(corrected=True), svag=PFLAlign(svag=True), plain=PFLAlign(precondition=False), none=PFLAlign(offset=False))
    _, first = client(PFLAlign())
    own = {**first.client, **{k: 10*v for k, v in first.client.items() if k.startswith("delta/")}}
    ends = {name: client(rule, own)[1].weights["conv1.weight"] for name, rule in rules.items()}
    names = list(ends)
    assert all(not ends[a].equal(ends[b]) for i, a in enumerate(names) for b in names[:i])
    kept = {name: {n.split("/")[0] for n in client(rule)[1].client} for name, rule in rules.items()}
    assert kept == {name: {"delta", "v", "P"} for name in rules} | dict(svag={"delta"}, plain={"delta", "v"}, none={"v", "P"})


def test_buffers_come_from_the_server_and_private_batchnorm_gets_no_second_offset():
    weights, got = client(PFLAlign(), model="resnet10")
    start = PFLAlign().broadcast(weights, {}, got.client)
    assert start["bn1.running_mean"] is weights["bn1.running_mean"] and close(start["conv1.weight"], got.weights["conv1.weight"], 1e-7)
    weights, got = client(PFLAlign(), model="resnet10", batchnorm="local")
    own = {k.removeprefix("batchnorm/"): v for k, v in got.client.items() if k.startswith("batchnorm/")}
    assert PFLAlign().broadcast({**weights, **own}, {}, got.client)["bn1.weight"].equal(got.weights["bn1.weight"])


def test_a_weight_with_two_names_keeps_its_offset():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.fc = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 4)
            self.b.weight = self.a.weight
        def forward(self, x): return self.fc(self.b(torch.relu(self.a(x.flatten(1)))))
    x, y = bands(24, 0)
    with torch.random.fork_rng(): net = Tied()
    weights, config = clone(net.state_dict()), Config(optimizer="sgd", lr=0.1, batch_size=8)
    got = train_client(net, torch.from_numpy(x), torch.from_numpy(y), np.arange(24), weights, config, PFLAlign(precondition=False), 1, 0)
    start = PFLAlign().broadcast(weights, {}, got.client)
    assert not start["b.weight"].equal(weights["b.weight"]) and start["a.weight"].equal(start["b.weight"])


def test_a_client_without_steps_keeps_what_it_had():
    own = {"delta/w": torch.ones(2)}
    local = Local({"w": torch.zeros(2)}, {"w": torch.ones(2)}, {}, own, 0.1, 0)
    assert PFLAlign().upload({"w": torch.ones(2)}, local) == ({}, own)


def quadratic(p): return ((p - torch.arange(3.0))**2).sum()


def test_the_optimisers_state_can_be_saved_and_loaded_in_mid_round():
    def play(interrupt):
        p = torch.nn.Parameter(torch.zeros(3))
        opt = Aligned([p], lr=0.3, steps=6)
        for r in range(3):
            with torch.no_grad(): p.zero_()
            opt.begin()
            for t in range(6):
                if interrupt and t == 3:
                    saved, value = copy.deepcopy(opt.state_dict()), p.detach().clone()
                    p = torch.nn.Parameter(value)
                    opt = Aligned([p], lr=9.0, steps=1)
                    opt.load_state_dict(saved)
                opt.zero_grad()
                quadratic(p).backward()
                opt.step()
            offset = opt.end()
        return offset[0]
    assert play(True).equal(play(False))


def test_the_optimiser_takes_groups_closures_a_given_offset_and_parameters_without_gradient():
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(2))
    opt = Aligned([dict(params=[p]), dict(params=[q], lr=0.5)], lr=0.1, steps=4, gate="constant", gamma=1.0)
    opt.begin([torch.zeros(3), torch.full((2,), 0.4)])
    assert q.tolist() == pytest.approx([1.4, 1.4])
    def closure():
        opt.zero_grad()
        loss = quadratic(p)
        loss.backward()
        return loss
    losses = [opt.step(closure).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and q.tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    assert [x.shape for x in opt.end()] == [(3,), (2,)]


def test_gsnr_is_the_squared_mean_by_the_variance_and_nan_where_there_is_none():
    grads = torch.randn(40, 6, generator=rng(1)) + 0.5
    grads[:, 5] = 0.1
    ratios = gsnr(grads)
    expected = grads.double().mean(0)**2 / grads.double().var(0)
    assert torch.allclose(ratios[:5].double(), expected[:5], rtol=1e-4) and ratios[5].isnan()


def mixed():
    opt = Aligned([torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2).double())], lr=1, steps=1)
    opt.begin()
    return opt


def one(steps=1, **settings): return Aligned([torch.nn.Parameter(torch.zeros(2))], **{"lr": 1, "steps": steps, **settings})


@pytest.mark.parametrize("wrong, words", [
    (lambda: PFLAlign(beta=1.0), "beta = 1.0"), (lambda: PFLAlign(beta="high"), "beta = 'high'"), (lambda: PFLAlign(eps=0), "eps = 0"), (lambda: PFLAlign(gate="erv"), "did you mean 'erf'"),
    (lambda: PFLAlign(gate="constant", gamma=1.5), "gamma = 1.5"), (lambda: PFLAlign(gamma=0.0), "gate='constant'"), (lambda: PFLAlign(svag=True, precondition=False), "precondition=True"),
    (lambda: PFLAlign(svag=True, corrected=True), "corrected=False"), (lambda: PFLAlign(beta=float("nan")), "beta = nan"),
    (lambda: get_strategy("pflalign", bta=0.5), "did you mean 'beta'"), (lambda: get_strategy("pflalign", svag="yes"), "true or false"),
    (lambda: alignment_step(torch.zeros(2), torch.zeros(3), {}, torch.zeros(2), 0.1, 5), "g has shape (3,)"),
    (lambda: alignment_step(torch.zeros(2), torch.zeros(2), {"v": torch.zeros(1)}, torch.zeros(2), 0.1, 5), "v has shape (1,)"),
    (lambda: alignment_step(torch.zeros(2), torch.zeros(2), {}, torch.zeros(2), 0.0, 5), "lr = 0.0"),
    (lambda: alignment_step(torch.zeros(2), torch.zeros(2), {}, torch.zeros(2), 0.1, 2.5), "steps = 2.5"),
    (lambda: alignment_step(torch.zeros(2), torch.zeros(2), {"u": torch.zeros(2)}, torch.zeros(2), 0.1, 5), "'u'"),
    (lambda: alignment_step(torch.zeros(2), torch.zeros(2), {}, torch.zeros(2), 0.1, 5, step=-1), "step = -1"),
    (lambda: alignment_step(torch.zeros(2).long(), torch.zeros(2), {}, torch.zeros(2), 0.1, 5), "are int64 on cpu: give float32"),
    (lambda: alignment_step(torch.zeros(2).half(), torch.zeros(2), {}, torch.zeros(2), 0.1, 5), "are float16"), (lambda: mixed().step(), "float32 on cpu and float64 on cpu"),
    (lambda: one(lr=-1), "lr = -1"), (lambda: one(steps=0), "steps = 0"), (lambda: one(momentum=0.9), "'momentum'"),
    (lambda: one().step(), "begin()"), (lambda: one().end(), "begin()"), (lambda: one().begin([torch.zeros(3)]), "one tensor a parameter"),
    (lambda: gsnr(torch.zeros(5)), "(batches, parameters)"), (lambda: gsnr(torch.zeros(1, 5)), "at least 2"),
])
def test_wrong_input_is_refused_in_one_sentence(wrong, words):
    with pytest.raises(InputError) as error: wrong()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_step_more_than_the_round_has_is_refused():
    p = torch.nn.Parameter(torch.zeros(2))
    opt = Aligned([p], lr=0.1, steps=1)
    opt.begin()
    opt.step()
    with pytest.raises(InputError, match="1 steps are done"): opt.step()


def test_another_optimiser_than_plain_sgd_is_refused(tiny, config, tmp_path):
    for wrong in (dict(optimizer="adam"), dict(optimizer="sgd", momentum=0.9), dict(optimizer="sgd", clip_grad=1.0)):
        with pytest.raises(InputError, match="plain SGD"): train(config.replace(strategy="pflalign", **wrong), tmp_path/"runs", data=tiny, progress=False)
    assert not (tmp_path/"runs").exists()
