"rows: the same image and place in every model, in memory or on disk."
import subprocess, sys
import numpy as np
import pytest
import torch
from torch import nn
from fedinterp.core import InputError, StorageError, seeded
from fedinterp.models import build_model
from fedinterp.rows import as_rows, collect, find_site
from fedinterp.sites import Site, adapter, capture


def images(n, shape=(1, 28, 28), seed=0): return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))
def pair(): return {"cnn": build_model("simple_cnn", channels=(4, 6, 8)), "resnet": build_model("resnet10", channels=(4, 6, 8, 10))}


WHERE = {"cnn": "conv3", "resnet": "block3.0"}


def test_rows_are_ordered_by_image_height_and_width():
    models, x = {"a": build_model("simple_cnn", channels=(4, 6, 8))}, images(5)
    rows, act = collect(models, x), capture(models["a"], x, "conv3")["conv3"]
    assert rows.acts["a"].shape == (5 * 9, 8) and rows.shape == {"a": (3, 3)} and rows.sites == {"a": "conv3"}
    for n, i, j in ((0, 0, 1), (3, 1, 0), (4, 2, 2)): assert torch.allclose(rows.acts["a"][9*n + 3*i + j], act[n, :, i, j], atol=1e-6)
    assert rows.image.tolist() == [n for n in range(5) for _ in range(9)]


def test_a_models_rows_belong_to_the_same_place_as_the_others():
    "A model that passes pixels on, beside one that passes their squares on: row by row, the one is the square of the other."
    class Power(nn.Module):
        def __init__(self, p): super().__init__(); self.p, self.site, self.fc = p, nn.Identity(), nn.Linear(16, 2)
        def forward(self, x): return self.fc(self.site(x ** self.p).flatten(1))
    rows = collect({"x": Power(1), "square": Power(2)}, images(6, (1, 4, 4)), Site("site"))
    assert torch.allclose(rows.acts["x"] ** 2, rows.acts["square"])


def test_different_grids_are_resized_to_the_smaller():
    models, x = pair(), images(4)
    rows = collect(models, x, WHERE)
    big = capture(models["cnn"], x, "conv3")["conv3"]
    assert rows.shape == {"cnn": (2, 2), "resnet": (2, 2)} and rows.acts["cnn"].shape == (16, 8)
    assert torch.allclose(rows.acts["cnn"], as_rows(nn.functional.interpolate(big, (2, 2), mode="bilinear")), atol=1e-6)


def test_the_memory_map_equals_the_rows_in_memory_whatever_the_batch(tmp_path):
    models, x = pair(), images(50)
    held = collect(models, x, WHERE, batch=50)
    for batch in (7, 50):
        mapped = collect(models, x, WHERE, tmp_path/str(batch), batch=batch)
        for n in models: assert np.allclose(mapped.acts[n], held.acts[n], atol=1e-6) and not mapped.acts[n].flags.writeable
    assert mapped.image.equal(held.image)


@pytest.mark.parametrize("change", ["weights", "images", "site", "order", "short", "note"])
def test_what_is_on_disk_is_used_only_if_complete_and_of_the_same(tmp_path, change):
    models, x, site = pair(), images(20), dict(WHERE)
    collect(models, x, site, tmp_path)
    kept = (tmp_path/"0.npy").stat().st_mtime_ns
    collect(models, x, site, tmp_path)
    assert (tmp_path/"0.npy").stat().st_mtime_ns == kept
    if change == "weights": models["cnn"].conv1.weight.data[0, 0, 0, 0] += 1
    if change == "images": x = x + .1
    if change == "site": site["cnn"] = "conv2"
    if change == "order": models = dict(reversed(models.items()))
    if change == "short": (tmp_path/"1.npy").write_bytes((tmp_path/"1.npy").read_bytes()[:-4])
    if change == "note": (tmp_path/"rows.json").write_text("[]")
    mapped, held = collect(models, x, site, tmp_path), collect(models, x, site)
    for n in models: assert np.array_equal(mapped.acts[n], held.acts[n])


def test_an_interrupted_writing_is_not_taken_for_complete(tmp_path):
    models, x = pair(), images(20)
    collect(models, x, WHERE, tmp_path)
    broken = {"cnn": models["cnn"], "resnet": build_model("resnet10", channels=(4, 6, 8, 10), seed=1)}
    handle = broken["resnet"].fc.register_forward_hook(lambda m, args, out: 1/0 if len(out) > 1 else out)
    where = {"cnn": Site("pool3"), "resnet": Site("block3")}
    with pytest.raises(ZeroDivisionError): collect(broken, x, where, tmp_path)
    handle.remove()
    assert (tmp_path/"0.npy").exists() and not (tmp_path/"rows.json").exists()
    mapped = collect(models, x, where, tmp_path)
    assert np.array_equal(mapped.acts["resnet"], collect(models, x, where).acts["resnet"])
    assert sum(len(m._forward_hooks) for net in broken.values() for m in net.modules()) == 0


def test_memory_stays_flat_with_a_folder(tmp_path):
    code = f"""
import resource, torch
from fedinterp.models import build_model
from fedinterp.rows import collect
from fedinterp.sites import Site
model, x = torch.nn.Sequential(torch.nn.Conv2d(1, 64, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(64*64, 2)), torch.rand(8000, 1, 8, 8)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
collect(dict(a=model), x[:400], Site("0"), {str(tmp_path/"few")!r}, batch=50)
before = peak()
rows = collect(dict(a=model), x, Site("0"), {str(tmp_path/"all")!r}, batch=50)
print(rows.acts["a"].nbytes / 2**20, peak() - before)"""
    size, grown = map(float, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert size == 125 and grown < 40


def test_a_declared_adapter_and_arrays_are_taken_too():
    class Odd(nn.Module):
        def __init__(self): super().__init__(); self.encoder, self.fc = nn.Sequential(nn.Flatten(), nn.Linear(16, 5)), nn.Linear(5, 2)
        def forward(self, x): return self.fc(self.encoder(x) if x.sum() > 0 else self.encoder(-x))
    with seeded(0, "odd"): net = Odd()
    x = images(10, (1, 4, 4)).numpy()
    declared = adapter(net, head="fc", sites=[Site("encoder", 5)], input_shape=(1, 4, 4))
    rows, again = collect({"odd": declared}, x), collect({"odd": net}, torch.from_numpy(x), Site("encoder"))
    assert rows.shape == {"odd": ()} and rows.acts["odd"].equal(again.acts["odd"]) and rows.image.tolist() == list(range(10))


def test_collecting_leaves_the_model_and_the_random_state_alone():
    models, state = pair(), torch.get_rng_state()
    models["cnn"].train()
    collect(models, images(4), WHERE)
    assert models["cnn"].training and torch.get_rng_state().equal(state)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for net in models.values() for m in net.modules()) == 0


def test_wrong_inputs_are_refused_in_one_sentence(tmp_path):
    models, x = pair(), images(4)
    for given, words in (((models, x, "conv9"), "conv9"), ((models, x, {"cnn": "conv3"}), "names none for 'resnet'"), ((models, x[:0]), "no images"),
                         ((models["cnn"], x), "{name: model}"), (({}, x), "at least one"), ((models, x.int(), WHERE), "floating"),
                         (({"a": models["cnn"], "b": models["cnn"]}, x, {"a": "conv3", "b": Site("fc")}), "cannot be brought together")):
        with pytest.raises(InputError, match=words): collect(*given)
    with pytest.raises(InputError, match="kind"): find_site(models["cnn"], kind="pots")
    (tmp_path/"file").write_text("")
    with pytest.raises(StorageError, match="could not write"): collect(models, x, WHERE, tmp_path/"file"/"rows")
