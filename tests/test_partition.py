"Whatever the law and the seed: every image to exactly one client, the minimum met or refused, the same deal for the same seed."
import random
import numpy as np
import pytest
import torch
from fedinterp.core import Config, InputError
from fedinterp.data import dataset_from_arrays
from fedinterp.partition import corrupt_clients, corrupted, counts, partition

LABELS = np.random.default_rng(0).integers(0, 10, 4000)
WRITERS = np.random.default_rng(1).integers(0, 150, 4000)
LAWS = ["iid", "dirichlet:0.5", "dirichlet:0.05", "dirichlet:1e-300", "dirichlet:1e308",
        "classes:1", "classes:2", "classes:3", "classes:10", "quantity:0.5", "quantity:0.01", "groups"]


def same(a, b): return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("how, clients", [(how, k) for how in LAWS for k in (1, 10, 37)
                                          if k > 1 or how not in ("classes:1", "classes:2", "classes:3")])
def test_every_law_deals_each_image_once_and_meets_the_minimum(how, clients, seed):
    parts = partition(LABELS, how, clients, seed, min_samples=5, groups=WRITERS)
    assert len(parts) == clients and all(p.dtype == np.int64 for p in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all((np.diff(p) > 0).all() for p in parts)
    assert min(map(len, parts)) >= 5
    assert same(parts, partition(torch.from_numpy(LABELS), how, clients, seed, min_samples=5, groups=WRITERS))


@pytest.mark.parametrize("how", [law for law in LAWS if law != "dirichlet:1e308"])
def test_another_seed_deals_another_hand(how):
    assert not same(partition(LABELS, how, 10, 0, groups=WRITERS), partition(LABELS, how, 10, 1, groups=WRITERS))


def test_a_deal_depends_on_nothing_but_its_arguments():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = partition(LABELS, "dirichlet:0.1")
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    np.random.seed(2)
    assert same(first, partition(LABELS, "dirichlet:.10"))
    assert [len(p) for p in first] == [len(p) for p in partition(LABELS, "dirichlet:0.1", min_samples=0)]


@pytest.mark.parametrize("alpha, clients, n, least", [
    (0.1, 100, 60_000, 160), (0.01, 50, 60_000, 20), (0.001, 3, 1000, 1), (1e-9, 100, 60_000, 600)])
def test_deals_that_make_other_partitioners_loop_or_divide_by_zero_end(alpha, clients, n, least):
    parts = partition(np.arange(n) % 10, f"dirichlet:{alpha}", clients, min_samples=least)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    assert min(map(len, parts)) >= least


def test_three_classes_for_each_of_seven_clients_lose_nothing():
    labels = np.arange(10_000) % 10
    parts = partition(labels, "classes:3", 7)
    assert sum(map(len, parts)) == 10_000
    assert [len(np.unique(labels[p])) for p in parts] == [3] * 7
    holders = sum(np.bincount(np.unique(labels[p]), minlength=10) for p in parts)
    assert sorted(holders) == [2] * 9 + [3]


@pytest.mark.parametrize("k, clients, classes", [(1, 10, 10), (2, 10, 10), (3, 40, 10), (7, 13, 11), (62, 3, 62), (5, 200, 62)])
def test_classes_are_dealt_as_evenly_as_possible(k, clients, classes):
    labels = np.arange(classes * 400) % classes
    parts = partition(labels, f"classes:{k}", clients, seed=4)
    assert [len(np.unique(labels[p])) for p in parts] == [k] * clients
    holders = sum(np.bincount(np.unique(labels[p]), minlength=classes) for p in parts)
    assert holders.max() - holders.min() <= 1


def test_classes_that_nobody_would_hold_are_named():
    labels = np.arange(1000) % 10
    words = r"classes:1 gives 4 clients 4 of 10 classes, and .* would be lost: use at least 10 clients, or classes:3"
    with pytest.raises(InputError, match=words) as e:
        partition(labels, "classes:1", 4)
    lost = str(e.value).split(", and ")[1].split(" would")[0].split(", ")
    assert len(lost) == 6 and set(lost) <= set("0123456789")


def test_labels_need_not_be_consecutive():
    labels = np.array([3, 3, 7, 7, 100, 100])
    assert sorted(map(len, partition(labels, "classes:1", 3))) == [2, 2, 2]


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(map(len, partition(LABELS[:103], "iid", 10))) == [10] * 7 + [11] * 3


def test_writers_stay_whole_and_sizes_are_balanced():
    parts = partition(LABELS, "groups", 10, groups=WRITERS)
    owners = [set(WRITERS[p]) for p in parts]
    assert sum(map(len, owners)) == len(set(WRITERS))
    sizes = [len(p) for p in parts]
    assert max(sizes) - min(sizes) <= np.bincount(WRITERS).max()
    names = np.array([f"writer {w}" for w in WRITERS])
    assert all(len(p) for p in partition(LABELS, "groups", len(set(WRITERS)), groups=names))


def test_the_repair_moves_no_more_than_is_missing():
    labels, least = np.zeros(1000, dtype=int), 40
    wild = [len(p) for p in partition(labels, "dirichlet:0.01", 20, min_samples=0)]
    mild = partition(labels, "dirichlet:0.01", 20, min_samples=least)
    assert min(map(len, mild)) == least and max(map(len, mild)) > least < max(wild)


def test_more_clients_than_images_is_refused_or_leaves_empty_clients_on_request():
    words = "3 images are too few for 5 clients with at least 1 each: use at most 3 clients, or min_samples = 0"
    with pytest.raises(InputError, match=words):
        partition([0, 1, 2], "iid", 5)
    for how in ("iid", "dirichlet:0.1", "quantity:1", "classes:2"):
        parts = partition([0, 1, 2], how, 5, min_samples=0)
        assert len(parts) == 5 and sorted(np.concatenate(parts)) == [0, 1, 2]


@pytest.mark.parametrize("how, words", [
    ("dirichelt:0.1", "did you mean 'dirichlet'"), ("IID", "unknown partition"), ("", "unknown partition"), (None, "unknown partition"),
    ("dirichlet", "lacks its number"), ("dirichlet:", "lacks its number"), ("dirichlet:-1", "finite number above 0"),
    ("dirichlet:0", "finite number above 0"), ("dirichlet:nan", "finite number above 0"), ("dirichlet:inf", "finite number above 0"),
    ("dirichlet:a", "finite number above 0"), ("quantity:-inf", "finite number above 0"), ("classes:0", "whole number from 1"),
    ("classes:1.5", "whole number from 1"), ("classes:11", "more classes than the 10"), ("iid:3", "takes no number"),
    ("groups", "needs groups"),
])
def test_a_wrong_scheme_is_refused_in_one_sentence(how, words):
    with pytest.raises(InputError, match=words) as e: partition(LABELS, how)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("arguments, words", [
    (dict(clients=0), "clients = 0"), (dict(clients=-3), "clients = -3"), (dict(clients=2.5), "clients = 2.5"),
    (dict(clients=True), "clients = True"),
    (dict(min_samples=-1), "min_samples = -1"), (dict(clients=100, min_samples=41), "too few for 100 clients"),
    (dict(how="groups", groups=WRITERS[:5]), "needs groups"), (dict(how="groups", groups=WRITERS, clients=151), "without splitting one"),
    (dict(how="groups", groups=np.minimum(WRITERS, 1), clients=2, min_samples=100), "leaves client"),
])
def test_impossible_arguments_are_refused_in_one_sentence(arguments, words):
    with pytest.raises(InputError, match=words): partition(LABELS, **arguments)


@pytest.mark.parametrize("labels", [[], [[0, 1]], [0.5, 1.0], ["a", "b"], 3])
def test_labels_that_are_no_labels_are_refused(labels):
    with pytest.raises(InputError, match="labels are one integer an image"): partition(labels, "iid", 1)


def test_counts_add_up_and_the_figures_have_their_known_values():
    labels = np.repeat([0, 1, 2, 3], 25)
    parts = [np.flatnonzero(labels == c) for c in range(4)]
    held = counts(parts, labels, classes=list("abcd")).set_index(["client", "cls", "metric"]).value
    assert held["2", "c", "samples"] == 25 and held["2", "a", "samples"] == 0 and held["all", "all", "samples"] == 100
    assert held["all", "all", "total_variation"] == pytest.approx(.75) and held["all", "all", "effective_classes"] == pytest.approx(1)
    one = counts([np.arange(100)], labels).set_index(["client", "cls", "metric"]).value
    assert one["0", "all", "total_variation"] == pytest.approx(0) and one["0", "all", "effective_classes"] == pytest.approx(4)
    assert one["0", "3", "samples"] == 25


def test_counts_of_a_real_deal_cover_every_cell_once():
    parts = partition(LABELS, "dirichlet:0.05", 20, min_samples=0)
    held = counts(parts, LABELS)
    assert not held.duplicated(["client", "cls", "metric"]).any()
    cells = held[(held.metric == "samples") & (held.cls != "all")]
    assert len(cells) == 200 and cells.value.sum() == len(LABELS)
    assert held[(held.metric == "samples") & (held.cls == "all") & (held.client != "all")].value.tolist() == [len(p) for p in parts]


# some of the writers

def test_some_of_the_writers_stay_whole_and_the_rest_go_to_nobody():
    parts = partition(LABELS, "groups:20", 20, groups=WRITERS)
    owners = [set(WRITERS[p]) for p in parts]
    assert [len(o) for o in owners] == [1] * 20 and len(set.union(*owners)) == 20
    assert all(len(p) == (WRITERS == WRITERS[p[0]]).sum() and (np.diff(p) > 0).all() for p in parts)
    merged = partition(LABELS, "groups:20", 4, groups=WRITERS)
    assert sum(len({*WRITERS[p]}) for p in merged) == 20 and max(map(len, merged)) - min(map(len, merged)) <= np.bincount(WRITERS).max()
    assert same(parts, partition(LABELS, "groups:20", 20, groups=[f"{w:03d}" for w in WRITERS]))
    assert not same(parts, partition(LABELS, "groups:20", 20, seed=1, groups=WRITERS))


def test_writers_with_too_few_images_are_not_drawn():
    sizes = np.bincount(WRITERS)
    least = int(np.sort(sizes)[-10])
    parts = partition(LABELS, "groups:5", 5, min_samples=least, groups=WRITERS)
    assert min(map(len, parts)) >= least
    many = int((sizes >= least).sum())
    with pytest.raises(InputError, match=rf"groups:100 asks for more than the {many} groups .* use at most groups:{many}"):
        partition(LABELS, "groups:100", 5, min_samples=least, groups=WRITERS)
    with pytest.raises(InputError, match="6 clients cannot share 5 groups"): partition(LABELS, "groups:5", 6, groups=WRITERS)
    for how, words in (("groups:0", "whole number from 1, as in 'groups:20'"), ("groups:1.5", "whole number from 1"), ("groups:", "lacks its number")):
        with pytest.raises(InputError, match=words): partition(LABELS, how, 5, groups=WRITERS)


# clients with bad data

def spoiled(tiny, how, **kw):
    config = Config(corrupt=how, clients=10, partition="iid", **kw)
    parts = partition(tiny.y_train, "iid", 10, config.seed)
    return corrupt_clients(tiny, parts, config), parts, corrupted(config)


def test_without_corruption_the_data_are_the_very_same(tiny):
    got, _, clients = spoiled(tiny, "none")
    assert got is tiny and clients == [] and Config(corrupt="none").id == Config().id and Config(corrupt="flip:0.2").id != Config().id


def test_flipped_clients_call_every_class_by_one_other_name(tiny):
    got, parts, clients = spoiled(tiny, "flip:0.3")
    assert len(clients) == 3 and got.x_train is tiny.x_train and got.x_test is tiny.x_test and got.y_test is tiny.y_test
    maps = []
    for k, p in enumerate(parts):
        pairs = {*zip(tiny.y_train[p].tolist(), got.y_train[p].tolist())}
        assert len(pairs) == 4 == len({new for _, new in pairs})
        assert all((old == new) == (k not in clients) for old, new in pairs)
        if k in clients: maps.append(pairs)
    assert len(set(map(frozenset, maps))) > 1


def test_noisy_clients_get_noise_of_the_strength_that_was_asked_for(tiny):
    before = tiny.x_train.clone()
    for how, strength in (("noise:0.4", 1.0), ("noise:0.4:0.25", .25)):
        got, parts, clients = spoiled(tiny, how)
        assert len(clients) == 4 and got.y_train is tiny.y_train and got.x_test is tiny.x_test
        for k, p in enumerate(parts):
            noise = got.x_train[p] - tiny.x_train[p]
            if k in clients: assert noise.std().item() == pytest.approx(strength, rel=.05) and abs(noise.mean().item()) < .1 * strength
            else: assert not noise.any()
    assert tiny.x_train.equal(before)


def test_corruption_repeats_for_its_seed_and_touches_no_global_state(tiny):
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for how in ("flip:0.5", "noise:0.5"):
        one, two, other = (spoiled(tiny, how, seed=s)[0] for s in (3, 3, 4))
        assert one.fingerprint == two.fingerprint != other.fingerprint
    assert before == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    shares = [set(corrupted(Config(corrupt=f"noise:{s}", clients=20))) for s in (.2, .4, 1)]
    assert [len(s) for s in shares] == [4, 8, 20] and shares[0] < shares[1] < shares[2]


def test_an_empty_client_can_be_corrupted_too(tiny):
    parts = [np.arange(160), np.empty(0, np.int64)]
    for how in ("flip:1", "noise:1"): assert len(corrupt_clients(tiny, parts, Config(corrupt=how, clients=2)).y_train) == 160


@pytest.mark.parametrize("how, words", [
    ("noize:0.4", "did you mean 'noise'"), ("", "unknown corruption"), ("noise", "as in 'noise:0.4'"), ("flip", "as in 'flip:0.2'"), ("none:0.1", "takes no number"),
    ("noise:40", "above 0, to at most 1"), ("flip:-0.2", "above 0, to at most 1"), ("flip:0", "above 0"), ("flip:nan", "above 0"), ("flip:a", "above 0"),
    ("noise:0.4:0", "standard deviation should be a finite number above 0"), ("noise:0.4:inf", "standard deviation"), ("noise:0.4:x", "above 0"),
    ("flip:0.2:1", "should have one number:"), ("noise:0.4:1:1", "should have one or two numbers"), ("flip:0.04", "would touch none of 10 clients: use at least 'flip:0.1'")])
def test_a_corruption_that_cannot_be_is_refused_in_one_sentence(tiny, how, words):
    with pytest.raises(InputError, match=words) as e: spoiled(tiny, how)
    assert "\n" not in str(e.value)


def test_texts_can_be_mislabelled_but_not_noisy():
    texts = dataset_from_arrays(np.arange(80).reshape(20, 4) % 9, np.arange(20) % 9, [[0, 1, 2, 3]], [4], vocab=9)
    parts = partition(texts.y_train, "iid", 2)
    with pytest.raises(InputError, match="tokens cannot be noisy: use 'flip:0.2'"): corrupt_clients(texts, parts, Config(corrupt="noise:0.5", clients=2))
    flipped = corrupt_clients(texts, parts, Config(corrupt="flip:1", clients=2))
    assert not (flipped.y_train == texts.y_train).any() and flipped.x_train is texts.x_train
