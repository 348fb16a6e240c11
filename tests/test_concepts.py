"What a shared dictionary says: sharing by hand, nulls in their order, stitching, pictures that stay with their concepts."
import os, subprocess, sys, warnings
import numpy as np, pytest, torch
from conftest import ROOT
from fedinterp.concepts import as_firing, dictionary_study, effects, gallery, layout, per_concept, read_codes, sharing, stitch
from fedinterp.core import Config, InputError, rng_for
from fedinterp.data import load_dataset
from fedinterp.models import build_model, predict
from fedinterp.overlap import chance_iou
from fedinterp.rows import collect, drawn
from fedinterp.sites import edit
from fedinterp.table import load, save
from fedinterp.train import train
from fedinterp.usae import train_usae

SMALL = dict(concepts=64, k=8, epochs=6, batch=256, encoder="batchnorm", unit_norm=True, progress=False)


@pytest.fixture(scope="module")
def data(): return load_dataset("fashion_mnist_small")


@pytest.fixture(scope="module")
def models(data, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    how = dict(clients=4, rounds=2, local_epochs=1, lr=1e-2, batch_size=64, eval_every=2, model_args=dict(channels=[8, 12, 16], head="pool"))
    return {name: train(Config(partition=p, **how), root=root, progress=False).model() for name, p in (("IID", "iid"), ("skewed", "dirichlet:0.2"))}


@pytest.fixture(scope="module")
def study(models, data): return dictionary_study(models, data, images=500, test_images=300, seeds=(0, 1), **SMALL)


@pytest.fixture(scope="module")
def rows(models, data): return collect(models, data.x_test[:300])


@pytest.fixture(scope="module")
def firing(study, rows): return read_codes(study.usae, rows)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def value(frame, metric, **keys):
    for key, wanted in dict(metric=metric, **keys).items(): frame = frame[frame[key] == wanted]
    assert len(frame) == 1
    return frame.value.item()


def at_once(frame, metric="shared", **keys): return value(frame, metric, rate=0.0, **keys)


def patterns(a, b):
    "Codes from 0/1 firing patterns, one list a concept."
    return {"a": np.array(a, float).T, "b": np.array(b, float).T}


def test_known_firing_patterns_give_known_sharing():
    found = sharing(patterns([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]), rates=(0, 0.5))
    assert value(found, "alive") == 3/4
    assert [at_once(found, m) for m in ("shared", "only a", "only b", "neither")] == pytest.approx([1/3, 1/3, 1/3, 0])
    assert [value(found, m, rate=0.5) for m in ("shared", "only a", "only b", "neither")] == pytest.approx([1/3, 0, 1/3, 1/3])
    assert value(found, "IoU") == pytest.approx((1/3 + 0 + 0) / 3)  # 1 row of the 3 in which either fires, not of the 4 firings
    assert value(found, "entropy") == pytest.approx(1/3)


def test_entropy_is_one_for_equal_firing_and_zero_for_one_model_only():
    assert value(sharing(patterns([[1, 1, 0, 0]], [[0, 0, 1, 1]])), "entropy") == 1
    assert value(sharing(patterns([[1, 1, 0, 0]], [[0, 0, 0, 0]])), "entropy") == 0
    three = per_concept({n: np.array([[1.0, n == "a"]]) for n in "abc"})
    assert three[three.metric == "entropy"].value.tolist() == pytest.approx([1, 0])


@pytest.mark.parametrize("seed", [0, 1])
def test_independent_firing_meets_its_chance_level(seed):
    rng = rng_for(seed, "test independent")
    rates = rng.uniform(0.002, 0.5, (2, 80))
    codes = {n: (rng.random((3000, 80)) < r) * rng.random((3000, 80)) for n, r in zip("ab", rates)}
    found = sharing(codes)
    assert abs(value(found, "IoU") - value(found, "chance")) < 0.01 and abs(value(found, "adjusted")) < 0.01 and abs(value(found, "correlation")) < 0.01


def test_the_exact_chance_level_is_that_of_the_overlap_room():
    codes = patterns([[1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]], [[1, 0, 1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]])
    assert value(sharing(codes, exact=True), "chance") == pytest.approx((chance_iou(2, 3, 8) + chance_iou(1, 1, 8)) / 2)


def test_a_model_and_itself_share_everything_and_silence_is_not_defined():
    codes = rng_for(0, "test itself").random((50, 6)) * (rng_for(1, "test itself").random((50, 6)) < 0.3)
    found = sharing({"a": codes, "b": codes})
    assert [value(found, m) for m in ("IoU", "adjusted", "correlation", "entropy", "energy overlap")] == pytest.approx([1] * 5)
    silent = sharing({"a": np.zeros((5, 2)), "b": np.zeros((5, 2))})
    assert value(silent, "alive") == 0 and np.isnan(value(silent, "IoU")) and np.isnan(at_once(silent))


def test_energy_counts_the_length_of_the_directions():
    codes = as_firing(patterns([[1, 1], [1, 1]], [[1, 1], [1, 1]]), norms={"a": np.array([1.0, 3.0]), "b": np.array([3.0, 1.0])})
    assert value(sharing(codes), "energy overlap") == pytest.approx(0.5 / 1.5)


def test_rows_may_come_in_any_order_and_three_models_make_three_pairs():
    rng = rng_for(0, "test order")
    codes = {n: rng.random((40, 5)) * (rng.random((40, 5)) < 0.4) for n in "abc"}
    order = rng.permutation(40)
    one, two = sharing(codes), sharing({n: z[order] for n, z in codes.items()})
    assert np.allclose(one.value, two.value, equal_nan=True) and set(one.client) == {"a & b", "a & c", "b & c"}


@pytest.mark.parametrize("codes, words", [({"a": np.ones((2, 2))}, "two models or more"), ({"a": np.ones((2, 2)), "b": np.ones((2, 3))}, "same rows"),
                                          ({"a": np.full((2, 2), np.nan), "b": np.ones((2, 2))}, "at least 0")])
def test_codes_that_cannot_be_compared_are_refused(codes, words):
    with pytest.raises(InputError, match=words): sharing(codes)


def test_firing_at_least_once_is_saturated_for_noise_as_well(study):
    assert at_once(study.table, of="noise") > 0.9 and at_once(study.table, of="re-paired") > 0.9
    assert at_once(study.table, of="noise") > at_once(study.table, of="models") - 0.05


def test_cross_r2_puts_trained_above_untrained_above_re_paired(study):
    cross = {of: value(study.table, "cross R2", of=of) for of in study.table.of.unique()}
    assert cross["models"] > cross["untrained"] > cross["re-paired"] and cross["copy"] > cross["shuffled"] > cross["noise"]
    assert (study.table.lo.isna() | (study.table.lo <= study.table.value + 1e-12)).all()


def test_r2_of_the_study_is_that_of_the_dictionary(models, data):
    alone = dictionary_study(models, data, nulls=False, images=500, test_images=300, **SMALL)
    assert alone.table[alone.table.metric == "R2"].value.to_numpy() == pytest.approx(alone.usae.r2(collect(models, data.x_test[drawn(len(data.y_test), 300)]).acts).to_numpy().ravel(), abs=1e-4)
    assert set(alone.table.of) == {"models"} and "position" not in set(alone.table.metric)


def test_a_study_repeats_bit_for_bit_and_survives_being_kept(models, data, study, tmp_path):
    state = torch.random.get_rng_state()
    again = dictionary_study(models, data, images=500, test_images=300, seeds=(0, 1), **SMALL)
    assert again.table.equals(study.table) and torch.equal(state, torch.random.get_rng_state())
    save(study.table, tmp_path/"study.parquet")
    assert load(tmp_path/"study.parquet").equals(study.table)


def test_a_study_refuses_names_that_are_its_own_and_a_lone_model(models, data):
    with pytest.raises(InputError, match="two or more"): dictionary_study({"IID": models["IID"]}, data)
    with pytest.raises(InputError, match="named otherwise"): dictionary_study({"IID": models["IID"], "copy": models["skewed"]}, data)
    with pytest.raises(InputError, match="unknown model 'IID'"): dictionary_study(models, data, ceiling={"iid": models["IID"]})


def test_as_published_trains_on_the_images_that_it_judges(models, data):
    how = dict(as_published=True, nulls=False, test_images=60, concepts=32, k=4, epochs=1, progress=False)
    seen = dictionary_study(models, data, **how)
    usae = train_usae(collect(models, data.x_test[drawn(len(data.y_test), 60)]).acts, **{**seen.usae.settings, "seed": 0}, image=np.repeat(np.arange(60), 9), progress=False)
    assert torch.equal(usae.directions("IID"), seen.usae.directions("IID")) and seen.usae.settings["encoder"] == "batchnorm" and seen.settings["as_published"]


def test_stitching_a_model_onto_its_copy_equals_its_own_reconstruction(models, data):
    twins = {"a": models["IID"], "b": models["IID"]}
    acts = collect(twins, data.x_train[:300])
    usae = train_usae(acts.acts, image=acts.image, **SMALL)
    usae.parts["b"] = usae.parts["a"]
    found = stitch(usae, twins, data, images=200, train_images=200)
    score = lambda a, b, what: found[(found.a == a) & (found.b == b) & (found.input == what)].value.item()
    assert score("a", "b", "all concepts") == score("a", "a", "all concepts") == score("b", "b", "all concepts") == score("b", "a", "all concepts")
    assert score("a", "b", "linear map") == pytest.approx(score("b", "b", "own activations"), abs=0.02)


def test_the_mean_is_at_chance_and_own_activations_give_the_models_own_accuracy(study, models, data):
    found = stitch(study.usae, models, data, images=300, train_images=300, rate=0.01)
    for name, model in models.items():
        own = found[(found.a == name) & (found.b == name)].set_index("input")
        at = drawn(len(data.y_test), 300)
        assert own.value["own activations"] == pytest.approx((predict(model, data.x_test[at]).argmax(-1) == data.y_test[at]).float().mean().item())
        assert own.lo["mean"] < 0.12 and own.value["mean"] < 0.2 < own.value["all concepts"]
    cross = found[found.a != found.b]
    families = cross[cross.input.isin(["shared", "only a", "only b"])].groupby("client").concepts.sum()
    assert (families <= study.usae.concepts).all() and (cross.n == 300).all()


def test_an_effect_is_the_forward_passes_own_where_the_rest_is_linear(study, models, data, firing):
    moves = effects(study.usae, models, firing, data.x_test[:20])
    z = firing.z["IID"].toarray()
    for k in np.flatnonzero(z.any(0))[:3]:
        add = torch.from_numpy(z[z[:, k] > 0, k].mean() * study.usae.directions("IID")[k].numpy()).float()
        with edit(models["IID"], {"conv3": lambda act: act + add[:, None, None]}) as net: moved = predict(net, data.x_test[:20])
        assert moves["IID"][k] == pytest.approx((moved - predict(models["IID"], data.x_test[:20])).mean(0).numpy(), abs=1e-4)


def test_a_concepts_figures_are_those_of_its_column(firing, data):
    cards = per_concept(firing, data.y_test, data.classes)
    figure = lambda run, metric, concept, cls="all": value(cards, metric, run=run, concept=concept, cls=cls)
    z, labels = firing.z["skewed"].toarray(), data.y_test.numpy()[firing.image]
    for k in (0, 7, 63):
        assert figure("skewed", "rate", k) == pytest.approx((z[:, k] > 0).mean()) and figure("skewed", "activation", k) == pytest.approx(z[:, k].mean())
        assert figure("skewed", "energy", k) == pytest.approx(z[:, k].mean() * firing.norms["skewed"][k])
        assert figure("skewed", "activation", k, data.classes[3]) == pytest.approx(z[labels == 3, k].mean())


def test_pictures_belong_to_their_concepts_after_any_filter(firing, data):
    pictures = data.images(data.x_test[:300])
    shown = gallery(firing, pictures, top=4)
    for part in (shown.table.sample(60, random_state=1), shown.table[shown.table.metric == "quantile"].iloc[::-7], shown.table[shown.table.concept == 5]):
        assert np.array_equal(shown.pictures(part.image), pictures[part.image])
        for r in part.head(20).itertuples(): assert firing.z[r.run][[r.image * 9 + r.position], [r.concept]].item() == r.value


def test_top_images_are_the_strongest_and_quantiles_fall(firing, data):
    shown = gallery(firing, data.images(data.x_test[:300]), top=4).table
    for (run, concept), part in shown.groupby(["run", "concept"]):
        best = np.sort(firing.z[run][:, [concept]].toarray().reshape(300, 9).max(1))[::-1]
        top, quantile = (part[part.metric == m].value for m in ("top", "quantile"))
        assert top.tolist() == best[best > 0][:4].tolist() and quantile.is_monotonic_decreasing and quantile.iloc[0] == best[0]
    with pytest.raises(InputError, match="give uint8"): gallery(firing, data.images(data.x_test[:200]))


def test_a_layout_is_deterministic_and_blind_to_length_and_sign(firing, study):
    d = study.usae.directions("IID").numpy().astype(float)
    scaled = d * rng_for(0, "test layout").uniform(0.5, 2, (len(d), 1))
    assert layout(d).equals(layout(d)) and np.allclose(layout(scaled)[["x", "y"]], layout(d)[["x", "y"]])
    alive = np.arange(len(d)) % 3 > 0
    assert layout(d, alive=alive).concept.tolist() == np.flatnonzero(alive).tolist()
    d[4] = 0
    assert 4 not in set(layout(d).concept)


def test_a_umap_layout_repeats_and_takes_small_dictionaries():
    code = ("import warnings; warnings.simplefilter('error', UserWarning); import numpy as np; from fedinterp.concepts import layout;"
            "d = np.random.default_rng(0).normal(size=(9, 4)); a, b = (layout(d, 'umap') for _ in 'ab');"
            "print(a.equals(b), len(a), bool(np.isfinite(a.x).all()), a.metric[0])")
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # compiling takes ten times as long as nine concepts
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.stdout.split() == ["True", "9", "True", "umap"], found.stderr[-500:]


def test_models_of_other_shapes_and_sites_by_name_are_stitched_too(data):
    nets = {"small": build_model("simple_cnn", channels=(4, 4, 8), head="pool"), "large": build_model("simple_cnn", channels=(4, 8, 12))}
    site = {"small": "conv3", "large": "conv2"}  # 3 × 3 and 7 × 7 positions
    study = dictionary_study(nets, data, site=site, images=60, test_images=40, concepts=16, k=2, steps=5, progress=False)
    found = stitch(study.usae, nets, data, site=site, images=40, train_images=40)
    assert len(found) == 2 * (3 + 5) and found.value.between(0, 1).all() and set(study.table.of) >= {"copy", "noise"}


def test_a_test_set_in_class_order_gives_the_same_kind_of_figures(study, models, data):
    from dataclasses import replace
    order = np.argsort(data.y_test.numpy(), kind="stable")
    sorted_ = replace(data, x_test=data.x_test[order], y_test=data.y_test[order])
    whole = {name: (predict(model, data.x_test).argmax(-1) == data.y_test).float().mean().item() for name, model in models.items()}
    found = stitch(study.usae, models, sorted_, images=400, train_images=300).set_index(["a", "b", "input"]).value
    assert all(abs(found[name, name, "own activations"] - v) < .08 and found[name, name, "mean"] < .2 for name, v in whole.items())
