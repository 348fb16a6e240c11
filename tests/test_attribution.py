"Attributions add up, leave the model as it was, name what they cannot do, and agree with circuits no more than chance when there is nothing to agree on."
import copy, sys, warnings
import numpy as np, pytest, torch
from torch import nn
from fedinterp.attribution import METHODS, agreement, attribute_channels, image_maps
from fedinterp.core import InputError, rng_for, seeded
from fedinterp.models import build_model
from fedinterp.sites import Site, adapter

pytest.importorskip("captum")
pytestmark = pytest.mark.filterwarnings("ignore:the .* attributions of site:UserWarning")  # few steps are enough for most of these tests


@pytest.fixture(scope="module")
def model():
    return build_model("simple_cnn", classes=4, size=8, channels=(6, 8, 10), seed=3)


def ask(model, data, method="conductance", **more):
    return attribute_channels(model, data, method, **{"per_class": 6, "steps": 8, "resamples": 50, **more})


def planted(data):
    "A network in which channel 2 alone sees the band of class a, and the others see nothing."
    with seeded(0, "planted"): net = nn.Sequential(nn.Conv2d(1, 5, 1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 64, 4))
    with torch.no_grad():
        for p in net.parameters(): p.zero_()
        net[0].weight[:, 0, 0, 0] = torch.tensor([.3, .3, 1., .3, .3])
        net[3].weight.view(4, 5, 8, 8)[0, 2, :2] = 1.0  # class a is bright in the first two rows
    return net


@pytest.mark.parametrize("method", METHODS)
def test_the_channel_that_was_planted_comes_first(tiny, method):
    found = ask(planted(tiny), tiny, method, sites=[Site("1", channels=5)], classes=["a"]).set_index("channel")
    assert found.value.idxmax() == 2 and found.lo[2] > 0
    assert found.value.drop(2).abs().max() < 1e-6


@pytest.mark.parametrize("method", ["conductance", "integrated_gradients"])
def test_attributions_add_up_to_the_change_in_the_margin(tiny, model, method):
    rough, fine = (ask(model, tiny, method, steps=steps).error.max() for steps in (4, 128))
    assert fine < 0.05 and fine < rough


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was_with_no_hook_behind_also_after_an_exception(tiny, method):
    net = build_model("resnet10", classes=4, channels_in=1, size=8, channels=(4, 4, 6, 8)).train()
    for m in net.modules():
        if isinstance(m, nn.ReLU): m.inplace = True
    before = copy.deepcopy(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ask(net, tiny, method, classes=["a"])
    with pytest.raises(InputError): ask(net, tiny, method, sites=[Site("conv1", channels=99)])
    assert all(m.training for m in net.modules()) and all(m.inplace for m in net.modules() if isinstance(m, nn.ReLU))
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + len(m._backward_pre_hooks) for m in net.modules()) == 0
    assert all(before[k].equal(v) for k, v in net.state_dict().items()) and all(p.grad is None for p in net.parameters())


def test_in_place_relus_and_train_mode_change_nothing(tiny, model):
    other = copy.deepcopy(model).train()
    for m in other.modules():
        if isinstance(m, nn.ReLU): m.inplace = True
    assert ask(model, tiny, kind="conv").equals(ask(other, tiny, kind="conv"))


def test_a_site_at_a_modules_input_is_attributed_like_the_output_before_it(tiny):
    net = planted(tiny)
    by_output, by_input = (ask(net, tiny, sites=[site], classes=["a"]).value for site in (Site("1", channels=5), Site("x", 5, (8, 8), "2", "input")))
    assert np.allclose(by_output, by_input)


def test_results_repeat_bit_for_bit_and_do_not_touch_global_random_state(tiny, model):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert ask(model, tiny).equals(ask(model, tiny))
    assert state.equal(torch.get_rng_state())


def test_chunks_do_not_change_a_value(tiny, model):
    assert np.allclose(ask(model, tiny, batch=2).value, ask(model, tiny, batch=12).value, atol=1e-6)


def test_a_functional_relu_under_deeplift_is_warned_of_and_its_module_twin_is_not(tiny):
    class Called(nn.Module):
        def __init__(self, module):
            super().__init__()
            with seeded(1, "called"): self.conv, self.relu, self.fc = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Linear(144, 4)
            self.module = module
        def forward(self, x): return self.fc((self.relu if self.module else torch.relu)(self.conv(x)).flatten(1))
    with pytest.warns(UserWarning, match="called as a function"): ask(Called(False), tiny, "deeplift", sites=[Site("conv")])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="captum")
        assert ask(Called(True), tiny, "deeplift", sites=[Site("conv")]).error.max() < 1e-4


def test_what_cannot_be_done_is_refused_by_name(tiny, model):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.relu, self.fc = nn.Linear(64, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)
        def forward(self, x): return self.fc(self.relu(self.b(self.relu(self.a(x.flatten(1))))))
    for wrong, says in ((dict(sites=[Site("relu")]), "module 'relu' is called 2 times"),):
        with pytest.raises(InputError, match=says): ask(Twice(), tiny, **wrong)
    for wrong, says in ((dict(method="conductence"), "did you mean 'conductance'"), (dict(sites=["conv9"]), "unknown site"), (dict(classes=["e"]), "unknown class"),
                        (dict(per_class=1000), "fewer than per_class")):
        with pytest.raises(InputError, match=says): ask(model, tiny, **wrong)
    with pytest.raises(InputError, match="DataParallel"): ask(nn.DataParallel(model), tiny)


def test_a_circuit_of_the_top_ranked_channels_agrees_fully_and_a_random_one_as_much_as_chance(tiny, model):
    ranked = ask(model, tiny, "activation_gradient")
    top, random, rng = {}, [], rng_for(0, "random circuits")
    sizes = {s: site.channels for s, site in adapter(model).sites.items()}
    for cls, rows in ranked.groupby("cls"):
        top[cls] = {s: (rows[rows.site == s].value.rank(ascending=False) <= n // 2).to_numpy() for s, n in sizes.items()}
    same = dict(method="activation_gradient", per_class=6, resamples=50)
    found = agreement(top, model, tiny, **same)
    assert (found[found.metric == "adjusted"].value == 1).all() and (found[found.metric == "spearman"].value > 0.8).all()
    assert set(found.cls) == set("abcd") and set(found.site) == {*sizes, "all"}
    for _ in range(30):
        masks = {cls: {s: rng.permutation(n) < n // 2 for s, n in sizes.items()} for cls in "abcd"}
        whole = agreement(masks, model, tiny, **same).query("site == 'all'")
        random.append([whole[whole.metric == m].value.mean() for m in ("adjusted", "spearman")])
    assert np.abs(np.mean(random, axis=0)).max() < 0.06


def test_an_empty_circuit_agrees_with_nothing_and_says_so(tiny, model):
    empty = {"a": {s: np.zeros(site.channels, dtype=bool) for s, site in adapter(model).sites.items()}}
    found = agreement(empty, model, tiny, "activation_gradient", per_class=6, resamples=20)
    assert found.value.isna().all() and (found.kept == 0).all()
    with pytest.raises(InputError, match="no circuits"): agreement({}, model, tiny)


def test_maps_of_images_add_up_and_fit_the_images(tiny, model):
    x, y = tiny.x_test[:3], tiny.y_test[:3]
    maps = image_maps(model, x, y, steps=128)
    with torch.no_grad(): z = model(x) - model(torch.zeros(1, 1, 8, 8))
    margin = (z - z.mean(1, keepdim=True)) * 4 / 3
    assert maps.shape == (3, 8, 8) and np.allclose(maps.sum((1, 2)), margin[range(3), y], atol=0.02 * float(margin.abs().max()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_stays_flat_over_repeated_attribution(tiny, model):
    def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
    for _ in range(3): ask(model, tiny, classes=["a"])
    before = resident()
    for _ in range(12): ask(model, tiny, classes=["a"])
    assert resident() - before < 20e6
