"A data set is found wherever one works, checked in one place, and normalised the same way for everybody."
import dataclasses
import gzip
import importlib.util
import itertools
import json
import os
import random
import shutil
from pathlib import Path
import numpy as np
import pytest
import torch
from PIL import Image
import fedinterp
from fedinterp import data as room
from fedinterp.core import Config, FedInterpError, InputError, rng_for
from fedinterp.data import balanced_indices, dataset_from_arrays, describe, load_dataset, read_debian_fashion_mnist, split_calibration
from fedinterp.models import predict
from fedinterp.partition import partition
from fedinterp.plays import ALPHABET, NAMES, decode, encode, read_roles, role_arrays, windows
from fedinterp.table import wide
from fedinterp.train import train

CHECKOUT = Path(__file__).resolve().parent.parent
needs_real_data = pytest.mark.skipif(not os.environ.get("FEDINTERP_DATA"), reason="FEDINTERP_DATA is not set: no real data sets")
needs_debian = pytest.mark.skipif(not room._debian.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed")
needs_checkout = pytest.mark.skipif(not (CHECKOUT / "data").is_dir(), reason="not a checkout: no data folder")


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return dict(x_train=rng.integers(0, 256, (40, 6, 6, 3), dtype=np.uint8), y_train=np.arange(40) % 4,
                x_test=rng.integers(0, 256, (12, 6, 6, 3), dtype=np.uint8), y_test=np.arange(12) % 4)


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    "A machine without any data set."
    monkeypatch.delenv("FEDINTERP_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(room, "_debian", tmp_path / "no-debian")
    return tmp_path


# the embedded set

def test_the_embedded_set_loads_from_any_working_directory(nowhere, monkeypatch):
    monkeypatch.chdir(nowhere)
    data = load_dataset("fashion_mnist_small")
    assert (data.x_train.shape, data.x_test.shape) == ((10_000, 1, 28, 28), (2_000, 1, 28, 28))
    assert data.x_train.dtype == torch.float32 and data.y_train.dtype == torch.int64 and data.x_train.is_contiguous()
    assert torch.bincount(data.y_train).tolist() == [1000] * 10 and torch.bincount(data.y_test).tolist() == [200] * 10
    assert data.classes[5] == "Sandal" and data.fingerprint == "bd0da13faa8a"


@needs_checkout
def test_the_embedded_set_loads_from_a_wheel(nowhere, monkeypatch):
    package = nowhere / "site-packages" / "fedinterp"
    (package / "_data").mkdir(parents=True)
    shutil.copy(CHECKOUT / "data" / "fashion_mnist_small.npz", package / "_data")
    monkeypatch.setattr(fedinterp, "__file__", str(package / "__init__.py"))
    assert load_dataset("fashion_mnist_small").fingerprint == "bd0da13faa8a"
    (package / "_data" / "fashion_mnist_small.npz").unlink()
    with pytest.raises(InputError, match="fashion_mnist_small was not found"): load_dataset("fashion_mnist_small")


@needs_checkout
@needs_debian
def test_the_embedded_set_is_rebuilt_to_the_same_arrays(tmp_path):
    spec = importlib.util.spec_from_file_location("maker", CHECKOUT / "data" / "make_fashion_mnist_small.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    first, again = maker.make(tmp_path / "a.npz"), maker.make(tmp_path / "b.npz")
    assert first.read_bytes() == again.read_bytes()
    with np.load(first) as new, np.load(CHECKOUT / "data" / "fashion_mnist_small.npz") as old:
        assert sorted(new) == sorted(old) and all(np.array_equal(new[k], old[k]) and new[k].dtype == old[k].dtype for k in old)


# finding others

@needs_debian
def test_the_whole_of_fashion_mnist_comes_from_debians_package(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDINTERP_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    data = load_dataset("fashion_mnist")
    assert len(data.x_train) == 60_000 and torch.bincount(data.y_train).tolist() == [6000] * 10
    assert abs(data.x_train.mean()) < 1e-3 and abs(data.x_train.std() - 1) < 1e-3
    assert (data.mean, data.std) == ((.286,), (.353,))


@needs_debian
def test_another_file_in_place_of_a_published_one_is_refused(tmp_path):
    for file in room._debian.iterdir(): (tmp_path / file.name).symlink_to(file)
    labels = tmp_path / "t10k-labels-idx1-ubyte.gz"
    raw = bytearray(gzip.decompress(labels.read_bytes()))
    raw[-1] = (raw[-1] + 1) % 10
    labels.unlink(), labels.write_bytes(gzip.compress(raw))
    with pytest.raises(InputError, match="not the published file"): read_debian_fashion_mnist(tmp_path)
    labels.write_bytes(gzip.compress(raw)[:50])
    with pytest.raises(InputError, match="cannot be read"): read_debian_fashion_mnist(tmp_path)


@needs_debian
def test_files_as_torchvision_keeps_them_are_read(nowhere):
    raw = nowhere / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for file in Path("/usr/share/datasets/fashion-mnist").glob("*.gz"): (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    data = load_dataset("fashion_mnist", root=nowhere)
    assert len(data.x_train) == 60_000 and data.classes[0] == "T-shirt/top"
    (raw / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(FedInterpError, match="incomplete or damaged"): load_dataset("fashion_mnist", root=nowhere)


@needs_real_data
@pytest.mark.parametrize("name, shape, classes, mean", [
    ("cifar10", (3, 32, 32), 10, (.4914, .4822, .4465)), ("mnist", (1, 28, 28), 10, (.1307,)), ("femnist", (1, 28, 28), 62, None)])
def test_real_sets_load_and_their_constants_fit(name, shape, classes, mean):
    data = load_dataset(name)
    assert tuple(data.x_train.shape[1:]) == shape and len(data.classes) == classes and (mean is None or data.mean == mean)
    assert data.x_train.mean((0, 2, 3)).abs().max() < 1e-3 and (data.x_train.std((0, 2, 3)) - 1).abs().max() < 1e-3
    assert (data.groups is not None) == (name == "femnist")
    assert wide(describe(data)).loc["all"].tolist() == [len(data.y_train), len(data.y_test)]


@needs_real_data
def test_femnist_knows_its_writers_and_its_letters():
    data = load_dataset("femnist")
    assert len(np.unique(data.groups)) == 207 and len(data.groups) == len(data.y_train)
    assert (data.classes[9], data.classes[10], data.classes[36]) == ("9", "A", "a")


def test_a_named_set_is_found_in_root_before_the_environment_before_the_cache(nowhere, monkeypatch, arrays):
    places = [nowhere / "root", nowhere / "variable", nowhere / "home" / ".cache" / "fedinterp"]
    for i, place in enumerate(places):
        place.mkdir(parents=True)
        np.savez(place / "mine.npz", **arrays, classes=[f"{i}{c}" for c in "abcd"])
    monkeypatch.setenv("FEDINTERP_DATA", str(places[1]))
    assert load_dataset("mine", root=places[0]).classes[0] == "0a"
    assert load_dataset("mine").classes[0] == "1a"
    monkeypatch.delenv("FEDINTERP_DATA")
    assert load_dataset("mine").classes[0] == "2a"


def test_a_folder_of_arrays_an_npz_and_the_arrays_give_the_same_data_set(nowhere, arrays):
    (nowhere / "mine").mkdir()
    for name, array in arrays.items(): np.save(nowhere / "mine" / f"{name}.npy", array)
    np.savez(nowhere / "packed.npz", **arrays, writer_train=np.arange(40) // 4)
    direct = dataset_from_arrays(**arrays)
    for found in (load_dataset(nowhere / "mine"), load_dataset(str(nowhere / "packed.npz")), load_dataset("mine", root=nowhere)):
        assert found.fingerprint == direct.fingerprint and found.mean == direct.mean and found.classes == ("0", "1", "2", "3")
    assert load_dataset(nowhere / "packed.npz").groups.tolist() == (np.arange(40) // 4).tolist()


@pytest.mark.parametrize("name, words", [
    ("cifar10", "cifar10 was not found .looked in .*download=True, or a file cifar10.npz in the folder that FEDINTERP_DATA names"),
    ("fashion_mnist", "Debian's package dataset-fashion-mnist"), ("femnist", "use a file femnist.npz"),
    ("fashion-mnist", "did you mean 'fashion_mnist'"), ("CIFAR10", "unknown data set 'CIFAR10'"),
    (None, "unknown data set"), ("", "unknown data set"),
    ("./nothing", "there is no data set at"), (Path("nothing"), "there is no data set at"), ("nothing.npz", "there is no data set at")])
def test_what_is_not_there_is_refused_with_the_way_to_get_it(nowhere, monkeypatch, name, words):
    monkeypatch.chdir(nowhere)
    with pytest.raises(InputError, match=words) as e: load_dataset(name)
    assert "\n" not in str(e.value)


def test_only_known_sources_are_downloaded(nowhere):
    with pytest.raises(InputError, match="femnist was not found"): load_dataset("femnist", download=True)


def test_a_failed_download_says_so(nowhere, monkeypatch):
    import torchvision
    def no_network(*args, **kwargs): raise RuntimeError("no route to host\nmore")
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", no_network)
    with pytest.raises(FedInterpError, match="cifar10 could not be downloaded to .*no route to host$"):
        load_dataset("cifar10", download=True)


def test_damaged_and_foreign_files_are_refused(nowhere, arrays):
    file = nowhere / "mine.npz"
    np.savez_compressed(file, **arrays)
    whole = file.read_bytes()
    for broken in (b"", b"text", whole[:len(whole) // 2], whole[:200] + bytes(100) + whole[300:]):
        file.write_bytes(broken)
        with pytest.raises(InputError, match="mine.npz"): load_dataset(file)
    np.savez(file, **{**arrays, "y_train": np.array([{}] * 40)})
    with pytest.raises(InputError, match="allow_pickle=False"): load_dataset(file)
    np.savez(file, x_train=arrays["x_train"])
    with pytest.raises(InputError, match="lacks y_train, x_test, y_test"): load_dataset(file)
    np.savez(file, **{**arrays, "y_train": arrays["y_train"][1:]})
    with pytest.raises(InputError, match=r"mine.npz: y_train has shape \(39,\)"): load_dataset(file)
    np.save(nowhere / "x.npy", arrays["x_train"])
    with pytest.raises(InputError, match="cannot be read"): load_dataset(nowhere / "x.npy")
    (nowhere / "empty").mkdir()
    with pytest.raises(InputError, match="lacks x_train"): load_dataset(nowhere / "empty")


# arrays

@pytest.mark.parametrize("form", ["uint8", "int64", "float 0..1", "float 0..255", "float64 standardised", "tensor"])
def test_every_accepted_form_gives_the_same_images(arrays, form):
    def change(x):
        first = x.transpose(0, 3, 1, 2)
        return {"uint8": x, "int64": x.astype(np.int64), "float 0..1": np.float32(first) / 255, "float 0..255": np.float32(first),
                "float64 standardised": (first / 255 - .4) / .2, "tensor": torch.from_numpy(x)}[form]
    plain = dataset_from_arrays(**arrays)
    other = dataset_from_arrays(change(arrays["x_train"]), torch.from_numpy(arrays["y_train"]), change(arrays["x_test"]), arrays["y_test"])
    assert torch.allclose(plain.x_train, other.x_train, atol=1e-4) and torch.allclose(plain.x_test, other.x_test, atol=1e-4)
    assert np.array_equal(plain.images(plain.x_train), arrays["x_train"])
    assert np.array_equal(plain.images(plain.x_test[3]), arrays["x_test"][3])


def test_grey_images_need_no_channel_axis_and_come_back_without_one(arrays):
    x, x_test = arrays["x_train"][..., 0], arrays["x_test"][..., 0]
    plain = dataset_from_arrays(x, arrays["y_train"], x_test, arrays["y_test"])
    floats = dataset_from_arrays(x / 255, arrays["y_train"], x_test / 255, arrays["y_test"])
    assert plain.channels == 1 and np.array_equal(plain.images(plain.x_train), x)
    assert torch.allclose(plain.x_train, floats.x_train, atol=1e-5)


def test_the_callers_arrays_are_never_written_to(arrays):
    floats = {k: v.transpose(0, 3, 1, 2).astype(np.float32).copy() if k[0] == "x" else v for k, v in arrays.items()}
    before = {k: v.copy() for k, v in floats.items()}
    data = dataset_from_arrays(**floats)
    data.y_train[:] = 0
    assert all(np.array_equal(before[k], floats[k]) for k in before)


def test_read_only_and_reversed_arrays_are_fine(arrays):
    x = arrays["x_train"][::-1]
    x.flags.writeable = False
    assert np.array_equal((d := dataset_from_arrays(**{**arrays, "x_train": x})).images(d.x_train), x)


def test_the_test_images_have_no_part_in_the_constants(arrays):
    one = dataset_from_arrays(**arrays)
    two = dataset_from_arrays(**{**arrays, "x_test": arrays["x_test"] // 2})
    assert (one.mean, one.std) == (two.mean, two.std)
    assert one.x_train.mean((0, 2, 3)).abs().max() < 1e-4


X, Y = np.zeros((8, 4, 4), np.uint8), np.arange(8) % 2


@pytest.mark.parametrize("wrong, words", [
    (dict(x_train=np.zeros((8, 4, 5), np.uint8)), "square"), (dict(x_train=np.zeros((8, 16), np.uint8)), r"shape \(8, 16\)"),
    (dict(x_train=np.zeros((8, 3, 4, 4), np.uint8)), "square"), (dict(x_train=np.zeros((8, 4, 4, 3), np.float32)), "square"),
    (dict(x_train=np.zeros((0, 4, 4), np.uint8), y_train=Y[:0]), "at least one"),
    (dict(x_test=np.zeros((8, 4, 4, 0), np.uint8)), "x_test has shape"),
    (dict(x_train=np.full((8, 4, 4), np.nan)), "128 values that are NaN"), (dict(x_train=np.full((8, 4, 4), np.inf)), "NaN or infinite"),
    (dict(x_train=np.full((8, 4, 4), 256)), "pixels go from 0 to 255"), (dict(x_train=np.full((8, 4, 4), "a")), "give pixels"),
    (dict(x_train=None), "give pixels"), (dict(y_train=Y[1:]), "one label an image"), (dict(y_train=Y[:, None]), "one label an image"),
    (dict(y_test=Y - 1), "y_test goes from -1"), (dict(y_train=Y / 1), "labels are integers"),
    (dict(y_train=Y + 10**9), "labels count the classes"),
    (dict(classes=["a"]), "y_train goes from 0 to 1"), (dict(classes=["a", "a"]), "different names"), (dict(classes=[]), "y_train goes"),
    (dict(groups=[1, 2]), "one id for each of 8"), (dict(x_test=np.zeros((8, 5, 5), np.uint8)), "should be alike"),
    (dict(x_test=np.zeros((8, 4, 4, 3), np.uint8)), "should be alike"), (dict(std=0), "std above 0"),
    (dict(mean=[.1, .2]), "should be one number each"),
    (dict(mean=np.nan), "finite"), (dict(x_train=np.arange(128.).reshape(8, 4, 4), mean=.5), "mean and std are for uint8")])
def test_wrong_arrays_are_refused_in_one_sentence(wrong, words):
    with pytest.raises(InputError, match=words) as e: dataset_from_arrays(**{**dict(x_train=X, y_train=Y, x_test=X, y_test=Y), **wrong})
    assert "\n" not in str(e.value)


def test_constant_images_stay_finite():
    assert dataset_from_arrays(X, Y, X, Y).x_train.isfinite().all()
    assert dataset_from_arrays(X + 7., Y, X + 7., Y).x_train.isfinite().all()


def test_the_fingerprint_notices_any_change_of_content(arrays):
    base = dataset_from_arrays(**arrays).fingerprint
    assert base == dataset_from_arrays(**arrays, name="other").fingerprint
    for key in arrays:
        changed = {k: v.copy() for k, v in arrays.items()}
        changed[key].flat[-1] = (changed[key].flat[-1] + 1) % 4
        assert dataset_from_arrays(**changed).fingerprint != base


# draws

@pytest.mark.parametrize("n", [1, 9, 10, 53, 400])
def test_a_balanced_draw_is_as_even_as_possible(n):
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    drawn = balanced_indices(labels, n, rng_for(0, "test", n))
    held = np.bincount(labels[drawn], minlength=10)
    assert len(np.unique(drawn)) == n and held.max() - held.min() <= 1 and np.array_equal(drawn, np.sort(drawn))
    assert np.array_equal(drawn, balanced_indices(torch.from_numpy(labels), n, rng_for(0, "test", n)))


def test_a_balanced_draw_uses_the_last_image_where_it_must():
    labels = [0, 0, 1, 1, 1]
    for seed in range(10): assert np.bincount(np.array(labels)[balanced_indices(labels, 5, rng_for(seed, "test"))]).tolist() == [2, 3]


@pytest.mark.parametrize("n, exclude", [(0, None), (-1, None), (9, None), (4, [0])])
def test_a_draw_that_cannot_be_balanced_is_refused(n, exclude):
    with pytest.raises(InputError, match="cannot be drawn evenly from 2 classes: class 0 has"):
        balanced_indices([0, 0, 1, 1, 1, 1, 1], n, rng_for(0, "test"), exclude=exclude)


def test_nothing_can_be_drawn_from_nothing():
    with pytest.raises(InputError, match="there are none"): balanced_indices([], 1, rng_for(0, "test"))


def test_the_calibration_slice_is_balanced_and_kept_out_of_the_fit():
    labels = np.random.default_rng(0).integers(0, 4, 300)
    fit, calibrate = split_calibration(labels, 40, rng_for(0, "test"))
    assert np.bincount(labels[calibrate]).tolist() == [10] * 4
    assert np.array_equal(np.sort(np.concatenate([fit, calibrate])), np.arange(300))


def test_nothing_here_touches_global_random_state(arrays):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    load_dataset("fashion_mnist_small"), dataset_from_arrays(**arrays), split_calibration(arrays["y_train"], 8, rng_for(0, "test"))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


# texts

VERSES = ("Mark me. I am thy father's spirit, doomed for a certain term to walk the night, and for the day confined to fast in fires.",
          "To be, or not to be: that is the question: whether 'tis nobler in the mind to suffer the slings and arrows of outrageous fortune.",
          "Tomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day, to the last syllable of recorded time.")


@pytest.fixture
def plays(tmp_path):
    "A file of four roles, one of whom says little."
    rows = [dict(play="P", role=r, lines=[f"{VERSES[i % 3]} {n}" for n in range(25)]) for i, r in enumerate("ABC")] + [dict(play="P", role="D", lines=["Who's there?"])]
    path = tmp_path / "shakespeare_roles.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_characters_come_back_and_strangers_become_spaces():
    assert len(set(ALPHABET)) == len(set(NAMES)) == 80
    assert decode(encode(ALPHABET)) == ALPHABET and decode(encode("ß→$\t|{")) == " " * 6


@pytest.mark.parametrize("length, stride, n", [(5, 1, 40), (5, 3, 40), (8, 8, 40), (5, 1, 6), (5, 1, 5), (5, 1, 0), (1, 1, 3)])
def test_windows_and_labels_are_the_text(length, stride, n):
    text = np.arange(n, dtype=np.uint8)
    x, y = windows(text, length, stride)
    assert len(x) == len(y) == (-(-(n - length) // stride) if n > length else 0)
    assert all(np.array_equal(row, text[i * stride:i * stride + length]) and label == text[i * stride + length] for i, (row, label) in enumerate(zip(x, y)))


def test_roles_are_cut_in_order_and_share_nothing(plays, monkeypatch):
    monkeypatch.setenv("FEDINTERP_DATA", str(plays.parent))
    data, said = load_dataset("shakespeare"), read_roles(plays)
    assert data.fingerprint == load_dataset("shakespeare").fingerprint == load_dataset(plays).fingerprint
    assert data.tokens and data.x_train.dtype == data.y_train.dtype == data.x_test.dtype == torch.int64 and data.size == 80 and len(data.classes) == 80
    assert sorted(set(data.groups)) == ["P: A", "P: B", "P: C"] and "texts of 80 tokens, 80 classes, 3 roles" in repr(data)
    texts = [said[g][:len(said[g]) * 9 // 10] for g in data.groups]
    assert all(decode([*row, label]) in text for row, label, text in zip(data.x_train, data.y_train, texts))
    tails = [said[g][len(said[g]) * 9 // 10:] for g in sorted(set(data.groups))]
    assert [decode([*row, label]) for row, label in zip(data.x_test, data.y_test)] == [t[i:i + 81] for t in tails for i in range(0, len(t) - 80, 80)]
    with pytest.raises(InputError, match="holds texts"): data.images(data.x_test)


def test_windows_of_ones_own_choice_make_a_data_set(plays):
    arrays = role_arrays(read_roles(plays), length=20, stride=7, min_characters=1000)
    data = dataset_from_arrays(**arrays, name="short")
    assert data.x_train.shape[1] == 20 and torch.equal(data.x_train, torch.from_numpy(arrays["x_train"].astype(np.int64)))
    with pytest.raises(InputError, match="no role says 5000 characters or more"): role_arrays(read_roles(plays), min_characters=5000)
    with pytest.raises(InputError, match="min_characters = 800 should be a whole number from 810"): role_arrays(read_roles(plays), min_characters=800)


def test_tokens_in_an_npz_are_texts(tmp_path):
    x = np.arange(40).reshape(10, 4) % 7
    np.savez(tmp_path / "codes.npz", x_train=x, y_train=x[:, 0], x_test=x[:3], y_test=x[:3, 1], vocab=7)
    data = load_dataset("codes", root=tmp_path)
    assert data.tokens and np.array_equal(data.x_train, x) and x.dtype == np.int64
    data.x_train[0, 0] = 6
    assert x[0, 0] == 0


@pytest.mark.parametrize("wrong, words", [
    (dict(x_train=np.zeros((8, 4, 4), np.uint8)), r"x_train has shape \(8, 4, 4\)"), (dict(x_train=np.zeros((8, 4))), "holds float64"),
    (dict(x_test=np.full((8, 4), 5)), "x_test holds tokens from 5 to 5: with vocab = 5, they go from 0 to 4"),
    (dict(x_train=np.full((8, 4), -1)), "tokens from -1"), (dict(x_test=np.zeros((8, 3), int)), r"training texts are \(4,\) and test texts \(3,\)")])
def test_wrong_texts_are_refused_in_one_sentence(wrong, words):
    ok = np.zeros((8, 4), int)
    with pytest.raises(InputError, match=words): dataset_from_arrays(**{**dict(x_train=ok, y_train=Y, x_test=ok, y_test=Y, vocab=5), **wrong})


# folders of images

@pytest.fixture
def photos(tmp_path, arrays):
    "Four classes of PNG files as Tiny-ImageNet has them."
    home = tmp_path / "tiny-imagenet-200"
    for part in ("train", "val/images", "test/images"): (home / part).mkdir(parents=True)
    for i, (x, y) in enumerate(zip(arrays["x_train"], arrays["y_train"])):
        (home / f"train/n{y}/images").mkdir(parents=True, exist_ok=True)
        Image.fromarray(x).save(home / f"train/n{y}/images/n{y}_{i:03d}.png")
    for i, x in enumerate(arrays["x_test"]): Image.fromarray(x).save(home / f"val/images/val_{i}.png")
    Image.fromarray(arrays["x_test"][0]).save(home / "test/images/test_0.png")
    (home / "val/val_annotations.txt").write_text("".join(f"val_{i}.png\tn{y}\t0\t0\t5\t5\n" for i, y in enumerate(arrays["y_test"])))
    return home


def test_tiny_imagenet_is_read_from_its_folder(photos, arrays):
    data = load_dataset("tiny_imagenet", root=photos.parent)
    order = np.argsort(arrays["y_train"], kind="stable")
    assert data.classes == ("n0", "n1", "n2", "n3") and np.array_equal(data.y_train, arrays["y_train"][order]) and np.array_equal(data.y_test, arrays["y_test"])
    assert np.array_equal(data.images(data.x_train), arrays["x_train"][order]) and np.array_equal(data.images(data.x_test), arrays["x_test"])
    assert data.mean == (.4802, .4481, .3975) and data.fingerprint != load_dataset(photos).fingerprint  # a path is only what it holds
    assert load_dataset(photos).classes == data.classes


def test_a_damaged_folder_of_images_is_refused_and_the_file_named(photos):
    (photos / "train/n0/images/n0_000.png").write_bytes(b"cut off")
    with pytest.raises(InputError, match="n0_000.png cannot be read as an image"): load_dataset(photos)
    shutil.rmtree(photos / "train")
    (photos / "train").mkdir()
    with pytest.raises(InputError, match="lacks images of its train part"): load_dataset(photos)


def test_sets_without_files_say_how_to_get_them(nowhere):
    for name, words in (("cifar100", "download=True, or a file cifar100.npz"), ("tiny_imagenet", "tiny-imagenet-200 or a file tiny_imagenet.npz"),
                        ("shakespeare", "shakespeare_roles.jsonl or a file shakespeare.npz"), ("femnist", "use a file femnist.npz")):
        with pytest.raises(InputError, match=words): load_dataset(name)


# one round on each

def one_round(tmp_path, data, model, args, **kw):
    config = Config(dataset=data.name, model=model, model_args=args, rounds=1, **{"local_steps": 2, "batch_size": 8, "lr": 1e-2, **kw})
    run = train(config, tmp_path / "runs", workers=1, progress=False, data=data)
    scores = run.metrics().query("client == 'server' and metric == 'accuracy' and cls == 'all'")
    assert run.done == 1 and scores.value.between(0, 1).all() and len(scores) == 2
    assert not all(torch.equal(run.server(0)[k], v) for k, v in run.server(1).items())
    return run


def test_a_federation_of_roles_trains_on_characters(tmp_path, plays):
    data = load_dataset(plays)
    run = one_round(tmp_path, data, "char_lstm", dict(hidden=8, embedding=4), partition="groups", clients=3)
    assert [set(data.groups[p]) for p in run.partition] in [[{f"P: {r}"} for r in order] for order in itertools.permutations("ABC")]
    assert predict(run.model(1), data.x_test).shape == (len(data.x_test), 80)
    again = train(run.config, tmp_path / "twice", workers=2, progress=False, data=data)
    assert all(torch.equal(v, again.server(1)[k]) for k, v in run.server(1).items())


@pytest.mark.parametrize("model, args", [("two_cnn", dict(hidden=2, features=8, grid=2)), ("femnist_cnn", dict(hidden=2, features=8, grid=2))])
def test_a_federation_trains_on_arrays_and_on_folders(tmp_path, arrays, photos, model, args):
    large = {k: v.repeat(2, 1).repeat(2, 2) if k[0] == "x" else v for k, v in arrays.items()}
    np.savez(tmp_path / "cifar100.npz", **large)
    data = load_dataset("cifar100", root=tmp_path)
    assert data.mean == (.5071, .4865, .4409)
    one_round(tmp_path, data, model, args, partition="dirichlet:1", clients=3)
    for file in photos.rglob("*.png"): Image.open(file).resize((10, 10), Image.NEAREST).save(file)
    one_round(tmp_path, load_dataset("tiny_imagenet", root=photos.parent), model, args, partition="iid", clients=4)


@needs_real_data
def test_a_client_of_femnist_is_a_writer(tmp_path):
    data = load_dataset("femnist")
    parts = partition(data.y_train, "groups", 207, groups=data.groups)
    assert len(parts) == 207 and all(len(set(data.groups[p])) == 1 for p in parts)
    few = dataclasses.replace(data, x_test=data.x_test[:200], y_test=data.y_test[:200])
    run = one_round(tmp_path, few, "femnist_cnn", dict(hidden=4, features=16), partition="groups:5", clients=5, min_samples=100)
    assert [len(set(data.groups[p])) for p in run.partition] == [1] * 5 and min(map(len, run.partition)) >= 100


@needs_real_data
def test_shakespeares_roles_are_the_groups(tmp_path):
    path = Path(os.environ["FEDINTERP_DATA"]) / "shakespeare_roles.jsonl"
    if not path.exists(): pytest.skip("FEDINTERP_DATA holds no shakespeare_roles.jsonl")
    roles = read_roles(path)
    assert len(roles) == 1009 and sum(len(t) >= 2000 for t in roles.values()) == 446
    some = dict(sorted(roles.items(), key=lambda r: -len(r[1]))[:6])
    data = dataset_from_arrays(**role_arrays(some, stride=50), name="roles")
    assert len(np.unique(data.groups)) == 6 and len(np.unique(data.y_train)) > 40
    few = dataclasses.replace(data, x_test=data.x_test[:100], y_test=data.y_test[:100])
    one_round(tmp_path, few, "char_lstm", dict(hidden=8), partition="groups:3", clients=3)
