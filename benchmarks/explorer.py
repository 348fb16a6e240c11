"""From a selector to paint, in headless Chromium: 20 changes on an invented run of 10 clients, 10 classes and 10 rounds; play at 20 Hz; memory after 200 changes;
the size of the page; and how long the kernel takes to refit a head of 1,152 features on 200 labels.

    python benchmarks/explorer.py
"""
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from fedinterp.explorer import Explorer
from fedinterp.trace import example

FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync "
         "--disable-dev-shm-usage --enable-precise-memory-info --js-flags=--expose-gc").split()

CHANGES = """async ({key, values, times}) => {
  const node = document.querySelector(`[data-key=${key}]`), found = []
  const painted = () => new Promise(done => requestAnimationFrame(() => { const c = new MessageChannel(); c.port1.onmessage = done; c.port2.postMessage(0) }))
  for (let i = 0; i < times; i++) {
    const start = performance.now()
    node.value = values[i % values.length]
    node.dispatchEvent(new Event(node.type === "range" ? "input" : "change", {bubbles: true}))
    await painted()
    found.push(performance.now() - start)
    await new Promise(done => setTimeout(done, 30))
  }
  return found
}"""

PLAY = """async ({rounds, every}) => { // a state every 50 ms, as fast playing would set them: how many are on the screen before the next?
  const node = document.querySelector("[data-key=round]"), says = document.querySelector(".fi-live")
  let shown = 0
  for (const r of rounds) {
    node.value = r
    node.dispatchEvent(new Event("input", {bubbles: true}))
    await new Promise(done => setTimeout(done, every))
    shown += says.textContent.includes(`round ${r}`)
  }
  return shown
}"""

def refits(times=10):
    "Seconds that a kernel takes to answer, a draw after the other; the first reads the features."
    from fedinterp.core import Config
    from fedinterp.explorer import Explorer as Live
    from fedinterp.train import train
    with tempfile.TemporaryDirectory() as folder:
        run = train(Config(rounds=1, clients=2, local_steps=5, model="simple_cnn"), root=folder, progress=False)
        ex = Live(run)
        def ask(how, draw):
            start = time.perf_counter()
            answer = ex._reply(dict(ask=dict(what="head", run=run.id, client="server", round=1, how=how, labels=200, draw=draw), number=0))["answer"]
            if answer.get("error"): raise RuntimeError(answer["error"])
            return time.perf_counter() - start
        features = run.model(1).state_dict()[[n for n in run.model(1).state_dict() if n.endswith("weight")][-1]].shape[1]
        print(f"live head, {features} features, 200 labels, 2,000 test images; the first answer, which reads the features: {ask('head', 0):.2f} s")
        for how in ("bias only", "scale + bias", "head", "head, by steps"):
            took = [ask(how, d) for d in range(1, times + 1)]
            print(f"  {how:<15} median {np.median(took):.2f} s, worst {max(took):.2f} s")


if __name__ == "__main__":
    refits()
    found = example(clients=10, names=tuple(f"class {i}" for i in range(10)), rounds=10, deep=True)
    start = time.process_time()
    ex = Explorer(found)
    print(f"rows {sum(map(len, found.tables.values())):,}; trace {len(ex.trace):,} bytes; made in {time.process_time() - start:.2f} CPU s")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        page = ex.to_html(Path(folder)/"explorer.html")
        browser = p.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        tab = browser.new_page(viewport=dict(width=1300, height=900))
        start = time.perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_selector("html[data-drawn]")
        print(f"page {page.stat().st_size:,} bytes; opened in {time.perf_counter() - start:.2f} s")
        classes = ex.recorded.meta["classes"]
        for key, values in dict(cls=classes, client=["server", "client 3", "reference", "client 7"], round=list(range(11))).items():
            took = tab.evaluate(CHANGES, dict(key=key, values=[str(v) for v in values[1:] + values[:1]], times=20))
            print(f"{key:<7} median {np.median(took):5.1f} ms, 90 % within {np.quantile(took, .9):5.1f} ms, worst {max(took):5.1f} ms")
        rounds = [str(r) for r in list(range(11)) * 4]
        print(f"play at 20 Hz: {tab.evaluate(PLAY, dict(rounds=rounds, every=50))} of {len(rounds)} states drawn")
        state = lambda: tab.evaluate("() => { gc(); return [performance.memory.usedJSHeapSize / 1e6, document.querySelectorAll('*').length] }")
        before = state()
        tab.evaluate(CHANGES, dict(key="cls", values=[str(v) for v in classes], times=200))
        after = state()
        print(f"200 changes: heap {before[0]:.1f} -> {after[0]:.1f} MB, nodes {before[1]:,} -> {after[1]:,}")
        browser.close()
