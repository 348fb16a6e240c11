"""What looking costs, in a real kernel:  python benchmarks/watch.py [--rounds 2] [--steps 20] [--repeats 5] [--clicks 10]

CPU seconds of the kernel and its worker processes, for `train` and for `watch`, in turn (A B A B …), each pair in a process of its own kernel;
then how soon a click on Stop is answered while clients train, from the message that the browser would send to the message that says "stopped";
then how long a cell with `1 + 1` takes while a training runs, against an idle kernel.
The shorter the clients, the dearer a process of its own for one worker: read the ratio of one worker with --steps 5 as well."""
import argparse
import json
import os
import random
import statistics
import time

from jupyter_client.manager import start_new_kernel

SETUP = """
import asyncio, resource, tempfile
from fedinterp.core import Config
from fedinterp.live import watch
from fedinterp.train import train
cpu = lambda: sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
config = Config(rounds=ROUNDS, local_steps=STEPS)
"""
PLAIN = """
began = cpu()
run = train(config, tempfile.mkdtemp(), workers=WORKERS, progress=False)
print(cpu() - began)
"""
WATCHED = """
began = cpu()
w = watch(config, tempfile.mkdtemp(), workers=WORKERS)
while w.state == "running": await asyncio.sleep(0.05)
w.wait()
print(cpu() - began)
"""
ENDLESS = """
w = watch(config.replace(local_steps=10**7), tempfile.mkdtemp(), workers=2)
print(w.live.model_id)
"""


class Kernel:
    "A real kernel; a cell's printed text, and the messages of its widgets."
    def __enter__(self):
        self.manager, self.client = start_new_kernel(env={**os.environ, "OMP_NUM_THREADS": "1"})
        return self
    def __exit__(self, *error):
        self.client.stop_channels()
        self.manager.shutdown_kernel()

    def run(self, code):
        said = []
        def heard(message):
            if message["msg_type"] == "stream": said.append(message["content"]["text"])
            if message["msg_type"] == "error": raise RuntimeError(message["content"]["evalue"])
        self.client.execute_interactive(code, output_hook=heard, timeout=600)
        return "".join(said).strip()

    def click(self, model, word):
        "Send what a button sends; seconds until the view is told that training has stopped."
        began = time.perf_counter()
        content = dict(comm_id=model, data=dict(method="custom", content=dict(do=word)))
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["msg_type"] == "comm_msg" and message["content"]["data"].get("state", {}).get("now", {}).get("state") == "stopped":
                return time.perf_counter() - began


def spread(values, form="{:.3f}"):
    return f"median {form.format(statistics.median(values))} ({form.format(min(values))} – {form.format(max(values))}, n = {len(values)})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(rounds=2, steps=20, repeats=5, clicks=10).items(): parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {args.rounds} rounds, 10 clients of {args.steps} steps, fashion_mnist_small, SimpleCNN", flush=True)
    with Kernel() as kernel:
        kernel.run(SETUP.replace("ROUNDS", str(args.rounds)).replace("STEPS", str(args.steps)))
        for workers in (2, 1):
            plain, watched = (code.replace("WORKERS", str(workers)) for code in (PLAIN, WATCHED))
            kernel.run(plain), kernel.run(watched)  # what is imported on first use is imported now
            pairs = [(float(kernel.run(plain)), float(kernel.run(watched))) for _ in range(args.repeats)]
            print(json.dumps([[round(v, 2) for v in pair] for pair in pairs]), flush=True)
            print(f"watch / train, CPU seconds of kernel and workers, {workers} worker(s): {spread([b / a for a, b in pairs])}   bar: ≤ 1.08", flush=True)
        took, chance = [], random.Random(0)
        for _ in range(args.clicks):
            model = kernel.run(ENDLESS)
            time.sleep(0.3 + chance.random())
            took.append(kernel.click(model, "stop"))
        print(f"from a click on Stop to the view that says so, while clients train, seconds: {spread(took)}   bar: ≤ 0.5", flush=True)
        def lap():
            began = time.perf_counter()
            kernel.run("1 + 1")
            time.sleep(0.05)
            return 1000 * (time.perf_counter() - began - 0.05)
        idle = [lap() for _ in range(40)]
        kernel.run(f"w = watch(config.replace(rounds=100, seed={args.rounds}), tempfile.mkdtemp(), workers=2)")
        during = [lap() for _ in range(40)]
        print(f"a cell with 1 + 1, ms: idle {spread(idle, '{:.0f}')}; while training {spread(during, '{:.0f}')}; then {kernel.run('print(w.state)')}")
