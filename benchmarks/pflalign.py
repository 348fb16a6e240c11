"""pFLAlign against its baselines: personal test accuracy on label-skewed images, loss and ROUGE-L on sixteen tasks of text; learning rates tuned for each method alike.

    FEDINTERP_DATA=... python benchmarks/pflalign.py tune    --root RUNS [--part 0 --of 2]   # resumable; parts run side by side; writes a table beside each run
    FEDINTERP_DATA=... python benchmarks/pflalign.py train   --root RUNS [--part 0 --of 2]   # at the rates that `tune` chose
    FEDINTERP_DATA=... python benchmarks/pflalign.py tables  --root RUNS --out nbs/tutorials/results
    FEDINTERP_DATA=... python benchmarks/pflalign.py autopsy --root RUNS --out nbs/tutorials/results

Images: 3,000 class-balanced training images of CIFAR-10 and 2,000 test images, 10 clients by Dirichlet 0.3, TwoCNN with 16 and 32 filters, 10 rounds of one local epoch.
Texts: FLAN in two federations of eight clients, each with a task of its own (240 rows to train on, 60 to test on); LoRA of rank 8 on all linear layers of a Llama of 260,032
parameters; 5 rounds of 8 local steps, batches of 4 rows of 128 tokens. Replies are greedy, of at most 48 tokens, to 30 test rows of each task.
Tuning: other seeds (one for images, two for texts), and validation rows in the place of test rows (1,000 other training images; the 60 other training rows of each task of the
first federation). Every method has three rates to begin with, and a neighbour more while the best is the last of its row; the criterion is the mean loss of the clients' models
after local training. The second seed tries again what the first did not leave more than 0.15 behind the best.
"""
import argparse, shutil
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from fedinterp.core import Config, DivergedError, rng_for
from fedinterp.data import Dataset, balanced_indices, load_dataset
from fedinterp.personal import drift, label_shares, personal
from fedinterp.run import Run
from fedinterp.train import train

SEEDS, TUNED_WITH = (0, 1, 2), {"images": (100,), "texts": (100, 101)}  # at rates that are nearly too high, texts are learnt with one seed and lost with another
UNTAUGHT, HOPELESS = 4.5, 0.15  # a loss that no learning rate worth having stays above; by how much a rate may be worse than the best and be tried again
ADAM, SGD, OWN = dict(optimizer="adamw"), dict(optimizer="sgd"), "after local training"
GRIDS = {"images": {"adamw": (3e-4, 1e-3, 3e-3), "sgd": (.01, .03, .1), "aligned": (.03, .1, .3)},
         "texts": {"adamw": (2e-3, 5e-3, 1e-2), "sgd": (.011, .033, .1), "aligned": (.3, 1.0, 3.0)}}
BOTH = {  # name -> (strategy, its settings, the optimiser of its clients, its grid)
    "FedAvg, AdamW": ("fedavg", {}, ADAM, "adamw"),
    "FedAvg, SGD": ("fedavg", {}, SGD, "sgd"),
    "FedAvgM ½, SGD": ("fedavgm", dict(beta=.5), SGD, "sgd"),  # what a constant γ = ½ comes near to
    "FedAdam": ("fedadam", dict(server_lr=1e-2), ADAM, "adamw"),
    "FedYogi": ("fedyogi", dict(server_lr=1e-2), ADAM, "adamw"),
    "FedSAM": ("fedsam", {}, ADAM, "adamw"),
    "FedProx": ("fedprox", dict(mu=.01), ADAM, "adamw"),
    "SCAFFOLD": ("scaffold", {}, SGD, "sgd"),
    "local only": ("local", {}, ADAM, "adamw"),
    "pFLAlign": ("pflalign", {}, SGD, "aligned"),
}
ABLATIONS = {
    "pFLAlign, P = 1": ("pflalign", dict(precondition=False), SGD, "sgd"),
    "pFLAlign, γ = 0": ("pflalign", dict(gate="constant", gamma=0.0), SGD, None),  # None: at the rate of pFLAlign
    "pFLAlign, γ = ½": ("pflalign", dict(gate="constant", gamma=.5), SGD, None),
    "pFLAlign, γ = 1": ("pflalign", dict(gate="constant", gamma=1.0), SGD, None),
    "pFLAlign, hard γ": ("pflalign", dict(gate="hard"), SGD, None),
    "pFLAlign, Δ = 0": ("pflalign", dict(offset=False), SGD, None),
    "pFLAlign, P = 1, γ = ½": ("pflalign", dict(precondition=False, gate="constant", gamma=.5), SGD, "sgd"),  # the heavy ball of FedAvgM ½, with persons
    "pFLAlign, corrected m": ("pflalign", dict(corrected=True), SGD, "sgd"),
    "pFLAlign, M-SVAG": ("pflalign", dict(svag=True), SGD, "sgd"),
}
ONLY = {
    "images": {"FedPer": ("fedper", {}, ADAM, "adamw")},
    "texts": {"FedPer, last block": ("fedper", dict(head="*layers.4.*"), ADAM, "adamw"), "FedSA-LoRA": ("fedsa_lora", {}, ADAM, "adamw"),
              "FFA-LoRA": ("ffa_lora", {}, ADAM, "adamw"), "FRLoRA": ("frlora", {}, ADAM, "adamw")},
}
STUDIES = {"CIFAR-10": "images", "FLAN 1": "texts", "FLAN 2": "texts"}
COMMON = {"images": dict(model="two_cnn", model_args=dict(hidden=16, features=128), partition="dirichlet:0.3", clients=10, rounds=10, local_epochs=1, batch_size=32, eval_every=10),
          "texts": dict(model="causal_lm", partition="groups", clients=8, rounds=5, local_steps=8, batch_size=4, eval_every=5)}
OBSERVED = ("FedAvg, SGD", "FedAvg, AdamW", "FedSAM", "pFLAlign", "pFLAlign, P = 1")  # whose gradients are looked at, round by round


def methods(kind): return BOTH | ONLY[kind] | ABLATIONS


@cache
def images(validation):
    whole = load_dataset("cifar10")
    order = balanced_indices(whole.y_train, 4000, rng_for(0, "pflalign"))
    at, held = order[:3000], order[3000:]
    x, y = (whole.x_train[held], whole.y_train[held]) if validation else (whole.x_test, whole.y_test)
    rows = np.arange(len(y)) if validation else rng_for(0, "pflalign test").permutation(len(y))[:2000]
    return Dataset(whole.x_train[at], whole.y_train[at], x[rows], y[rows], whole.classes, "cifar10_3000" + "_validation" * validation, whole.mean, whole.std)


@cache
def tokenizer():
    "Its stories ended with <s>; the EOS that it names the model has never seen, and cannot tell from the other tokens that it has never seen."
    from fedinterp.text import load_tokenizer
    return load_tokenizer("stories260k", end="<s>")


@cache
def texts(federation, validation):
    from fedinterp.text import instruction_data, read_instructions
    rows, test = (read_instructions(f"flan16_{part}", federation=federation) for part in ("train", "test"))
    tasks = dict.fromkeys(r["task"] for r in rows)
    def cut(part, a, b):  # in an order of our own: the file sorts some tasks by their answer
        for t in tasks:
            own = [r for r in part if r["task"] == t]
            yield from (own[i] for i in rng_for(0, "pflalign rows", t).permutation(len(own))[a:b])
    held = list(cut(rows, 240, 300) if validation else cut(test, 0, 60))
    data = instruction_data(list(cut(rows, 0, 240)), held, tokenizer(), length=128, misfits="leave out", name=f"flan{federation}" + "-validation" * validation)
    return data


def data_of(study, validation=False): return images(validation) if STUDIES[study] == "images" else texts(int(study[-1]), validation)


def config_of(study, method, lr, seed, validation=False):
    kind = STUDIES[study]
    strategy, args, optimiser, _ = methods(kind)[method]
    model = {}
    if kind == "texts": model = dict(model_args=dict(path="stories260k", rank=8, targets="all-linear", dropout=.05, fold=strategy == "frlora"))
    return Config(**COMMON[kind] | model | optimiser, dataset=data_of(study, validation).name, strategy=strategy, strategy_args=args, lr=lr, seed=seed)


def slim(run, keep):
    "Drop the weights of all rounds but those asked for: what was to be learnt of them stands in tables."
    for r in run.rounds:
        if r not in keep: shutil.rmtree(run.path/"rounds"/f"{r:04d}")


def tuned(study, root):
    "method -> its rate of the least validation loss over all seeds; an ablation without a grid has that of pFLAlign."
    kind, found = STUDIES[study], grids(root)
    found = found[(found.study.map(STUDIES) == kind) & (found.seeds == len(TUNED_WITH[kind]))].sort_values("loss").groupby("method").lr.first()
    return {m: found[m if how[3] else "pFLAlign"] for m, how in methods(kind).items()}


def tune(root, part, of):
    "Try each method's grid; where the best rate is at its end, go on by a factor of three. More seeds try again what is not hopeless."
    jobs = [(s, m, how[3]) for s in ("CIFAR-10", "FLAN 1") for m, how in methods(STUDIES[s]).items() if how[3]]
    for study, method, grid in jobs[part::of]:
        first, *more = TUNED_WITH[STUDIES[study]]
        tried, rates = {}, list(GRIDS[STUDIES[study]][grid])
        while rates and len(tried) < 7:
            tried |= {lr: loss_of(once(root, study, method, lr, first, True)) for lr in rates}
            best = min(tried, key=lambda lr: (not np.isfinite(tried[lr]), tried[lr], lr))
            if not tried[best] < UNTAUGHT: best = min(tried)  # nothing was learnt yet: the rates are too high
            rates = [float(f"{best / 3:.2g}")] * (best == min(tried)) + [float(f"{best * 3:.2g}")] * (best == max(tried))
        for seed in more:
            for lr in (lr for lr in tried if tried[lr] < min(tried.values()) + HOPELESS): once(root, study, method, lr, seed, True)


def loss_of(rows): return rows[(rows.client == "all") & (rows.metric == "loss") & (rows.model == OWN)].value.iloc[0]


def once(root, study, method, lr, seed, validation=False):
    "One run and what it came to; a run that diverges has an infinite loss."
    config, data = config_of(study, method, lr, seed, validation), data_of(study, validation)
    told = Path(root)/config.id/"told.csv"
    if told.exists(): return pd.read_csv(told)
    try: run = train(config, root, workers=1, progress=False, trace="all", data=data)
    except DivergedError as e:
        print(study, method, lr, "diverged:", e, flush=True)
        rows = pd.DataFrame([dict(client="all", metric="loss", model=OWN, value=np.inf)])
    else:
        rows = personal(run, data, resamples=200, others=STUDIES[study] == "images")
        if not validation:
            if STUDIES[study] == "texts": rows = pd.concat([rows, replies(run, study)])
            if method in OBSERVED and STUDIES[study] == "images": rows = pd.concat([rows, drift(run, data, rounds=(1, 3, 6, 10), batches=8, batch_size=16, steps=0)])
    told.parent.mkdir(parents=True, exist_ok=True)
    rows.assign(study=study, method=method, lr=lr, seed=seed).to_csv(told, index=False)
    if (told.parent/"rounds").is_dir():
        run = Run.open(told.parent)
        slim(run, () if validation else (run.done - 1, run.done))
    print(study, method, lr, seed, f"{loss_of(rows):.3f}", flush=True)
    return rows


def replies(run, study):
    "ROUGE-L and exact match of what the models write, client by client."
    from fedinterp.replies import reply_scores
    data = texts(int(study[-1]), False)
    return reply_scores(run, data, tokenizer(), which=("ROUGE-L", "exact match"), models=(OWN, "global"), rows_per_task=30, max_new_tokens=48)


def final(root, part, of, only):
    rates = {STUDIES[study]: tuned(study, root) for study in only}
    jobs = [(s, m, seed) for later in (False, True) for s in only for seed in SEEDS for m in methods(STUDIES[s]) if (m in ABLATIONS) == later]
    for i, (study, method, seed) in enumerate(jobs):
        if i % of == part: once(root, study, method, rates[STUDIES[study]][method], seed)


def collected(root):
    "Every table that a run left, of tuning and of the study."
    found = [pd.read_csv(p).assign(run=p.parent.name) for p in sorted(Path(root).glob("*/told.csv"))]
    rows = pd.concat(found, ignore_index=True)
    rows["grid"] = ~rows.seed.isin(SEEDS)
    return rows


def grids(root):
    "study, method, lr, loss, seeds: what was tried in tuning."
    rows = collected(root).query("grid and client == 'all' and metric == 'loss' and model == @OWN")
    return rows.groupby(["study", "method", "lr"], sort=False).value.agg(["mean", "size"]).reset_index().rename(columns=dict(mean="loss", size="seeds"))


def clients(rows, root):
    "study, method, client, metric, value. Clients are dealt anew with each seed: texts go by their task, as means over seeds, images are those of seed 0."
    rows = rows[(rows.client != "all") & (rows.model == OWN)]
    names = {}
    for (study, seed), run in rows[rows.study.map(STUDIES) == "texts"].groupby(["study", "seed"]).run.first().items():
        data = texts(int(study[-1]), False)
        names |= {(study, seed, str(k)): data.classes[c] for k, c in enumerate(label_shares(Run.open(Path(root)/run), data).argmax(1))}
    rows = pd.concat([rows[(rows.study.map(STUDIES) == "texts") | (rows.seed == 0)], *floors(rows, root)])
    rows = rows.assign(client=[names.get((s, seed, k), k) for s, seed, k in zip(rows.study, rows.seed, rows.client.astype(str))])
    return rows.groupby(["study", "method", "client", "metric"], sort=False).value.mean().reset_index()


def floors(rows, root):
    "What always giving a task's commonest training answer scores, on the rows that the models were asked."
    from fedinterp.replies import FLOOR, reply_scores
    for study, run in rows[(rows.study.map(STUDIES) == "texts") & (rows.seed == 0)].groupby("study").run.first().items():
        told = reply_scores(Run.open(Path(root)/run), texts(int(study[-1]), False), tokenizer(), which=("ROUGE-L", "exact match"), models=(), rows_per_task=30)
        yield told[told.client != "all"].assign(study=study, method=FLOOR, seed=0)


def tables(root, out):
    rows, rates = collected(root).query("not grid"), {(s, m): lr for s in STUDIES for m, lr in tuned(s, root).items()}
    rows = rows[[rates[s, m] == lr for s, m, lr in zip(rows.study, rows.method, rows.lr)]]  # a rate that further tuning gave up is none of the study
    save = lambda frame, name: frame.to_csv(Path(out)/f"pflalign_{name}.csv", index=False, float_format="%.4g")
    save(grids(root), "rates")
    scores = rows[rows.metric.isin(["accuracy", "loss", "ROUGE-L", "exact match"])]
    save(scores[scores.client == "all"][["study", "method", "lr", "seed", "model", "metric", "value"]], "all")
    save(clients(scores, root), "clients")
    seen = rows[rows["round"].notna() & rows.metric.isin(["GSNR mean", "GSNR median", "consistency", "norm", "KL", "bound term", "training error"])]
    save(seen.groupby(["study", "method", "seed", "round", "metric", "model"], sort=False)[["value", "null"]].mean().reset_index(), "drift")


INSIDE = Config(dataset="fashion_mnist_small", model="two_cnn", model_args=dict(hidden=16, features=128), partition="dirichlet:0.3", clients=5,
                rounds=10, local_steps=60, batch_size=32, eval_every=10)
LOOKED_AT, WHO = ("FedAvg, SGD", "pFLAlign", "local only"), (0, 1)


def opened(run, data, client, seed):
    "One client's model and the server's: native and probed accuracy, and the circuits of the client's two commonest classes in both, on trial, with their overlap."
    from fedinterp.circuit import evaluate_circuits, find_circuits
    from fedinterp.overlap import adjusted_iou
    from fedinterp.probe import probe
    shares = label_shares(run, data)[client]
    common = [data.classes[i] for i in np.argsort(-shares)[:2]]
    models = {"own": run.model(client=client), "server": run.model()}
    masks = {}
    for name, model in models.items():
        scores = probe(model, data, budget=200, draws=5, seed=seed)
        for held, classes in (("its classes", common), ("all", ["all"])):
            rows = scores[scores.cls.isin(classes) & scores.metric.isin(["native", "probe", "floor untrained"])]
            yield from (dict(of=name, held=held, metric=m, value=v) for m, v in rows.groupby("metric").value.mean().items())
        search = lambda s: {c.cls: c for c in find_circuits(model, data, classes=common, size=.2, steps=30, seed=s, progress=False)}
        masks[name], masks[f"{name} again"] = search(seed), search(seed + 1)
        trial = evaluate_circuits(list(masks[name].values()), model, data, nulls=False, necessity=False, progress=False)
        trial = trial[(trial.metric == "AUROC") & trial.of.isin(["circuit", "random", "full model"])]
        yield from (dict(of=name, held="its classes", metric=f"AUROC, {of}", value=v) for of, v in trial.groupby("of").value.mean().items())
    both = lambda a, b: np.mean([adjusted_iou({s: m.numpy() for s, m in masks[a][c].masks.items()}, {s: m.numpy() for s, m in masks[b][c].masks.items()}) for c in common])
    yield dict(of="own & server", held="its classes", metric="overlap, adjusted", value=both("own", "server"))
    for name in models: yield dict(of=f"{name}, searched again", held="its classes", metric="overlap, adjusted", value=both(name, f"{name} again"))


def autopsy(root, out):
    data, rows = load_dataset("fashion_mnist_small"), []
    for seed in SEEDS:
        for method in LOOKED_AT:
            strategy, args, optimiser, _ = BOTH[method]
            config = INSIDE.replace(**optimiser, seed=seed, strategy=strategy, strategy_args=args, lr=tuned("CIFAR-10", root)[method])
            run = train(config, Path(root)/"inside", workers=1, progress=False, trace="all", data=data)
            scores = personal(run, data, resamples=200)
            rows += [dict(method=method, seed=seed, client=k, of=m, held="its share", metric="accuracy", value=v)
                     for k, m, v in scores[(scores.metric == "accuracy") & scores.client.isin(map(str, WHO))][["client", "model", "value"]].itertuples(index=False)]
            for client in WHO: rows += [dict(method=method, seed=seed, client=client, **row) for row in opened(run, data, client, seed)]
            print(method, seed, flush=True)
    pd.DataFrame(rows).to_csv(Path(out)/"pflalign_inside.csv", index=False, float_format="%.4g")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "train", "tables", "autopsy"))
    parser.add_argument("--root", required=True)
    parser.add_argument("--out", default="nbs/tutorials/results")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--only", action="append", choices=tuple(STUDIES), help="a study to train; may be given again")
    given = parser.parse_args()
    for folder in (given.root, given.out): Path(folder).mkdir(parents=True, exist_ok=True)
    if given.what == "tune": tune(given.root, given.part, given.of)
    elif given.what == "train": final(given.root, given.part, given.of, given.only or tuple(STUDIES))
    else: (tables if given.what == "tables" else autopsy)(given.root, given.out)
