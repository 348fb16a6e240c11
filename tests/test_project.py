"Contracts of the project itself: metadata, order of rooms, notebooks and modules in step."
import ast, configparser, json, os, re, shutil, subprocess, sys, tomllib
from importlib.metadata import requires, version
from pathlib import Path
import pytest
from conftest import ROOT
from kernels import Kernels

NOTEBOOKS = sorted(p for p in (ROOT/"nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
LONG = {f"{name}.ipynb" for name in ("30_probe", "31_heads", "36_similarity", "49_autopsy")}  # the tests of these modules hold them to the same claims
ROOMS = [p for p in NOTEBOOKS if p.parent == ROOT/"nbs" and re.match(r"\d\d_", p.name)]
TABLES_ONLY = {"charts", "model_charts", "pruning_charts", "personal_charts", "report", "panel_charts", "circuit_charts", "concept_charts", "autopsy_report", "trace",
               "explorer"}  # views read tables, so they start fast and need no torch
cfg = configparser.ConfigParser(delimiters=["="], interpolation=None)
cfg.read(ROOT/"settings.ini", encoding="utf-8")
META = cfg["DEFAULT"]


def code(path):
    return ["".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]


def module_of(path):
    return next((m[1] for s in code(path) if (m := re.search(r"^#\|\s*default_exp\s+(\w+)", s, re.M))), None)


NUMBER = {module_of(p): int(p.name[:2]) for p in ROOMS}


def ours(source):
    "The modules of ours that a piece of code imports, anywhere in it."
    tree = ast.parse("\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedinterp."): yield node.module.split(".")[1]
        if isinstance(node, ast.Import): yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("fedinterp."))


def test_settings_pyproject_and_the_package_agree():
    pyproject = tomllib.loads((ROOT/"pyproject.toml").read_text(encoding="utf-8"))
    import fedinterp
    assert META["lib_name"] == pyproject["project"]["name"] == pyproject["tool"]["nbdev"]["lib_path"] == "fedinterp"
    assert META["version"] == fedinterp.__version__ == version("fedinterp")
    assert set(pyproject["project"]) == {"name", "dynamic"}
    plain = {r.split(";")[0].strip() for r in requires("fedinterp") if "extra ==" not in r}
    names = lambda requirements: {re.split(r"[<>=!~\[ ]", r)[0].lower() for r in requirements}
    assert names(plain) == names(META["requirements"].split())


def test_a_wheel_carries_the_embedded_data_its_licence_and_the_notebooks(tmp_path):
    subprocess.run([sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path], cwd=ROOT, check=True, capture_output=True)
    built = {str(p.relative_to(tmp_path/"fedinterp")) for p in tmp_path.rglob("*") if p.is_file()}
    assert {"core.py", "_data/fashion_mnist_small.npz", "_data/LICENSE.fashion-mnist", "_nbs/index.ipynb", "_nbs/images/demo.png"} <= built
    assert any(p.startswith("_data/example/") and p.endswith("autopsy.json") for p in built) and {"static/explorer.js", "static/live.js"} <= built
    code = "from fedinterp.data import load_dataset; import fedinterp; print(fedinterp.__file__, len(load_dataset('fashion_mnist_small').y_train))"
    found = subprocess.run([sys.executable, "-c", code], cwd="/", env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(tmp_path/"fedinterp/__init__.py"), "10000"]


@pytest.mark.parametrize("path", ROOMS, ids=lambda p: p.stem)
def test_a_room_imports_only_from_rooms_with_lower_numbers(path):
    mine = int(path.name[:2])
    for module in {m for source in code(path) for m in ours(source)}:
        assert module in NUMBER, f"{path.name} imports fedinterp.{module}, which no notebook makes"
        assert NUMBER[module] < mine or module == module_of(path), f"{path.name} imports fedinterp.{module} of room {NUMBER[module]}"


def test_analyses_never_ask_which_strategy_and_tables_need_nothing_of_ours():
    exported = {p: [s for s in code(p) if re.search(r"^#\|\s*exporti?\b", s, re.M)] for p in ROOMS}
    for path, cells in exported.items():
        used = {m for s in cells for m in ours(s)}
        if 30 <= int(path.name[:2]) < 40: assert not used & {"strategy", "baselines", "local", "train"}, path.name
        if module_of(path) == "table": assert not used
        if module_of(path) in TABLES_ONLY: assert used <= {"core", "table", *TABLES_ONLY}, path.name


@pytest.mark.parametrize("module", sorted(TABLES_ONLY & set(NUMBER)) + ["cli"])
def test_views_and_the_command_line_import_without_torch(module):
    found = subprocess.run([sys.executable, "-c", f"import sys, fedinterp.{module}; print('torch' in sys.modules)"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_modules_equal_a_fresh_export_and_notebooks_are_clean(tmp_path):
    for name in ("nbs", "pyproject.toml", "settings.ini", "fedinterp"):
        source = ROOT/name
        shutil.copytree(source, tmp_path/name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "runs")) if source.is_dir() else shutil.copy(source, tmp_path/name)
    for made in (tmp_path/"fedinterp").glob("*.py"):
        if made.name != "__init__.py": made.unlink()
    for command in ("nbdev-clean", "nbdev-export"):
        subprocess.run([str(Path(sys.executable).with_name(command))], cwd=tmp_path, check=True, capture_output=True)
    fresh = {p.name: p.read_text(encoding="utf-8") for p in (tmp_path/"fedinterp").glob("*.py")}
    assert fresh == {p.name: p.read_text(encoding="utf-8") for p in (ROOT/"fedinterp").glob("*.py")}
    dirty = [p.name for p in NOTEBOOKS if p.read_text(encoding="utf-8") != (tmp_path/p.relative_to(ROOT)).read_text(encoding="utf-8")]
    assert dirty == []


def test_the_readme_is_what_the_front_door_notebook_makes():
    assert subprocess.run([sys.executable, ROOT/"tools/readme.py", "--check"], capture_output=True, text=True).stdout == "README.md is up to date\n"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_a_notebook_keeps_its_outputs_small_and_loads_nothing_from_elsewhere(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) <= 150_000 and not re.search(r"cdn\.|jsdelivr|unpkg", text)
    assert not re.search(r'"output_type": "error"', text)
    assert "/root/" not in text and "/home/" not in text and f"{ROOT}/" not in text


@pytest.fixture(scope="module")
def kernels():
    made = Kernels()
    yield made
    made.close()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT/"nbs")))
def test_every_notebook_runs_in_a_real_kernel(path, kernels, tmp_path):
    if path.name in LONG and not os.environ.get("FEDINTERP_LONG"): pytest.skip("it takes most of a minute: set FEDINTERP_LONG=1, or run `make notebooks`")
    if (ROOT/"runs").is_dir(): (tmp_path/"runs").symlink_to(ROOT/"runs")  # what the demo has trained need not be trained again
    if (path.parent/"results").is_dir(): (tmp_path/"results").symlink_to(path.parent/"results")  # the tables of studies
    kernels.run([source for source in code(path) if not re.search(r"^#\|\s*eval:\s*false", source, re.M)], tmp_path)
