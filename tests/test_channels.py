"Channel groups derived by tracing: what is proved, and what is refused."
import pytest
import torch
from torch import nn
import torch.nn.functional as F
from fedinterp.channels import AdapterError, Entry, Group, permute_group, trace
from fedinterp.core import InputError
from fedinterp.models import build_model

def axes(group): return {(e.name, e.axis, e.block) for e in group.entries}
def net(*modules): return nn.Sequential(*modules).eval()
TAIL = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

class Around(nn.Module):
    "A convolution, a function of it and the input, a head."
    def __init__(self, how, d=4):
        super().__init__()
        self.how, self.conv, self.fc = how, nn.Conv2d(4, 4, 3, padding=1), nn.Linear(d, 2)
    def forward(self, x): return self.fc(self.how(self.conv, x).mean((2, 3)))

def test_simple_cnn_has_the_three_known_groups():
    groups = trace(build_model("simple_cnn", channels_in=3, head="flatten")).groups
    assert list(groups) == ["conv1", "conv2", "conv3"]
    assert axes(groups["conv1"]) == {("conv1.weight", 0, 1), ("conv1.bias", 0, 1), ("conv2.weight", 1, 1)}
    assert axes(groups["conv3"]) == {("conv3.weight", 0, 1), ("conv3.bias", 0, 1), ("fc.weight", 1, 16)}
    assert axes(trace(build_model("simple_cnn", head="pool")).groups["conv3"]) == {("conv3.weight", 0, 1), ("conv3.bias", 0, 1), ("fc.weight", 1, 1)}

def test_resnet10_has_the_streams_and_inner_groups_of_the_literature():
    groups = trace(build_model("resnet10", channels_in=3)).groups
    bn = lambda path: {(f"{path}.{p}", 0, 1) for p in ("weight", "bias", "running_mean", "running_var")}
    w = lambda *pairs: {(f"{path}.weight", axis, 1) for path, axis in pairs}
    assert set(groups) == {"conv1"} | {f"block{i}.0.conv1" for i in (1, 2, 3, 4)} | {f"block{i}.0" for i in (2, 3, 4)}
    assert axes(groups["conv1"]) == bn("bn1") | bn("block1.0.bn2") | w(
        ("conv1", 0), ("block1.0.conv2", 0), ("block1.0.conv1", 1), ("block2.0.conv1", 1), ("block2.0.downsample.0", 1))
    assert axes(groups["block3.0"]) == bn("block3.0.bn2") | bn("block3.0.downsample.1") | w(
        ("block3.0.conv2", 0), ("block3.0.downsample.0", 0), ("block4.0.conv1", 1), ("block4.0.downsample.0", 1))
    assert axes(groups["block4.0"]) == bn("block4.0.bn2") | bn("block4.0.downsample.1") | w(
        ("block4.0.conv2", 0), ("block4.0.downsample.0", 0), ("fc", 1))
    assert axes(groups["block2.0.conv1"]) == bn("block2.0.bn1") | w(("block2.0.conv1", 0), ("block2.0.conv2", 1))

def test_roles_tell_producers_scales_and_readers_apart():
    roles = {e[:2]: e.role for e in trace(build_model("resnet10")).groups["block1.0.conv1"].entries}
    assert roles[("block1.0.conv1.weight", 0)] == "write" and roles[("block1.0.bn1.running_var", 0)] == "scale"
    assert roles[("block1.0.conv2.weight", 1)] == "read"

def test_a_depthwise_convolution_stays_in_its_space_in_blocks():
    groups = trace(net(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 2)), (1, 8, 8)).groups
    assert {("1.weight", 0, 2), ("2.running_var", 0, 2), ("4.weight", 1, 32)} < axes(groups["0"]) and len(groups) == 1

@pytest.mark.parametrize("module", [nn.Softmax(1), nn.LayerNorm([4, 8, 8]), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, groups=2), nn.ChannelShuffle(2),
                                    nn.LocalResponseNorm(2), nn.Softmax2d(), nn.ConvTranspose2d(4, 4, 1)])
def test_a_module_that_mixes_channels_is_named_and_refused(module):
    with pytest.raises(AdapterError, match="module '1'.*declare them"): trace(net(nn.Conv2d(4, 4, 1), module, *TAIL), (4, 8, 8))

@pytest.mark.parametrize("how,d,word", [
    (lambda conv, x: torch.cat([conv(x), x], 1), 8, "'cat'"), (lambda conv, x: conv(x).transpose(1, 2), 8, "'transpose'"),
    (lambda conv, x: conv(conv(x)), 4, "called 2 times"), (lambda conv, x: conv(x) if x.sum() > 0 else x, 4, "control flow"),
    (lambda conv, x: F.softmax(conv(x), 1), 4, "'softmax'"), (lambda conv, x: conv(x)[:, :4], 4, "'getitem'"),
    (lambda conv, x: conv(x) - conv.bias.mean(), 4, "bias"), (lambda conv, x: conv(x) - conv.bias.view(1, 4, 1, 1), 4, "bias"),
    (lambda conv, x: conv(x).view(-1, 2, 2, 8, 8).flatten(2, 3), 2, "'view'"), (lambda conv, x: conv(x) * conv(x).mean(1, keepdim=True), 4, "called 2 times"),
    (lambda conv, x: (lambda y: y * y.mean(1, keepdim=True))(conv(x)), 4, "'mean'"), (lambda conv, x: (lambda y: y + y.mean((2, 3)).sum())(conv(x)), 4, "'sum'"),
    (lambda conv, x: F.max_pool2d(conv(x).flatten(2), 3, 1, 1)[..., None], 4, "max_pool2d|boolean_dispatch|'fn'"),
    (lambda conv, x: (lambda y: (F.relu(y, inplace=True), y)[1])(conv(x)), 4, "not used")])
def test_an_operation_that_mixes_channels_is_refused(how, d, word):
    with pytest.raises(AdapterError, match=word): trace(Around(how, d).eval(), (4, 8, 8))

def test_tied_weights_no_head_and_parametrised_weights_are_refused():
    tied = net(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(AdapterError, match="'0.weight' and '1.weight' are one tensor"): trace(tied, (4,))
    with pytest.raises(AdapterError, match="no nn.Linear"): trace(net(nn.Conv2d(1, 2, 3)), (1, 8, 8))
    with pytest.raises(AdapterError, match="input shape is not known"): trace(net(nn.Linear(4, 2)))
    with pytest.raises(AdapterError, match="module '0'"):
        trace(net(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), *TAIL), (4, 8, 8))
    with pytest.raises(AdapterError, match="not the head"): trace(net(nn.Flatten(), nn.Linear(64, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 2, 1)), (1, 8, 8))

def test_what_comes_after_the_logits_does_not_matter():
    groups = trace(net(nn.Conv2d(4, 4, 1), nn.ReLU(), *TAIL, nn.LogSoftmax(1)), (4, 8, 8)).groups
    assert axes(groups["0"]) == {("0.weight", 0, 1), ("0.bias", 0, 1), ("4.weight", 1, 1)}

def test_a_value_added_to_the_image_cannot_be_renamed():
    assert trace(Around(lambda conv, x: conv(x) + x).eval(), (4, 8, 8)).groups == {}

def test_tracing_leaves_modes_weights_and_the_generator_alone():
    model = build_model("resnet10").train()
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    trace(model)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items()) and torch.equal(rng, torch.get_rng_state())
    assert all(m.training for m in model.modules())

def test_permuting_moves_blocks_and_is_undone_by_the_inverse():
    state = dict(w=torch.arange(12.).reshape(2, 6), b=torch.arange(3.), other=torch.ones(1))
    group = Group("g", 3, (Entry("w", 1, 2), Entry("b", 0)))
    perm = torch.tensor([2, 0, 1])
    moved = permute_group(state, group, perm)
    assert moved["w"].tolist() == [[4, 5, 0, 1, 2, 3], [10, 11, 6, 7, 8, 9]] and moved["b"].tolist() == [2, 0, 1]
    assert moved["other"] is state["other"] and state["b"].tolist() == [0, 1, 2]
    back = permute_group(moved, group, perm.argsort())
    assert all(back[k].equal(state[k]) for k in state)

@pytest.mark.parametrize("perm", [[0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1]])
def test_what_is_not_a_permutation_is_refused(perm):
    with pytest.raises(InputError, match="each of 0..2 once"): permute_group(dict(b=torch.ones(3)), Group("g", 3, (Entry("b", 0),)), perm)

def test_an_axis_that_is_not_there_is_refused():
    state = dict(b=torch.ones(3))
    with pytest.raises(InputError, match="unknown state-dict entry 'bb'"): permute_group(state, Group("g", 3, (Entry("bb", 0),)), range(3))
    with pytest.raises(InputError, match="axis 1 of b"): permute_group(state, Group("g", 3, (Entry("b", 1),)), range(3))
