"Universal sparse autoencoders: exact steps, codes that depend on nothing else, and what must not be found."
import inspect, json
import numpy as np
import pytest
import torch
from fedinterp.core import InputError, RunError, intra_op_threads, rng_for, torch_rng
from fedinterp.data import load_dataset
from fedinterp.models import build_model
from fedinterp.sites import capture
from fedinterp.sparse import Codes, above, encode_rows, gradients, kth, top
from fedinterp.table import check
from fedinterp.usae import USAE, _Training, published, train_usae

SMALL = dict(concepts=48, k=4, steps=60, batch=128, progress=False)
DEFAULTS = {key: p.default for key, p in inspect.signature(train_usae).parameters.items() if p.kind == p.KEYWORD_ONLY} | dict(concepts=48, k=4)

@pytest.fixture(autouse=True)
def one_thread():
    with intra_op_threads(1): yield

def factors(rows, atoms, active, seed=0):
    rng = rng_for(seed, "factors")
    on = rng.random((rows, atoms)).argsort(1) < active
    return torch.from_numpy(on * rng.uniform(.5, 1.5, on.shape)).float()

@pytest.fixture(scope="module")
def acts():
    z = factors(1200, 24, 3)
    return {name: z @ torch.randn(24, d, generator=torch_rng(0, name)) for name, d in (("left", 16), ("right", 24))}

@pytest.fixture(scope="module")
def usae(acts): return train_usae(acts, **SMALL)

@pytest.fixture(scope="module")
def real():
    "Block-3 activations of a small CNN trained on Fashion-MNIST: rows (image, position), and each row's image."
    with intra_op_threads(1):
        data = load_dataset("fashion_mnist_small")
        model, x, y = build_model("simple_cnn", channels=(8, 16, 32), seed=0), torch.as_tensor(data.x_train), torch.as_tensor(data.y_train).long()
        adam = torch.optim.Adam(model.parameters(), 3e-3)
        for at in torch.from_numpy(rng_for(0, "order").permutation(3840)).split(64):
            adam.zero_grad()
            torch.nn.functional.cross_entropy(model(x[at]), y[at]).backward()
            adam.step()
        a = capture(model, x[:1500], ["conv3"])["conv3"]
    return a.movedim(1, -1).flatten(0, -2).contiguous(), np.arange(1500).repeat(a.shape[2] * a.shape[3])

def net(*dims, m=96, seed=0):
    g = torch_rng(seed, "net")
    draw = lambda *shape: torch.randn(*shape, generator=g)
    return {f"m{i}": dict(encoder=draw(m, d) / d**.5, bias=.1*draw(m), decoder=draw(m, d), shift=draw(d), threshold=0.) for i, d in enumerate(dims)}

def batch(net, n=70, seed=0):
    g = torch_rng(seed, "batch")
    return {j: torch.randn(n, p["encoder"].shape[1], generator=g) for j, p in net.items()}

def by_autograd(net, name, x, k, activation, loss):
    leaf = {j: {key: torch.as_tensor(v).clone().requires_grad_() for key, v in p.items()} for j, p in net.items()}
    pre = x[name] @ leaf[name]["encoder"].T + leaf[name]["bias"]
    on = torch.zeros_like(pre).scatter(1, pre.topk(k, 1).indices, 1.) if activation == "topk" else (pre.detach() > kth(pre.detach(), k)).float()
    z, idle = pre.relu() * on, pre.relu() * (1 - on)
    idle = idle * torch.zeros_like(pre).scatter(1, idle.topk(idle.shape[1] // 2, 1).indices, 1.)
    total = 0.
    for j, p in leaf.items():
        rest = x[j] - (z @ p["decoder"] + p["shift"])
        total = total + (rest.square().mean() if loss == "mse" else rest.abs().mean() + .1 * (rest - idle @ p["decoder"]).abs().mean())
    total.backward()
    return total.item(), {j: {key: v.grad for key, v in p.items()} for j, p in leaf.items()}

@pytest.mark.parametrize("loss", ["mse", "l1"])
@pytest.mark.parametrize("activation", ["topk", "batchtopk", "jumprelu"])
@pytest.mark.parametrize("dims", [(20,), (20, 12), (9, 16, 5)])
def test_gradients_equal_those_of_dense_autograd(dims, activation, loss):
    parts = net(*dims)
    x = batch(parts)
    total, truth = by_autograd(parts, "m0", x, 6, activation, loss)
    ours, grads, _ = gradients(parts, "m0", x, 6, activation, loss)
    assert ours == pytest.approx(total, rel=1e-5)
    assert set(grads["m0"]) == {"encoder", "bias", "decoder", "shift"} and all(set(grads[j]) == {"decoder", "shift"} for j in grads if j != "m0")
    for j, g in grads.items():
        for key, v in g.items(): torch.testing.assert_close(v, truth[j][key], rtol=1e-5, atol=1e-5)

@pytest.mark.parametrize("m, k", [(2048, 32), (96, 48), (30, 7), (64, 64), (5, 1)])
def test_the_k_largest_are_those_of_topk(m, k):
    pre = torch.randn(300, m, generator=torch_rng(m, "pre"))
    pre[:9] = pre[:9].round()                                # many ties
    pre[9] = 0.
    value, at = top(pre, k)
    assert value.sort(1, descending=True).values.equal(pre.topk(k, 1).values) and pre.gather(1, at).equal(value)
    assert all(len(set(row)) == k for row in at.tolist())

def test_codes_may_be_empty():
    none = above(-torch.ones(3, 8), 0.)
    assert none.decode(torch.ones(8, 5)).equal(torch.zeros(3, 5)) and none.dense(8).equal(torch.zeros(3, 8))
    silent = net(6)
    silent["m0"]["bias"] = torch.full((96,), -100.)
    for activation in ("topk", "batchtopk", "jumprelu"):
        _, grads, _ = gradients(silent, "m0", batch(silent), 4, activation)
        assert not grads["m0"]["encoder"].any() and not grads["m0"]["decoder"].any() and grads["m0"]["shift"].any()

def test_a_bias_does_not_leak_into_the_auxiliary_target():
    parts = net(20, 12)
    x = batch(parts)
    moved, moved_x = {**parts, "m1": parts["m1"] | {"shift": parts["m1"]["shift"] + 8.}}, {**x, "m1": x["m1"] + 8.}
    (total, grads, _), (total8, grads8, _) = (gradients(p, "m0", v, 6, loss="l1") for p, v in ((parts, x), (moved, moved_x)))
    assert total8 == pytest.approx(total, rel=1e-4)
    for j, g in grads.items():
        for key, v in g.items(): torch.testing.assert_close(grads8[j][key], v, rtol=1e-3, atol=1e-4)

def test_dead_concepts_are_those_unused_in_an_encoders_own_window(acts):
    training = _Training(acts, np.arange(1200), [], DEFAULTS | dict(concepts=6, k=2))
    training.seen, training.window = dict(left=900, right=40), 500
    training.last = dict(left=np.array([900, 401, 400, 0, 500, 1]), right=np.array([0, 1, 0, 40, 0, 0]))
    assert training.dead("left").tolist() == [False, False, True, True, False, True]
    assert training.dead("right").tolist() == [True, False, True, False, True, True]

def test_a_step_records_what_fired():
    a = torch.eye(4)[torch.arange(32) % 3] * 2.               # nothing along the fourth axis
    with torch.no_grad():
        training = _Training({"a": a}, np.arange(32), [], DEFAULTS | dict(concepts=4, k=1))
        training.net["a"]["encoder"].copy_(torch.eye(4))
        x = {"a": a.clone()}
        for _ in range(3): training.step("a", x, 1)
    assert training.seen == {"a": 96} and training.last["a"].tolist() == [96, 96, 96, 0] and training.dead("a").tolist() == [False, False, False, True]

def test_what_is_dead_everywhere_is_started_anew(acts):
    for revive in (True, False):
        with torch.no_grad():
            training = _Training(acts, np.arange(1200), [], DEFAULTS | dict(steps=300, batch=128, revive=revive))
            for part in training.net.values(): part["bias"][:10] = -1e3
            dead = training.run(np.array([]), False).dead
        assert (max(dead.values()) < 10) if revive else min(dead.values()) >= 10

def test_planted_factors_are_recovered_in_both_models():
    maps = {name: torch.randn(48, d, generator=torch_rng(1, name)) for name, d in (("left", 40), ("right", 56))}
    z = factors(6000, 48, 4)
    usae = train_usae({name: z @ m for name, m in maps.items()}, 96, 4, steps=600, progress=False)
    for name, m in maps.items():
        cos = torch.nn.functional.cosine_similarity(m[:, None], usae.directions(name)[None], dim=2)
        assert (cos.amax(1) >= .9).float().mean() >= .9
    assert usae.r2({name: z @ m for name, m in maps.items()}).to_numpy().min() > .85

def scored(real, other):
    a, image = real
    usae = train_usae({"model": a, "other": other}, 256, 8, image=image, steps=300, progress=False)
    held = np.isin(image, usae.held_out)
    return usae.r2({"model": a[held], "other": other[held]})

def test_a_copy_and_a_permuted_copy_are_rebuilt_as_well_as_the_model_itself(real):
    for other in (real[0].clone(), real[0][:, torch.from_numpy(rng_for(0, "channels").permutation(32))]):
        r2 = scored(real, other)
        assert r2.loc["model", "model"] > .8 and (r2.to_numpy().max() - r2.to_numpy().min()) < .02

def test_noise_and_rows_paired_at_random_share_nothing(real):
    a = real[0]
    for other in (torch.from_numpy(rng_for(0, "noise").standard_normal(a.shape)).float(), a[torch.from_numpy(rng_for(0, "rows").permutation(len(a)))]):
        r2 = scored(real, other)
        assert r2.loc["model", "model"] > .6 and r2.loc["model", "other"] <= .05 and r2.loc["other", "model"] <= .05

@pytest.mark.parametrize("activation", ["topk", "batchtopk", "jumprelu"])
def test_a_row_has_the_same_code_alone_in_any_batch_and_after_loading(acts, activation, tmp_path):
    usae = train_usae(acts, activation=activation, **SMALL)
    usae.save(tmp_path/"kept")
    again = USAE.load(tmp_path/"kept")
    for name, a in acts.items():
        whole = usae.encode(name, a)
        assert whole.shape == (1200, 48) and (whole >= 0).all() and 2.5 < (whole > 0).sum(1).float().mean() < 5
        assert again.encode(name, a).equal(whole) and again.directions(name).equal(usae.directions(name))
        for rows in ([0], [7, 300], list(range(1199, 800, -1))):
            part = usae.encode(name, a[rows])
            assert (part > 0).equal(whole[rows] > 0)
            torch.testing.assert_close(part, whole[rows], rtol=1e-6, atol=1e-6)
    assert (again.settings, again.dead, again.names, again.dims) == (usae.settings, usae.dead, usae.names, usae.dims)
    assert again.history.equals(usae.history) and (again.held_out == usae.held_out).all()

def test_equal_input_gives_equal_bits_on_any_number_of_threads_and_touches_no_global_generator(acts, usae, tmp_path):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    maps = {}
    for name, a in acts.items():
        np.save(tmp_path/f"{name}.npy", a.numpy())
        maps[name] = np.load(tmp_path/f"{name}.npy", mmap_mode="r")
    for threads, given in ((2, acts), (1, maps)):
        with intra_op_threads(threads): again = train_usae(given, **SMALL)
        assert all(again.parts[j][key].equal(v) for j, p in usae.parts.items() for key, v in p.items())
        assert again.r2(given).equals(usae.r2(acts))
    assert torch.get_rng_state().equal(before[0]) and (np.random.get_state()[1] == before[1]).all()
    assert not train_usae(acts, **SMALL, seed=1).parts["left"]["decoder"].equal(usae.parts["left"]["decoder"])

def test_activations_are_never_read_whole():
    class Stored:
        ndim, shape = 2, (40_000, 6)
        def __len__(self): return 40_000
        def __getitem__(self, at):
            rows = np.arange(40_000)[at]
            assert len(rows) <= 8192
            return np.stack([np.sin(rows * (c + 1)) for c in range(6)], 1).astype("float32")
    usae = train_usae({"a": Stored()}, 16, 2, steps=5, progress=False)
    assert usae.r2({"a": Stored()}).notna().to_numpy().all()

def test_whole_images_are_held_out(acts):
    image = np.arange(1200) // 8
    usae = train_usae(acts, image=image, **SMALL)
    assert len(usae.held_out) == 15 and set(usae.history["rows"]) == {"held out"}
    assert set(train_usae(acts, holdout=0., **SMALL).history["rows"]) == {"training"}
    loud = {j: a.clone() for j, a in acts.items()}
    for a in loud.values(): a[np.isin(image, usae.held_out)] = 1e4            # what is held out changes nothing
    again = train_usae(loud, image=image, **SMALL)
    assert all(again.parts[j][key].equal(v) for j, p in usae.parts.items() for key, v in p.items())

def test_history_and_settings_are_plain(acts, usae):
    check(usae.history)
    assert set(usae.history.metric) == {"loss", "dead", "R2"} and json.loads(json.dumps(usae.settings)) == usae.settings
    loss = usae.history.query("metric == 'loss'").value.to_numpy()
    assert loss[-1] < loss[0] and usae.dead == {j: int(usae.history.query("metric == 'dead' and encoder == @j").value.iloc[-1]) for j in acts}

def test_decoder_rows_have_norm_one_or_are_free(acts, usae):
    for part in usae.parts.values(): torch.testing.assert_close(part["decoder"].norm(dim=1), torch.ones(48))
    assert train_usae(acts, **SMALL, unit_norm=False).parts["left"]["decoder"].norm(dim=1).std() > .01

def test_selected_steps_the_drawn_model_only(acts):
    with torch.no_grad():
        training = _Training(acts, np.arange(1200), [], DEFAULTS | dict(update="selected"))
        before = {j: {key: v.clone() for key, v in p.items()} for j, p in training.params.items()}
        training.step("left", training.read(slice(0, 64)), 4)
    moved = {j: [key for key, v in p.items() if not v.equal(before[j][key])] for j, p in training.params.items()}
    assert moved == {"left": ["encoder", "bias", "decoder", "shift"], "right": []}

def test_a_batch_normalised_step_equals_autograd_through_batchnorm(acts):
    with torch.no_grad():
        training = _Training(acts, np.arange(1200), [], DEFAULTS | published() | dict(concepts=48, k=4, lr=1e-12))
        raw, x = training.net["left"]["raw"], training.read(slice(0, 200))
        training.step("left", x, 4)
    norm = torch.nn.BatchNorm1d(48)
    leaf = raw["weight"].detach().clone().requires_grad_()
    pre = norm(x["left"] @ leaf.T)
    z = torch.zeros_like(pre).scatter(1, pre.topk(4, 1).indices, 1.) * pre.relu()
    sum((z @ training.net[j]["decoder"] - x[j]).square().mean() for j in acts).backward()
    torch.testing.assert_close(raw["weight"].grad, leaf.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(raw["gamma"].grad, norm.weight.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(raw["beta"].grad, norm.bias.grad, rtol=1e-3, atol=1e-5)

@pytest.mark.parametrize("given", [dict(activation="batchtopk"), dict(activation="jumprelu"), dict(loss="l1"), dict(encoder="batchnorm"), dict(update="selected"), dict(standardise=False)])
def test_every_option_learns(acts, given):
    usae = train_usae(acts, **SMALL | dict(steps=300) | given)
    assert usae.r2(acts).to_numpy().min() > .4

@pytest.mark.parametrize("a", [torch.zeros(20, 5), torch.ones(20, 5) * 7, torch.eye(5)[:1], torch.eye(5)[:3], torch.eye(5)[torch.zeros(50, dtype=torch.int64)],
                               torch.cat([torch.randn(40, 4, generator=torch_rng(0, "a")), torch.full((40, 1), 1e4)], 1)])
@pytest.mark.parametrize("activation", ["topk", "batchtopk"])
def test_poor_data_gives_numbers(a, activation):
    usae = train_usae({"a": a, "b": a + 1}, 16, 8, steps=12, activation=activation, progress=False)
    assert usae.r2({"a": a, "b": a + 1}).notna().to_numpy().all() and usae.history.value.notna().all()
    assert usae.encode("a", a).isfinite().all() and usae.decode("b", usae.encode("a", a)).isfinite().all()

def test_r2_is_not_clipped_unless_asked(acts, usae):
    wrong = {"left": acts["left"], "right": -acts["right"]}
    assert usae.r2(wrong).loc["left", "right"] < 0 and usae.r2(wrong, clip=True).loc["left", "right"] == 0
    assert list(usae.r2(acts).index) == list(usae.r2(acts).columns) == ["left", "right"]

def test_decoding_is_in_the_units_of_the_activations(acts, usae):
    left = usae.encode("left", acts["left"])
    built = usae.decode("left", left)
    assert (built - acts["left"]).square().sum() < .5 * (acts["left"] - acts["left"].mean(0)).square().sum()
    torch.testing.assert_close(built, left @ usae.directions("left") + usae.decode("left", torch.zeros(1, 48)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(usae.decode("left", usae.codes("left", acts["left"])), built, rtol=1e-4, atol=1e-4)
    assert isinstance(usae.codes("left", acts["left"]), Codes)

def test_published_is_a_preset_of_existing_arguments():
    assert set(published()) <= set(inspect.signature(train_usae).parameters)
    assert (published()["concepts"], published()["k"], published()["epochs"], published()["lr"], published()["batch"]) == (2048, 48, 100, 1e-3, 1024)

@pytest.mark.parametrize("given, sentence", [
    (dict(k=49), "k = 49 should be at most concepts = 48"), (dict(k=0), "k = 0 should be a whole number"), (dict(activation="topkk"), "did you mean 'topk'"),
    (dict(loss="l2"), "unknown loss 'l2'"), (dict(encoder="bn"), "unknown encoder 'bn'"), (dict(update="one"), "unknown update 'one'"), (dict(lr=0.), "lr = 0.0"),
    (dict(steps=None), "steps = None"), (dict(epochs=-1), "epochs = -1"), (dict(holdout=1.), "holdout = 1.0"), (dict(image=np.arange(3)), r"image should be \(1200,\)")])
def test_a_wrong_setting_is_refused_in_one_sentence(acts, given, sentence):
    with pytest.raises(InputError, match=sentence): train_usae(acts, **SMALL | given)

def test_wrong_activations_are_refused_in_one_sentence(acts, usae, tmp_path):
    nan = {"left": acts["left"].clone().index_fill_(0, torch.tensor([3]), float("nan"))}
    for given, sentence in (({}, "at least one model"), (acts["left"], "dict"), ({"a": acts["left"][:, 0]}, r"\(N, d\)"), (nan, "'left' hold NaN or infinity"),
                            ({"left": acts["left"], "right": acts["right"][1:]}, "numbers differ"), ({"left": acts["left"][:0]}, r"\(N, d\), not \(0, 16\)")):
        with pytest.raises(InputError, match=sentence): train_usae(given, **SMALL)
    with pytest.raises(InputError, match="did you mean 'left'"): usae.encode("lefd", acts["left"])
    with pytest.raises(InputError, match=r"should be \(n, 16\), not \(1200, 24\)"): usae.encode("left", acts["right"])
    with pytest.raises(InputError, match=r"codes should be \(n, 48\)"): usae.decode("left", torch.zeros(2, 5))
    with pytest.raises(InputError, match="unknown model"): usae.r2({"left": acts["left"]})
    (tmp_path/"a.json").write_text("{}")
    with pytest.raises(RunError, match="no universal autoencoder"): USAE.load(tmp_path/"a")

def test_encoding_is_by_the_threshold_that_was_remembered():
    part = net(8)["m0"]
    x = batch({"m0": part})["m0"]
    part["threshold"] = .7
    pre = torch.addmm(part["bias"], x, part["encoder"].T)
    assert encode_rows(part, x, 4, "batchtopk").dense(96).equal(torch.where(pre > .7, pre, 0.))
