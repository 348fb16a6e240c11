"A federation trained in a real JupyterLab, in a real browser, with nothing fetched from anywhere."
import json, os, shutil, socket, subprocess, sys, time, urllib.request
import numpy as np, pytest
from conftest import bands, end

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
READY = ".jp-Notebook-ExecutionIndicator[data-status=idle]"  # a kernel has its name before it is there
CELL = """from fedinterp.core import Config
from fedinterp.train import train
run = train(Config(dataset="tiny.npz", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=3, batch_size=16), workers=2)
print("kept", run.rounds, "accuracy", run.metrics().query("client == 'server' and cls == 'all' and metric == 'accuracy'").value.iloc[-1])"""


@pytest.fixture
def lab(tmp_path):
    "A JupyterLab server on a folder with a small data set and one notebook; gives its address and folder."
    (x, y), (xt, yt) = bands(160, 0), bands(80, 1)
    work = tmp_path/"work"
    work.mkdir()
    np.savez(work/"tiny.npz", x_train=x, y_train=y, x_test=xt, y_test=yt)
    cell = dict(cell_type="code", id="one", source=CELL, metadata={}, outputs=[], execution_count=None)
    kernel = dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"))
    (work/"first.ipynb").write_text(json.dumps(dict(cells=[cell], metadata=kernel, nbformat=4, nbformat_minor=5)))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folders = {f"JUPYTER_{k}_DIR": str(tmp_path/k.lower()) for k in ("CONFIG", "DATA", "RUNTIME")}
    env = {**os.environ, **folders, "JUPYTERLAB_SETTINGS_DIR": str(tmp_path/"settings"), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path/"spaces")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=t", "--LabApp.news_url=", str(work)]
    server = subprocess.Popen(command, env=env, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    for _ in range(600):
        try: urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=t"); break
        except OSError: time.sleep(0.1)
    yield f"http://127.0.0.1:{port}", work
    end(server)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_federation_trains_in_jupyterlab_with_a_progress_bar_and_without_the_network(lab):
    from playwright.sync_api import TimeoutError as PlaywrightTimeout, sync_playwright
    (address, work), foreign = lab, []
    def guard(route):
        if route.request.url.startswith((address, "data:", "blob:")): return route.continue_()
        foreign.append(route.request.url)
        route.abort()
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1300, "height": 800})
        page.route("**/*", guard)
        page.goto(f"{address}/lab/workspaces/auto-f/tree/first.ipynb?token=t&reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
        page.wait_for_selector(".jp-Toolbar-kernelName:has-text('Python 3')", timeout=90_000)
        page.wait_for_selector(READY, timeout=90_000)
        for _ in range(6):  # what is asked of a kernel too early is lost
            page.click("text=Run >> nth=0")
            page.click("[data-command='runmenu:run-all']")
            try: page.wait_for_selector(".jp-InputArea-prompt:not(:has-text('[ ]'))", timeout=10_000); break
            except PlaywrightTimeout: pass
        page.wait_for_selector(".jp-OutputArea-output:has-text('kept [0, 1, 2, 3]')", timeout=90_000)
        shown = page.inner_text(".jp-OutputArea")
        if os.environ.get("FEDINTERP_SHOTS"): page.screenshot(path=os.environ["FEDINTERP_SHOTS"] + "/lab.png")
        browser.close()
    assert foreign == []
    assert "3 rounds of 4 clients; the trace (all) will take" in shown and "12/12" in shown and "client/s" in shown
    assert len(list((work/"runs").iterdir())) == 1
