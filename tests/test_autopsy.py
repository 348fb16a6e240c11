"The autopsy: tables of every diagnostic, words from intervals, seeds pooled, and nothing computed twice."
import json
import numpy as np
import pytest
from conftest import bands, visit

from fedinterp import autopsy as module
from fedinterp.autopsy import Autopsy, autopsy, in_words, twins
from fedinterp.core import Config, InputError, RunError
from fedinterp.data import dataset_from_arrays
from fedinterp.evidence import evidence, pooled, word
from fedinterp.run import Run
from fedinterp.table import table
from fedinterp.train import train

QUICK = dict(budget=20, draws=3, sizes=(.25, .5), circuits=dict(steps=10, samples=8), dictionary=dict(concepts=16, k=2, epochs=2, images=80, test_images=60), progress=False)


@pytest.fixture(scope="module")
def data():
    (x, y), (xt, yt) = bands(200, 0), bands(100, 1)
    return dataset_from_arrays(x, y, xt, yt, name="bands")


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    "A skewed federation and its IID reference, for two seeds."
    root = tmp_path_factory.mktemp("runs")
    make = lambda how, seed: train(Config(dataset="bands", model_args=dict(channels=[4, 4, 8]), clients=3, rounds=2, local_epochs=1, batch_size=16,
                                          partition=how, seed=seed), root=root, data=data, workers=1, progress=False)
    return {(how, seed): make(how, seed) for how in ("dirichlet:0.1", "iid") for seed in (0, 1)}


@pytest.fixture(scope="module")
def whole(runs, data): return autopsy(runs["dirichlet:0.1", 0], runs["iid", 0], data, rounds="all", seeds=False, **QUICK)


def test_every_diagnostic_leaves_tables_and_a_row_of_evidence(whole, runs):
    assert set(whole.tables) == {"metrics", "counts", "probes", "decomposition", "heads", "circuits", "channels", "edges", "answers", "overlap", "shared circuits",
                                 "dictionary", "stitching", "concepts", "map", "gallery", "patching", "similarity", "evidence"}
    assert list(whole.tables["evidence"].metric) == ["probe", "head", "circuits", "dictionary", "run → reference", "reference → run"]
    assert set(whole.tables["probes"]["round"]) == {0, 1, 2} and set(whole.tables["circuits"]["round"]) == {2}
    assert set(whole.tables["heads"].run) == {r.id for (_, seed), r in runs.items() if seed == 0}
    assert set(whole.tables["gallery"].run) == {"run", "reference"} and len(whole.thumbnails) > whole.tables["gallery"].image.max()
    assert {"untrained", "shuffled", "random", "empty", "full model"} <= set(whole.tables["circuits"].of)
    assert {"copy", "untrained", "shuffled", "re-paired", "noise"} <= set(whole.tables["dictionary"].of)


@pytest.fixture(scope="module")
def deep(whole, runs, data):
    "The same with every client, in every round; the parts that are not asked of clients are kept already."
    return autopsy(runs["dirichlet:0.1", 0], runs["iid", 0], data, rounds="all", seeds=False, deep=True, **QUICK)


def test_single_answers_belong_to_the_thumbnails_and_add_up_to_the_trial(whole, runs, data):
    said, trial = whole.tables["answers"], whole.tables["circuits"]
    assert set(said.budget) == {"", "0.25", "0.5"} and set(said.run) == {runs[how, 0].id for how in ("dirichlet:0.1", "iid")} and set(said.client) == {"server"}
    from fedinterp.rows import drawn
    shown = drawn(len(data.y_test), 1000)
    assert (said.truth.to_numpy() == np.array(data.classes)[data.y_test[shown[said.image]].numpy()]).all()
    assert (whole.thumbnails == data.images(data.x_test[shown])).all()
    key = ["run", "cls", "budget"]
    for metric, own in (("TPR, calibrated", True), ("FPR, calibrated", False)):  # all 100 test images are shown here, and all of them answered
        rates = trial[(trial.of == "circuit") & (trial.metric == metric)].set_index(key).value
        part = said[(said.of == "circuit") & ((said.truth == said.cls) == own)].assign(yes=lambda f: f.value > 0).groupby(key).yes.mean()
        assert np.allclose(part[rates.index], rates)


def test_the_question_about_pixels_is_about_the_picture_that_the_thumbnails_show(whole, runs, data, monkeypatch):
    from fedinterp import answers
    seen, work = [], answers.image_maps
    monkeypatch.setattr(answers, "image_maps", lambda net, x, *a, **k: seen.append(x) or work(net, x, *a, **k))
    for image in (0, 41, 99): answers.ask_attribution(runs["iid", 0], image, data.classes[0], data=data)
    assert all((data.images(x)[0] == whole.thumbnails[image]).all() for x, image in zip(seen[::2], (0, 41, 99)))


def test_deep_asks_every_client_and_every_round_and_changes_no_verdict(whole, deep, runs):
    run, tables = runs["dirichlet:0.1", 0], deep.tables
    assert set(tables) == set(whole.tables) and deep.verdict == whole.verdict and tables["evidence"].equals(whole.tables["evidence"])
    who = lambda name: set(map(tuple, tables[name][tables[name].run == run.id][["round", "client"]].values))
    everyone = {"server", *map(str, run.clients(2))}
    assert who("circuits") == who("channels") == who("edges") == {(0, "server")} | {(r, k) for r in (1, 2) for k in everyone}
    assert who("heads") == who("answers") == {(2, k) for k in everyone} and who("probes") == {(r, "server") for r in (0, 1, 2)} | {(2, k) for k in everyone}
    others = tables["circuits"][(tables["circuits"].client != "server") | (tables["circuits"]["round"] < 2)]
    assert set(others.budget) == {"0.5"} and {"circuit", "random", "full model"} <= set(others.of) and not {"untrained", "shuffled"} & set(others.of)
    assert set(tables["answers"][tables["answers"].client != "server"].budget) == {"", "0.5"}
    last = tables["circuits"][(tables["circuits"].client == "server") & (tables["circuits"]["round"] == 2)].reset_index(drop=True)
    assert last.equals(whole.tables["circuits"])


def test_the_report_and_the_first_table_of_a_deep_autopsy_speak_of_the_last_servers(whole, deep, tmp_path):
    from fedinterp.autopsy_report import headline
    assert headline(deep).equals(headline(whole))
    drawn = [(a.report(tmp_path/f"{name}.html").read_text(encoding="utf-8").split(">What was run</h2>")[0]) for name, a in (("whole", whole), ("deep", deep))]
    assert drawn[0] == drawn[1] and "deep=True" in (tmp_path/"deep.html").read_text(encoding="utf-8")


def test_deep_needs_a_run_and_is_another_autopsy(whole, deep, runs, data):
    with pytest.raises(InputError, match="deep looks into the clients of a run"): autopsy(runs["iid", 0].model(), data=data, deep=True, progress=False)
    kept = [Autopsy.load(p.parent) for p in (runs["dirichlet:0.1", 0].path/"autopsies").glob("*/autopsy.json")]
    assert [a.settings["deep"] for a in sorted(kept, key=lambda a: a.settings["deep"]) if a.settings["rounds"] == [0, 1, 2]] == [False, True]


def test_a_second_call_reads_and_computes_nothing(whole, runs, data, monkeypatch):
    monkeypatch.setattr(module, "ASKED", {name: None for name in module.ASKED})
    again = autopsy(runs["dirichlet:0.1", 0], runs["iid", 0], data, rounds="all", seeds=False, **QUICK)
    assert again.verdict == whole.verdict and all(again.tables[k].equals(v) for k, v in whole.tables.items())
    assert (again.thumbnails == whole.thumbnails).all()


def test_an_autopsy_that_was_stopped_goes_on_where_it_was(whole, runs, data, monkeypatch):
    import shutil
    shutil.rmtree(runs["dirichlet:0.1", 0].path/"autopsies")
    for name in ("fedinterp.heads.decompose", "fedinterp.circuit.evaluate_circuits", "fedinterp.concepts.dictionary_study", "fedinterp.similarity.patch"):
        monkeypatch.setattr(name, None)  # calling it would fail
    again = autopsy(runs["dirichlet:0.1", 0], runs["iid", 0], data, rounds="all", seeds=False, **QUICK)
    assert again.tables["evidence"].equals(whole.tables["evidence"])


def test_models_without_runs_give_the_same_figures(whole, runs, data):
    a, b = (runs[how, 0].model() for how in ("dirichlet:0.1", "iid"))
    plain = autopsy(a, b, data, **{**QUICK, "diagnostics": ["probe", "head", "circuits"]})
    same = plain.tables["evidence"].merge(whole.tables["evidence"], on="metric")
    assert len(same) == 3 and np.allclose(same.value_x, same.value_y, equal_nan=True)
    assert plain.pairs == [("model", "reference")] and set(plain.tables["heads"].run) == {"model", "reference"}


def test_runs_that_differ_by_their_seed_are_found_and_pooled(runs, data):
    skewed, iid = runs["dirichlet:0.1", 0], runs["iid", 0]
    assert [(a.config.seed, b.config.partition, b.config.seed) for a, b in twins(skewed, iid)] == [(1, "iid", 1)]
    both = autopsy(skewed, iid, data, **{**QUICK, "diagnostics": "probe"})
    assert len(both.pairs) == 2 and "over seeds and test images" in both.verdict
    found = both.tables["evidence"].set_index("metric").loc["probe"]
    alone = autopsy(skewed, iid, data, **{**QUICK, "diagnostics": "probe"}, seeds=False).tables["evidence"].set_index("metric").loc["probe"]
    assert "one seed" in autopsy(skewed, iid, data, **{**QUICK, "diagnostics": "probe"}, seeds=False).verdict
    assert not found.hi - found.lo < alone.hi - alone.lo  # two seeds decide less than one seems to


def test_seeds_are_pooled_by_students_interval_and_never_made_surer_than_one_run():
    rows = lambda values, half: table([dict(run=str(i), cls="all", metric="m", value=v, lo=v - half, hi=v + half) for i, v in enumerate(values)])
    wide = pooled(rows((.1, .3, .5), .01)).iloc[0]
    assert np.isclose(wide.value, .3) and np.isclose(wide.hi - wide.value, 4.3027 * .2 / np.sqrt(3), rtol=1e-3)
    alike = pooled(rows((.3, .3, .3), .09)).iloc[0]
    assert np.isclose(alike.hi - alike.lo, 2 * .09 / np.sqrt(3))


def decomposition(**figures):
    base = {"loss": (.1, .2), "backbone loss": (-.01, .02), "read-out loss": (.08, .18), "reference above floor": (.1, .2), "preservation": (.8, 1.),
            "read-out share": (.7, 1.), "above floor": (.1, .2), "bias gain": (.05, .1), "head gain": (.05, .1), "head beyond bias": (-.01, .01),
            "read-out share if erased": (.1, .2)}
    rows = [dict(run="a", round=1, cls="all", metric=m, value=(lo + hi) / 2, lo=lo, hi=hi, n=100, budget=20) for m, (lo, hi) in {**base, **figures}.items()]
    return dict(decomposition=table(rows))


@pytest.mark.parametrize("expected, figures", [
    ("misrouted", {}),
    ("erased", {"backbone loss": (.08, .18), "read-out loss": (-.01, .02), "preservation": (.1, .4)}),
    ("misrouted and erased", {"backbone loss": (.03, .08), "read-out loss": (.05, .1)}),
    ("preserved", {"loss": (-.01, .02)}),
    ("not decided", {"reference above floor": (-.01, .02)}),
    ("not decided", {"backbone loss": (-.1, .2), "read-out loss": (-.1, .2)})])
def test_the_word_follows_from_the_intervals(expected, figures):
    tables = decomposition(**figures)
    tables["evidence"] = evidence(tables, [("a", "b")])
    said = in_words(tables)
    assert said.split(":")[0].lower() == expected
    assert expected != "not decided" or "would decide it" in said


def test_an_interval_across_one_half_carries_no_word():
    assert [word(.51, .9), word(.1, .49), word(.2, .8), word(float("nan"), float("nan"))] == ["preserved", "erased", "not decided", "not decided"]


def test_without_a_reference_nothing_is_decided_and_the_verdict_says_what_would(runs, data):
    alone = autopsy(runs["dirichlet:0.1", 0], data=data, seeds=False, **{**QUICK, "diagnostics": ["probe", "circuits"]})
    assert alone.word == "not decided" and "given as reference=" in alone.verdict and "evidence" not in alone.tables


def test_it_saves_loads_and_refuses_a_damaged_folder(whole, tmp_path):
    whole.save(tmp_path/"kept")
    again = Autopsy.load(tmp_path/"kept")
    assert again.verdict == whole.verdict and again.pairs == whole.pairs and again.settings == json.loads(json.dumps(whole.settings))
    (tmp_path/"kept"/"heads.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunError, match="holds no autopsy that can be read"): Autopsy.load(tmp_path/"kept")
    with pytest.raises(RunError, match="holds no autopsy"): Autopsy.load(tmp_path)


def test_wrong_input_is_refused_in_a_sentence_before_work_starts(runs, data):
    skewed, iid = runs["dirichlet:0.1", 0], runs["iid", 0]
    for arguments, words in (((skewed, skewed), "its own reference"), ((skewed.model(), iid), "needs data="), (("runs/a", iid), "neither a Run"),
                             ((skewed, "iid"), "neither a Run"), ((skewed, Run), "neither a Run")):
        with pytest.raises(InputError, match=words): autopsy(*arguments, progress=False)
    for options, words in ((dict(rounds=9), "keeps no round 9"), (dict(diagnostics=["prob"]), "did you mean 'probe'"), (dict(sizes=(20,)), "shares of the channels"),
                           (dict(sizes=()), "shares of the channels"), (dict(budget=0), "whole number"), (dict(draws=True), "whole number")):
        with pytest.raises(InputError, match=words): autopsy(skewed, iid, data, progress=False, **options)


def test_the_report_of_a_whole_autopsy_is_one_small_page_with_every_section(whole, tmp_path):
    from fedinterp.autopsy_report import FIGURES
    text = whole.report(tmp_path/"report.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 6e6 and all(f">{title}</h2>" in text for title, *_ in FIGURES)
    assert text.count("Show the call") == len(FIGURES) and 'class="pixels"' in text


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark")])
def test_the_report_opens_offline_on_a_desk_and_on_a_phone_without_a_word_on_the_console(whole, tmp_path, chromium, width, scheme):
    from fedinterp.autopsy_report import FIGURES
    tab, asked, said = visit(chromium, whole.report(tmp_path/"report.html"), viewport=dict(width=width, height=800), color_scheme=scheme)
    tab.wait_for_selector(f"html[data-drawn={scheme}]", timeout=60_000)
    assert (asked, said) == ([], [])
    assert tab.locator("figure svg.marks").count() == len(FIGURES)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.context.close()


@pytest.mark.parametrize("wrong, words", [
    (dict(rounds="x"), "rounds should be numbers"), (dict(rounds=[]), "rounds should be numbers"), (dict(sizes="x"), "shares of the channels"), (dict(seed="x"), "seed = 'x'"),
    (dict(circuits=3), "a dict of arguments"), (dict(diagnostics=3), "unknown diagnostic"), (dict(dictionary=[1]), "a dict of arguments")])
def test_a_wrong_setting_is_refused_in_a_sentence_before_anything_is_computed(wrong, words):
    from fedinterp.run import Run
    from fedinterp.trace import shipped
    with pytest.raises(InputError, match=words): autopsy(Run.list(shipped())[0], progress=False, **wrong)
