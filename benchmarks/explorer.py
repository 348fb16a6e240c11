"""From a selector to paint, in headless Chromium: 20 changes on an invented run of 10 clients, 10 classes and 10 rounds; memory after 200; the size of the page.

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

if __name__ == "__main__":
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
        state = lambda: tab.evaluate("() => { gc(); return [performance.memory.usedJSHeapSize / 1e6, document.querySelectorAll('*').length] }")
        before = state()
        tab.evaluate(CHANGES, dict(key="cls", values=[str(v) for v in classes], times=200))
        after = state()
        print(f"200 changes: heap {before[0]:.1f} -> {after[0]:.1f} MB, nodes {before[1]:,} -> {after[1]:,}")
        browser.close()
