"""probe: what a linear head reads, and what it has to be compared with."""
from dataclasses import replace
import numpy as np
import pytest
import torch
from torch import nn
from fedinterp.core import Config, InputError, rng_for
from fedinterp.data import load_dataset
from fedinterp.models import build_model, predict
from fedinterp.probe import floor, freeze, probe, probe_heads, published, untrained
from fedinterp.train import train

FEW = dict(budget=100, draws=3)


@pytest.fixture(scope="module")
def data():
    whole = load_dataset("fashion_mnist_small")
    return replace(whole, x_train=whole.x_train[::5], y_train=whole.y_train[::5], x_test=whole.x_test[::4], y_test=whole.y_test[::4])


def net(seed=0, head="flatten", **kw):
    return build_model("simple_cnn", channels=(4, 6, 8), head=head, seed=seed, **kw)


def value(table, metric): return table[(table.cls == "all") & (table.metric == metric)].value.item()


def test_the_table_has_every_control_with_an_interval_around_it(data):
    found = probe(net(), data, **FEW)
    assert {"native", "probe", "floor untrained", "floor pixels", "shuffled", "gap", "above floor", "selectivity"} == set(found[found.cls == "all"].metric)
    assert (found.lo <= found.value).all() and (found.value <= found.hi).all() and set(found.budget) == {100} and set(found.draws) == {3}
    assert set(found[found.cls != "all"].metric) == {"native", "probe"} and set(found.cls) == {"all", *data.classes}
    assert value(found, "gap") == pytest.approx(value(found, "probe") - value(found, "native"))


def test_an_untrained_model_is_not_above_the_untrained_floor(data):
    found = probe(net(3), data, budget=100, draws=10)
    row = found[found.metric == "above floor"].iloc[0]
    assert row.lo < 0.05 and row.hi > -0.05 and abs(value(found, "shuffled") - 0.1) < 0.06


def test_constant_features_probe_at_chance(data):
    model = net()
    model.conv3.weight.data.zero_()
    frozen = freeze(model, data, **FEW)
    right = frozen.score(probe_heads(frozen))
    assert right.mean() == pytest.approx(0.1, abs=0.03)


def test_dead_and_duplicated_channels_are_no_obstacle(data):
    model = net(head="pool")
    model.conv3.weight.data[2:] = 0
    model.conv3.bias.data[2:] = 0
    model.conv3.weight.data[1] = model.conv3.weight.data[0]
    assert np.isfinite(probe(model, data, **FEW, controls=False).value).all()


def test_the_budget_is_honest_images_outside_a_draw_are_never_read(data):
    frozen = freeze(net(), data, **FEW)
    assert len(frozen.pool) <= 300 and torch.bincount(frozen.labels[0]).tolist() == [10] * 10
    noise = torch.from_numpy(rng_for(0, "noise").standard_normal(data.x_train.shape)).float()
    noise[frozen.pool] = data.x_train[frozen.pool]
    assert probe(net(), replace(data, x_train=noise), **FEW).equals(probe(net(), data, **FEW))


def test_test_labels_only_score(data):
    swapped = replace(data, y_test=data.y_test.flip(0))
    one, other = (probe_heads(freeze(net(), d, **FEW)) for d in (data, swapped))
    assert torch.equal(one.weight, other.weight) and torch.equal(one.penalty, other.penalty)


def test_two_models_meet_the_same_draws_and_the_same_floor(data):
    one, other = freeze(net(0), data, **FEW), freeze(net(1), data, **FEW)
    assert np.array_equal(one.pool, other.pool) and torch.equal(one.rows, other.rows) and np.array_equal(floor(one), floor(other))


def test_the_result_is_the_same_for_any_number_of_threads_and_touches_no_global_state(data):
    state, old, found = (torch.get_rng_state(), np.random.get_state()[1].copy()), torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(probe(net(), data, **FEW))
            assert torch.get_num_threads() == n
    finally: torch.set_num_threads(old)
    assert found[0].equals(found[1])
    assert torch.equal(state[0], torch.get_rng_state()) and (state[1] == np.random.get_state()[1]).all()


def test_more_labels_probe_better(data):
    few, many = (value(probe(net(), data, budget=b, draws=3, controls=False), "probe") for b in (30, 1000))
    assert many > few + 0.05


def test_the_published_preset_reads_every_training_label(data):
    found = probe(net(), data, controls=False, **published())
    assert set(found.budget) == {len(data.y_train)} and set(found.draws) == {1}


def test_a_run_is_probed_at_the_server_or_a_client_of_any_round(data, tmp_path):
    config = Config(partition="iid", clients=2, rounds=1, local_epochs=0.2, model_args=dict(channels=[4, 6, 8]))
    run = train(config, root=tmp_path, workers=1, progress=False, data=data)
    server, client = probe(run, data, **FEW, controls=False), probe(run, data, client=1, **FEW, controls=False)
    assert set(server.client) == {"server"} and set(client.client) == {"1"} and set(server["round"]) == {1} and set(server.run) == {run.id}
    assert value(server, "native") == pytest.approx((predict(run.model(), data.x_test).argmax(-1) == data.y_test).float().mean().item(), abs=1e-6)
    assert value(probe(run, data, round=0, **FEW, controls=False), "native") == pytest.approx(
        (predict(run.model(0), data.x_test).argmax(-1) == data.y_test).float().mean().item(), abs=1e-6)
    with pytest.raises(InputError, match="was trained on other data"): probe(run)


def test_a_model_of_ones_own_is_probed_by_the_name_of_its_head(data):
    torch_rng = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    for p in model.parameters(): p.data = torch.randn(p.shape, generator=torch_rng) * 0.05
    found = probe(freeze(model, data, head="3", **FEW))
    assert value(found, "probe") > 0.3


def test_the_model_keeps_its_mode_and_weights(data):
    model = net().train()
    before = [p.clone() for p in model.parameters()]
    probe(model, data, **FEW)
    assert model.training and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_an_untrained_copy_has_fresh_weights_and_batchnorm():
    model = build_model("resnet10", channels_in=1, channels=(4, 4, 4, 4))
    model.bn1.running_mean.fill_(7.0)
    fresh = untrained(model, 1)
    assert fresh.bn1.running_mean.eq(0).all() and model.bn1.running_mean.eq(7).all() and fresh.conv1.weight.ne(model.conv1.weight).any()


@pytest.mark.parametrize("wrong, sentence", [
    (dict(recipe="sgd"), "unknown recipe"), (dict(draws=0), "at least 1"), (dict(budget=5000), "cannot be drawn evenly"), (dict(client=1), "here a model was given"),
])
def test_wrong_arguments_are_refused_in_one_sentence(data, wrong, sentence):
    with pytest.raises(InputError, match=sentence): probe(net(), data, **wrong)
    with pytest.raises(InputError, match="needs data"): probe(net())
    with pytest.raises(InputError, match="neither a Run"): probe("model.pt", data)
