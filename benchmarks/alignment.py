"""What gradient alignment costs over plain SGD at equal steps:  python benchmarks/alignment.py [--steps 20] [--repeats 9]

Both train the same client from the same weights on the same batches of 32 random images, in one process with one thread, in turn (A B A B …).
pFLAlign runs with what its client kept from a first round, so that P and the gate both work. CPU seconds of the process count, so that other
processes on the machine disturb as little as they can; printed are the median of the paired ratios and their spread. The second column leaves out
what happens once a round (unpacking the client's tensors, measuring its new offset), by comparing rounds of T and of 2T steps."""
import argparse, os, statistics, time
import numpy as np, torch
from fedinterp.core import Config, clone
from fedinterp.local import train_client
from fedinterp.models import build_model
from fedinterp.pflalign import PFLAlign
from fedinterp.strategy import FedAvg


def seconds(work):
    "CPU seconds of this process."
    began = time.process_time()
    work()
    return time.process_time() - began


def compare(name, steps, repeats, batch=32):
    "Rows of (plain, aligned) CPU seconds for T steps, and the same for 2T."
    model = build_model(name, channels_in=3, size=32)
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(10*batch, 3, 32, 32)).astype("float32")), torch.arange(10*batch) % 10
    weights, everybody = clone(model.state_dict()), np.arange(10*batch)
    config = Config(optimizer="sgd", lr=1e-2, batch_size=batch, local_steps=steps)
    def round(strategy, own, config): return train_client(model, x, y, everybody, weights, config, strategy, 2, 0, {}, own)
    kept = round(PFLAlign(), {}, config).client
    def pair(config): return seconds(lambda: round(FedAvg(), {}, config)), seconds(lambda: round(PFLAlign(), kept, config))
    pair(config)
    return [(pair(config), pair(config.replace(local_steps=2*steps))) for _ in range(repeats)], sum(p.numel() for p in model.parameters())


def show(what, ratios):
    low, mid, high = statistics.quantiles(ratios, n=4)
    print(f"  {what:<42} {mid:+.1%}   (quartiles {low:+.1%} … {high:+.1%}, all {min(ratios):+.1%} … {max(ratios):+.1%})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=["simple_cnn", "resnet10"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; bar: at most +15 %")
    for name in args.models:
        rows, size = compare(name, args.steps, args.repeats)
        plain, aligned = (statistics.median(r[0][i] for r in rows) for i in (0, 1))
        print(f"{name}, {size:,} parameters, {args.steps} steps of 32 images: plain SGD {plain/args.steps*1e3:.1f}, pFLAlign {aligned/args.steps*1e3:.1f} CPU ms a step, medians of {args.repeats}")
        show("a round, all it does", [a/p - 1 for (p, a), _ in rows])
        show("a step, without what is once a round", [(a2 - a)/(p2 - p) - 1 for (p, a), (p2, a2) in rows])
