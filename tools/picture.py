"Draw the front door's picture, nbs/images/demo.png, from the demo's kept runs:  python tools/picture.py [ROOT]"
import base64, io, sys, tempfile
from pathlib import Path
from notebooks import ROOT, compact
from fedinterp.charts import fig_decompose
from fedinterp.cli import demo

if __name__ == "__main__":
    found = demo(sys.argv[1] if len(sys.argv) > 1 else "runs", Path(tempfile.mkdtemp())/"report.html", progress=False)
    buffer = io.BytesIO()
    fig_decompose(found.tables["decomposition"]).save(buffer, format="png", ppi=144)
    target = ROOT/"nbs/images/demo.png"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(base64.b64decode(compact(base64.b64encode(buffer.getvalue()).decode())))
    print(target.relative_to(ROOT), target.stat().st_size // 1024, "KB")
