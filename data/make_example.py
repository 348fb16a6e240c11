"""Makes data/example: two small federations on the embedded Fashion-MNIST, one skewed and one IID, with the autopsy of every model in them. Takes about ten minutes on two cores.

    python data/make_example.py

What is kept: configuration, partition, metrics of every round, the last server's weights (so that a head can be refitted), and the autopsy's tables and thumbnails.
"""
import shutil
import tempfile
from pathlib import Path

from fedinterp.autopsy import autopsy
from fedinterp.core import Config
from fedinterp.train import train
from fedinterp.trace import newest

TARGET = Path(__file__).parent/"example"
CONFIG = Config(partition="dirichlet:0.1", clients=5, rounds=4, local_epochs=1, model_args=dict(head="pool"))

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        skewed, iid = (train(CONFIG.replace(partition=p), root=folder, progress=False) for p in (CONFIG.partition, "iid"))
        print(autopsy(skewed, iid, rounds="all", deep=True).verdict)
        shutil.rmtree(TARGET, ignore_errors=True)
        for run in (skewed, iid):
            keep = [run.path/n for n in ("config.json", "run.json", "partition.npz")] + sorted((run.path/"rounds").glob("*/metrics.parquet")) + sorted((run.path/"rounds").glob("*/DONE"))
            keep.append(run.path/"rounds"/f"{run.done:04d}"/"server.safetensors")
            found = newest(run.path)
            if found: keep += sorted(p for p in found.iterdir() if p.is_file())
            for file in keep:
                copy = TARGET/file.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    print(f"{sum(p.stat().st_size for p in TARGET.rglob('*') if p.is_file())/1e6:.1f} MB in {TARGET}")
