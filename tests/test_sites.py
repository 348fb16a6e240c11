"Sites: derived or declared, read, changed, and proved right."
from dataclasses import replace
import numpy as np
import pytest
import torch
from torch import nn
import torch.nn.functional as F
from fedinterp.core import InputError, intra_op_threads, seeded
from fedinterp.channels import AdapterError, Entry, Group, permute_group
from fedinterp.models import build_model, predict
from fedinterp.sites import Adapter, Site, adapter, capture, check_adapter, edit, gate
from fedinterp.table import check

def images(n, shape, seed=0): return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))
def hooks(model): return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

class LeNet(nn.Module):
    "Functions in place of modules, view, dropout and log-softmax, as in many tutorials."
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.fc1, self.fc2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.Linear(256, 32), nn.Linear(32, 10)
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(x.view(-1, 16 * 4 * 4), 0.25, self.training)
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)

class SE(nn.Module):
    "A residual block with squeeze and excitation."
    def __init__(self, c):
        super().__init__()
        self.conv, self.bn, self.down, self.up = nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.Linear(c, 4), nn.Linear(4, c)
    def forward(self, x):
        y = self.bn(self.conv(x))
        s = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3))))))
        return F.relu(x + y * s.unsqueeze(-1).unsqueeze(-1))

class Open(nn.Module):
    "A residual net written in one forward, without blocks."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 3)
    def forward(self, x):
        x = F.relu(self.a(x))
        x = F.relu(x + self.c(F.relu(self.b(x))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))

def bottle(a, b): return nn.Sequential(nn.Conv2d(a, a, 3, padding=1, groups=a), nn.BatchNorm2d(a), nn.ReLU6(), nn.Conv2d(a, b, 1), nn.ReLU6())
def vgg(): return nn.Sequential(
    nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(True), nn.MaxPool2d(2)),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Sequential(nn.Linear(48, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 5)))
def resnet18():
    import torchvision
    return torchvision.models.resnet18(num_classes=4)

NETS = dict(
    lenet=(LeNet, (1, 28, 28)), open=(Open, (1, 8, 8)), vgg=(vgg, (3, 16, 16)), resnet18=(resnet18, (3, 32, 32)),
    mlp=(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), (1, 8, 8)),
    se=(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), SE(8), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(8, 3)), (3, 8, 8)),
    separable=(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), bottle(8, 12), nn.Conv2d(12, 24, 3, groups=12), nn.ReLU(), nn.Flatten(), nn.Linear(24*16, 3)), (3, 8, 8)),
    groupnorm=(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(1, 8), nn.ReLU(), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(8, 3)), (3, 8, 8)),
    **{f"{name}-{head}-{c}": ((lambda name=name, head=head, c=c, w=w: build_model(name, head=head, channels_in=c, channels=w)), (c, s, s))
       for name, w in (("simple_cnn", (6, 8, 10)), ("resnet10", (6, 8, 10, 12))) for head in ("flatten", "pool") for c, s in ((1, 28), (3, 32))})

@pytest.fixture(autouse=True)
def one_thread():
    with intra_op_threads(1): yield

@pytest.fixture(params=NETS)
def derived(request):
    make, shape = NETS[request.param]
    with seeded(0, "test"): model = make()
    return adapter(model, input_shape=shape)

def test_permuting_any_group_leaves_the_logits_unchanged(derived):
    proof = check(check_adapter(derived))
    assert (proof[proof.metric == "logit_change"].value <= 1e-5).all()
    assert proof[proof.metric == "channels_covered"].value.tolist() == [1.0]
    assert not (proof.metric == "channels_not_covered").any()

def test_full_size_models_pass_too():
    for name in ("simple_cnn", "resnet10"): check_adapter(build_model(name, channels_in=3))

def test_a_group_that_forgets_any_one_axis_fails_and_is_named():
    model = build_model("resnet10", channels_in=1, channels=(6, 8, 10, 12))
    for group in adapter(model).groups.values():
        for left_out in group.entries:
            lame = replace(group, entries=tuple(e for e in group.entries if e is not left_out))
            with pytest.raises(AdapterError, match=f"group '{group.name}'"): check_adapter(adapter(model, groups=[lame]))

def test_site_channels_move_with_the_sites_group(derived):
    x, model = images(3, derived.input_shape), derived.model.double()
    sites = {f"{s.kind} {s.name}": replace(s, name=f"{s.kind} {s.name}") for s in (*derived.sites.values(), *derived.conv_sites.values())}
    before, state = capture(model, x, sites.values()), model.state_dict()
    state = {k: v.clone() for k, v in state.items()}
    for group in derived.groups.values():
        perm = torch.arange(group.channels).roll(1)
        model.load_state_dict(permute_group(state, group, perm))
        after = capture(model, x, sites.values())
        for name, site in sites.items():
            block = site.channels // group.channels if site.group == group.name else 0
            order = (perm[:, None] * block + torch.arange(block)).flatten() if block else torch.arange(site.channels)
            assert torch.allclose(after[name], before[name][:, order], atol=1e-9), (group.name, name)

def test_every_site_can_be_read_and_changed(derived):
    x, model = images(3, derived.input_shape), derived.model
    logits = predict(model, x)
    for site in (*derived.sites.values(), *derived.conv_sites.values()):
        seen = []
        with edit(model, {site: lambda act: seen.append(act) or act.clone()}): assert predict(model, x).equal(logits)
        assert len(seen) == 1 and seen[0].shape == (3, site.channels, *site.shape) and seen[0].equal(capture(model, x, site)[site.name])
        with edit(model, {site: lambda act: act * 0.5 + 0.1}): assert not predict(model, x).equal(logits), site
    assert hooks(model) == 0

@pytest.mark.parametrize("make,site,readers", [
    (lambda: build_model("resnet10", channels_in=3), "block1.0", ("block2.0.conv1", "block2.0.downsample.0")),
    (resnet18, "layer1.1", ("layer2.0.conv1", "layer2.0.downsample.0"))])
def test_an_edit_of_a_residual_stream_reaches_both_of_its_ways(make, site, readers):
    with seeded(0, "test"): model = make()
    x = images(2, (3, 32, 32))
    with edit(model, {site: torch.zeros_like}, input_shape=(3, 32, 32)): zeroed = predict(model, x)
    for path in readers: model.get_submodule(path).weight.data.zero_()
    assert zeroed.equal(predict(model, x))

def test_features_are_what_the_head_reads(derived):
    x = images(5, derived.input_shape)
    logits = derived.features(x) @ derived.head_module.weight.T + derived.head_module.bias
    got = predict(derived.model, x)
    assert torch.allclose(logits.log_softmax(1), got.log_softmax(1), atol=1e-5)

def test_sites_of_the_built_in_models_are_named_after_their_blocks():
    simple, resnet = adapter(build_model("simple_cnn", head="pool")), adapter(build_model("resnet10", channels_in=3))
    assert [(s.name, s.channels, s.shape) for s in simple.sites.values()] == [("conv1", 32, (14, 14)), ("conv2", 64, (7, 7)), ("conv3", 128, (3, 3))]
    assert list(resnet.sites) == ["conv1"] + [n for i in (1, 2, 3, 4) for n in (f"block{i}.0.conv1", f"block{i}.0")]
    assert [resnet.sites[f"block{i}.0"].shape for i in (1, 2, 3, 4)] == [(8, 8), (4, 4), (2, 2), (1, 1)]
    assert resnet.sites["block1.0"].group == resnet.sites["conv1"].group == "conv1"
    assert {"conv1", "block2.0.downsample.0", "block4.0.conv2"} < set(resnet.conv_sites) and resnet.conv_sites["conv1"].shape == (16, 16)
    assert {e.name for e in resnet.write("block2.0")} == {"block2.0.conv2.weight", "block2.0.downsample.0.weight"}

def test_a_relu_that_is_used_twice_is_avoided_by_derived_sites_and_refused_by_name():
    with seeded(0, "test"): model = resnet18()
    found, x = adapter(model, input_shape=(3, 32, 32)), images(2, (3, 32, 32))
    assert found.sites["layer1.0.conv1"].at == "input" and found.sites["layer2.1"].module == "layer2.1" and found.notes == ()
    acts = capture(model, x, list(found.sites.values()))
    assert acts["layer1.0"].min() >= 0 and acts["layer1.0"].shape == (2, 64, 8, 8)
    with pytest.raises(InputError, match="'layer1.0.relu' is called 2 times"): capture(model, x, Site("layer1.0.relu"))
    assert hooks(model) == 0

def test_places_that_cannot_be_hooked_are_left_out_and_noted():
    found = adapter(Open(), input_shape=(1, 8, 8))
    assert list(found.sites) == ["b"] and len(found.notes) == 2 and "site 'a' is left out" in found.notes[0]

def test_capture_copies_before_an_in_place_operation():
    with seeded(0, "test"): model = vgg().eval()
    x = images(4, (3, 16, 16))
    assert capture(model, x, Site("0.0"))["0.0"].equal(model[0][0](x).detach()) and capture(model, x, Site("0.0"))["0.0"].min() < 0

def test_capture_is_chunked_reduced_and_without_gradients():
    model, x = build_model("simple_cnn").train(), images(7, (1, 28, 28))
    whole, parts = capture(model, x), capture(model, x.numpy().astype(np.float64), batch=3)
    assert all(torch.allclose(whole[k], parts[k], atol=1e-6) and not whole[k].requires_grad for k in whole)
    sizes = []
    means = capture(model, x, ["conv2", "conv3"], batch=3, reduce=lambda a: sizes.append(len(a)) or a.mean((2, 3)))
    assert list(means) == ["conv2", "conv3"] and torch.allclose(means["conv3"], whole["conv3"].mean((2, 3)), atol=1e-6)
    assert sorted(sizes) == [1, 1, 3, 3, 3, 3] and model.training and hooks(model) == 0
    assert capture(model, x[:0], "conv1")["conv1"].shape == (0, 32, 14, 14)

def test_hooks_and_modes_are_restored_after_an_error():
    model, x = build_model("simple_cnn").train(), images(2, (1, 28, 28))
    def fails(act): raise KeyError("mine")
    with pytest.raises(KeyError): capture(model, x, reduce=fails)
    with pytest.raises(KeyError), edit(model, {"conv1": fails}): model(x)
    with pytest.raises(InputError), edit(model, {Site("conv1"): fails, Site("nowhere"): fails}): pass
    assert hooks(model) == 0 and all(m.training for m in model.modules())

@pytest.mark.parametrize("sites,words", [
    (["con1"], "unknown site 'con1'.*did you mean 'conv1'"), ([Site("con1")], "unknown module 'con1'.*did you mean"), ([Site("conv1", 5)], "has 5 channels"),
    (["conv1", "conv1"], "name one twice")])
def test_wrong_sites_are_refused_in_a_sentence(sites, words):
    with pytest.raises(InputError, match=words): capture(build_model("simple_cnn"), images(2, (1, 28, 28)), sites)

def test_wrong_edits_are_refused_in_a_sentence():
    model, x = build_model("simple_cnn"), images(2, (1, 28, 28))
    for edits, words in (({"conv1": torch.ones(32)}, "give a function"), ({"conv9": gate(torch.ones(32))}, "unknown site 'conv9'"),
                         ({"conv1": gate(torch.ones(31))}, "does not fit 32 channels"), ({"conv1": lambda a: None}, "returned NoneType"),
                         ({"conv1": lambda a: a[:, :1]}, "in place of")):
        with pytest.raises(InputError, match=words), edit(model, edits): model(x)
    with pytest.raises(InputError, match="unknown kind 'pre'"): capture(model, x, kind="pre")
    with pytest.raises(InputError, match="DataParallel"): capture(nn.DataParallel(model), x, Site("conv1"))

def test_a_module_that_is_never_called_is_named():
    class Skips(nn.Module):
        def __init__(self): super().__init__(); self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        def forward(self, x): return self.used(x)
    with pytest.raises(InputError, match="'unused' is called 0 times"): capture(Skips(), torch.ones(1, 2), Site("unused"))

def test_a_part_of_the_model_may_run_twice_inside_an_edit():
    model = build_model("simple_cnn")
    with edit(model, {"conv1": lambda a: a}):
        for _ in range(2): model.pool1(torch.zeros(1, 32, 28, 28))

def test_gates_ablate_to_zero_or_the_mean_per_channel_or_per_image():
    act, mean = images(2, (3, 4, 4)), torch.tensor([1., 2., 3.])
    keep = torch.tensor([1., 0., 1.])
    assert gate(keep)(act)[:, 1].abs().max() == 0 and gate(keep)(act)[:, 0].equal(act[:, 0])
    assert (gate(keep.bool(), mean)(act)[:, 1] == 2).all()
    each = gate(torch.tensor([[1., 0., 0.], [1., 1., 1.]]), mean)(act)
    assert each[1].equal(act[1]) and (each[0, 2] == 3).all() and gate(keep)(act.mean((2, 3))).shape == (2, 3)

def test_gradients_reach_the_gate_and_match_the_closed_form():
    with seeded(0, "test"): model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x, mask = images(5, (3,)), torch.ones(4, requires_grad=True)
    with edit(model, {"0": gate(mask)}, input_shape=(3,)): model(x).sum().backward()
    hidden = model[1](model[0](x))
    assert torch.allclose(mask.grad, (hidden * model[2].weight[0]).sum(0), atol=1e-6)

def test_zero_after_the_nonlinearity_equals_removing_the_channel():
    model, x = build_model("simple_cnn"), images(3, (1, 28, 28))
    keep = torch.ones(64); keep[::3] = 0
    with edit(model, {"conv2": gate(keep)}): gated = predict(model, x)
    model.conv3.weight.data[:, ::3] = 0
    assert torch.allclose(gated, predict(model, x), atol=1e-6)

def test_a_model_that_cannot_be_traced_has_features_and_declared_sites():
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU()), nn.Linear(16, 3)
        def forward(self, x): return self.classifier(self.encoder(x) if x.sum() > 0 else self.encoder(-x))
    with seeded(0, "test"): model = Foreign()
    x = images(4, (1, 8, 8))
    with pytest.raises(AdapterError, match="cannot be traced.*declare them"): adapter(model, input_shape=(1, 8, 8))
    with pytest.raises(InputError, match="did you mean 'classifier'"): adapter(model, head="clasifier")
    bare = adapter(model, head="classifier")
    assert bare.features(x).equal(model.encoder(x).detach()) and not bare.groups and bare.notes
    with pytest.raises(AdapterError, match="nothing to check"): check_adapter(bare, x)
    group = Group("hidden", 16, (Entry("encoder.1.weight", 0, role="write"), Entry("encoder.1.bias", 0, role="write"), Entry("classifier.weight", 1)))
    full = adapter(model, "classifier", sites=[Site("encoder", 16, group="hidden")], groups=[group])
    assert full.notes == () and full.sites["encoder"].group == "hidden"
    assert check_adapter(full, x).value.tolist()[1] == 1.0
    with pytest.raises(AdapterError, match="group 'hidden'"): check_adapter(replace(full, groups={"hidden": replace(group, entries=group.entries[:2])}), x)

def test_declared_groups_with_an_impossible_axis_are_refused_before_work_starts():
    model = build_model("simple_cnn")
    with pytest.raises(InputError, match="does not hold 31 channels"): adapter(model, groups=[Group("g", 31, (Entry("conv1.bias", 0),))])
    with pytest.raises(InputError, match="did you mean 'conv1.bias'"): adapter(model, groups=[Group("g", 32, (Entry("conv1.bia", 0),))])

def test_what_the_groups_leave_out_is_in_the_table():
    found = adapter(build_model("simple_cnn"))
    partial = check_adapter(replace(found, groups={"conv2": found.groups["conv2"]}))
    assert set(partial[partial.metric == "channels_not_covered"].site) == {"conv1", "conv3"}
    assert partial[partial.metric == "channels_covered"].value.item() == pytest.approx(64 / 224)

def test_the_check_repeats_and_leaves_the_model_alone():
    model = build_model("simple_cnn").train()
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    a, b = check_adapter(model), check_adapter(model)
    assert a.equals(b) and all(v.equal(before[k]) for k, v in model.state_dict().items()) and model.training and torch.equal(rng, torch.get_rng_state())
    assert isinstance(adapter(model), Adapter)
