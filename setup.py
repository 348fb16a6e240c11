"Reads every piece of package metadata from settings.ini, and puts the embedded data and the notebooks into the wheel."
import configparser, pathlib, shutil
from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
cfg = configparser.ConfigParser(delimiters=["="], interpolation=None)
cfg.read(HERE / "settings.ini", encoding="utf-8")
meta = cfg["DEFAULT"]
EXTRAS = "_requirements"


class build_with_data(build_py):
    "A wheel carries data/ and nbs/ inside the package, since nothing beside a package survives installation; a checkout reads them in place."
    def run(self):
        super().run()
        if self.editable_mode: return
        for folder, pattern in (("data", "*.npz"), ("data", "LICENSE*"), ("data", "example/**/*"), ("nbs", "*.ipynb"), ("nbs", "tutorials/*.ipynb"), ("nbs", "tutorials/results/*.csv"), ("nbs", "images/*.png")):
            for source in sorted(p for p in (HERE / folder).glob(pattern) if p.is_file()):
                target = pathlib.Path(self.build_lib) / "fedinterp" / f"_{folder}" / source.relative_to(HERE / folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


extras = {key[: -len(EXTRAS)]: meta[key].split() for key in meta if key.endswith(EXTRAS)}
setup(
    name=meta["lib_name"],
    version=meta["version"],
    description=meta["description"],
    long_description=(HERE / "README.md").read_text(encoding="utf-8") if (HERE / "README.md").exists() else meta["description"],
    long_description_content_type="text/markdown",
    keywords=meta["keywords"].split(),
    author=meta["author"],
    license=meta["license"],
    license_files=["LICENSE", "data/LICENSE*"],
    python_requires=f">={meta['min_python']}",
    install_requires=meta["requirements"].split(),
    extras_require={**extras, "all": sorted({need for needs in extras.values() for need in needs})},
    entry_points={"console_scripts": meta["console_scripts"].split(), "nbdev": ["fedinterp=fedinterp._modidx:d"]},
    packages=["fedinterp"],
    include_package_data=False,
    package_data={"fedinterp": ["static/*"]},
    classifiers=["Programming Language :: Python :: 3 :: Only", "Intended Audience :: Science/Research", "Framework :: Jupyter"],
    cmdclass={"build_py": build_with_data},
)
