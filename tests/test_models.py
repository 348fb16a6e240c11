"The reference networks, building by name, and logits."
from dataclasses import replace
import numpy as np
import pytest
import torch
from torch import nn
from fedinterp.channels import AdapterError, Entry, Group, permute_group
from fedinterp.core import InputError, register, seeded, _registry
from fedinterp.gated import Gated
from fedinterp.models import (FEMNISTCNN, LastStep, NextCharLSTM, Recurrent, ResNet10, SimpleCNN, TwoCNN, batches, build_model, evaluating, predict,
                              random_inputs)
from fedinterp.sites import adapter, capture, check_adapter, edit, gate
from fedinterp.slices import connections, sliced

def count(model): return sum(p.numel() for p in model.parameters())
def images(n=6, shape=(1, 28, 28), seed=0): return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))

def test_parameter_counts_are_the_published_ones():
    assert count(build_model("resnet10", channels_in=3)) == 1_977_802
    assert count(build_model("simple_cnn", channels_in=3, channels=(64, 128, 256))) == 411_786

def test_state_dict_names_are_the_published_ones():
    assert list(SimpleCNN().state_dict())[:2] == ["conv1.weight", "conv1.bias"] and "fc.bias" in SimpleCNN().state_dict()
    names = set(ResNet10().state_dict())
    assert {"conv1.weight", "bn1.running_var", "block1.0.conv2.weight", "block4.0.bn2.bias", "block2.0.downsample.0.weight",
            "block2.0.downsample.1.running_mean", "fc.weight"} <= names
    assert not any(n.startswith("block1.0.downsample") for n in names) and "conv1.bias" not in names

@pytest.mark.parametrize("name", ["simple_cnn", "resnet10"])
@pytest.mark.parametrize("head", ["flatten", "pool", None])
@pytest.mark.parametrize("channels_in,size", [(1, None), (3, None), (3, 8), (1, 64)])
def test_every_head_and_size_gives_logits(name, head, channels_in, size):
    model = build_model(name, classes=7, channels_in=channels_in, size=size, head=head)
    side = size or {1: 28, 3: 32}[channels_in]
    assert model.input_shape == (channels_in, side, side)
    assert predict(model, images(3, model.input_shape)).shape == (3, 7)

def test_no_module_is_reused_or_works_in_place():
    for model in (SimpleCNN(), ResNet10()):
        relus = [m for m in model.modules() if isinstance(m, nn.ReLU)]
        calls = []
        for m in relus: m.register_forward_hook(lambda m, *_: calls.append(m))
        model.eval()(torch.zeros(1, *model.input_shape))
        assert len(calls) == len(relus) == len(set(map(id, calls))) and not any(m.inplace for m in relus)

def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    a, b, c = (build_model("resnet10", seed=s).state_dict() for s in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(a[k].equal(b[k]) for k in a) and not a["conv1.weight"].equal(c["conv1.weight"])

@pytest.mark.parametrize("kw,words", [
    (dict(head="flatt"), "did you mean 'flatten'"), (dict(chanels=(1, 2, 3)), "did you mean 'channels'"), (dict(channels=(8, 8)), "3 numbers"),
    (dict(channels=(8, 8, 0)), "at least 1"), (dict(channels=8), "3 numbers"), (dict(channels=(8, 8, 1.5)), "whole number"), (dict(size=7), "at least 8"),
    (dict(size="28"), "whole number"), (dict(channels_in=0), "channels_in = 0"), (dict(classes=0), "classes = 0"), (dict(classes=True), "whole number"),
    (dict(name="simplecnn"), "did you mean 'simple_cnn'")])
def test_what_cannot_be_built_is_refused_in_a_sentence(kw, words):
    with pytest.raises(InputError, match=words): build_model(**{"name": "simple_cnn", **kw})

def test_a_registered_class_is_built_by_name():
    class Mine(nn.Module):
        def __init__(self, classes, channels_in, size, width=4):
            super().__init__()
            self.fc = nn.Linear(width, classes)
    register("model", "mine", Mine)
    try:
        model = build_model("mine", classes=3, width=5)
        assert model.fc.weight.shape == (3, 5) and model.input_shape == (1, 28, 28)
        with pytest.raises(InputError, match="option of mine 'head'"): build_model("mine", head="pool")
    finally: _registry["model"].pop("mine")

def test_predict_ignores_batch_statistics_and_changes_nothing():
    model = build_model("resnet10", channels_in=1).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = images(8)
    assert torch.allclose(predict(model, x)[:2], predict(model, x[:2]), atol=1e-5)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items()) and model.training

def test_predict_repeats_its_bits_and_takes_arrays_of_any_float_type():
    model, x = build_model("simple_cnn"), images(7)
    logits = predict(model, x)
    assert logits.equal(predict(model, x)) and logits.equal(predict(model, x.numpy())) and logits.equal(predict(model, x.numpy().astype(np.float64)))
    assert torch.allclose(logits, predict(model, x, batch=2), atol=1e-6) and not logits.requires_grad
    assert predict(model, x[:0]).shape == (0, 10)

def test_predict_refuses_integers_bad_batches_and_non_tensors():
    model = build_model("simple_cnn")
    with pytest.raises(InputError, match="torch.uint8"): predict(model, torch.zeros(1, 1, 28, 28, dtype=torch.uint8))
    with pytest.raises(InputError, match="batch = 0"): predict(model, images(), batch=0)
    class Pair(nn.Module):
        def forward(self, x): return x, x
    with pytest.raises(InputError, match="returned tuple"): predict(Pair(), images())

def test_each_modules_own_mode_comes_back_even_after_an_error():
    model = build_model("resnet10", channels_in=1).train()
    model.bn1.eval()
    with pytest.raises(RuntimeError), evaluating(model):
        assert not any(m.training for m in model.modules())
        raise RuntimeError
    with pytest.raises(RuntimeError): predict(model, images(2, (3, 28, 28)))
    assert model.training and model.block1.training and not model.bn1.training

def test_batches_keep_every_row_in_order():
    x = torch.arange(7.)
    assert torch.cat(list(batches(nn.Identity(), x, 3))).equal(x)
    assert [len(b) for b in batches(nn.Identity(), x, 3)] == [3, 3, 1]
    assert next(batches(nn.Linear(1, 1).double(), x, 3)).dtype == torch.float64


# the models of the pruning studies

SMALL = dict(two_cnn=dict(hidden=4, features=16), femnist_cnn=dict(hidden=4, features=16, grid=2), char_lstm=dict(hidden=6, embedding=3, vocab=20))

def small(name, **kw): return build_model(name, **{"classes": 7, **SMALL[name], **kw})
def inputs(model, n=5): return random_inputs(model, n, model.input_shape, torch.Generator().manual_seed(0))

def test_the_models_of_the_pruning_studies_have_the_published_sizes():
    assert count(build_model("two_cnn", channels_in=3)) == (3*25*32 + 32) + (32*25*64 + 64) + (98*32*512 + 512) + 5130
    assert count(build_model("femnist_cnn", classes=62)) == (25*64 + 64) + (64*25*128 + 128) + (98*64*2048 + 2048) + (2048*62 + 62)
    lstm = lambda i, h: 4*h*(i + h) + 8*h
    assert count(build_model("char_lstm", classes=80)) == 80*8 + lstm(8, 256) + lstm(256, 256) + 256*80 + 80
    assert (FEMNISTCNN().fc.out_features, NextCharLSTM().fc.out_features, TwoCNN().fc.out_features) == (62, 80, 10)

@pytest.mark.parametrize("name", SMALL)
def test_renaming_any_group_of_a_pruning_model_leaves_its_logits(name):
    proof = check_adapter(small(name))
    assert (proof[proof.metric == "logit_change"].value <= 1e-9).all()
    assert proof[proof.metric == "channels_covered"].value.tolist() == [1.0] and not (proof.metric == "channels_not_covered").any()

@pytest.mark.parametrize("name,groups", [("two_cnn", ["conv1", "conv2", "fc1"]), ("char_lstm", ["embedding", "lstm1", "lstm2"])])
def test_groups_that_forget_any_one_axis_are_found_out(name, groups):
    model = small(name)
    assert list(adapter(model).groups) == list(adapter(model).sites) == groups
    for group in adapter(model).groups.values():
        for left_out in group.entries:
            lame = replace(group, entries=tuple(e for e in group.entries if e is not left_out))
            with pytest.raises(AdapterError, match=f"group '{group.name}'"): check_adapter(adapter(model, groups=[lame]))

@pytest.mark.parametrize("channels_in,size", [(1, None), (3, None), (3, 8), (3, 64)])
def test_the_two_cnns_fit_every_size_of_image(channels_in, size):
    for name in ("two_cnn", "femnist_cnn"):
        model = small(name, channels_in=channels_in, size=size)
        assert predict(model, inputs(model)).shape == (5, 7) and adapter(model).sites["conv2"].group == "conv2"

def test_an_lstm_units_rows_stand_in_each_gates_quarter():
    state = dict(w=torch.arange(12)[:, None].repeat(1, 2))
    moved = permute_group(state, Group("g", 3, (Entry("w", 0, copies=4),)), [2, 0, 1])
    assert moved["w"][:, 0].tolist() == [2, 0, 1, 5, 3, 4, 8, 6, 7, 11, 9, 10]
    with pytest.raises(InputError, match="does not hold 4 channels in blocks of 1, 4 times"): permute_group(state, Group("g", 4, (Entry("w", 0, copies=4),)), range(4))

def test_the_hidden_states_of_both_layers_can_be_read_and_changed():
    model = small("char_lstm")
    x = inputs(model)
    states, logits = capture(model, x), predict(model, x)
    assert {k: tuple(v.shape) for k, v in states.items()} == {"embedding": (5, 3, 80), "lstm1": (5, 6, 80), "lstm2": (5, 6)}
    assert torch.allclose(states["lstm2"] @ model.fc.weight.T + model.fc.bias, logits, atol=1e-6) and adapter(model).head == "fc"
    keep = torch.tensor([1., 1, 0, 1, 1, 1])
    with edit(model, {"lstm2": gate(keep)}): assert torch.allclose(predict(model, x), (states["lstm2"] * keep) @ model.fc.weight.T + model.fc.bias, atol=1e-6)
    with edit(model, {"lstm1": gate(keep)}): assert not predict(model, x).equal(logits)
    assert predict(model, x).equal(logits)

def test_a_model_that_reads_tokens_refuses_what_are_none():
    model = small("char_lstm", size=9)
    assert predict(model, np.zeros((2, 9), np.uint8)).equal(predict(model, torch.zeros(2, 9, dtype=torch.long)))
    assert predict(model, torch.zeros(0, 9, dtype=torch.long)).shape == (0, 7)
    with pytest.raises(InputError, match="reads tokens"): predict(model, torch.zeros(2, 9))
    with pytest.raises(InputError, match="build it with vocab=21"): predict(model, torch.full((1, 9), 20))
    with pytest.raises(InputError, match="tokens from -1"): predict(model, torch.full((1, 9), -1))

def test_the_pruning_models_repeat_for_their_seed():
    for name in SMALL:
        before, a, b, c = torch.get_rng_state(), *(small(name, seed=s).state_dict() for s in (3, 3, 4))
        assert torch.equal(before, torch.get_rng_state())
        assert all(a[k].equal(b[k]) for k in a) and not any(a[k].equal(c[k]) for k in a)

@pytest.mark.parametrize("name,kw,words", [
    ("two_cnn", dict(hidden=0), "hidden = 0"), ("two_cnn", dict(hiden=4), "did you mean 'hidden'"), ("two_cnn", dict(head="pool"), "option of two_cnn 'head'"),
    ("two_cnn", dict(grid=1.5), "grid = 1.5"), ("femnist_cnn", dict(size=7), "at least 8"), ("char_lstm", dict(vocab=0), "vocab = 0"),
    ("char_lstm", dict(size=0), "size = 0"), ("char_lstm", dict(hidden="8"), "whole number")])
def test_a_pruning_model_that_cannot_be_built_is_refused_in_a_sentence(name, kw, words):
    with pytest.raises(InputError, match=words): small(name, **kw)

def test_a_circuit_in_a_recurrent_model_can_be_sliced_like_any_other():
    with seeded(0, "series"): model = nn.Sequential(Recurrent(3, 6), Recurrent(6, 5), LastStep(), nn.Linear(5, 2))
    x = images(4, (3, 9))
    gated, masks = Gated(model, input_shape=(3, 9)), {"0": torch.tensor([1, 0, 1, 1, 0, 1]), "1": torch.tensor([1, 1, 0, 1, 1])}
    with edit(model, {s: gate(m) for s, m in masks.items()}, input_shape=(3, 9)): cut = predict(model, x)
    assert torch.allclose(sliced(gated, masks)(x), cut, atol=1e-6)
    strength = connections(gated)["0", "1"]
    assert strength.shape == (5, 6) and torch.allclose(strength, model[1].weight_ih_l0.detach().abs().view(4, 5, 6).sum(0))
