"""The study behind the claims page:  python benchmarks/claims.py [--root FOLDER] [--only train|analyse|collect] [--ask NAME] [--workers N]

Federations on 4,000 class-balanced training images of Fashion-MNIST and CIFAR-10 (the latter in the folder that FEDINTERP_DATA names), scored on 2,000 test images:
10 clients, 6 rounds of 2 epochs, batch 32, Adam 1e-3, uniform weights as published. What is finished is kept and not done again, so it can be stopped at any time."""
import argparse, pathlib, tempfile
import pandas as pd
from fedinterp import heads
from fedinterp.circuit import evaluate_circuits, find_circuits, published as published_circuits
from fedinterp.concepts import dictionary_study, stitch
from fedinterp.core import Config, RunError, intra_op_threads, rng_for
from fedinterp.data import Dataset, balanced_indices, load_dataset
from fedinterp.overlap import over_rounds, rediscover
from fedinterp.probe import freeze, probe, published as published_probe
from fedinterp.run import Run
from fedinterp.table import table
from fedinterp.train import train

SKEWS = ("iid", "dirichlet:0.5", "dirichlet:0.2", "dirichlet:0.05")
SOURCES = dict(fashion_mnist="fashion_mnist_small", cifar10="cifar10")


def dataset(name):
    "4,000 class-balanced training images and 2,000 test images."
    whole = load_dataset(SOURCES[name])
    at, test = balanced_indices(whole.y_train, 4000, rng_for(0, "claims")), balanced_indices(whole.y_test, 2000, rng_for(0, "claims test"))
    return Dataset(whole.x_train[at], whole.y_train[at], whole.x_test[test], whole.y_test[test], whole.classes, f"{name}_4000", whole.mean, whole.std)


def cell(data, model, partition, seed=0, sparsity=0.0, weighting="uniform"):
    "One federation."
    args = dict(channels=[32, 64, 128], head="flatten") if model == "simple_cnn" else {}
    return Config(dataset=f"{data}_4000", model=model, model_args=args, partition=partition, seed=seed, sparsity=sparsity, weighting=weighting, min_samples=10, eval_every=6)


def cells():
    "Every federation of the study, the main ones first."
    for seed in range(3):
        for partition in SKEWS[::3] + SKEWS[1:3]: yield cell("cifar10", "simple_cnn", partition, seed)
    for seed in range(3):
        for partition in SKEWS[::3] if seed else SKEWS: yield cell("fashion_mnist", "simple_cnn", partition, seed)
    for data, skews in (("cifar10", SKEWS), ("fashion_mnist", SKEWS[::3])):
        for partition in skews: yield cell(data, "resnet10", partition)
    for data in SOURCES:
        for partition in SKEWS[::3]: yield cell(data, "simple_cnn", partition, sparsity=0.999)
        yield cell(data, "simple_cnn", "dirichlet:0.05", weighting="samples")


LABELS = dict(budget=200, draws=10)


def read_out(run, reference, data):
    "Accuracy, probe with its floors, every repair of the head, and where the loss against the reference sits."
    f = freeze(run, data, **LABELS)
    yield probe(f)
    yield heads.realign_head(f, fine_tune=False)
    yield heads.realign_head(f, fine_tune=False, recipe="published").query("metric.str.startswith('head')").assign(metric=lambda t: "published " + t.metric)
    if reference: yield heads.decompose(f, freeze(reference, data, **LABELS))


def published_read_out(run, reference, data):
    "The probe on every training label, by the published recipe."
    yield probe(run, data, controls=True, draws=1, **published_probe()).assign(metric=lambda t: "published " + t.metric)


def circuits(run, reference, data):
    "Circuits of the default, beside random circuits, the full model, and networks that learned nothing."
    yield evaluate_circuits(find_circuits(run, data, size=.2, progress=False), run, data, progress=False)


def published_recipe(run, reference, data):
    "Circuits of the published recipe, but for batches of 64 in place of 256, beside random circuits and the full model."
    yield evaluate_circuits(find_circuits(run, data, progress=False, **{**published_circuits(), "batch": 64}), run, data, nulls=False, progress=False)


def overlap(run, reference, data):
    "What circuits of clients and server have in common in the last two rounds, beside chance, noise floor and nulls."
    found = rediscover(run, rounds=run.rounds[-2:], times=2, progress=False, data=data, method="path", size=.2)
    yield over_rounds(found, published=True, run=run.id)


def dictionary(run, reference, data):
    "A dictionary for the reference and the run, with every null; and what the heads make of its concepts."
    nets = {"reference": reference.model(), "run": run.model()}
    study = dictionary_study(nets, data, images=1000, test_images=500, progress=False)
    yield study.table.assign(way="default")
    yield stitch(study.usae, nets, data, images=500, train_images=500).assign(way="default", metric=lambda t: "stitch " + t.metric)


def published_dictionary(run, reference, data):
    "The published dictionary, trained and judged on the same test images, but for 20 epochs of 500 images; with the nulls that it lacked."
    nets = {"reference": reference.model(), "run": run.model()}
    yield dictionary_study(nets, data, test_images=500, epochs=20, as_published=True, progress=False).table.assign(way="published")


def analyses(config):
    "What is asked of which federation: all of them about their read-out, the extremes about everything."
    yield read_out
    ends, first = config.partition in SKEWS[::3] and not config.sparsity and config.weighting == "uniform", config.seed == 0
    if ends and first:
        yield published_read_out
        yield circuits
        if config.model == "simple_cnn": yield overlap
        if config.partition != "iid" and config.model == "simple_cnn": yield published_recipe  # minutes a model
    if config.partition == SKEWS[-1] and config.weighting == "uniform" and not config.sparsity:
        yield dictionary
        if first and config.model == "simple_cnn": yield published_dictionary


def reference_of(config): return None if config.partition == "iid" else config.replace(partition="iid", weighting="uniform")


class NotAsked(Exception): pass

def analyse(root, data, config, ask, only_kept=False):
    "A kept table, or a new one."
    run, other = Run.open(f"{root}/{config.id}"), reference_of(config)
    other = other and Run.open(f"{root}/{other.id}")
    images = data[config.dataset]
    def compute():
        if only_kept: raise NotAsked(config.id)
        return table(pd.concat(list(ask(run, other, images)), ignore_index=True))
    return run.cached(f"claims {ask.__name__}", compute, data=images.fingerprint).drop(columns=["run", "client"] + ["round"] * (ask is not overlap), errors="ignore").assign(
        dataset=config.dataset.removesuffix("_4000"), model=config.model, partition=config.partition, training_seed=config.seed,
        sparsity=config.sparsity, weighting=config.weighting)


def collect(root, data, out):
    "Write one small table for each analysis: figures over all classes, and those of single classes that the page needs."
    for ask in (read_out, published_read_out, circuits, published_recipe, overlap, dictionary, published_dictionary):
        frames = []
        for config in cells():
            if ask not in analyses(config): continue
            try: frames.append(analyse(root, data, config, ask, only_kept=True))
            except (NotAsked, RunError): print("not there:", config.dataset, config.model, config.partition, config.seed, ask.__name__)
        if not frames: continue
        frame = pd.concat(frames, ignore_index=True)
        if ask in (read_out, published_read_out, overlap): frame = frame[(frame.cls == "all") | frame.metric.isin(["native"])]
        if ask is overlap: frame = frame[frame.site == "all"] if (frame.get("site") == "all").any() else frame
        if ask is circuits: frame = frame[frame.metric.isin(["AUROC", "necessity"])]
        if ask is published_recipe: frame = frame[frame.metric.isin(["TPR", "FPR", "constant"]) & frame.of.isin(["circuit", "full model"])]
        if "dictionary" in ask.__name__: frame = frame[frame.metric.isin(["R2", "cross R2", "position", "shared", "IoU", "chance", "energy overlap", "stitch accuracy"])]
        frame = frame.drop(columns=["method", "objective", "ablation", "kind", "draws", "samples", "numbers", "seeds"], errors="ignore")
        keep = [c for c in frame if frame[c].notna().any() and not frame[c].astype(str).eq("").all()]
        frame = frame[keep].drop_duplicates([c for c in keep if c not in ("value", "lo", "hi", "n", "samples", "numbers", "note", "budget", "draws", "reference")])
        frame.round(4).to_csv(out/f"claims_{ask.__name__}.csv", index=False)
        print(ask.__name__, len(frame), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=tempfile.gettempdir() + "/fedinterp-claims")
    parser.add_argument("--only", choices=["train", "analyse", "collect"])
    parser.add_argument("--ask", help="one analysis by its name, such as read_out; default: all")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent/"nbs/tutorials/results")
    args = parser.parse_args()
    data = {f"{name}_4000": dataset(name) for name in SOURCES}
    for config in cells() if args.only in (None, "train") else ():
        run = train(config, args.root, data=data[config.dataset], workers=args.workers, trace="all" if config.model == "simple_cnn" else "last", progress=False)
        print(run, flush=True)
    with intra_op_threads(1):
        for config in cells() if args.only in (None, "analyse") else ():
            for ask in analyses(config):
                if args.ask not in (None, ask.__name__): continue
                print(config.dataset, config.model, config.partition, config.seed, ask.__name__, len(analyse(args.root, data, config, ask)), flush=True)
    if args.only in (None, "collect"): collect(args.root, data, args.out)
