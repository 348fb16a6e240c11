"What several test files share: tiny data, tiny configs, and the digest of a run."
import hashlib, os, re, signal, subprocess
from contextlib import suppress
from pathlib import Path
import numpy as np, pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread of arithmetic, as in the engine: equal bits everywhere, and no spinning
os.environ.setdefault("NUMBA_DISABLE_JIT", "1")  # UMAP of a few concepts is done long before it would be compiled
import torch._dynamo  # noqa: F401  which the first optimiser imports, in a second and a half: once here, and not in each worker of each training

ROOT = Path(__file__).resolve().parent.parent


def bands(n, seed, classes=4, size=8):
    "Noise with a bright band, in another place for each class."
    y = np.arange(n) % classes
    x = np.random.default_rng(seed).normal(size=(n, 1, size, size)).astype("float32")
    step = size // classes
    for c in range(classes): x[y == c, :, step*c:step*(c + 1)] += 1.0
    return x, y


@pytest.fixture(scope="session")
def tiny():
    "A data set of 160 + 80 images of 8 × 8 in four classes."
    from fedinterp.data import dataset_from_arrays
    return dataset_from_arrays(*bands(160, 0), *bands(80, 1), classes=("a", "b", "c", "d"), name="tiny")


@pytest.fixture
def config():
    from fedinterp.core import Config
    return Config(dataset="tiny", model_args=dict(channels=[4, 4, 8]), clients=4, rounds=3, local_epochs=1, batch_size=16, partition="dirichlet:0.5")


def digest(run):
    "Every file of a run that defines it: name -> hash; the log (wall times) and the lock are left out."
    return {str(p.relative_to(run.path)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(run.path.rglob("*")) if p.is_file() and p.name not in ("log.jsonl", "lock")}


def gone_on_with(whole, data, root, rounds):
    "The run `whole` made again in `root`: stopped after some rounds on two workers, and gone on with on one."
    from fedinterp.train import train
    half = train(whole.config.replace(rounds=rounds), root/"half", workers=2, data=data, progress=False)
    resumed = root/"whole"/whole.config.id
    resumed.parent.mkdir()
    half.path.rename(resumed)
    (resumed/"config.json").write_text((whole.path/"config.json").read_text())
    return train(whole.config, root/"whole", workers=1, data=data, progress=False)


def end(server):
    "See a server and all that it started gone: asked first, and killed where it does not hear."
    os.killpg(server.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired): server.wait(5)
    with suppress(ProcessLookupError): os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def real_data(name):
    "The path of a real data set, or skip with the reason."
    folder = os.environ.get("FEDINTERP_DATA")
    if not folder: pytest.skip("FEDINTERP_DATA is not set: it names the folder with real data")
    path = Path(folder)/f"{name}.npz"
    if not path.exists(): pytest.skip(f"FEDINTERP_DATA holds no {name}.npz")
    return path


CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync "
         "--disable-dev-shm-usage").split()


@pytest.fixture(scope="module")  # closed before another module starts one: two at a time are refused
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists(): pytest.skip(f"there is no {CHROMIUM}")
    with api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()

def visit(chromium, path, **options):
    "Open a file; the page, what it asked for outside of files, and what it said."
    tab, asked, said = chromium.new_context(**options).new_page(), [], []
    def guard(route):
        if route.request.url.startswith(("file://", "data:")): return route.continue_()
        asked.append(route.request.url)
        route.abort()
    tab.route(re.compile(".*"), guard)
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(path.as_uri())
    return tab, asked, said
