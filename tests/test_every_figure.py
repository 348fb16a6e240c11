"What the figures of all rooms keep to, whatever they draw."
import subprocess, sys
import pytest
import test_charts, test_circuit_charts, test_concept_charts, test_personal_charts, test_pruning_charts
from fedinterp.charts import DARK, LIGHT, theme
from fedinterp.table import TableError, table

ROOMS = test_charts, test_circuit_charts, test_concept_charts, test_personal_charts, test_pruning_charts
FIGURES = [(figure, frame() if callable(frame) else frame) for room in ROOMS for figure, frame in room.FIGURES]
each_figure = pytest.mark.parametrize("figure, frames", [(f, x if isinstance(x, tuple) else (x,)) for f, x in FIGURES], ids=[f.__name__ for f, _ in FIGURES])


@each_figure
def test_it_is_a_valid_spec_with_a_title_of_its_own_or_the_caller_s_a_description_and_no_colour_of_its_own(figure, frames):
    spec = figure(*frames).to_dict()  # validates against Vega-Lite's schema
    assert spec["title"]["text"] and spec["title"]["subtitle"] and spec["description"]
    assert figure(*frames, title="Mine").to_dict()["title"]["text"] == "Mine"
    body = str({k: v for k, v in spec.items() if k != "config"})
    assert not [c for c in (*LIGHT, *DARK) if c in body]


@each_figure
def test_the_same_table_gives_the_same_bytes_and_is_not_changed(figure, frames):
    before = [frame.copy(deep=True) for frame in frames]
    assert figure(*frames).to_json() == figure(*frames).to_json()
    assert all(a.equals(b) for a, b in zip(before, frames))


@each_figure
def test_it_draws_through_vega_in_the_light_and_the_dark_look_without_a_warning(figure, frames, recwarn):
    import vl_convert
    spec = figure(*frames).to_dict()
    light, dark = (vl_convert.vegalite_to_svg({**spec, "config": theme(dark)}, vl_version="6.4") for dark in (False, True))
    assert min(light.count("<path"), dark.count("<path")) > 10 and theme(True)["title"]["color"].lower() in dark.lower()
    assert [str(w.message) for w in recwarn] == []


@each_figure
def test_a_foreign_table_is_refused_in_one_sentence_that_names_the_figure(figure, frames):
    for foreign in (table([dict(run="a", round=1, metric="something", value=1.)]), frames[0].assign(metric="something")):
        with pytest.raises(TableError) as error: figure(foreign, *frames[1:])
        assert figure.__name__ in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("room", [room.__name__.removeprefix("test_") for room in ROOMS])
def test_a_room_of_figures_is_imported_without_what_only_drawing_needs(room):
    code = f"import sys, fedinterp.{room}; print([m for m in ('torch', 'altair', 'pandas', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
