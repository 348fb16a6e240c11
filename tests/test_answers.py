"Answers to single images, and the questions of a view: what they agree with, what they refuse, and that nobody's random numbers move."
import json, random, threading
import numpy as np
import pytest
import torch
from conftest import bands

from fedinterp import answers
from fedinterp.answers import HOW, answer, ask_attribution, ask_head, image_answers
from fedinterp.attribution import PIXELS, margin_changes
from fedinterp.circuit import Circuits, evaluate_circuits, find_circuits
from fedinterp.core import Config, InputError, lookup
from fedinterp.data import Dataset, load_dataset
from fedinterp.heads import MODES, realign_head
from fedinterp.rows import drawn
from fedinterp.train import train

QUICK = dict(steps=10, samples=8, size=[.25, .5], progress=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory): return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def run(root):
    (x, y), (xt, yt) = bands(200, 0), bands(120, 1)
    np.savez(root/"bands.npz", x_train=x, y_train=y, x_test=xt, y_test=yt)
    config = Config(dataset=str(root/"bands.npz"), model_args=dict(channels=[4, 4, 8]), clients=3, rounds=2, local_epochs=1, batch_size=16)
    return train(config, root=root, workers=1, progress=False)


@pytest.fixture(scope="module")
def data(run): return load_dataset(run.config.dataset)


@pytest.fixture(scope="module")
def found(run, data): return find_circuits(run, data, **QUICK)


def test_single_answers_add_up_to_the_rates_of_the_trial(run, data, found):
    trial, said = evaluate_circuits(found, run, data, nulls=False, progress=False), image_answers(found, run, data)
    for (cls, budget, of), part in said.groupby(["cls", "budget", "of"]):
        rows = trial[(trial.cls == cls) & (trial.of == of)]
        rows = (rows[rows.budget == budget] if budget else rows).drop_duplicates("metric").set_index("metric").value
        yes, own = part.value > 0, part.truth == cls
        assert np.isclose(yes[own].mean(), rows["TPR, calibrated"]) and np.isclose(yes[~own].mean(), rows["FPR, calibrated"])
    assert len(said) == len(data.y_test) * (len(found) + len(data.classes)) and set(said.metric) == {"margin, calibrated"}
    assert (said.truth == np.array(data.classes)[data.y_test.numpy()[said.image]]).all()


def test_only_the_images_asked_for_answer_and_are_numbered_by_their_place(run, data, found):
    key, some = ["cls", "budget", "of", "image"], [90, 3, 41]
    whole, few = (image_answers(found, run, data, images).set_index(key) for images in (None, some))
    for place, image in enumerate(some):
        assert np.allclose(few.xs(place, level="image").value, whole.xs(image, level="image").value, atol=2e-4)
    assert set(few.index.get_level_values("image")) == {0, 1, 2}


def test_circuits_of_several_models_are_answered_each_by_its_own_model(run, data, found):
    client = find_circuits(run, data, clients=1, **QUICK)
    both, alone = image_answers(Circuits([*found, *client]), run, data), image_answers(client, run, data)
    assert set(both.client) == {"server", "1"} and both[both.client == "1"].reset_index(drop=True).equals(alone)
    model = image_answers(client, run.model(2, 1), data)
    assert (model.value.to_numpy() == alone.value.to_numpy()).all() and set(model.run) == {"model"}
    with pytest.raises(InputError, match="no circuits"): image_answers([], run, data)


@pytest.mark.parametrize("how", MODES)
def test_a_head_asked_for_is_the_one_that_the_table_of_repairs_has(run, how):
    ours = ask_head(run, client=1, how=how, labels=40).set_index(["metric", "cls"])
    table = realign_head(run, samples=40, draws=1, client=1, fine_tune=False).set_index(["metric", "cls"])
    assert set(ours.index.get_level_values("metric")) == {"native", how, "gain"}
    for cls in ("all", *load_dataset(run.config.dataset).classes):
        for metric in ("native", how): assert np.isclose(ours.loc[(metric, cls), "value"], table.loc[(metric, cls), "value"], atol=.02)
    assert (ours.lo <= ours.value).all() and ours.loc[("native", "all"), "samples"] == 0 and ours.loc[(how, "all"), "samples"] == 40


def test_steps_have_a_learning_rate_and_what_is_solved_has_none(run):
    solved, steps = ([ask_head(run, how=how, labels=40, lr=lr) for lr in (1e-3, .3)] for how in ("head", "head, by steps"))
    assert solved[0].equals(solved[1]) and "no learning rate" in solved[0].note.iloc[1]
    assert steps[0].value.tolist() != steps[1].value.tolist() and "AdamW at 0.3" in steps[1].note.iloc[1]
    assert not ask_head(run, labels=20, draw=1).equals(ask_head(run, labels=20, draw=0))


def test_features_are_read_once_and_few_models_are_kept(run, monkeypatch):
    read, opened = [], []
    monkeypatch.setattr(answers, "_MODELS", answers.Recent(2))
    for name, seen in (("read_features", read), ("freeze", opened)):
        work = getattr(answers, name)
        monkeypatch.setattr(answers, name, lambda *a, work=work, seen=seen, **k: seen.append(1) or work(*a, **k))
    for how in HOW: ask_head(run, how=how, labels=40)
    ask_head(run, how="head, by steps", labels=40, lr=.1)
    assert (len(opened), len(read)) == (1, 1)
    ask_head(run, labels=20)
    for client in (0, 1): ask_head(run, client=client, labels=20)
    assert (len(opened), len(read), len(answers._MODELS.kept)) == (3, 4, 2)


def test_wrong_questions_about_a_head_are_refused_in_a_sentence(run):
    for given, words in ((dict(labels=10_000), "more than .* holds evenly: .* so ask for 1 to"), (dict(labels=0), "labels = 0 should be a whole number"),
                         (dict(labels=True), "whole number"), (dict(draw=-1), "draw = -1"), (dict(how="full"), "unknown refit"), (dict(lr=0.), "above 0"),
                         (dict(lr=float("nan")), "above 0"), (dict(lr="fast"), "above 0"),
                         (dict(lr=1e308, how="head, by steps"), "at most 1000"), (dict(round=9), "keeps no round 9"), (dict(client="9"), "unknown model of round 2 '9'")):
        with pytest.raises(InputError, match=words): ask_head(run, **given)


@pytest.mark.parametrize("method", PIXELS)
def test_a_map_has_the_shape_of_the_image_and_says_how_far_it_is_off_its_sum(run, data, method):
    seen = ask_attribution(run, 5, data.classes[1], method=method)
    assert seen.map.shape == seen.control.shape == tuple(data.x_test.shape[2:]) and -1 <= seen.correlation <= 1
    x, base = data.x_test[drawn(len(data.y_test), 1000)[5]][None], data.x_train.mean(0, keepdim=True)
    off = abs(seen.map.sum() - margin_changes(run.model(), x, [1], base)[0])
    if method in ("integrated_gradients", "deeplift"): assert np.isclose(seen.completeness * abs(margin_changes(run.model(), x, [1], base)[0]), off, atol=1e-5)
    else: assert np.isnan(seen.completeness)
    assert method != "integrated_gradients" or seen.completeness < .15


def test_a_circuit_of_every_channel_is_the_whole_model_and_a_small_one_is_not(run, data, found):
    model, whole = ask_attribution(run, 5, data.classes[1]), {site: list(range(len(m))) for site, m in found[0].masks.items()}
    assert np.allclose(ask_attribution(run, 5, data.classes[1], circuit=whole).map, model.map, atol=1e-5)
    small = found.select(cls=data.classes[1], budget=.25)[0]
    as_numbers = {site: np.flatnonzero(m).tolist() for site, m in small.masks.items()}
    inside = ask_attribution(run, 5, data.classes[1], circuit=small)
    assert not np.allclose(inside.map, model.map, atol=1e-3) and inside.completeness < .15
    assert np.array_equal(ask_attribution(run, 5, data.classes[1], circuit=as_numbers).map, inside.map)
    for circuit, words in (("conv1", "should be a Circuit"), ({"conv9": [0]}, "unknown site"), ({"conv1": [4]}, "from 0 to 3"), ({"conv1": "ab"}, "from 0 to 3"),
                           ({"conv1": [[0], [1, 2]]}, "from 0 to 3"), ({"conv1": []}, "nothing of an image passes")):
        with pytest.raises(InputError, match=words): ask_attribution(run, 5, data.classes[1], circuit=circuit)


def test_the_control_is_the_map_of_a_network_that_lost_what_it_learned(run, data):
    model, anew = run.model(), answers.drawn_anew(run.model())
    assert all(not a.equal(b) for a, b in zip(model.parameters(), anew.parameters())) and answers.drawn_anew(model).fc.weight.equal(anew.fc.weight)
    other = ask_attribution(run, 5, data.classes[1], seed=1)  # another seed draws other weights, and shows other images
    assert not np.allclose(ask_attribution(run, 5, data.classes[1]).control, other.control)


def test_an_answer_is_json_and_a_mistake_is_a_sentence(run, root, data):
    head = answer(dict(what="head", run=run.id, round=2, client="0", how="bias only", labels=40, draw=1, lr=.1, seed=0), root)
    pixels = answer(dict(what="attribution", run=run.id, image=3, cls=data.classes[0], method="saliency"), root)
    for found in (head, pixels): assert json.loads(json.dumps(found, allow_nan=False)) == found and found["error"] is None and found["seconds"] >= 0
    assert {r["cls"] for r in head["rows"]} == {"all", *data.classes} and pixels["shape"] == [8, 8] and pixels["completeness"] is None
    assert np.array(pixels["map"]).shape == np.array(pixels["control"]).shape == (8, 8)
    for wrong, words in ((None, "a question is a dict"), ({}, "unknown question None"), (dict(what="head"), "unknown run None"), (dict(what="head", run="../asked"), "unknown run"),
                         (dict(what="head", run=run.id, image=3), "unknown part"), (dict(what="attribution", run=run.id, cls="a"), "needs 'image'"),
                         (dict(what="attribution", run=run.id, image=-1, cls=data.classes[0]), "0 to 119"), (dict(what="attribution", run=run.id, image=1.5, cls=data.classes[0]), "0 to 119"),
                         (dict(what="head", run=run.id, labels=10**9), "so ask for"), (dict(what="head", run=run.id, round="2"), "keeps no round '2'")):
        found = answer(wrong, root)
        assert list(found) == ["error"] and words in found["error"] and "\n" not in found["error"], found
    assert "there are no runs" in answer(dict(what="head", run=run.id), root/"nowhere")["error"]


def test_threads_get_the_same_answers_and_leave_the_global_random_state_alone(run, root, data, monkeypatch):
    questions = [dict(what="head", run=run.id, client=str(k % 3), labels=20, draw=k) for k in range(4)] + [dict(what="attribution", run=run.id, image=k, cls=data.classes[0]) for k in range(4)]
    one = [answer(q, root) | dict(seconds=0) for q in questions]
    state = lambda: (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads())
    before, found = state(), [None] * len(questions)
    monkeypatch.setattr(answers, "_MODELS", answers.Recent(2))
    def work(i): found[i] = answer(questions[i], root) | dict(seconds=0)
    threads = [threading.Thread(target=work, args=[i]) for i in range(len(questions))]
    for t in threads: t.start()
    for t in threads: t.join()
    assert found == one and state() == before


def test_a_model_may_be_called_in_one_thread_while_another_is_traced_elsewhere(run, data):
    from fedinterp.channels import trace
    model, found, stop = run.model(), [], threading.Event()
    def call():
        while not stop.is_set(): found.append(model(data.x_test[:4]).tolist())
    thread = threading.Thread(target=call)
    thread.start()
    groups = [sorted(trace(run.model()).groups) for _ in range(40)]
    stop.set()
    thread.join()
    assert len(found) > 1 and all(f == found[0] for f in found) and groups == groups[:1] * 40


def test_a_run_on_data_of_ones_own_is_asked_with_them(run, data):
    few = Dataset(data.x_train, data.y_train, data.x_test[:50], data.y_test[:50], data.classes)
    assert set(ask_head(run, labels=20, data=few).query("cls == 'all'").n) == {50} and set(ask_head(run, labels=20).query("cls == 'all'").n) == {120}


def test_the_explorer_finds_it_by_name(): assert lookup("ask", "view") is answer
