"""stats: one bootstrap, shared by figures that are compared."""
import numpy as np
import pytest
from fedinterp.core import InputError, rng_for
from fedinterp.stats import Bootstrap, interval


def test_the_estimate_is_the_plain_mean_and_lies_in_its_interval():
    right = rng_for(0, "r").random((5, 400)) < 0.7
    found = interval(Bootstrap(400, draws=5).mean(right))
    assert found["value"] == right.mean() and found["lo"] < found["value"] < found["hi"]


def test_a_difference_is_paired_so_a_model_differs_from_itself_by_exactly_nothing():
    right, boot = rng_for(0, "r").random((5, 400)) < 0.7, Bootstrap(400, draws=5)
    assert interval(boot.mean(right) - boot.mean(right.copy())) == dict(value=0.0, lo=0.0, hi=0.0)


def test_an_interval_for_images_alone_has_the_width_of_the_normal_approximation():
    right = np.arange(2000) < 1500
    found = interval(Bootstrap(2000, resamples=4000).mean(right))
    assert found["hi"] - found["lo"] == pytest.approx(2 * 1.96 * (0.75 * 0.25 / 2000) ** 0.5, rel=0.05)


def test_answers_that_depend_on_the_draw_only_are_as_uncertain_as_the_draws():
    right = np.repeat(np.arange(20)[:, None] < 10, 500, axis=1)
    found = interval(Bootstrap(500, draws=20).mean(right))
    assert found["hi"] - found["lo"] > 0.3


def test_a_class_is_scored_on_its_own_images():
    y = np.arange(100) % 4
    assert Bootstrap(100).mean(y == 2, where=y == 2)[0] == 1.0


def test_the_same_seed_gives_the_same_bits_and_global_state_is_left_alone():
    before = np.random.get_state()[1].copy()
    right = rng_for(0, "r").random(300) < 0.5
    assert np.array_equal(Bootstrap(300, seed=4).mean(right), Bootstrap(300, seed=4).mean(right))
    assert (np.random.get_state()[1] == before).all()


def test_answers_of_another_shape_are_refused():
    with pytest.raises(InputError, match="do not fit 3 draws of 50 images"): Bootstrap(50, draws=3).mean(np.ones((2, 50)))
