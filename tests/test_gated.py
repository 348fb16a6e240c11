"Channels cut: masks, the cached prefix, groups of circuits in one batch, sliced networks, and who reads whom."
import copy
import pytest
import torch
from torch import nn
import torch.nn.functional as F
from fedinterp.core import InputError, intra_op_threads, seeded
from fedinterp.gated import Gated
from fedinterp.models import build_model, predict
from fedinterp.sites import Site, adapter, edit, gate
from fedinterp.slices import CannotSlice, connections, connectivity, logits, sliced
from test_sites import NETS, hooks, images

@pytest.fixture(autouse=True)
def one_thread():
    with intra_op_threads(1): yield

def varied(model, seed=0):
    "Biases and BatchNorm statistics that are not all alike."
    rng = torch.Generator().manual_seed(seed)
    for v in model.state_dict().values():
        if v.is_floating_point(): v.copy_(v * (.5 + torch.rand(v.shape, generator=rng)) + (.3 * torch.rand(v.shape, generator=rng) if v.ndim < 2 else 0))
    return model

def draw(gated, share, seed=0, rows=()):
    rng = torch.Generator().manual_seed(seed)
    return {s: (torch.rand(*rows, c, generator=rng) < share).float() for s, c in gated.channels.items()}

def close(a, b, tol=1e-5): return (a - b).abs().max() <= tol * b.abs().max()

def hooked(model, gated, masks, fill):
    with edit(model, {gated.sites[s]: gate(m, fill.values.get(s)) for s, m in masks.items()}): return predict(model, gated.x)

@pytest.fixture(params=[(name, kind) for name in NETS for kind in ("post", "conv")], ids=lambda p: "-".join(p))
def net(request):
    (make, shape), kind = NETS[request.param[0]], request.param[1]
    with seeded(0, "test"): model = varied(make())
    gated = Gated(model, kind=kind, input_shape=shape)
    gated.x = images(16, shape)
    return model, gated

def test_masked_and_sliced_runs_equal_a_run_with_hooks(net):
    model, gated = net
    values = gated.prefix(gated.x)
    assert gated.nodes is not None and close(gated.run(values, {}), predict(model, gated.x), 1e-6)
    for how in ("zero", "mean"):
        fill = gated.fill(how, gated.x)
        for share in (.3, .8):
            masks = draw(gated, share)
            expected = hooked(model, gated, masks, fill)
            assert close(gated.run(values, masks, fill.values), expected)
            assert close(predict(sliced(gated, masks, fill), gated.x), expected)
            assert close(logits(gated, values, masks, fill), expected)

def test_groups_of_circuits_in_one_batch_give_the_gradients_of_single_runs(net):
    _, gated = net
    fill, values = gated.fill("mean", gated.x), gated.prefix(gated.x)
    together = {s: m.requires_grad_() for s, m in draw(gated, .3, rows=(2,)).items()}
    out = gated.run(values, together, fill.values)
    out[:, 1].sum().backward()
    for k in range(2):
        alone = {s: m.detach()[k].clone().requires_grad_() for s, m in together.items()}
        z = gated.run([v[8*k:8*k + 8] for v in values], alone, fill.values)
        z[:, 1].sum().backward()
        assert close(out[8*k:8*k + 8], z)
        top = max(m.grad.abs().max() for m in alone.values())
        assert all((together[s].grad[k] - m.grad).abs().max() <= 1e-4 * top for s, m in alone.items())

def test_a_closed_gate_after_the_non_linearity_still_receives_gradient():
    gated = Gated(build_model("simple_cnn", channels=(4, 4, 4)))
    masks = {s: torch.zeros(c).requires_grad_() if s == "conv2" else torch.ones(c) for s, c in gated.channels.items()}
    gated.run(gated.prefix(images(8, (1, 28, 28))), masks)[:, 0].sum().backward()
    assert (masks["conv2"].grad != 0).any()

def test_the_users_model_is_left_alone_also_after_an_error():
    model = build_model("resnet10", channels_in=1, channels=(4, 4, 4, 4)).train()
    model.bn1.eval()
    modes, before, state = [m.training for m in model.modules()], hooks(model), copy.deepcopy(model.state_dict())
    gated = Gated(model)
    x = images(8, (1, 28, 28))
    logits(gated, gated.prefix(x), draw(gated, .5), gated.fill("mean", x))
    with pytest.raises(RuntimeError): gated.prefix(images(2, (3, 28, 28)))
    with pytest.raises(Exception): gated.run(gated.prefix(x), {"conv1": torch.ones(7)})
    assert [m.training for m in model.modules()] == modes and hooks(model) == before
    assert all(v.equal(state[k]) for k, v in model.state_dict().items())

class Inplace(nn.Module):
    "One in-place ReLU, used twice, and a functional one."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.relu, self.fc = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Linear(6, 3)
    def forward(self, x):
        x = self.relu(self.a(x))
        x = F.relu(x + self.relu(self.b(x)), inplace=True)
        return self.fc(F.max_pool2d(F.relu(self.c(x)), 2).mean((2, 3)))

@pytest.mark.parametrize("kind", ["post", "conv"])
def test_in_place_reused_and_functional_relus_give_the_right_result(kind):
    with seeded(1, "inplace"): model = Inplace().eval()
    gated = Gated(model, kind=kind, input_shape=(1, 8, 8))
    x = images(12, (1, 8, 8))
    values = gated.prefix(x)
    kept, fill = [v.clone() for v in values], gated.fill("mean", x)
    for share in (1., .5, .5):
        masks = draw(gated, share)
        with edit(model, {gated.sites[s]: gate(m, fill.values[s]) for s, m in masks.items()}): expected = predict(model, x)
        assert close(gated.run(values, masks, fill.values), expected)
        assert close(logits(gated, values, masks, fill), expected)
    assert all(a.equal(b) for a, b in zip(kept, values))

def test_what_cannot_be_cut_is_a_sentence_that_names_the_way_out():
    model = build_model("simple_cnn", channels=(4, 4, 4))
    with pytest.raises(InputError, match="give its .module"): Gated(nn.DataParallel(model))
    with pytest.raises(InputError, match="did you mean 'conv2'"): Gated(model, sites=["conv22"])
    with pytest.raises(InputError, match="is called 2 times"): Gated(adapter(Inplace(), head="fc", groups=[], sites=[Site("relu", 6)], input_shape=(1, 8, 8)))
    with pytest.raises(InputError, match="no sites of kind 'conv'"): Gated(adapter(model, sites=[Site("pool1", 4)]), kind="conv")

def test_a_model_that_cannot_be_traced_is_cut_by_hooks():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Linear(64, 10), nn.Linear(10, 3)
        def forward(self, x): return self.fc(torch.relu(self.body(x.flatten(1) if x.sum() > 0 else -x.flatten(1))))
    with seeded(0, "branches"): model = Branches()
    gated = Gated(adapter(model, head="fc", sites=[Site("body", 10)], input_shape=(1, 8, 8)))
    x, mask = images(9, (1, 8, 8)), (torch.arange(10) < 4).float()
    with edit(model, {Site("body", 10): gate(mask)}): expected = predict(model, x)
    assert gated.nodes is None and "cannot be traced" in gated.note
    assert close(logits(gated, gated.prefix(x), {"body": mask}), expected, 1e-6)
    with pytest.raises(CannotSlice, match="cannot be traced"): sliced(gated, {"body": mask})

def test_a_prefix_that_is_too_large_to_keep_is_computed_anew():
    model = build_model("simple_cnn", channels=(8, 8, 8))
    small, large = Gated(model, kind="conv"), Gated(model, kind="conv", images=100_000)
    x, masks = images(6, (1, 28, 28)), draw(small, .5)
    assert large.prefix(x)[0].shape == (6, 1, 28, 28) and small.prefix(x)[0].shape == (6, 8, 28, 28)
    assert close(large.run(large.prefix(x), masks), small.run(small.prefix(x), masks), 1e-6)
    assert close(predict(sliced(large, masks), x), small.run(small.prefix(x), masks))

def test_resampled_channels_come_from_the_reference_images_and_depend_on_the_seed_alone():
    gated = Gated(build_model("simple_cnn", channels=(4, 4, 4)))
    x = images(20, (1, 28, 28))
    a, b, c = gated.fill("resample", x, 0), gated.fill("resample", x, 0), gated.fill("resample", x, 1)
    rows = lambda f: f.rows(7, "here")["conv1"]
    assert rows(a).equal(rows(b)) and not rows(a).equal(rows(c)) and not rows(a).equal(a.rows(7, "there")["conv1"])
    known = {tuple(v.flatten()[:5].tolist()) for v in a.values["conv1"]}
    assert all(tuple(v.flatten()[:5].tolist()) in known for v in rows(a))
    closed = {s: torch.zeros(n) for s, n in gated.channels.items()}
    assert logits(gated, gated.prefix(x), closed, a).equal(logits(gated, gated.prefix(x), closed, b))

def test_a_slice_is_small_and_independent_of_the_global_random_state():
    model = build_model("simple_cnn")
    gated, before = Gated(model), torch.get_rng_state()
    small = sliced(gated, {s: torch.arange(c) < c // 8 for s, c in gated.channels.items()})
    count = lambda net: sum(p.numel() for p in net.parameters())
    assert torch.get_rng_state().equal(before)
    assert count(small) < count(model) / 20 and [small.conv2.in_channels, small.conv2.out_channels] == [4, 8]
    assert predict(small, images(3, (1, 28, 28))).shape == (3, 10)

def test_edges_follow_branches_and_exist_only_where_a_change_can_pass():
    with seeded(0, "edges"): model = varied(build_model("resnet10", channels_in=1, channels=(4, 5, 6, 7)))
    with torch.no_grad(): model.block2[0].conv1.weight[2] = 0
    edges = connections(Gated(model))
    assert set(edges) == {("conv1", "block1.0.conv1"), ("conv1", "block1.0"), ("block1.0.conv1", "block1.0"), ("block4.0", "logits")} | {
        e for i in (2, 3, 4) for e in ((f"block{i-1}.0", f"block{i}.0.conv1"), (f"block{i-1}.0", f"block{i}.0"), (f"block{i}.0.conv1", f"block{i}.0"))}
    assert edges["conv1", "block1.0"].equal(torch.eye(4))
    assert (edges["block1.0", "block2.0.conv1"][2] == 0).all() and (edges["block1.0", "block2.0.conv1"][[0, 1, 3, 4]] > 0).all()
    from types import SimpleNamespace
    circuit = SimpleNamespace(cls="a", kind="post", masks={s: torch.arange(c) < 2 for s, c in Gated(model).channels.items()})
    found = connectivity(circuit, model, label=3)
    assert (found.value > 0).all() and found.channel.where(found.site != "logits", 3).loc[found.site == "logits"].eq(3).all()
    assert found[found.site != "logits"].channel.max() == 1 and found.from_channel.max() == 1
