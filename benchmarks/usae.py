"""What a step of a universal sparse autoencoder costs:  python benchmarks/usae.py [--repeats 15] [--other FOLDER]

Dictionary 2,048, k 32, batch 1,024, float32, one thread, d = 128 and 512. CPU seconds, measured in turn (A B C A B C …); printed are median, minimum and maximum, and
ratios of the same turn. Floor: the five dense products of a step (encode, decode, and their three gradients). The other package is `overcomplete` 0.3 (TopKSAE, its own
batch-normalised encoder and mean squared error, Adam, the body of its own `train_sae` loop without monitoring), if it is installed or --other names a folder that holds it."""
import argparse, statistics, sys, time, types
import torch
from fedinterp.core import intra_op_threads, torch_rng
from fedinterp.usae import _Training, _check, train_usae

CONCEPTS, K, BATCH = 2048, 32, 1024


def cpu(work, steps=5):
    "CPU milliseconds of a step."
    began = time.process_time()
    for _ in range(steps): work()
    return (time.process_time() - began) * 1e3 / steps


def settings(acts):
    "The defaults of train_usae, as it keeps them."
    s = {k: p.default for k, p in __import__("inspect").signature(train_usae).parameters.items() if k not in ("acts", "image", "progress")}
    _check(acts, s)
    return s


def floor(d):
    "Five dense products of the sizes of a step."
    g = torch_rng(0, "floor")
    x, w, z = (torch.randn(*shape, generator=g) for shape in ((BATCH, d), (d, CONCEPTS), (BATCH, CONCEPTS)))
    return lambda: (x @ w, z @ w.T, x @ w, z.T @ x, x.T @ z)


def ours(*dims):
    "A whole step: codes, gradients, Adam, unit norms, the record of what fired."
    g = torch_rng(0, "acts")
    acts = {f"m{i}": torch.randn(4 * BATCH, d, generator=g).relu_() for i, d in enumerate(dims)}
    training = _Training(acts, torch.arange(4 * BATCH).numpy(), [], settings(acts))
    x = training.read(slice(0, BATCH))
    def step():
        with torch.no_grad(): training.step("m0", x, K)
    return step


def lean(*dims):
    "The same step by autograd and dense products."
    g = torch_rng(0, "lean")
    x = [torch.randn(BATCH, d, generator=g) for d in dims]
    encoder = torch.randn(dims[0], CONCEPTS, generator=g).div_(dims[0] ** .5).requires_grad_()
    decoders = [torch.randn(CONCEPTS, d, generator=g).requires_grad_() for d in dims]
    bias = torch.zeros(CONCEPTS, requires_grad=True)
    adam = torch.optim.Adam([encoder, bias, *decoders], 1e-3, fused=True)
    def step():
        pre = torch.addmm(bias, x[0], encoder).relu()
        value, at = pre.topk(K, 1)
        z = torch.zeros_like(pre).scatter(1, at, value)
        loss = sum((z @ D - a).square().mean() for D, a in zip(decoders, x))
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            for D in decoders: D.div_(D.norm(dim=1, keepdim=True))
    return step


def other(d):
    "One pass of the loop body of overcomplete's train_sae."
    from overcomplete.sae.topk_sae import TopKSAE
    from overcomplete.sae.train import train_sae
    x = torch.randn(BATCH, d, generator=torch_rng(0, "other"))
    model = TopKSAE(d, nb_concepts=CONCEPTS, top_k=K)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    criterion = lambda x, x_hat, pre_codes, codes, dictionary: (x - x_hat).square().mean()
    return lambda: train_sae(model, [x], criterion, adam, nb_epochs=1, monitoring=0)


def importable(folder):
    "Make overcomplete's autoencoders importable without its plots; is it there?"
    if folder: sys.path.append(folder)
    for name in ("overcomplete.visualization", "overcomplete.models", "overcomplete.optimization"):
        stub = types.ModuleType(name)
        stub.__getattr__ = lambda attribute: None if not attribute.startswith("__") else (_ for _ in ()).throw(AttributeError(attribute))
        sys.modules.setdefault(name, stub)
    try: import overcomplete.sae.train  # noqa: F401
    except ImportError as e: return print(f"overcomplete is left out: {e}")
    return True


def turns(ways, repeats):
    for work in ways.values(): work(), work()
    rows = [{name: cpu(work) for name, work in ways.items()} for _ in range(repeats)]
    for name in ways:
        values = [r[name] for r in rows]
        print(f"    {name:<44} {statistics.median(values):7.1f} ms   ({min(values):.1f} – {max(values):.1f})")
    return rows


def ratio(rows, a, b, bar):
    values = [r[a] / r[b] for r in rows]
    print(f"    {a} / {b}: {statistics.median(values):.3f}   ({min(values):.3f} – {max(values):.3f}, n = {len(values)})   bar: {bar}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--other", default="", help="a folder with the package overcomplete")
    args = parser.parse_args()
    there = importable(args.other)
    with intra_op_threads(1):
        for d, bar in ((128, "≤ 0.85"), (512, "≤ 0.50")):
            print(f"d = {d}, one model")
            ways = {"ours": ours(d), "five dense products": floor(d), "autograd, dense": lean(d)} | ({"overcomplete": other(d)} if there else {})
            rows = turns(ways, args.repeats)
            ratio(rows, "ours", "five dense products", bar)
            ratio(rows, "autograd, dense", "ours", "none")
            if there: ratio(rows, "overcomplete", "ours", "≥ 2.5" if d == 512 else "none")
        print("d = 512, two models, one code")
        rows = turns({"ours": ours(512, 512), "autograd, dense": lean(512, 512)}, args.repeats)
        ratio(rows, "autograd, dense", "ours", "none")
