"The reference networks, building by name, and logits."
import numpy as np
import pytest
import torch
from torch import nn
from fedinterp.core import InputError, register, _registry
from fedinterp.models import ResNet10, SimpleCNN, batches, build_model, evaluating, predict

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
