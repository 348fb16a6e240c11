"""What the engine costs, against plain PyTorch:  python benchmarks/engine.py [--rounds 1] [--repeats 5]

Every ratio pairs two measurements of one process run, taken in turn (A B A B …); printed are its median, minimum and maximum.
The floor is a bare loop: the same clients, batches of the same sizes, optimiser steps and evaluations, and nothing kept.
Wall times mean something on an idle machine only; CPU seconds count this process and its children."""
import argparse, os, resource, statistics, subprocess, sys, tempfile, time
import torch
from torch.nn import functional as F
from fedinterp.core import Config
from fedinterp.data import load_dataset
from fedinterp.engine import BLOCK
from fedinterp.models import build_model
from fedinterp.partition import partition
from fedinterp.train import train


def bare_loop(config, data, parts):
    "FedAvg with nothing around it."
    model = build_model(config.model, classes=len(data.classes), channels_in=data.channels, size=data.size, seed=config.seed, **config.model_args)
    generator = torch.Generator().manual_seed(0)
    def evaluate():
        model.eval()
        with torch.no_grad():
            logits = torch.cat([model(x) for x in data.x_test.split(BLOCK)])
            return float((logits.argmax(1) == data.y_test).float().mean()), float(F.cross_entropy(logits, data.y_test))
    server, total = {k: v.clone() for k, v in model.state_dict().items()}, sum(map(len, parts))
    evaluate()
    for _ in range(config.rounds):
        mean = {k: torch.zeros_like(v) for k, v in server.items()}
        for part in map(torch.from_numpy, parts):
            model.load_state_dict(server)
            model.train()
            optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
            for _ in range(int(config.local_epochs)):
                for batch in part[torch.randperm(len(part), generator=generator)].split(config.batch_size):
                    optimizer.zero_grad(set_to_none=True)
                    F.cross_entropy(model(data.x_train[batch]), data.y_train[batch]).backward()
                    optimizer.step()
            for k, v in model.state_dict().items(): mean[k] += v * (len(part) / total)
        server = mean
        model.load_state_dict(server)
        evaluate()


def measure(work):
    "(CPU seconds of this process and its children, wall seconds)."
    cpu = lambda: sum(r.ru_utime + r.ru_stime for r in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    c, w = cpu(), time.perf_counter()
    work()
    return cpu() - c, time.perf_counter() - w


def threads(n, work):
    "`work` with n intra-op threads."
    def run():
        old = torch.get_num_threads()
        torch.set_num_threads(n)
        try: work()
        finally: torch.set_num_threads(old)
    return run


def show(name, ratios, bar):
    print(f"{name:<66} {statistics.median(ratios):.3f}  ({min(ratios):.3f} – {max(ratios):.3f}, n = {len(ratios)})   bar: {bar}", flush=True)


def peak_memory(rounds):
    "Peak resident MB of a fresh process that trains a tiny federation for so many rounds."
    code = f"""
import numpy as np, resource, tempfile
from fedinterp.core import Config
from fedinterp.data import dataset_from_arrays
from fedinterp.train import train
x = np.random.default_rng(0).normal(size=(400, 1, 8, 8)).astype("float32"); y = np.arange(400) % 4
data = dataset_from_arrays(x, y, x[:80], y[:80], classes=tuple("abcd"), name="tiny")
train(Config(dataset="tiny", model_args=dict(channels=[8, 8, 8]), rounds={rounds}, local_epochs=1, partition="iid"), tempfile.mkdtemp(), data=data, workers=1, progress=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def import_seconds(statement):
    "Wall seconds of a fresh interpreter with one import, less those of one without."
    def start(code): return measure(lambda: subprocess.run([sys.executable, "-c", code], check=True))[1]
    return statistics.median(start(statement) for _ in range(7)) - statistics.median(start("pass") for _ in range(7))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    data = load_dataset("fashion_mnist_small")
    config = Config(rounds=args.rounds, local_epochs=1)
    parts = partition(data.y_train.numpy(), config.partition, config.clients, config.seed)
    print(f"{len(data.y_train):,} images, SimpleCNN(32, 64, 128), {config.clients} clients {config.partition}, {config.rounds} round(s) of {config.local_epochs:g} epoch, "
          f"batch {config.batch_size}; torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)

    def ours(workers): return lambda: train(config, tempfile.mkdtemp(), workers=workers, progress=False)
    bare, two = threads(1, lambda: bare_loop(config, data, parts)), threads(2, lambda: bare_loop(config, data, parts))
    bare(), ours(1)()  # warm-up: first use of the optimiser imports more of torch
    rows = []
    for _ in range(args.repeats):
        rows.append({name: measure(work) for name, work in (("bare", bare), ("serial", ours(1)), ("workers", ours(2)), ("two threads", two))})
        print({name: f"{cpu:.2f} CPU s, {wall:.2f} s" for name, (cpu, wall) in rows[-1].items()}, flush=True)
    print("wall seconds, median:", {k: round(statistics.median(r[k][1] for r in rows), 2) for k in rows[0]})
    show("serial engine with full trace / bare loop, CPU seconds", [r["serial"][0] / r["bare"][0] for r in rows], "≤ 1.05")
    show("2 workers / serial, wall, one thread each", [r["workers"][1] / r["serial"][1] for r in rows], "≤ 0.55")
    show("2 workers / bare loop with two intra-op threads, wall", [r["workers"][1] / r["two threads"][1] for r in rows], "≤ 1.00")
    few, many = peak_memory(5), peak_memory(100)
    print(f"peak memory: {few:.0f} MB after 5 rounds, {many:.0f} MB after 100 rounds (ratio {many / few:.3f})   bar: independent of the rounds")
    print(f"import fedinterp: {import_seconds('import fedinterp'):.3f} s; with fedinterp.core: {import_seconds('import fedinterp.core'):.3f} s   bar: ≤ 0.3 s")
