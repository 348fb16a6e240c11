"Circuits: found, kept, tried; and what must not be called sufficient."
import numpy as np
import pytest
import torch
from fedinterp.channels import permute_group
from fedinterp.circuit import Circuit, Circuits, evaluate_circuits, find_circuits, published, shuffled, smallest, summary
from fedinterp.core import Config, InputError, RunError, intra_op_threads, rng_for
from fedinterp.data import balanced_indices, dataset_from_arrays, load_dataset
from fedinterp.discovery import counts, draw_images, gate_of, own_answer, prepare
from fedinterp.models import build_model
from fedinterp.scores import auroc, calibrate, margin, placements, wilson
from fedinterp.sites import adapter
from fedinterp.table import check
from fedinterp.train import train
from conftest import real_data

QUICK = dict(steps=9, samples=8, reference=8, path_steps=2, progress=False)

@pytest.fixture(autouse=True)
def one_thread():
    with intra_op_threads(1): yield

@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    config = Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=2, local_epochs=3, batch_size=16, partition="classes:2", lr=1e-2)
    return train(config, tmp_path_factory.mktemp("runs"), data=tiny, workers=1, progress=False)

def planted():
    "Channels 2c and 2c + 1 of each site carry class c; the last four carry nothing."
    net = build_model("simple_cnn", classes=4, channels_in=8, size=8, channels=(12, 12, 12), seed=1)
    with torch.no_grad():
        for layer in (net.conv1, net.conv2, net.conv3):
            layer.weight.mul_(.05)
            layer.bias.zero_()
            for j in range(8): layer.weight[j, j, 1, 1] = 1.
        net.fc.weight.mul_(.05)
        net.fc.bias.zero_()
        for j in range(8): net.fc.weight[j//2, j] = 2.
    return net

def halves(n, seed):
    y, rng = np.arange(n) % 4, np.random.default_rng(seed)
    x = rng.normal(0, .3, (n, 8, 8, 8)).astype("float32")
    for h in range(2): x[np.arange(n), 2*y + h] += rng.uniform(0, 2, (n, 1, 1)).astype("float32")
    return x, y

@pytest.fixture(scope="module")
def plain(): return dataset_from_arrays(*halves(400, 0), *halves(200, 1), classes=("a", "b", "c", "d"), name="halves")

def same(a, b): return [x.cls for x in a] == [y.cls for y in b] and all(x.masks[s].equal(y.masks[s]) for x, y in zip(a, b) for s in x.masks)

@pytest.mark.parametrize("method", ["path", "gates"])
def test_a_planted_circuit_is_recovered(plain, method):
    for c in find_circuits(planted(), plain, size=6, method=method, progress=False):
        i = plain.classes.index(c.cls)
        for mask in c.masks.values():
            truth = torch.isin(torch.arange(12), torch.tensor([2*i, 2*i + 1]))
            assert (mask & truth).sum() / (mask | truth).sum() >= .9

@pytest.mark.parametrize("method", ["path", "gates"])
def test_a_permuted_copy_of_a_model_has_the_permuted_circuits(plain, method):
    net, perms = planted(), {}
    state = net.state_dict()
    for name, group in adapter(net).groups.items():
        perms[name] = rng_for(3, "rename", name).permutation(12)
        state = permute_group(state, group, perms[name])
    moved = planted()
    moved.load_state_dict(state)
    found, again = (find_circuits(m, plain, size=6, method=method, progress=False) for m in (net, moved))
    assert same([c.permuted(perms) for c in found], again)

def test_a_constant_predictor_scores_a_half_and_is_flagged(plain):
    net = planted()
    with torch.no_grad():
        net.fc.weight.zero_()
        net.fc.bias.copy_(torch.tensor([5., 0, 0, 0]))
    frame = evaluate_circuits(find_circuits(net, plain, size=6, method="path", classes="a", progress=False), net, plain, nulls=False)
    row = frame[frame.of == "circuit"].set_index("metric")
    assert [row.value[m] for m in ("TPR", "FPR", "balanced accuracy", "J", "AUROC", "constant")] == [1, 1, .5, 0, .5, 1]
    assert row.verdict["constant"] == "constant" and row.verdict["AUROC"] == "not shown" and row.value["distinct predictions"] == 1

def test_the_empty_circuit_is_at_chance_and_necessity_is_not_testable_where_the_class_is_not_answered(plain):
    net = planted()
    with torch.no_grad(): net.fc.bias[1] = -50.
    frame = evaluate_circuits(find_circuits(net, plain, size=6, method="path", progress=False), net, plain, nulls=False)
    empty = frame[(frame.of == "empty") & (frame.metric == "AUROC")]
    assert (empty.value == .5).all()
    needed = frame[(frame.metric == "necessity") & (frame.of == "circuit")].set_index("cls")
    assert needed.verdict["b"] == "not testable" and np.isnan(needed.value["b"]) and np.isfinite(needed.value["a"])

def test_every_row_has_n_and_sufficient_means_above_the_band(run, tiny):
    found = find_circuits(run, tiny, size=[.3, .6], **QUICK)
    frame = check(evaluate_circuits(found, run, tiny))
    assert (frame.n > 0).all() and set(frame.of) == {"circuit", "full model", "empty", "random", "untrained", "shuffled"}
    assert set(frame[frame.of == "circuit"].metric) >= {"TPR", "FPR", "balanced accuracy", "J", "TPR, calibrated", "FPR, calibrated", "AUROC", "distinct predictions", "KL to full model", "necessity"}
    area = frame[(frame.metric == "AUROC") & (frame.of == "circuit")]
    band = frame[(frame.metric == "AUROC") & (frame.of == "random")]
    assert ((area.verdict == "sufficient").to_numpy() == (area.lo.to_numpy() > band.hi.to_numpy())).all() and (band.draws == 20).all()
    share = frame[frame.metric.isin(["TPR", "FPR", "balanced accuracy", "AUROC"]) & (frame.of != "random")].dropna(subset="value")
    assert share.value.between(0, 1).all() and (share.lo <= share.value + 1e-9).all() and (share.value <= share.hi + 1e-9).all()
    assert set(summary(frame).budget) == {"0.3", "0.6"}
    enough = smallest(frame, loss=.1)
    assert (enough.value >= enough.value_full - .1).all()

def test_the_same_call_gives_the_same_bits_and_leaves_the_global_generators_alone(run, tiny):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    model = run.model()
    a, b = (find_circuits(model, tiny, size=.3, restarts=2, **QUICK) for _ in range(2))
    assert same(a, b) and all(x.scores[s].equal(y.scores[s]) for x, y in zip(a, b) for s in x.scores)
    frames = [evaluate_circuits(a, model, tiny) for _ in range(2)]
    assert frames[0].equals(frames[1])
    assert before[0].equal(torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()

@pytest.mark.parametrize("options", [dict(ablation="zero"), dict(ablation="resample"), dict(kind="conv"), dict(objective="contrastive"), dict(objective="class_only"),
                                     dict(size=None, lam=[.1, 1.]), dict(method="path", ablation="resample"), dict(objective="class_only", method="path"), dict(init=2., restarts=2)], ids=str)
def test_every_option_runs_and_is_evaluated_with_its_own_ablation(run, tiny, options):
    found = find_circuits(run, tiny, **{"size": .4, **QUICK, **options})
    assert len(found) == 4 * len(options.get("lam", [0])) and found[0].ablation == options.get("ablation", "mean")
    frame = evaluate_circuits(found[:2], run, tiny, nulls=False)
    assert frame[(frame.of == "circuit") & (frame.metric == "AUROC")].value.between(0, 1).all()

def test_resnets_are_searched_at_both_kinds_of_site():
    x, y = halves(80, 0)
    data = dataset_from_arrays(x, y, x[:40], y[:40], classes=("a", "b", "c", "d"), name="small")
    net = build_model("resnet10", classes=4, channels_in=8, size=8, channels=(4, 6, 6, 8))
    for kind in ("post", "conv"):
        found = find_circuits(net, data, kind=kind, size=.5, **QUICK)
        frame = evaluate_circuits(found[:1], net, data, nulls=False)
        assert ("block2.0.downsample.0" in found[0].masks) == (kind == "conv") and len(frame)

def test_a_run_is_searched_over_rounds_and_clients_kept_and_gone_on_with(run, tiny, monkeypatch):
    first = find_circuits(run, tiny, rounds=[1], clients="all", size=.3, method="path", **QUICK)
    assert [(c.meta["round"], c.meta["client"]) for c in first[::4]] == [(1, k) for k in ("server", "0", "1", "2", "3")]
    import fedinterp.circuit as module
    done = []
    monkeypatch.setattr(module, "prepare", lambda *args: done.append(1) or prepare(*args))
    both = find_circuits(run, tiny, rounds="all", clients=["server", 0], size=.3, method="path", **QUICK)
    assert len(done) == 2 and len(both) == 16  # round 1 was there already
    assert same(both.select(round=1, client="0"), first.select(client="0"))
    frame = evaluate_circuits(both.select(client="0"), run, tiny, nulls=False)
    assert set(zip(frame["round"], frame.client)) == {(1, "0"), (2, "0")}
    crossed = evaluate_circuits(both.select(client="0", round=2), run, tiny, client="server", nulls=False)
    assert set(crossed.client) == {"server"}

def test_which_images_are_used_is_an_argument_and_stays_with_the_result(run, tiny):
    own = find_circuits(run, tiny, clients=1, size=.3, images="client", method="path", **QUICK)
    assert set(own[0].meta["index"]) <= set(run.partition[1].tolist())
    topped = find_circuits(run, tiny, clients=1, size=.3, images="client+global", method="path", **QUICK)
    held = np.bincount(tiny.y_train[topped[0].meta["index"]], minlength=4)
    assert held.tolist() == [8] * 4 and topped[0].meta["images"] == "client+global"
    given = find_circuits(run, tiny, size=.3, images=run.partition[2], method="path", **QUICK)
    assert set(given[0].meta["index"]) <= set(run.partition[2].tolist()) and given[0].meta["client"] == "server"
    labelled = find_circuits(run, tiny, clients=1, size=.3, images="client", objective="contrastive", method="path", **QUICK)
    assert {c.cls for c in labelled} == {tiny.classes[i] for i in set(tiny.y_train[run.partition[1]].tolist())}

def test_circuits_survive_the_disk_with_everything(run, tiny, tmp_path):
    found = find_circuits(run, tiny, size=[.3, 5], **QUICK)
    found.save(tmp_path/"all")
    again = Circuits.load(tmp_path/"all")
    assert same(found, again) and [c.meta for c in again] == [c.meta for c in found]
    assert again.table.equals(found.table) and again.channels.equals(found.channels)
    assert evaluate_circuits(again[:1], run, tiny, nulls=False).equals(evaluate_circuits(found[:1], run, tiny, nulls=False))
    (tmp_path/"all.safetensors").write_bytes((tmp_path/"all.safetensors").read_bytes()[:50])
    with pytest.raises(RunError, match="damaged"): Circuits.load(tmp_path/"all")
    with pytest.raises(RunError, match="no circuits"): Circuits.load(tmp_path/"none")

def test_wrong_settings_are_refused_in_a_sentence(run, tiny):
    for options, words in ((dict(size=1.5), "a share such as 0.2"), (dict(size=0), "a share such as 0.2"), (dict(method="gate"), "did you mean 'gates'"), (dict(objective="faith"), "faithful"),
                           (dict(classes=["e"]), "unknown class"), (dict(size=None), "either a size"), (dict(size=None, lam=.1, method="path"), "either a size"), (dict(steps=0), "steps = 0"),
                           (dict(images="client"), "the server has no images"), (dict(init="zero"), "init = 'zero'"), (dict(sites=["conv9"]), "did you mean")):
        with pytest.raises(InputError, match=words): find_circuits(run, tiny, **{**QUICK, **options})
    with pytest.raises(InputError, match="at least 20"): evaluate_circuits([Circuit("a", {})], run, tiny, draws=5)
    with pytest.raises(InputError, match="no circuits"): evaluate_circuits([], run, tiny)
    with pytest.raises(InputError, match="needs data"): find_circuits(run.model())

def test_the_published_recipe_is_what_was_published():
    assert published() == dict(method="gates", objective="class_only", ablation="zero", kind="conv", size=None, lam=.01, penalty="sum", init=2.,
                               steps=300, batch=256, lr=.1, restarts=1, samples=1024)

def test_a_gate_is_hard_forwards_soft_backwards_and_keeps_to_its_budget():
    tau = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for keep in (1, 7, 20): assert gate_of(tau, keep).sum(1).tolist() == [keep] * 3 and set(gate_of(tau, keep).flatten().tolist()) <= {0., 1.}
    gate_of(tau, None).sum().backward()
    assert torch.allclose(tau.grad, tau.sigmoid() * (1 - tau.sigmoid()), atol=1e-6)

def test_budgets_are_met_exactly():
    channels = dict(a=32, b=64, c=128)
    assert counts(channels, .1) == dict(a=3, b=6, c=13) and counts(channels, 1.) == channels
    for n in (3, 10, 77, 224): assert sum(counts(channels, n).values()) == n and min(counts(channels, n).values()) >= 1

def test_the_circuit_of_a_class_does_not_depend_on_which_classes_are_asked_for_in_its_group(plain):
    together = find_circuits(planted(), plain, size=9, **QUICK)
    alone = find_circuits(planted(), plain, size=9, classes=["c"], **QUICK)
    assert same(together.select(cls="c"), alone)

def test_a_class_that_is_never_predicted_still_has_a_target():
    margins = torch.randn(100, 10) - torch.tensor([50.] + [0.] * 9)
    target = own_answer(margins)
    assert target[:, 0].std() > .05 and target[:, 0].argmax() == margins[:, 0].argmax()

def test_random_sets_and_the_figures_meet_their_chance_levels():
    rng = np.random.default_rng(0)
    own = np.arange(400) % 10 == 0
    areas = [auroc(rng.normal(size=400), own) for _ in range(400)]
    assert abs(np.mean(areas) - .5) < .01
    assert auroc(np.ones(400), own) == .5 and auroc(own * 1., own) == 1 and auroc(own * -1., own) == 0
    score = rng.normal(size=400).round(1)
    assert np.isclose(placements(score, own)[own].mean(), placements(score, own)[~own].mean())
    assert wilson(0, 0)["n"] == 0 and wilson(5, 10)["lo"] < .5 < wilson(5, 10)["hi"]
    assert calibrate(np.zeros(20), own[:20]) == (0., -1.)
    z = torch.randn(7, 5, dtype=torch.float64)
    assert torch.allclose(margin(z).sigmoid(), z.softmax(-1))

def test_a_shuffled_network_has_the_same_numbers_elsewhere():
    model = build_model("simple_cnn", channels=(4, 4, 4))
    other = shuffled(model, 1)
    for (_, a), (_, b) in zip(model.named_parameters(), other.named_parameters()):
        assert a.flatten().sort().values.equal(b.flatten().sort().values)
    assert not model.conv2.weight.equal(other.conv2.weight) and shuffled(model, 1).conv2.weight.equal(other.conv2.weight)

def test_images_are_balanced_and_repeat():
    labels = np.repeat(np.arange(5), 20)
    a, b = (draw_images(labels, 6, rng_for(0, "x"), np.arange(100)) for _ in range(2))
    assert a.tolist() == b.tolist() and np.bincount(labels[a]).tolist() == [6] * 5 and len(set(a)) == 30

def test_on_real_images_the_published_recipe_says_yes_to_everything_and_the_default_does_not(tmp_path):
    real = load_dataset(real_data("cifar10"))
    train_at, test_at = balanced_indices(real.y_train, 1500, rng_for(0, "train")), balanced_indices(real.y_test, 500, rng_for(0, "test"))
    data = dataset_from_arrays(real.images(real.x_train[train_at]), real.y_train[train_at], real.images(real.x_test[test_at]), real.y_test[test_at], name="cifar10_1500")
    config = Config(dataset=data.name, model_args=dict(channels=[8, 16, 32]), clients=2, rounds=2, local_epochs=4, partition="iid", lr=3e-3)
    run, three = train(config, tmp_path, data=data, progress=False), data.classes[:2]
    recipe = find_circuits(run, data, classes=three, **{**published(), "steps": 70, "samples": 60, "batch": 60})
    ours = find_circuits(run, data, classes=three, size=.35, progress=False)
    frame = evaluate_circuits(recipe + ours, run, data, nulls=False, progress=False)
    shown = summary(frame).set_index("objective")
    full = frame[(frame.of == "full model") & (frame.metric == "FPR")].value.mean()
    assert shown.TPR["class_only"] > .8 and shown.FPR["class_only"] > 2 * full
    assert shown["constant, calibrated"]["faithful"] == 0 and shown["J, calibrated"]["faithful"] > shown["J, calibrated"]["class_only"]

def test_a_discovery_that_used_every_training_image_can_still_be_calibrated(run, tiny):
    found = find_circuits(run, tiny, size=.3, method="path", **{**QUICK, "samples": 1000})
    assert len(found[0].meta["index"]) == len(tiny.y_train)
    frame = evaluate_circuits(found[:1], run, tiny, nulls=False)
    assert frame[(frame.of == "full model") & (frame.metric == "constant, calibrated")].value.item() == 0

def test_a_pool_without_images_is_refused(run, tiny):
    with pytest.raises(InputError, match="there are none to search on"): find_circuits(run, tiny, size=.3, images=[], **QUICK)
