"""heads: repairs of the read-out, and where a loss sits."""
import copy
from dataclasses import replace
import numpy as np
import pytest
import torch
from torch import nn
from fedinterp.core import Config, InputError
from fedinterp.data import load_dataset
from fedinterp.heads import decompose, finetune, judge, label_prior, published, realign_head, refit, verdict, with_head
from fedinterp.models import build_model, predict
from fedinterp.probe import freeze, untrained
from fedinterp.run import create

FEW = dict(draws=4, seed=1)


@pytest.fixture(scope="module")
def data():
    whole = load_dataset("fashion_mnist_small")
    return replace(whole, x_train=whole.x_train[::4], y_train=whole.y_train[::4], x_test=whole.x_test[::2], y_test=whole.y_test[::2])


@pytest.fixture(scope="module")
def good(data):
    "A pooled network, trained centrally for a few seconds."
    model = build_model("simple_cnn", channels=(8, 16, 16), head="pool").train()
    step, rng = torch.optim.Adam(model.parameters(), 5e-3), torch.Generator().manual_seed(0)
    for _ in range(5):
        for at in torch.randperm(len(data.y_train), generator=rng).split(32):
            step.zero_grad()
            nn.functional.cross_entropy(model(data.x_train[at]), data.y_train[at]).backward()
            step.step()
    return model.eval()


@pytest.fixture(scope="module")
def shifted(good): return with_head(good, "fc", good.fc.weight, good.fc.bias + torch.linspace(-4, 4, 10))


@pytest.fixture(scope="module")
def read(data, good, shifted): return {name: freeze(m, data, **FEW) for name, m in dict(good=good, shifted=shifted).items()}


def accuracy(model, data): return (predict(model, data.x_test).argmax(-1) == data.y_test).float().mean().item()
def overall(table): return table[table.cls == "all"].set_index("metric")


def test_the_two_losses_add_up_exactly_overall_and_in_every_class(read):
    parts = decompose(read["shifted"], read["good"]).pivot(index="cls", columns="metric", values="value")
    assert (parts["loss"] == parts["backbone loss"] + parts["read-out loss"]).all() and len(parts) == 11
    assert np.allclose(parts["loss"], parts["reference accuracy"] - parts["accuracy"], atol=1e-12)


def test_a_model_against_itself_has_lost_nothing_and_no_share_is_given(read):
    table = decompose(read["good"], read["good"])
    at = overall(table)
    assert (at.loc["loss", ["value", "lo", "hi"]] == 0).all() and judge(table) == "no loss" and verdict(table).startswith("No loss")
    assert np.isnan(at.value["read-out share"]) and "the loss reaches 0" in at.note["read-out share"]


def test_shifted_biases_are_a_read_out_loss_that_biases_alone_repair(read, data, good):
    table = decompose(read["shifted"], read["good"])
    at = overall(table)
    assert at.lo["read-out loss"] > 0.05 and at.value["backbone loss"] == 0 and at.value["preservation"] == 1
    assert judge(table) == "misrouted" and "New biases alone gain" in verdict(table)
    assert at.value["bias only"] > accuracy(good, data) - 0.03


def test_a_reinitialised_backbone_under_a_refitted_head_is_erased(data, good):
    def well_read(model):
        heads = refit(freeze(model, data, **FEW))
        return with_head(model, "fc", heads.weight[0], heads.bias[0])
    table = decompose(well_read(untrained(good, 5)), well_read(good), data, **FEW)
    assert judge(table) == "erased" and "in the backbone, nothing measurable in the read-out" in verdict(table)
    assert overall(table).value["preservation"] < 0.5


def test_where_the_reference_is_not_above_the_floor_nothing_is_decided(data, shifted, read):
    frozen = freeze(shifted, data, **FEW)
    frozen.once("floor convex", lambda: np.ones((4, len(data.y_test)), dtype=bool))  # as if untrained networks were as good as can be
    table = decompose(frozen, read["good"])
    assert judge(table) == "not decided" and "would decide it" in verdict(table)
    assert np.isnan(overall(table).value["preservation"]) and "reaches 0" in overall(table).note["preservation"]


def test_every_repair_uses_the_same_labels_and_says_how_many(read):
    table = realign_head(read["shifted"], fine_tune=False)
    at = overall(table)
    assert at.samples[["native", "prior-adjusted"]].tolist() == [0, 0] and at.samples[["bias only", "head", "fresh head"]].tolist() == [200] * 3
    assert at.numbers[["bias only", "scale + bias", "head"]].tolist() == [10, 20, 170]
    assert at.value["head gain"] == pytest.approx(at.value["head"] - at.value["native"]) and at.lo["head gain"] > 0.05
    assert (table.groupby("metric").size() == 11).sum() == 6


def test_a_good_head_is_hardly_moved(read):
    at = overall(realign_head(read["good"], fine_tune=False))
    assert at.value["head"] > at.value["native"] - 0.03


def test_a_known_prior_is_taken_out_exactly(read, good, data):
    prior = np.exp(np.linspace(-4, 4, 10))
    at = overall(realign_head(read["shifted"], prior=prior, fine_tune=False))
    assert at.value["prior-adjusted"] == pytest.approx(accuracy(good, data), abs=2e-3) and at.note["prior-adjusted"] == "prior: given"


def test_a_partitions_prior_follows_the_servers_weighting(tmp_path):
    labels = np.array([0] * 90 + [1] * 10)
    parts = [np.arange(90), np.arange(90, 100)]
    by_samples, uniform = (label_prior(create(tmp_path/w, Config(clients=2, weighting=w), parts), labels, 2) for w in ("samples", "uniform"))
    assert np.allclose(by_samples, [91/102, 11/102]) and np.allclose(uniform, [0.5, 0.5])
    assert np.allclose(label_prior(create(tmp_path/"c", Config(clients=2), parts), labels, 2, client=1), [1/12, 11/12])


def test_fine_tuning_changes_a_copy_and_leaves_batchnorm_statistics(data):
    model = build_model("resnet10", channels_in=1, channels=(4, 4, 4, 4))
    model.bn1.running_mean.fill_(0.1)
    before = copy.deepcopy(model.state_dict())
    tuned = finetune(freeze(model, data, budget=50, draws=1), epochs=1)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert torch.equal(tuned.bn1.running_mean, model.bn1.running_mean) and tuned.conv1.weight.ne(model.conv1.weight).any()


def test_the_published_recipe_reports_the_last_epoch_beside_the_one_chosen_on_test_images(read):
    at = overall(realign_head(read["shifted"], fine_tune=False, **published()))
    assert at.value["head, best epoch on test"] >= at.value["head"]


def test_results_repeat_to_the_last_bit_and_touch_no_global_state(data, shifted):
    state = torch.get_rng_state()
    one, other = (realign_head(shifted, data, samples=50, draws=2) for _ in range(2))
    assert one.equals(other) and torch.equal(state, torch.get_rng_state())


def test_a_head_goes_into_a_copy(good):
    changed = with_head(good, "fc", torch.zeros(10, 16), torch.arange(10.0))
    assert (changed(torch.zeros(2, 1, 28, 28)).argmax(-1) == 9).all() and good.fc.weight.abs().max() > 0


def test_wrong_input_is_refused_in_one_sentence(data, good, read):
    with pytest.raises(InputError, match="same data, budget, draws and seed"): decompose(read["good"], freeze(good, data, draws=3, seed=1))
    with pytest.raises(InputError, match="needs data"): decompose(good, good)
    with pytest.raises(InputError, match="10 shares above 0"): realign_head(read["good"], prior=[0.5, 0.5])
    with pytest.raises(InputError, match="needs a run that knows its partition"): realign_head(read["good"], prior="partition")
    with pytest.raises(InputError, match="unknown recipe"): realign_head(good, data, recipe="adam")
    with pytest.raises(InputError, match="takes a shape of"): with_head(good, "fc", torch.zeros(3, 3), torch.zeros(3))
