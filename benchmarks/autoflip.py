"""AutoFLIP against its baselines, from the same θ⁰ and with the same local epochs, exploration charged: accuracy, realised FLOPs, bytes and latency; with noisy and with
label-flipped clients; and what pruning keeps of the circuits.

    FEDINTERP_DATA=... python benchmarks/autoflip.py train  --root RUNS [--part 0 --of 2]   # resumable; parts run side by side
    FEDINTERP_DATA=... python benchmarks/autoflip.py tables --root RUNS --out nbs/tutorials/results
    python benchmarks/autoflip.py circuits --root RUNS --out nbs/tutorials/results             # a few minutes

CIFAR-10: 4,000 class-balanced training images and 1,000 test images, 10 clients with 2 classes each (the papers' pathological split), or by Dirichlet 0.5, where the dense
model learns more and on which the noisy and the flipped clients are tried. FEMNIST: 20 writers drawn by the seed.
15 rounds of one local epoch, everybody takes part; TwoCNN and the FEMNIST CNN as published, with fewer units. Nothing was tuned: one learning rate for all methods.
Circuits: a federation of its own on the embedded Fashion-MNIST subset, where the dense model learns enough to have circuits, and half of its FLOPs taken away in three ways.
"""
import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from fedinterp.autoflip import guidance
from fedinterp.circuit import evaluate_circuits, find_circuits
from fedinterp.core import Config, InputError, rng_for
from fedinterp.cost import account, cost, latency, to_target, total
from fedinterp.data import Dataset, balanced_indices, load_dataset
from fedinterp.overlap import adjusted_iou, iou
from fedinterp.pruning import bits_only, squares_sent
from fedinterp.run import Run
from fedinterp.shrink import shrink
from fedinterp.train import train

SEEDS = (0, 1, 2)
ROUNDS = 15
COMMON = dict(local_epochs=1, batch_size=32, lr=1e-3, rounds=ROUNDS)
TASKS = {
    "CIFAR-10, 2 classes each": dict(dataset="cifar10_4000", model="two_cnn", model_args=dict(hidden=16, features=128), partition="classes:2", clients=10),
    "CIFAR-10, Dirichlet 0.5": dict(dataset="cifar10_4000", model="two_cnn", model_args=dict(hidden=16, features=128), partition="dirichlet:0.5", clients=10),
    "FEMNIST": dict(dataset="femnist_20", model="femnist_cnn", model_args=dict(hidden=16, features=256), partition="groups:20", clients=20),
}
WISH = "flops -50%, bytes -65%"  # what the paper reports
METHODS = {  # name -> (strategy, its settings)
    "dense FedAvg": ("fedavg", {}),
    "dense FedAvg, 2 rounds more": ("fedavg", {}),  # as many local epochs as those that explore
    "random mask, 30 %": ("random_mask", dict(pruned=.3)),
    "magnitude, 30 %": ("magnitude", dict(pruned=.3)),
    "EFLPrune stand-in, 30 %": ("eflprune_standin", dict(pruned=.3)),
    "PruneFL at 30 %": ("prunefl", dict(pruned=.3, adaptive=False)),
    "FedMask, 30 %": ("fedmask", dict(pruned=.3)),
    "AutoFLIP, 30 %": ("autoflip", dict(pruned=.3)),
    "AutoFLIP over 5 rounds, 30 %": ("autoflip", dict(pruned=.3, ramp=5)),
    "AutoFLIP G·A over 5 rounds, 30 %": ("autoflip", dict(pruned=.3, score="G*A", ramp=5)),
    "AutoFLIP, threshold": ("autoflip", dict(threshold=.001)),
    "random units, intent": ("random_mask", dict(intent=WISH)),
    "magnitude units, intent": ("magnitude", dict(intent=WISH)),
    "AutoFLIP units, intent": ("autoflip", dict(intent=WISH)),
}
HARD = {"clean": "none", "40 % noisy": "noise:0.4", "20 % flipped": "flip:0.2"}
TRIED_HARD = ("dense FedAvg", "random mask, 30 %", "magnitude, 30 %", "AutoFLIP, 30 %", "AutoFLIP G·A over 5 rounds, 30 %", "AutoFLIP units, intent")


def data_of(name):
    "The stated subsets."
    whole, test_images = load_dataset(name.split("_")[0]), dict(cifar10_4000=1000, femnist_20=2000)[name]
    at = balanced_indices(whole.y_train, 4000, rng_for(0, "autoflip")) if name == "cifar10_4000" else np.arange(len(whole.y_train))
    test = rng_for(0, "autoflip test").permutation(len(whole.y_test))[:test_images]
    groups = whole.groups if whole.groups is None else whole.groups[at]
    return Dataset(whole.x_train[at], whole.y_train[at], whole.x_test[test], whole.y_test[test], whole.classes, name, whole.mean, whole.std, groups)


def jobs():
    "Every run, the comparison first: (task, method, condition, Config)."
    found = [(t, m, "clean", s) for s in SEEDS for m in METHODS for t in TASKS] + [("CIFAR-10, Dirichlet 0.5", m, h, s) for s in SEEDS for m in TRIED_HARD for h in HARD if h != "clean"]
    for task, method, hard, seed in found:
        strategy, args = METHODS[method]
        more = 2 * method.endswith("rounds more")
        yield task, method, hard, Config(**COMMON | dict(rounds=ROUNDS + more), **TASKS[task], seed=seed, strategy=strategy, strategy_args=args, corrupt=HARD[hard])


def train_all(root, part, of):
    held = {}
    for i, (task, method, hard, config) in enumerate(jobs()):
        if i % of != part: continue
        if config.dataset not in held: held[config.dataset] = data_of(config.dataset)
        try: run = train(config, root, workers=1, progress=False, trace="all/server", data=held[config.dataset])
        except InputError as e:
            print(task, method, hard, config.seed, "refused:", e, flush=True)
            continue
        rows = run.metrics().query("client == 'server' and cls == 'all' and metric == 'accuracy'").sort_values("round")
        print(f"{task}, {method}, {hard}, seed {config.seed}: {rows.value.iloc[-1]:.3f}", flush=True)


def moved(run):
    "Share of all entries whose mask changed after the exploration, counted each time, and the mean agreement of those in training; NaN where there is no such thing."
    try: told = guidance(run)
    except InputError: return dict(changed=np.nan, agreement=np.nan)
    told = told[told["round"] > 0].assign(size=lambda t: t.site.map({n: w.numel() for n, w in run.server().items()}))
    changed, agreed = (told[told.metric == m] for m in ("changed", "agreement"))
    once = changed.drop_duplicates("site")["size"].sum()
    return dict(changed=(changed.value * changed["size"]).sum() / once, agreement=np.average(agreed.value, weights=agreed["size"]) if len(agreed) else np.nan)


def figures(run, dense, data):
    "One run's row, with its account and its accuracies."
    shape = tuple(data.x_train.shape[1:])
    sent = {"fedmask": dict(sends=bits_only), "prunefl": dict(beside=squares_sent(run) if run.config.strategy == "prunefl" else None)}
    bill = account(run, **sent.get(run.config.strategy, {}))
    spent, explored = (bill[bill["round"] == r].set_index("metric").total for r in (bill["round"].max(), 0))
    scores = run.metrics().query("client == 'server' and cls == 'all' and metric == 'accuracy'").sort_values("round")
    small, weights = shrink(run.model(), shape), run.server()
    a, b = cost(small, shape), cost(dense, shape)
    took = latency({"dense": dense, "small": small}, shape, repeats=9).query("metric == 'latency ratio' and run == 'small'").iloc[0]
    zeros = np.mean(np.concatenate([(weights[n] == 0).flatten().numpy() for n, _ in small.named_parameters()]))
    row = dict(accuracy=scores.value.iloc[-1], n=int(scores.n.iloc[-1]), zeros=zeros, flops=total(a) / total(b), params=total(a, "params") / total(b, "params"),
               latency=took.value, latency_lo=took.lo, latency_hi=took.hi, training_flops=spent["FLOPs"], training_flops_sparse=spent["FLOPs sparse"], bytes=spent["bytes"],
               explored_flops=explored["FLOPs"], explored_bytes=explored["bytes"], **moved(run))
    return row, bill, scores


def tables(root, out):
    rows, held, dense, targets = [], {}, {}, {}
    for task, method, hard, config in jobs():
        if not (Path(root)/config.id/"config.json").exists(): continue
        run = Run.open(Path(root)/config.id)
        if run.done < config.rounds: continue
        if config.dataset not in held: held[config.dataset] = data_of(config.dataset)
        key = task, config.seed
        if method == "dense FedAvg" and hard == "clean": dense[key] = run
        found, bill, scores = figures(run, dense[key].model(), held[config.dataset])
        if method == "dense FedAvg" and hard == "clean": targets[key] = found["accuracy"] * .9
        reached = to_target(bill, scores, targets[key]).set_index("metric").value
        until = dict(target=targets[key], rounds_to_target=reached["rounds"], flops_to_target=reached["FLOPs"], bytes_to_target=reached["bytes"])
        rows.append(dict(task=task, method=method, condition=hard, seed=config.seed, **found, **until))
        print(task, method, hard, config.seed, flush=True)
    pd.DataFrame(rows).to_csv(Path(out)/"autoflip.csv", index=False, float_format="%.6g")


CUT = Config(dataset="fashion_mnist_small", model="two_cnn", model_args=dict(hidden=16, features=128), partition="dirichlet:0.3", clients=5,
             rounds=10, local_steps=15, batch_size=32, lr=1e-3, eval_every=10)
HALVES = {"dense FedAvg": ("fedavg", {}), "random units": ("random_mask", {}), "magnitude units": ("magnitude", dict(explore_epochs=.5)),
          "AutoFLIP units": ("autoflip", dict(explore_epochs=.5))}
SHOWN = ("AUROC", "TPR, calibrated", "FPR, calibrated")


def preserved(dense, again, own, kept, channels):
    "Rows of one class: what of the dense model's circuit survived, and how far the pruned model's circuit is the same on the channels that survived."
    at = {site: np.asarray(kept.get(site, range(n))) for site, n in channels.items()}
    within = lambda circuit: {site: circuit.masks[site].numpy()[at[site]] for site in channels}
    was, mine = {site: int(m.sum()) for site, m in dense.masks.items()}, {site: m.numpy() for site, m in own.masks.items()}
    yield "survived", "circuit", sum(int(m.sum()) for m in within(dense).values()) / sum(was.values())
    yield "survived", "chance", sum(was[s] * len(at[s]) / n for s, n in channels.items()) / sum(was.values())
    for of, other in (("circuit", mine), ("searched again", within(again))):
        for metric, figure in (("IoU", iou), ("adjusted IoU", adjusted_iou)): yield metric, of, float(figure(within(dense), other))


def circuits(root, out):
    "Circuits of every class in the dense model and in three that were cut to half of its FLOPs, on trial, and their overlap with the dense model's."
    data, rows = load_dataset("fashion_mnist_small"), []
    shape = tuple(data.x_train.shape[1:])
    for seed in SEEDS:
        for name, (strategy, args) in HALVES.items():
            pruned = strategy != "fedavg"
            config = CUT.replace(seed=seed, strategy=strategy, strategy_args=args | (dict(intent="flops -50%") if pruned else {}))
            run = train(config, Path(root)/"circuits", workers=1, progress=False, trace="last/server", data=data)
            model = shrink(run.model(), shape) if pruned else run.model()
            search = lambda s: {c.cls: c for c in find_circuits(model, data, size=.2, steps=30, seed=s, progress=False)}
            found = search(0)
            if not pruned: whole, dense, again = model, found, search(1)
            about = dict(method=name, seed=seed)
            last = run.metrics().query("client == 'server' and cls == 'all' and metric == 'accuracy'").value.iloc[-1]
            rows += [about | dict(cls="all", metric=m, of="model", value=v) for m, v in (("accuracy", last), ("FLOPs", total(cost(model, shape)) / total(cost(whole, shape))))]
            trial = evaluate_circuits(list(found.values()), model, data, nulls=False, necessity=False, progress=False)
            trial = trial[trial.metric.isin(SHOWN) & ((trial.metric == "AUROC") | (trial.of == "circuit")) & (trial.of != "empty")]
            rows += [about | row for row in trial[["cls", "metric", "of", "value", "lo", "hi", "verdict"]].to_dict("records")]
            kept, channels = (model.shrunk.kept if pruned else {}), {s: len(m) for s, m in next(iter(dense.values())).masks.items()}
            rows += [about | dict(cls=c, metric=m, of=of, value=v) for c in found if pruned for m, of, v in preserved(dense[c], again[c], found[c], kept, channels)]
            print(name, seed, f"{last:.3f}", flush=True)
    pd.DataFrame(rows).to_csv(Path(out)/"autoflip_circuits.csv", index=False, float_format="%.4g")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "tables", "circuits"))
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", default="nbs/tutorials/results")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    given = parser.parse_args()
    Path(given.out).mkdir(parents=True, exist_ok=True)
    if given.what == "train": train_all(given.root, given.part, given.of)
    else: (tables if given.what == "tables" else circuits)(given.root, given.out)
