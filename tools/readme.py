"""Make README.md from nbs/index.ipynb, without Quarto:  python tools/readme.py [--check]

Markdown cells are taken as they are, code cells become fenced blocks without their `#|` lines, text outputs follow as a block; cells marked
`#| hide` are left out. Paths of pictures are made relative to the repository's root."""
import json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def text_of(output: dict) -> str:
    "The plain text of one output, or nothing."
    data = output.get("text") or output.get("data", {}).get("text/plain", "")
    return "" if "image/png" in output.get("data", {}) else "".join(data).rstrip()


def render(notebook: dict) -> str:
    "A notebook as Markdown."
    parts = ["<!-- made from nbs/index.ipynb by tools/readme.py: edit the notebook -->"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).strip()
        if re.search(r"^#\|\s*hide\b", source, re.M): continue
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\]\((?!https?:|#|/)([^)]+)\)", r"](nbs/\1)", source).replace("](nbs/../", "]("))
            continue
        code = "\n".join(line for line in source.splitlines() if not line.startswith("#|")).strip()
        if code: parts.append(f"```python\n{code}\n```")
        outputs = "\n".join(filter(None, map(text_of, cell.get("outputs", []))))
        if outputs: parts.append(f"```text\n{outputs}\n```")
    return "\n\n".join(parts) + "\n"


def main(check: bool) -> int:
    "Write README.md, or say whether it is up to date."
    made = render(json.loads((ROOT / "nbs/index.ipynb").read_text(encoding="utf-8")))
    readme = ROOT / "README.md"
    if check:
        fresh = readme.exists() and readme.read_text(encoding="utf-8") == made
        print("README.md is up to date" if fresh else "README.md is stale: run `make readme`")
        return not fresh
    readme.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__": sys.exit(main("--check" in sys.argv[1:]))
