"""Run notebooks in a real kernel, keep their outputs small, clean and export them:  python tools/notebooks.py [NAME ...]

NAME is a part of a file name (`10_data`); without one, every notebook is run. Pictures are reduced to a palette, since a chart of 100 KB in
each notebook makes a repository that nobody likes to clone."""
import base64, io, subprocess, sys, time
from pathlib import Path
import nbclient, nbformat

ROOT = Path(__file__).resolve().parent.parent


def compact(picture: str) -> str:
    "A base64 PNG with a palette of 96 colours, if that is smaller."
    from PIL import Image
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    small = base64.b64encode(buffer.getvalue()).decode()
    return min(small, picture.replace("\n", ""), key=len)


def execute(path: Path) -> float:
    "Run one notebook in its own folder and save it; returns seconds."
    notebook, began = nbformat.read(path, as_version=4), time.time()
    for cell in notebook.cells:
        if cell.cell_type == "code" and "#| eval: false" in cell.source: cell.metadata["tags"] = ["skip-execution"]
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}): output["data"]["image/png"] = compact(output["data"]["image/png"])
        cell.metadata.pop("tags", None)
    nbformat.write(notebook, path)
    return time.time() - began


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for path in sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts):
        if wanted and not any(w in path.name for w in wanted): continue
        seconds = execute(path)
        print(f"{path.relative_to(ROOT)}: {seconds:.1f} s, {path.stat().st_size // 1024} KB", flush=True)
    for command in ("nbdev-clean", "nbdev-export"): subprocess.run([str(Path(sys.executable).with_name(command))], cwd=ROOT, check=True)
