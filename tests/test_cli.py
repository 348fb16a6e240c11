"The command line: help everywhere, one sentence for a mistake, and a training that survives an interrupt."
import html
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import bands

from fedinterp import cli
from fedinterp.autopsy_report import headline
from fedinterp.cli import demo, main, notebooks
from fedinterp.core import ClientError, Config
from fedinterp.run import Run

COMMANDS = ("demo", "autopsy", "train", "runs", "show", "data", "lab", "version")


@pytest.fixture
def here(tmp_path, monkeypatch):
    "An empty working directory with a small data set in it."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for colour in ("FORCE_COLOR", "CLICOLOR_FORCE"): monkeypatch.delenv(colour, raising=False)
    (x, y), (xt, yt) = bands(160, 0), bands(80, 1)
    np.savez("tiny.npz", x_train=x, y_train=y, x_test=xt, y_test=yt)
    return tmp_path

TINY = ["--dataset", "tiny.npz", "--model-args", '{"channels": [4, 4, 8]}', "--clients", "4", "--rounds", "2", "--batch-size", "16",
        "--partition", "dirichlet:0.5"]


@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)], ids=lambda c: " ".join(c) or "fedinterp")
def test_help_is_everywhere(command, capsys):
    assert main([*command, "--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert [c for c in COMMANDS if c not in said] == []


def test_every_field_of_a_config_is_an_option_of_train(capsys):
    main(["train", "--help"])
    said = capsys.readouterr().out
    assert [f for f in Config.model_fields if "--" + f.replace("_", "-") not in said] == []


MISTAKES = [
    ["trian"], ["train", "--learning-rate", "1"], ["train", "--lr", "fast"], ["train", "--lr"], ["train", "--strategy", "fedagv"],
    ["train", "--partition", "dirichlet:-1"], ["train", "--dataset", "fashion-mnist-smal"], ["train", "--model", "simplecnn"],
    ["train", "--model-args", "pool"], ["train", "nowhere.json"], ["train", "text.json"], ["train", "typo.json"], ["train", "newer.json"],
    ["train", "tiny.npz"], ["train", "--workers", "0"], ["train", "--trace", "some"], ["runs", "nowhere"], ["show", "nothing"], ["show", "empty"],
    ["show"], ["autopsy", "nowhere"], ["data", "nowhere.npz"], ["data", "text.json"], ["demo", "--report", "nowhere/report.html"], ["demo", "--report", "empty"],
    ["demo", "--seed", "-1"], ["version", "now"]]

@pytest.mark.parametrize("line", MISTAKES, ids=" ".join)
def test_a_mistake_costs_one_sentence_and_status_2(line, here, capsys):
    for name, text in {"text.json": "not json", "typo.json": '{"round": 3}', "newer.json": '{"schema": 99}'}.items(): (here/name).write_text(text)
    (here/"empty").mkdir()
    before = sorted(here.rglob("*"))
    assert main(line) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("fedinterp: ") and said.err.count("\n") == 1 and "Traceback" not in said.err
    assert sorted(here.rglob("*")) == before  # no work was started


def test_a_mistake_in_a_process_of_its_own_leaves_with_2_and_an_empty_output():
    done = subprocess.run([sys.executable, "-c", "import sys; from fedinterp.cli import main; sys.exit(main())", "train", "--lr", "0"],
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "lr = " in done.stderr


def test_the_nearest_valid_name_is_offered(here, capsys):
    for line, nearest in ((["trian"], "train"), (["train", "--strategy", "fedagv"], "fedavg"), (["train", "--partition", "dirichelt:1"], "dirichlet")):
        assert main(line) == 2
        assert nearest in capsys.readouterr().err


def test_a_failed_client_is_one_sentence_without_its_traceback(monkeypatch, capsys):
    def failing(*args, **kwargs): raise ClientError("client 3 failed in round 2: boom", 2, 3, "Traceback (most recent call last): ...")
    monkeypatch.setattr(cli, "demo", failing)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "fedinterp: client 3 failed in round 2: boom\n"


def test_an_interrupt_says_that_finished_rounds_are_kept(monkeypatch, capsys):
    def interrupted(*args, **kwargs): raise KeyboardInterrupt
    monkeypatch.setattr(cli, "demo", interrupted)
    assert main(["demo"]) == 130
    assert "every finished round is kept" in capsys.readouterr().err


def test_train_runs_show_and_data(here, capsys):
    assert main(["train", *TINY, "--root", "kept", "--workers", "1"]) == 0
    run, = Run.list("kept")
    assert run.config == Config(dataset="tiny.npz", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=2, batch_size=16, partition="dirichlet:0.5")
    assert "round 2 of 2, accuracy" in capsys.readouterr().out
    assert main(["runs", "kept"]) == 0
    assert run.id in capsys.readouterr().out
    for way in ([run.id, "--root", "kept"], [str(run.path)]):
        assert main(["show", *way]) == 0
        said = capsys.readouterr().out
        assert all(word in said for word in ("dirichlet:0.5", "Images of each class", "Accuracy of the server", "rounds with weights: 0, 1, 2"))
    assert main(["data", "tiny.npz"]) == 0
    assert "1 × 8 × 8" in capsys.readouterr().out


WRONG_INTENTS = {"": "cannot be read", "make it small": "cannot be read", "flops 40%": "did you mean 'flops -40%'?", "flops +40%": "did you mean flops=-0.4?",
                 "flops -40": "did you mean flops=-0.4?", "flops -0%": "asks for no change", "flops -100%": "no model at all", "flop -40%": "did you mean 'flops'?",
                 "latency -40%": "never promised", "flops -40%, flops -30%": "names flops twice", "flops -40% params -30%": "cannot be read", "flops -140%": "less than nothing"}

@pytest.mark.parametrize("wish, said", WRONG_INTENTS.items(), ids=list(WRONG_INTENTS))
def test_a_wrong_intent_costs_one_sentence_and_status_2_before_any_work(wish, said, here, capsys):
    before = sorted(here.rglob("*"))
    assert main(["train", *TINY, "--intent", wish]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith("fedinterp: ") and found.err.count("\n") == 1 and said in found.err
    assert sorted(here.rglob("*")) == before


def test_wrong_intents_get_sentences_of_their_own(here, capsys):
    for wish in WRONG_INTENTS: main(["train", *TINY, "--intent", wish])
    said = capsys.readouterr().err.splitlines()
    assert len(set(said)) == len(WRONG_INTENTS) >= 10


PRUNED = [*TINY[:3], '{"channels": [16, 24, 32]}', *TINY[4:], "--strategy-args", '{"explore_epochs": 1}', "--workers", "1"]

@pytest.mark.parametrize("strategy", ["fedavg", "magnitude"])
def test_an_intent_trains_a_model_that_meets_it_within_two_points_and_says_so(strategy, here, capsys):
    from fedinterp.shrink import cost, shrink
    assert main(["train", *PRUNED, "--strategy", strategy, "--intent", "flops -40%"]) == 0
    said = re.search(r"The intent was flops -40%; achieved: flops (-[\d.]+)%", capsys.readouterr().out)
    run, = Run.list("runs")
    total = lambda model: cost(model).query("site == 'all' and metric == 'FLOPs'").value.iloc[0]
    achieved = 100 * (total(shrink(run.model())) / total(run.model()) - 1)
    assert abs(achieved + 40) <= 2 and float(said[1]) == pytest.approx(achieved, abs=.06)
    assert run.config.strategy == ("autoflip" if strategy == "fedavg" else strategy)


def test_an_intent_that_cannot_be_met_says_what_can_be_and_leaves_with_2(here, capsys):
    assert main(["train", *PRUNED, "--intent", "flops -99.99%"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fedinterp: the intent 'flops -99.99%' cannot be met: with every layer at its floor the change is flops -")


def test_a_config_file_and_options_make_one_config_and_the_run_is_returned_the_second_time(here, capsys):
    fields = dict(dataset="tiny.npz", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=2, lr=.5)
    (here/"config.json").write_text(json.dumps(fields))
    for _ in range(2): assert main(["train", "config.json", "--lr", "0.01", "--rounds", "1", "--workers", "1"]) == 0
    run, = Run.list("runs")
    assert (run.config.lr, run.config.rounds, run.config.clients) == (.01, 1, 4)
    assert len((run.path/"log.jsonl").read_text().splitlines()) == 1  # the second call trained nothing


def test_options_may_be_written_with_underscores(here):
    assert main(["train", *[o.replace("model-args", "model_args") for o in TINY], "--workers", "1"]) == 0


def test_the_demo_answers_writes_a_report_and_keeps_everything(here):
    config = Config(dataset="tiny.npz", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=2, batch_size=16)
    quick = dict(budget=20, draws=2, sizes=(.5,), dictionary=dict(concepts=16, k=2, epochs=2, images=60, test_images=60))
    def run(): return demo("runs", "report.html", config, workers=1, progress=False, **quick)
    found = run()
    assert {"bias only refitted", "floor: untrained backbone"} <= set(headline(found)[""])
    assert found.verdict and html.escape(found.verdict) in (here/"report.html").read_text(encoding="utf-8")
    assert list(headline(found))[1:] == ["IID", "Dirichlet 0.1"]
    assert {"evidence", "probes", "heads", "decomposition", "circuits", "overlap", "dictionary", "stitching", "gallery", "patching", "similarity"} <= set(found.tables)
    before = {p: p.stat().st_mtime_ns for p in here.rglob("*") if p.is_file()}
    assert headline(run()).equals(headline(found))
    assert {p: p.stat().st_mtime_ns for p in here.rglob("*") if p.is_file()} == before
    (here/"report.html").unlink()
    run()
    assert (here/"report.html").exists()
    kept = ("import sys\nfrom fedinterp.cli import demo\nfrom fedinterp.core import Config\n"
            f"demo('runs', 'report.html', Config(**{config.changed()!r}), progress=False, **{quick!r})\n"
            "assert 'torch' not in sys.modules and 'altair' not in sys.modules")
    subprocess.run([sys.executable, "-c", kept], check=True)
    skewed, iid = found.pairs[0]
    assert main(["autopsy", skewed, "--reference", iid, "--diagnostics", "probe", "--report", "two.html", "--budget", "20", "--draws", "2"]) == 0 and (here/"two.html").exists()
    for wrong in (["autopsy", skewed, "--reference", skewed], ["autopsy", skewed, "--rounds", "one"], ["autopsy", skewed, "--diagnostics", "prob"]):
        assert main(wrong) == 2


def test_notebooks_of_a_checkout_are_used_where_they_are(): assert (notebooks()/"00_core.ipynb").exists()


def test_installed_notebooks_are_copied_once_and_never_overwritten(tmp_path, monkeypatch):
    package = tmp_path/"site"/"fedinterp"
    (package/"_nbs"/"tutorials").mkdir(parents=True)
    for name in ("00_core.ipynb", "tutorials/first.ipynb"): (package/"_nbs"/name).write_text("{}")
    monkeypatch.setattr(cli.fedinterp, "__file__", str(package/"__init__.py"))
    folder = notebooks(tmp_path/"mine")
    (folder/"00_core.ipynb").write_text("mine")
    assert (notebooks(tmp_path/"mine")/"00_core.ipynb").read_text() == "mine" and (folder/"tutorials"/"first.ipynb").exists()


def test_lab_opens_jupyterlab_on_the_notebooks_and_passes_arguments_on(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(cli.subprocess, "call", lambda command: called.append(command) or 7)
    assert main(["lab", "--", "--no-browser"]) == 7
    assert called == [[sys.executable, "-m", "jupyterlab", str(notebooks()), "--no-browser"]]


def test_help_loads_neither_torch_nor_pandas():
    code = "import sys; from fedinterp.cli import main; main(['train', '--help']); bad = {'torch', 'pandas', 'altair'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
