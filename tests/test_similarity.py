"similarity: figures with their nulls, and what one model makes of another's activations."
from dataclasses import replace
import numpy as np
import pytest
import torch
from torch import nn
from fedinterp.circuit import find_circuits
from fedinterp.core import Config, InputError, rng_for
from fedinterp.data import load_dataset
from fedinterp.models import build_model, predict
from fedinterp.rows import collect
from fedinterp.similarity import cka, patch, similarity, svcca, translate
from fedinterp.sites import Site, adapter
from fedinterp.table import check
from fedinterp.train import train


def noise(n, d, name="a"): return torch.from_numpy(rng_for(0, name, n, d).standard_normal((n, d)))
def net(seed=0, **kw): return build_model("simple_cnn", channels=(4, 6, 8), seed=seed, **kw)
def hooks(*models): return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for model in models for m in model.modules())


@pytest.fixture(scope="module")
def data():
    whole = load_dataset("fashion_mnist_small")
    return replace(whole, x_train=whole.x_train[::5], y_train=whole.y_train[::5], x_test=whole.x_test[::5], y_test=whole.y_test[::5])


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return train(Config(partition="iid", rounds=2, local_epochs=1, lr=5e-3, batch_size=64, eval_every=2, model_args=dict(channels=[4, 6, 8])),
                 root=tmp_path_factory.mktemp("runs"), progress=False)


def pick(table, of="donor", dose=1.0, cls="all", metric="accuracy", site="conv3"):
    return table[(table.of == of) & (table.dose == dose) & (table.cls == cls) & (table.metric == metric) & (table.site == site)].iloc[0]


@pytest.mark.parametrize("figure", [cka, lambda a, b: cka(a, b, debias=False), svcca], ids=["cka", "cka as published", "svcca"])
def test_what_does_not_change_the_representation_does_not_change_the_figure(figure):
    a, turn = noise(400, 12) @ torch.diag(torch.arange(1., 13).double()), torch.linalg.qr(noise(12, 12))[0]
    order = torch.from_numpy(rng_for(0, "order").permutation(12))
    for b in (a, a @ turn, 7 * a, a + 3, a[:, order], (a @ turn).float().numpy()): assert figure(a, b) == pytest.approx(1, abs=1e-6)
    other = a[:, :5] + 3 * noise(400, 5, "b")
    assert figure(a, other) == pytest.approx(figure(other, a)) and 0.01 < figure(a, other) < 0.95


def test_independent_noise_is_near_zero_only_for_the_unbiased_estimate():
    few, many = (noise(60, 200), noise(60, 200, "b")), (noise(4000, 10), noise(4000, 10, "b"))
    assert abs(cka(*few)) < 0.1 and cka(*few, debias=False) > 0.6
    assert abs(cka(*many)) < 0.01 and svcca(*many) < 0.1
    draws = [cka(noise(40, 50, f"x{i}"), noise(40, 50, f"y{i}")) for i in range(40)]
    assert abs(np.mean(draws)) < 0.02


def test_the_estimates_agree_with_the_textbook_formulas():
    a, b = noise(50, 6), noise(50, 6) @ noise(6, 4) + noise(50, 4, "b")
    k, l, n = a @ a.T, b @ b.T, 50
    def unbiased(k, l):
        k, l, one = k - torch.diag(k.diag()), l - torch.diag(l.diag()), torch.ones(n, dtype=torch.float64)
        return (torch.trace(k @ l) + (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ k @ l @ one)) / (n * (n - 3))
    assert cka(a, b) == pytest.approx(float(unbiased(k, l) / (unbiased(k, k) * unbiased(l, l)).sqrt()), abs=1e-9)
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    product = lambda k, l: torch.trace(k @ h @ l @ h)
    assert cka(a, b, debias=False) == pytest.approx(float(product(k, l) / (product(k, k) * product(l, l)).sqrt()), abs=1e-6)
    from sklearn.cross_decomposition import CCA
    u, v = CCA(4, max_iter=5000, tol=1e-10).fit_transform(a.numpy(), b.numpy())
    assert svcca(a, b, keep=1) == pytest.approx(np.mean([np.corrcoef(u[:, i], v[:, i])[0, 1] for i in range(4)]), abs=1e-3)


def test_constant_features_have_no_similarity():
    a = noise(100, 5)
    for constant in (torch.zeros(100, 3), torch.full((100, 3), 1234.567), a[:1].expand(100, -1)):
        for figure in (cka, svcca, lambda a, b: cka(a, b, False)):
            assert np.isnan(figure(a, constant)) and np.isnan(figure(constant, a)) and np.isnan(figure(constant, constant))


def test_chunks_memory_maps_and_large_means_change_nothing(tmp_path, monkeypatch):
    a, b = noise(500, 8).float(), (noise(500, 8) @ noise(8, 8, "m")).float()
    np.save(tmp_path/"a.npy", a.numpy())
    mapped = np.load(tmp_path/"a.npy", mmap_mode="r")
    assert cka(mapped, b) == cka(a, b) and svcca(mapped, b) == svcca(a, b)
    assert cka(a.double() + 1e6, b) == pytest.approx(cka(a, b), abs=1e-9)
    import fedinterp.similarity as room
    whole = cka(a, b), svcca(a, b)
    chunks = room._chunks
    monkeypatch.setattr(room, "_chunks", lambda n, block: chunks(n, block, 37))
    assert (cka(a, b), svcca(a, b)) == pytest.approx(whole, abs=1e-12)


def test_a_copy_with_renamed_channels_is_the_same_and_an_untrained_or_re_paired_one_is_not(data, learned):
    from fedinterp.channels import permute_group
    model, copy = learned.model(), net()
    copy.load_state_dict(permute_group(model.state_dict(), adapter(model).groups["conv3"], torch.arange(8).flip(0)))
    found = check(similarity({"model": model, "renamed": copy}, data, images=200))
    value = found.set_index(["site", "metric", "of"]).value
    assert found.site.unique().tolist() == ["conv1", "conv2", "conv3"] and (found.lo <= found.value).all() and (found.value <= found.hi).all()
    for site in ("conv1", "conv2", "conv3"):
        for metric in ("cka", "svcca"): assert value[site, metric, "pair"] == pytest.approx(1, abs=1e-5)
        assert value[site, "cka", "re-paired"] < value[site, "cka", "untrained"] < 0.98
    assert similarity({"model": model, "renamed": copy}, data, images=200).equals(found)


def test_circuits_are_compared_beside_as_many_channels_at_random(data, learned):
    models = {"last": learned.model(), "first": learned.model(1)}
    circuits = {n: find_circuits(m, data, classes=["Bag", "Coat"], method="path", size=0.5, samples=5, reference=5, progress=False) for n, m in models.items()}
    found = similarity(models, data, ["conv2"], circuits, images=100)
    narrow = found[found.cls != "all"]
    assert set(narrow.cls) == {"Bag", "Coat"} and set(narrow.of) == {"circuit", "random channels"} and len(narrow) == 8
    same = similarity(models, data, ["conv2"], {n: circuits["last"] for n in models}, images=100)
    both = collect(models, data.x_test, "conv2")
    mask = circuits["last"][0].masks["conv2"]
    assert similarity({"a": models["last"], "b": models["last"]}, data, ["conv2"], {n: circuits["last"] for n in "ab"}, images=100).query(
        "of == 'circuit' and metric == 'cka'").value.tolist() == pytest.approx([1, 1])
    whole = similarity(models, data, ["conv2"], {n: circuits["last"] for n in models}, images=None).query("of == 'circuit' and metric == 'cka' and cls == 'Bag'")
    assert whole.value.item() == pytest.approx(cka(both.acts["last"][:, mask], both.acts["first"][:, mask])) and len(same) == len(found)


def test_resnets_and_models_with_different_sites_can_be_compared(data):
    wide, deep = build_model("resnet10", channels_in=1, channels=(4, 6, 8, 10)), build_model("resnet10", channels_in=1, channels=(4, 6, 8, 12), seed=1)
    mixed = similarity({"cnn": net(), "resnet": wide}, data, [{"cnn": "conv3", "resnet": "block3.0"}], images=100)
    assert set(mixed.site) == {"conv3 / block3.0"}
    assert len(set(similarity({"a": wide, "b": deep}, data, images=50).site)) == 9
    with pytest.raises(InputError, match="unless aligned=True"): patch(wide, deep, data, ["block4.0"], images=50)
    into = patch(wide, deep, data, ["block4.0", "conv1"], doses=(0, 1), images=50, fit=100, aligned=True)
    assert set(into.site) == {"block4.0", "conv1"} and set(into.of) == {"donor", "same class", "re-paired", "mean", "untrained"}


def test_dose_zero_is_the_models_own_accuracy_and_a_copys_dose_one_changes_nothing(data, learned):
    model = learned.model()
    right = predict(model, data.x_test).argmax(-1) == data.y_test
    found = check(patch(model, learned.model(), data, doses=(0, .5, 1), images=None))
    for site in ("conv1", "conv2", "conv3"):
        for of in ("donor", "same class", "re-paired", "mean", "untrained"): assert pick(found, of, 0.0, site=site).value == right.double().mean().item()
        for dose in (0.5, 1.0):
            assert pick(found, dose=dose, site=site).value == right.double().mean().item()
            assert pick(found, dose=dose, site=site, metric="gain")[["value", "lo", "hi"]].tolist() == [0, 0, 0]
    for label, cls in enumerate(data.classes):
        assert pick(found, cls=cls).value == pytest.approx(right[data.y_test == label].double().mean().item())


def test_other_images_lose_the_answer_and_other_images_of_the_class_keep_it(data, learned):
    found = patch(learned, learned, data, ["conv3"], doses=(1,), images=None)
    own = pick(found).value
    assert own > 0.5 and pick(found, "same class").value == own
    for of in ("re-paired", "mean", "untrained"): assert pick(found, of).value < 0.2
    assert pick(found, metric="above untrained").value == pytest.approx(own - pick(found, "untrained").value)


def test_dose_one_at_the_last_site_is_the_donors_features_under_the_models_head(data, learned):
    donor, model = learned.model(), learned.model(1)
    expected = (model.fc(adapter(donor).features(data.x_test)).argmax(-1) == data.y_test).double().mean().item()
    assert pick(patch(model, donor, data, ["conv3"], doses=(1,), images=None, controls=False)).value == pytest.approx(expected)


def test_aligning_undoes_renamed_channels(data, learned):
    from fedinterp.channels import permute_group
    model, renamed = learned.model(), net()
    renamed.load_state_dict(permute_group(model.state_dict(), adapter(model).groups["conv3"], torch.arange(8).roll(3)))
    raw, aligned = (pick(patch(model, renamed, data, ["conv3"], doses=(0, 1), images=None, aligned=a, controls=False, ridge=1e-6)) for a in (False, True))
    own = (predict(model, data.x_test).argmax(-1) == data.y_test).double().mean().item()
    assert raw.value < 0.4 and aligned.value == pytest.approx(own, abs=0.02)


def test_no_hook_is_left_even_after_an_exception(data):
    class Fails(nn.Module):
        "Fails once its site gives something else than what it expects."
        input_shape = (1, 28, 28)
        def __init__(self): super().__init__(); self.site, self.fc = nn.Flatten(), nn.Linear(784, 10)
        def forward(self, x):
            seen = self.site(x)
            if len(x) > 1 and not torch.equal(seen, x.flatten(1)): raise RuntimeError("no")
            return self.fc(seen)
    model, donor = Fails(), Fails()
    donor.site = nn.Sequential(nn.Flatten(), nn.ReLU())
    donor.forward = lambda x: donor.fc(donor.site(x))
    with pytest.raises(RuntimeError, match="no"): patch(model, donor, data, [Site("site")], doses=(1,), images=20, controls=False)
    assert hooks(model, donor) == 0
    patch(net(), other := net(1), data, ["conv3"], images=20, doses=(1,))
    assert hooks(other) == 0


def test_translating_a_model_into_itself_changes_nothing_and_unrelated_pairs_carry_nothing(data, learned):
    model = learned.model()
    found = check(translate(model, model, data, k=(1, 20, 500), ridge=1e-6))
    value = found.set_index(["how", "k"]).value
    full = value["target"].item()
    assert value["source"].item() == value["identity"].item() == full
    assert found[found.how == "svcca"].iloc[-1].value == pytest.approx(full, abs=0.01) and value["ridge"].item() == pytest.approx(full, abs=0.01)
    assert value["re-paired ridge"].item() < 0.25 and found[found.how == "re-paired svcca"].value.max() < 0.3
    assert value["svcca", 1] < value["svcca", 20]


def test_tables_repeat_and_the_random_state_is_left_alone(data, learned):
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (patch(learned, learned, data, ["conv3"], doses=(0, .3), images=100, aligned=True) for _ in range(2))
    assert first.equals(second) and translate(learned, learned, data, k=(5,)).equals(translate(learned, learned, data, k=(5,)))
    assert torch.get_rng_state().equal(state[0]) and (np.random.get_state()[1] == state[1]).all()


def test_wrong_inputs_are_refused_in_one_sentence(data, learned):
    a, model = noise(10, 3), learned.model()
    for call, words in ((lambda: cka(a, a[1:]), "same images"), (lambda: cka(a[:3], a[:3]), "at least 4 rows"), (lambda: svcca(a / 0, a), "NaN"),
                        (lambda: svcca(a, a, keep=0), "keep = 0"), (lambda: similarity({"a": model}, data), "at least two"),
                        (lambda: similarity({"a": model, "b": model}), "needs data"), (lambda: patch(model, model, data, ["conv7"]), "conv7"),
                        (lambda: patch(model, model, data, doses=(0, 1.5)), "doses"), (lambda: patch(model, model, data, images=0), "images = 0"),
                        (lambda: patch(model, model, data, ["conv3"], donor_sites=["conv2", "conv3"]), "name one for each"),
                        (lambda: patch(model, model, data, ["conv3"], donor_sites=["conv2"]), "one grid"),
                        (lambda: patch("model.pt", model, data), "neither a Run"), (lambda: translate(model, net(), data, fit=0), "images = 0"),
                        (lambda: similarity({"a": model, "b": model}, data, circuits={"c": []}), "unknown model with circuits")):
        with pytest.raises(InputError, match=words): call()
    found = find_circuits(model, data, classes=["Bag"], method="path", size=[.2, .5], samples=5, reference=5, progress=False)
    with pytest.raises(InputError, match="two circuits of class 'Bag'"): similarity({"a": model, "b": model}, data, circuits={"a": found})
