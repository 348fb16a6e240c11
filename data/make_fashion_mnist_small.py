"""Build fashion_mnist_small.npz, the embedded subset of Fashion-MNIST:  python data/make_fashion_mnist_small.py [OUT]

Needs the full data set from Debian's package `dataset-fashion-mnist`; the md5 of every unpacked file is checked on the way in.
1,000 training and 200 test images of each class, drawn with a fixed seed and kept in their original order. The same arrays every time;
the same bytes too, with the same zlib."""
import sys
from pathlib import Path
import numpy as np
from fedinterp.core import rng_for
from fedinterp.data import balanced_indices, read_debian_fashion_mnist

OUT = Path(__file__).resolve().parent / "fashion_mnist_small.npz"


def make(out=OUT):
    full, small = read_debian_fashion_mnist(), {}
    for part, n in (("train", 10_000), ("test", 2_000)):
        keep = balanced_indices(full[f"y_{part}"], n, rng_for(0, "fashion_mnist_small", part))
        small[f"x_{part}"], small[f"y_{part}"] = full[f"x_{part}"][keep], full[f"y_{part}"][keep].astype(np.uint8)
    np.savez_compressed(out, **small)
    return out


if __name__ == "__main__":
    out = make(*map(Path, sys.argv[1:2]))
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
