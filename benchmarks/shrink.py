"""Does time follow arithmetic?  python benchmarks/shrink.py [--batch 32] [--repeats 15] [--densities 0.75 0.5 0.25] [--multiple 1] [--only two_cnn]

CIFAR-10 shapes (3 × 32 × 32). From every group the same share of units is taken at random, as masks; the model is made smaller and timed against the dense one in turns
(A B C A B C …): CPU seconds of one thread, a forward pass in evaluation mode. Printed are the ratio of FLOPs, the ratio of times (median and quartiles of the turns'
ratios), and the one over the other. Bar: between 1/1.5 and 1.5."""
import argparse, os
import pandas as pd, torch
from fedinterp.channels import trace
from fedinterp.core import torch_rng
from fedinterp.cost import cost, latency, total
from fedinterp.models import build_model
from fedinterp.shrink import shrink, unit_mask

MODELS = {"two_cnn, 32": ("two_cnn", dict(hidden=32)), "two_cnn, 64": ("two_cnn", dict(hidden=64)), "simple_cnn": ("simple_cnn", {}),
          "simple_cnn, wide": ("simple_cnn", dict(channels=(64, 128, 256))), "resnet10": ("resnet10", {})}


def smaller(dense, density, multiple=1, seed=0):
    "The dense model with this share of each group's units, drawn at random."
    groups = trace(dense).groups
    ranks = {n: torch.randperm(g.channels, generator=torch_rng(seed, n)) / g.channels for n, g in groups.items()}
    return shrink(dense, masks=unit_mask(ranks, groups, 1 - density, dense, multiple=multiple))


def measure(name, densities, batch, repeats, multiple):
    kind, options = MODELS[name]
    dense = build_model(kind, channels_in=3, **options)
    models = {"dense": dense, **{f"{d:g}": smaller(dense, d, multiple) for d in densities}}
    times = latency(models, batch=batch, repeats=repeats)
    times = {m: times[times.metric == m].set_index("run") for m in ("latency", "latency ratio")}
    for d in models:
        flops, ratio = total(cost(models[d])) / total(cost(dense)), times["latency ratio"].loc[d]
        yield dict(model=name, units=d, MFLOPs=total(cost(models[d])) / 1e6, ms=1e3 * times["latency"].value[d] / batch, flops=flops, time=ratio.value, lo=ratio.lo, hi=ratio.hi,
                   factor=ratio.value / flops)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.75, 0.5, 0.25])
    parser.add_argument("--multiple", type=int, default=1, help="each group keeps a multiple of this many units")
    parser.add_argument("--only", default="", help="models whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in MODELS if args.only in name for row in measure(name, args.densities, args.batch, args.repeats, args.multiple)]
    print(pd.DataFrame(rows).round(3).to_string(index=False))
    worst = max(max(r["factor"], 1 / r["factor"]) for r in rows)
    print(f"\nlargest factor between the two ratios: {worst:.2f}   bar: ≤ 1.5   (batch {args.batch}, {args.repeats} turns, load {os.getloadavg()[0]:.1f})")
