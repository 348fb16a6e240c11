"Training in the background: the same bytes, stopped and gone on with; one at a time; nothing left behind; a view that follows."
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, digest
from test_lab import READY, lab  # noqa: F401  the latter is a fixture
from test_train import _state

from fedinterp import live
from fedinterp.core import ClientError, InputError, RunError, StorageError, register
from fedinterp.live import Job, Snapshot, Watch, past, running, still, watch
from fedinterp.run import Run, RoundWriter
from fedinterp.strategy import Strategy
from fedinterp.train import train


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    yield
    if running(): running().stop()


def until(reached, job):
    "Wait for a moment of a training."
    while not reached(job.snapshot) and job.snapshot.state == "running": time.sleep(0.002)


# ---------------------------------------------------------------- the same bytes

@pytest.mark.parametrize("workers", [1, 2])
def test_a_watched_run_has_the_bytes_of_a_plain_one(tiny, config, tmp_path, workers):
    plain = train(config, tmp_path/"plain", data=tiny, progress=False)
    w = watch(config, tmp_path/"watched", workers=workers, data=tiny)
    assert w.wait() == w.state == "finished" and w.error is None
    assert digest(w.run) == digest(plain)
    assert past(plain) == w.job.snapshot.history and [row[0] for row in past(plain)] == [0, 1, 2, 3]


@pytest.mark.parametrize("changes", [dict(), dict(strategy="scaffold", optimizer="sgd", lr=0.05, participation=0.5), dict(sparsity=0.8, eval_every=2, trace="last")])
def test_a_run_stopped_in_the_middle_of_rounds_and_gone_on_with_has_the_bytes_of_one_that_never_was(tiny, config, tmp_path, changes):
    trace = changes.pop("trace", "all")
    config = config.replace(rounds=6, local_steps=30, **changes)
    whole = train(config, tmp_path/"whole", data=tiny, progress=False, trace=trace)
    w = watch(config, tmp_path/"stopped", workers=2, data=tiny, trace=trace)
    for stop in (2, 4):
        until(lambda s: s.round >= stop and s.done >= 1, w.job)
        w.stop()
        assert w.state == "stopped" and Run.open(w.run.path).done == w.job.snapshot.kept < 6
        assert w.explorer().recorded.meta["rounds"][0] == 0  # a stopped run is a run
        w.resume()
    assert w.wait() == "finished" and digest(w.run) == digest(whole) and w.job.snapshot.history == past(whole)


def test_looking_touches_no_global_state_and_prints_nothing(tiny, config, tmp_path, capfd):
    torch.set_num_threads(2)
    try:
        before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()
        w = watch(config, tmp_path, data=tiny, workers=2)
        during = torch.get_num_threads()
        w.wait()
        assert before == (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()) and during == 2
    finally: torch.set_num_threads(1)
    assert capfd.readouterr() == ("", "")


def test_a_finished_run_is_shown_at_once(tiny, config, tmp_path):
    run = train(config, tmp_path, data=tiny, progress=False)
    w = watch(config, tmp_path)  # without the data: nothing is trained
    assert (w.state, w.run.path, w.job.snapshot.history) == ("finished", run.path, past(run))
    assert w.explorer().recorded.meta["rounds"] == [0, 1, 2, 3]
    with pytest.raises(InputError, match="nothing to go on with"): w.resume()


# ---------------------------------------------------------------- stopping

ENDLESS = dict(local_steps=10**7)

def test_a_stop_does_not_wait_for_the_clients_and_ends_their_processes(tiny, config, tmp_path):
    w = watch(config.replace(**ENDLESS), tmp_path, workers=2, data=tiny)
    until(lambda s: s.kept == 0, w.job)
    children = [int(p) for p in os.listdir("/proc") if p.isdigit() and _parent_is_me(p)]
    w.stop()
    assert w.state == "stopped" and w.run.rounds == [0] and len(children) >= 2
    assert not any(_parent_is_me(p) for p in children) and Run.open(w.run.path).metrics()["round"].max() == 0

def _parent_is_me(pid):
    try: return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid()
    except OSError: return False


def test_a_run_stopped_before_its_first_round_has_nothing_to_explore_and_goes_on(tiny, config, tmp_path, monkeypatch):
    gate, evaluate = threading.Event(), live.Job._observe
    monkeypatch.setattr(Job, "_observe", lambda self, at: (evaluate(self, at), gate.wait(30)))
    w = watch(config, tmp_path, workers=1, data=tiny)
    w.job.stop()
    gate.set()
    assert w.wait() == "stopped" and w.run.done == -1
    with pytest.raises(RunError, match="no finished round yet"): w.explorer()
    assert w._repr_mimebundle_()["text/html"].count("<tr>") == 1 and len(w.children) == 1
    w.resume()
    assert w.wait() == "finished"


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from conftest import bands
from fedinterp.core import Config
from fedinterp.data import dataset_from_arrays
from fedinterp.live import watch
tiny = dataset_from_arrays(*bands(160, 0), *bands(80, 1), classes=("a", "b", "c", "d"), name="tiny")
w = watch(Config(**{config!r}), {root!r}, data=tiny, workers=2)
import multiprocessing, time
while w.job.snapshot.kept < 0: time.sleep(.01)
print(*[p.pid for p in multiprocessing.active_children()], flush=True)
{then}
"""

@pytest.mark.parametrize("then", ["", "time.sleep(600)"], ids=["ends", "is killed"])
def test_workers_never_outlive_their_kernel_even_in_the_middle_of_a_client(tiny, config, tmp_path, then):
    config = config.replace(**ENDLESS)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(tests=str(ROOT/"tests"), config=config.changed(), root=str(tmp_path), then=then)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in process.stdout.readline().split()]
    try:
        if then: process.kill()
        said = process.communicate()[1]
        alive = lambda: [pid for pid in workers if _state(pid) not in ("gone", "Z")]
        for _ in range(200):
            if not alive(): break
            time.sleep(0.05)
        assert len(workers) == 2 and alive() == []
        if not then: assert (process.returncode, said) == (0, "")
    finally:
        for pid in workers:
            if _state(pid) != "gone": os.kill(pid, signal.SIGKILL)
    assert Run.open(tmp_path/config.id).done == 0


# ---------------------------------------------------------------- one at a time

def test_a_second_start_is_refused_with_the_name_of_the_first_and_a_way_to_stop_it(tiny, config, tmp_path):
    w = watch(config.replace(**ENDLESS), tmp_path, workers=1, data=tiny)
    for again in (config.replace(**ENDLESS), config.replace(seed=7)):
        with pytest.raises(InputError) as error: watch(again, tmp_path, data=tiny)
        assert w.job.config.id in str(error.value) and "fedinterp.live.running().stop()" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(InputError, match="is being trained"): w.resume()
    assert w.state == "running" and not (tmp_path/config.replace(seed=7).id).exists()
    running().stop()
    assert (w.state, running()) == ("stopped", None)
    assert watch(config, tmp_path, data=tiny).wait() == "finished"


def test_a_folder_that_another_process_trains_into_is_refused(tiny, config, tmp_path):
    code = f"import sys\nfrom fedinterp.run import writing\nwith writing({str(tmp_path/config.id)!r}): print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(RunError, match="being trained by another process"): watch(config, tmp_path, data=tiny)
    other.communicate("")
    w = watch(config, tmp_path, data=tiny)
    assert w.wait() == "finished"


@pytest.mark.parametrize("wrong", [dict(strategy="fedagv"), dict(partition="dirichlet:-1"), dict(clients=161)])
def test_a_wrong_experiment_is_refused_by_the_call_before_anything_is_written(tiny, config, tmp_path, wrong):
    with pytest.raises(InputError): watch(config.replace(**wrong), tmp_path/"runs", data=tiny)
    with pytest.raises(InputError): watch(config, tmp_path/"runs", data=tiny, workers=0)
    for given, root in ((3, tmp_path), ([config], tmp_path), (config, 3)):
        with pytest.raises(InputError, match="should be a Config or a dict of its fields"): watch(given, root)
    assert not (tmp_path/"runs").exists() and running() is None


# ---------------------------------------------------------------- what goes wrong later

@dataclass(frozen=True)
class Flaky(Strategy):
    "Client 2 fails for as long as a file is there."
    path: str = ""
    def upload(self, trained, local):
        if Path(self.path).exists(): raise KeyError("a lost key")
        return super().upload(trained, local)


def test_a_failure_is_one_sentence_nothing_is_lost_and_resume_goes_on(tiny, config, tmp_path):
    register("strategy", "flaky", Flaky)
    config = config.replace(strategy="flaky", strategy_args=dict(path=str(tmp_path/"broken")), rounds=30)
    whole = train(config, tmp_path/"whole", data=tiny, progress=False)
    w = watch(config, tmp_path/"runs", workers=2, data=tiny)
    until(lambda s: s.kept >= 2, w.job)
    (tmp_path/"broken").touch()
    assert w.wait() == "failed" and isinstance(w.error, ClientError)
    assert "failed in round" in w.live.now["error"] and "a lost key" in w.live.now["error"] and "Traceback" not in w.live.now["error"]
    assert 2 <= Run.open(w.run.path).done == w.live.now["kept"] < 30
    (tmp_path/"broken").unlink()
    w.resume()
    assert w.wait() == "finished" and w.live.now["error"] == "" and digest(w.run) == digest(whole)


def test_a_full_disk_is_told_and_gone_on_from(tiny, config, tmp_path, monkeypatch):
    def full(self, *rest):
        if self.final.name == "0002": raise StorageError("could not write 0002: No space left on device; every finished round is still there")
        return finish(self, *rest)
    finish = RoundWriter.finish
    monkeypatch.setattr(RoundWriter, "finish", full)
    w = watch(config, tmp_path/"a", workers=2, data=tiny)
    assert w.wait() == "failed" and "No space left" in w.live.now["error"] and w.run.rounds == [0, 1]
    monkeypatch.undo()
    w.resume()
    w.wait()
    assert digest(w.run) == digest(train(config, tmp_path/"b", data=tiny, progress=False))


def test_an_error_of_ones_own_has_its_kind_in_the_sentence(tiny, config, tmp_path, monkeypatch):
    monkeypatch.setattr("fedinterp.train.Federation.step", lambda *a: 1 / 0)
    w = watch(config, tmp_path, workers=1, data=tiny)
    assert w.wait() == "failed" and w.live.now["error"] == "ZeroDivisionError: division by zero"


# ---------------------------------------------------------------- the widgets

def test_only_the_loop_writes_and_buttons_only_leave_a_word(tiny, config, tmp_path):
    async def session():
        w = watch(config.replace(rounds=8, local_steps=60), tmp_path, workers=2, data=tiny)
        writers, seen = set(), []
        w.live.observe(lambda change: (writers.add(threading.current_thread().name), seen.append(change.new)), "now")
        turns = 0
        while w.live.now["kept"] < 2: await asyncio.sleep(0.01); turns += 1
        click = threading.Thread(target=w._hear, args=(w.live, dict(do="stop"), []))  # as from a kernel's subshell
        click.start()
        while w.live.now["state"] == "running": await asyncio.sleep(0.01)
        assert (w.live.now["state"], w.state, running()) == ("stopped", "stopped", None) and turns > 2
        click = threading.Thread(target=w._hear, args=(w.live, dict(do="go on"), []))
        click.start()
        while w.live.now["state"] != "finished": await asyncio.sleep(0.01)
        return w, writers, seen
    w, writers, seen = asyncio.run(session())
    assert writers == {threading.main_thread().name}
    spans = [[s["round"] for s in span] for running, span in groupby(seen, lambda s: s["state"] == "running") if running]
    assert len(spans) >= 2 and all(span == sorted(span) for span in spans)  # a round that was cut off begins again
    assert np.frombuffer(w.live.history, "<f8").reshape(-1, 7)[:, 0].tolist() == list(range(9))


def test_a_message_that_is_no_wish_does_nothing(tiny, config, tmp_path):
    w = watch(config, tmp_path, workers=1, data=tiny)
    w.wait()
    shown = w.live.now
    for noise in (None, 3, "stop", ["stop"], {}, dict(do={}), dict(do=["stop"]), dict(do="rm")): w._hear(w.live, noise, [])
    assert not w._tick() and w.live.now == shown and w.state == "finished"


def test_a_wish_that_cannot_be_granted_is_told_in_the_view(tiny, config, tmp_path):
    one = watch(config, tmp_path, workers=1, data=tiny)
    one.job.stop()
    one.wait()
    if one.state == "stopped":
        two = watch(config.replace(**ENDLESS), tmp_path, workers=1, data=tiny)
        one._hear(one.live, dict(do="go on"), [])
        one.wait()
        assert two.job.config.id in one.live.now["error"] and one.live.now["state"] == "stopped"


def test_the_explorer_opens_below_the_chart_where_somebody_looks_and_leaves_when_training_goes_on(tiny, config, tmp_path):
    w = watch(config.replace(rounds=30, local_steps=30), tmp_path, workers=2, data=tiny)
    bundle = w._repr_mimebundle_()
    assert len(w.children) == 1 and "application/vnd.jupyter.widget-view+json" in bundle
    until(lambda s: s.kept >= 1, w.job)
    w.stop()
    assert [type(c).__name__ for c in w.children] == ["Live", "Explorer"] and w.live.now["open"]
    w._hear(w.live, dict(do="explorer"), [])
    w.wait()
    assert len(w.children) == 1 and not w.live.now["open"]
    w.resume()
    assert len(w.children) == 1 and w.wait() == "finished" and len(w.children) == 2


def test_an_autopsy_that_cannot_be_read_is_told_and_does_not_hide_the_end(tiny, config, tmp_path, monkeypatch):
    def broken(run): raise RunError("autopsies/x holds no autopsy that can be read")
    monkeypatch.setattr(live, "Explorer", broken)
    w = watch(config, tmp_path, workers=1, data=tiny)
    w._repr_mimebundle_()
    assert w.wait() == "finished" and w.live.now["state"] == "finished" and w.live.now["kept"] == 3
    w.wait()
    assert "no autopsy that can be read" in w.live.now["error"] and len(w.children) == 1


def test_the_plain_table_has_the_numbers_and_no_markup_of_names(tiny, config, tmp_path):
    w = watch(config, tmp_path, workers=1, data=tiny)
    w.wait()
    w.run.info["classes"][0] = "<script>alert(1)</script>"
    w.job._publish(error="<img>")
    table = w._repr_mimebundle_()["text/html"]
    assert table == still(w) and table.count("<tr>") == 5 and "<script" not in table and "<img" not in table and "finished, round 3 of 3 done" in table
    assert repr(w) == f"<Watch {w.job.config.id}: finished, round 3 of 3 done>"


def test_a_snapshot_is_never_changed(tiny, config, tmp_path):
    w = watch(config, tmp_path, workers=1, data=tiny)
    first = w.job.snapshot
    w.wait()
    assert w.job.snapshot is not first and first.state == "running" and isinstance(first, Snapshot) and isinstance(w, Watch)


def test_live_is_imported_without_torch_and_its_script_asks_for_nothing():
    subprocess.run([sys.executable, "-c", "import sys, fedinterp.live\nassert 'torch' not in sys.modules and 'pandas' not in sys.modules"], check=True)
    script = (live.STATIC/"live.js").read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|\bimport\b|innerHTML|insertAdjacent|\beval\b", script)


DEAF = """async ([script, about, now]) => { // a view of a kernel that answers no question
  const {default: view} = await import(URL.createObjectURL(new Blob([script], {type: "text/javascript"})))
  const values = {about, now, history: null}, told = {}, sent = []
  const model = {get: k => values[k], on: (e, f) => told[e] = f, off: () => {}, send: m => sent.push(m)}, el = document.createElement("div")
  const word = () => el.querySelector(".fl-badge").dataset.word, frames = () => new Promise(f => requestAnimationFrame(() => setTimeout(f, 50)))
  view.render({model, el})
  const first = [word(), sent.length]
  document.body.append(el)
  await frames()
  const there = [word(), sent.length]
  values.now = {...now, round: 2, left: 9}
  told["change:now"]()
  await frames()
  return {first, there, then: word(), says: el.querySelector(".fl-says").textContent}
}"""

def test_a_view_asks_for_its_kernel_when_the_page_has_it_and_takes_what_the_kernel_changes_for_an_answer(chromium, tiny, config, tmp_path):
    w = watch(config, tmp_path, workers=1, data=tiny)
    w.stop()
    tab = chromium.new_context().new_page()
    seen = tab.evaluate(DEAF, [(live.STATIC/"live.js").read_text(encoding="utf-8"), w.live.about, w.live.now | dict(state="running", round=1)])
    tab.context.close()
    assert seen["first"] == ["recorded", 0] and seen["there"] == ["recorded", 1]
    assert seen["then"] == "live" and seen["says"].startswith("Round 2 of ") and seen["says"].endswith("left.")


# ---------------------------------------------------------------- in JupyterLab

CELLS = ("from fedinterp.core import Config\nfrom fedinterp.live import watch\n"
         "w = watch(Config(model_args=dict(channels=[8, 8, 16]), clients=6, rounds=16, local_steps=25, partition='classes:2', lr=2e-3), workers=2)\nw",
         "print('meanwhile', 6 * 7, w.state)",
         "print('at last', w.state, w.run.done, w.run.rounds[-1])")

def test_in_jupyterlab_the_chart_grows_other_cells_run_stop_and_go_on_are_answered(chromium, lab):  # noqa: F811
    (address, work), foreign, said = lab, [], []
    cell = lambda i, source: dict(cell_type="code", id=f"c{i}", source=source, metadata={}, outputs=[], execution_count=None)
    kernel = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
    (work/"first.ipynb").write_text(json.dumps(dict(cells=[cell(i, s) for i, s in enumerate(CELLS)], metadata=kernel, nbformat=4, nbformat_minor=5)))
    tab = chromium.new_context(viewport=dict(width=1400, height=1000), color_scheme="light").new_page()
    def guard(route):
        if route.request.url.startswith((address, "data:", "blob:")): return route.continue_()
        foreign.append(route.request.url)
        route.abort()
    tab.route(re.compile(".*"), guard)
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    tab.goto(f"{address}/lab/workspaces/auto-w/tree/first.ipynb?token=t&reset")
    tab.wait_for_selector(".jp-Toolbar-kernelName:has-text('Python 3')", timeout=90_000)
    def execute(i):
        tab.locator(".jp-CodeCell .jp-InputArea-editor").nth(i).click()
        tab.keyboard.press("Control+Enter")
    rounds = lambda n: f"() => Number(document.querySelector('.fl').dataset.rounds) >= {n}"
    line = lambda: tab.locator(".fl-line.fl-main").first.get_attribute("d")
    tab.wait_for_selector(READY, timeout=90_000)
    for _ in range(6):  # what is asked of a kernel too early is lost
        execute(0)
        try: tab.wait_for_selector(".fl[data-state=running]", timeout=20_000); break
        except Exception: pass
    tab.wait_for_function(rounds(2), timeout=60_000)
    first = line()
    execute(1)
    tab.wait_for_selector(".jp-OutputArea-output:has-text('meanwhile 42 running')", timeout=30_000)
    tab.wait_for_function(rounds(4), timeout=60_000)
    tab.wait_for_function("n => document.querySelector('.fl-line.fl-main').getAttribute('d').length > n", arg=len(first))
    tab.wait_for_selector(".fl-badge[data-word=live]", timeout=10_000)  # busy for a moment where the machine is
    tab.wait_for_selector(".fl-says:has-text('left')", timeout=10_000)
    shots(tab, "live-running")
    tab.wait_for_function(rounds(6), timeout=60_000)
    tab.locator(".fl [data-do=stop]").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".fl[data-state=stopped]", timeout=30_000)
    tab.wait_for_selector(".fi [data-panel=rounds] svg", timeout=30_000)  # the explorer, below
    assert "Stopped after round" in tab.inner_text(".fl-says") and tab.evaluate("document.activeElement.dataset.do") == "go on"
    shots(tab, "live-stopped")
    tab.locator(".fl [data-do=explorer]").click()
    tab.wait_for_selector(".fi", state="detached", timeout=30_000)
    tab.locator(".fl [data-cls=Bag], .fl [data-cls=bag]").first.click()
    tab.wait_for_selector(".fl [aria-pressed=true]")  # drawn with the next frame
    assert tab.locator(".fl [aria-pressed=true]").count() == 1
    tab.locator(".fl [data-do='go on']").click()
    tab.wait_for_selector(".fl[data-state=finished]", timeout=90_000)
    tab.wait_for_selector(".fi [data-panel=rounds] svg", timeout=30_000)
    assert tab.locator(".fl").get_attribute("data-rounds") == "17" and tab.inner_text(".fl-says") == "All 16 rounds are done."
    execute(2)
    tab.wait_for_selector(".jp-OutputArea-output:has-text('at last finished 16 16')", timeout=30_000)
    tab.locator(".fl [data-do=table]").click()
    tab.wait_for_selector(".fl-rows tbody tr >> nth=16")
    assert tab.locator(".fl-rows tbody tr").count() == 17
    tab.context.close()
    assert (foreign, said) == ([], [])
    [folder] = (work/"runs").iterdir()
    run = Run.open(folder)
    assert digest(run) == digest(train(run.config, work/"plain", progress=False))


def shots(tab, name):
    "Pictures of both themes, for people to look at."
    if not os.environ.get("FEDINTERP_SHOTS"): return
    tab.locator(".fl").scroll_into_view_if_needed()
    for theme in ("Dark", "Light"):
        tab.click("text=Settings >> nth=0")
        tab.hover(".lm-Menu-itemLabel:text-is('Theme')")
        tab.click(f".lm-Menu-itemLabel:text-is('JupyterLab {theme}')")
        tab.wait_for_selector(f".fl[data-theme={theme.lower()}]")
        tab.wait_for_timeout(500)
        tab.screenshot(path=f"{os.environ['FEDINTERP_SHOTS']}/{name}-{theme.lower()}.png")
