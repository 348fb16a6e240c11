"Contracts of configs, names, streams and the algebra on states."
import random, subprocess, sys
import numpy as np, pytest, torch
from fedinterp.core import Config, InputError, RunError, config_from_json, config_to_json, rng_for, seed_for, seeded, torch_rng, weighted_mean


def test_importing_the_package_or_a_config_needs_neither_torch_nor_pandas():
    code = "import sys, fedinterp, fedinterp.core, fedinterp.table; fedinterp.core.Config(); print([m for m in ('torch', 'pandas', 'altair', 'sklearn') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_a_mean_keeps_dtype_and_shape_of_every_kind_of_entry(dtype, shape):
    states = [{"x": torch.ones(shape).to(dtype)}, {"x": torch.zeros(shape).to(dtype)}]
    mean = weighted_mean(states, [1, 3])["x"]
    assert mean.dtype == dtype and mean.shape == torch.Size(shape)
    assert mean.double().flatten().tolist() == [0.25 if dtype.is_floating_point else 1.0] * mean.numel()


def test_a_weighted_mean_is_exact_where_the_result_is_representable():
    states = [{"x": torch.full((1000,), v)} for v in (1.0, 11.0)]
    assert set(weighted_mean(states, [1, 9])["x"].tolist()) == {10.0}


def test_a_mean_of_equal_states_is_that_state_to_the_bit():
    state = {"x": torch.randn(10000, generator=torch_rng(0, "x"))}
    assert weighted_mean([state] * 7, [0.1, 0.7, 3, 1e-9, 5, 1/3, 2])["x"].equal(state["x"])


@pytest.mark.parametrize("weights", [[], [1], [0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_weights_that_define_no_mean_are_refused(weights):
    with pytest.raises(InputError): weighted_mean([{"x": torch.ones(1)}] * 2, weights)


@pytest.mark.parametrize("fields, word", [
    (dict(rounds=0), "rounds"), (dict(clients=0), "clients"), (dict(participation=0), "participation"), (dict(participation=1.5), "participation"),
    (dict(lr=-1), "lr"), (dict(lr="fast"), "lr"), (dict(sparsity=1.0), "sparsity"), (dict(batch_size=0), "batch_size"), (dict(seed=-1), "seed"),
    (dict(local_epochs=0), "local_epochs"), (dict(local_steps=0), "local_steps"), (dict(weighting="sample"), "samples"), (dict(batchnorm="avg"), "average"),
    (dict(optimizer="SGD"), "sgd"), (dict(augment="crop"), "flip"), (dict(on_failure="ignore"), "raise"), (dict(round=1), "rounds"), (dict(clip_grad=0), "clip_grad"),
    (dict(strategy_args={"f": {1, 2}}), "strategy_args"), (dict(lr=float("inf")), "lr"), (dict(momentum=0.9), "sgd"), (dict(clients=2.5), "clients"),
])
def test_a_wrong_field_is_refused_in_one_sentence_that_names_it(fields, word):
    with pytest.raises(InputError) as error: Config(**fields)
    assert word in str(error.value) and "\n" not in str(error.value)


def test_an_id_depends_on_what_is_changed_and_on_nothing_else():
    assert Config().id == Config(rounds=6, lr=1e-3).id
    ids = {Config(**f).id for f in (dict(), dict(seed=1), dict(lr=1e-2), dict(partition="iid"), dict(strategy="fedprox"), dict(strategy_args={"mu": 1}))}
    assert len(ids) == 6


def test_a_config_survives_its_file_and_refuses_a_newer_one():
    config = Config(partition="classes:2", model_args={"channels": [4, 4, 4]}, clip_grad=1.0)
    assert config_from_json(config_to_json(config)) == config
    for text in ('{"schema": 2}', '{"schema": "new"}', '[]', '{', '{"rounds": -1}', '{"no_such": 1}'):
        with pytest.raises(RunError): config_from_json(text)


def test_streams_with_different_names_differ_and_equal_names_agree():
    names = [("local", r, c) for r in range(20) for c in range(20)] + [("cohort", r) for r in range(20)]
    assert len({seed_for(0, *n) for n in names}) == len(names)
    assert rng_for(3, "a", 1).random() == rng_for(3, "a", 1).random()


def test_no_stream_touches_the_global_generators():
    before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    rng_for(0, "a").random(3); torch.randn(3, generator=torch_rng(0, "b"))
    with seeded(0, "c"): torch.nn.Linear(3, 3)
    with pytest.raises(ZeroDivisionError):
        with seeded(0, "d"): torch.randn(()) / (1 // 0)
    assert before == (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
