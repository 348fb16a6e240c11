"""What circuits reach, and what they cost:  python benchmarks/circuits.py [--root FOLDER] [--data cifar10] [--seeds 3] [--repeats 3] [--steps 200] [--only reach|speed|run]

Reach: two federations on 6,000 Fashion-MNIST images (SimpleCNN(32, 64, 128), flattened head, 10 clients, 6 rounds of 2 epochs; IID and Dirichlet 0.1), trained once
into --root; held-out AUROC of the circuits of each method at 10, 20 and 35 % of the channels, between that of random circuits and that of the full model; the published
recipe with its false positives (one seed; on colour images with batches of 64 in place of 256); the same discovery on networks that learned nothing. The table is kept in
--out, from which nbs/tutorials/perfect_score.ipynb is written.
Speed: ratios of CPU seconds, measured in turn (A B C A B C …) on one thread; printed are median, minimum and maximum."""
import argparse, os, pathlib, statistics, tempfile, time
from itertools import product
import numpy as np, pandas as pd, torch
from torch.utils.data import DataLoader, TensorDataset
from fedinterp.circuit import _settings, evaluate_circuits, find_circuits, published, summary
from fedinterp.core import Config, intra_op_threads, rng_for
from fedinterp.data import Dataset, balanced_indices, load_dataset
from fedinterp.discovery import counts, draw_images, gate_of, prepare, rank_by_path, train_gates
from fedinterp.scores import margin
from fedinterp.sites import adapter, edit, gate
from fedinterp.train import train

SIZES = [0.1, 0.2, 0.35]


def dataset(name):
    "6,000 class-balanced training images and 2,000 test images of a known set."
    whole = load_dataset(name)
    at, test = balanced_indices(whole.y_train, 6000, rng_for(0, "fashion_mnist_6000")), balanced_indices(whole.y_test, 2000, rng_for(0, "test"))
    name = f"{name.removesuffix('_small')}_6000"
    return Dataset(whole.x_train[at], whole.y_train[at], whole.x_test[test], whole.y_test[test], whole.classes, name, whole.mean, whole.std)


def federation(how, data, root):
    return train(Config(dataset=data.name, partition=how, model_args=dict(channels=[32, 64, 128], head="flatten")), root=root, data=data, progress=False)


def trials(run, data, seed):
    "What is tried: name -> function that finds and evaluates; both methods at three sizes, the published recipe, and the default at its mean size."
    recipe = published() if data.x_train.shape[1] == 1 else {**published(), "batch": 64}  # 20 CPU minutes a model of colour images, with the published 256
    find = lambda **settings: find_circuits(run, data, seed=seed, progress=False, **settings)
    tried = lambda found, nulls=False: evaluate_circuits(found, run, data, nulls=nulls, progress=False)
    ways = {"path": lambda: tried(find(method="path", size=SIZES), seed == 0), "gates": lambda: tried(find(size=SIZES), seed == 0)}
    if seed: return ways  # the published recipe costs ten times as much: one seed of it
    return ways | {"published": lambda: tried(find(**recipe)),
                   "gates at the published size": lambda: tried(find(size=float(statistics.mean(c.share for c in find(**recipe)))))}


def reach(runs, data, seeds, out):
    "Write a row a federation, method, size and seed of the discovery, unless it is there, and print their means."
    for (name, run), seed in product(runs.items(), range(seeds)):
        for way, compute in trials(run, data, seed).items():
            about = dict(data=data.name, clients=name, way=way, training_seed=run.config.seed, seed=seed)
            there = pd.read_csv(out) if os.path.exists(out) else pd.DataFrame(columns=list(about))
            if (there[list(about)] == pd.Series(about)).all(axis=1).any(): continue
            frame = compute()
            full = frame[frame.of == "full model"].groupby("metric").value.mean()
            rows = summary(frame).assign(**about, **{"full TPR": full["TPR"], "full FPR": full["FPR"]})
            rows = rows[[*about, *(c for c in rows if c not in about)]].round(4)
            pd.concat([there, rows] if len(there) else [rows]).sort_values(["data", "clients", "way", "seed"], kind="stable").to_csv(out, index=False)
            print(*about.values(), sep=", ", flush=True)
    pd.set_option("display.width", 250, "display.max_columns", 50, "display.precision", 3)
    shown = pd.read_csv(out)
    columns = ["share", "AUROC", "random", "best random", "full model", "above best", "sufficient", "TPR", "FPR", "full TPR", "full FPR", "constant", "constant, calibrated", "untrained", "shuffled"]
    print(shown.groupby(["data", "clients", "way", shown.budget.where(shown.way.isin(["path", "gates"]), "")])[columns].mean().to_string())


def one_class_at_a_time(model, images, target, fill, start, keep, steps, kind="conv", rescan=None):
    "The usual loop: a class, a step, a batch; the whole model runs with a hook at each site, as published at the raw convolutions."
    found, sites = {}, adapter(model).sites if kind == "post" else adapter(model).conv_sites
    for c in range(10):
        rng = rng_for(0, "one class", c)
        tau = {s: t[c:c + 1].clone().requires_grad_() for s, t in start.items()}
        step = torch.optim.Adam(tau.values(), 0.05)
        for _ in range(steps):
            if rescan is None: x, t = images[rows := torch.from_numpy(rng.permutation(len(images))[:32])], target[rows, c]
            else:
                x, t = torch.empty(0, *images.shape[1:]), torch.zeros(0)
                for xb, yb, tb in rescan[0]:
                    x, t = torch.cat([x, xb[yb == c]])[:32], torch.cat([t, tb[yb == c, c]])[:32]
                    if len(x) == 32 and rescan[1]: break
            edits = {sites[s]: gate(gate_of(v, keep[s])[0], fill.values[s]) for s, v in tau.items()}
            with edit(model, edits): z = margin(model(x))[:, c]
            z, t = z - z.mean(), t - t.mean()
            loss = 1 - (z * t).mean() / (z.square().mean().sqrt() * t.square().mean().sqrt() + 1e-6)
            step.zero_grad()
            loss.backward()
            step.step()
        found[c] = tau
    return found


def speed(run, data, steps, repeats):
    model = run.model().requires_grad_(False)
    s = _settings("gates", "faithful", "mean", "post", None, 0.2, None, "mean", "path", steps, 32, 0.05, 1, 4, 20, 20, 0)
    index = draw_images(data.y_train.numpy(), 20, rng_for(0, "speed"), np.arange(len(data.y_train)))
    task = prepare(model, data, list(range(10)), index, index, s)
    start, keep = rank_by_path(task, 1), counts(task.gated.channels, 0.2)
    made_up = torch.rand(len(data.y_train), 10, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(data.x_train, data.y_train, made_up), batch_size=256, shuffle=True, generator=torch.Generator().manual_seed(0))
    def ours():
        for at in (0, 5): train_gates(task.part(at, 5), {site: t[at:at + 5] for site, t in start.items()}, keep, None, s, 0)
    loop = lambda kind, rescan=None: lambda: one_class_at_a_time(model, data.x_train[index], task.target, task.fill, start, keep, steps, kind, rescan)
    def cpu(work):
        began = time.process_time()
        work()
        return time.process_time() - began
    ways = {"ours": ours, "hooks": loop("conv"), "rescan to the end": loop("conv", (loader, False)), "rescan until 32 are found": loop("conv", (loader, True)),
            "hooks after the pooling": loop("post")}
    rows = [{name: cpu(work) for name, work in ways.items()} for _ in range(repeats)]
    print(f"\n10 classes × {steps} steps × 32 images, CPU seconds, median:", {k: round(statistics.median(r[k] for r in rows), 2) for k in rows[0]})
    for other, bar in (("hooks", "≤ 0.55"), ("rescan to the end", "≤ 0.25"), ("rescan until 32 are found", "none"), ("hooks after the pooling", "none")):
        ratios = [r["ours"] / r[other] for r in rows]
        print(f"all classes in one batch / one class at a time, {other:<26} {statistics.median(ratios):.3f}  ({min(ratios):.3f} – {max(ratios):.3f}, n = {len(ratios)})   bar: {bar}", flush=True)


def whole(run, data):
    "10 clients and the server, three rounds, all classes."
    began, wall, jobs = time.process_time(), time.perf_counter(), [(r, k) for r in (1, 3, 6) for k in ("server", *run.clients(r))]
    found = [c for r, k in jobs for c in find_circuits(run.model(r, k), data)]  # as for the run itself, but without what is kept under it
    cpu, wall = time.process_time() - began, time.perf_counter() - wall
    print(f"\n{len(found)} circuits of {len(jobs)} models: {cpu:.0f} CPU s, {wall:.0f} s on {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f})   "
          "bar: ≤ 300 s on 2 cores", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=tempfile.gettempdir() + "/fedinterp-circuits")
    parser.add_argument("--data", default="fashion_mnist_small", help="or another known set, such as cifar10 in the folder that FEDINTERP_DATA names")
    parser.add_argument("--out", default=str(pathlib.Path(__file__).resolve().parent.parent/"nbs/tutorials/results/circuits.csv"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=["reach", "speed", "run"])
    args = parser.parse_args()
    data = dataset(args.data)
    runs = {name: federation(how, data, args.root) for name, how in (("IID", "iid"), ("skewed", "dirichlet:0.1"))}
    with intra_op_threads(1):
        if args.only in (None, "reach"): reach(runs, data, args.seeds, args.out)
        if args.only in (None, "speed"): speed(runs["skewed"], data, args.steps, args.repeats)
        if args.only in (None, "run"): whole(runs["skewed"], data)
