"""lora: federated averaging of low-rank adapters, and presets with their sources."""
import json
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from conftest import digest, gone_on_with
from fedinterp.core import Config, InputError, weighted_mean
from fedinterp.cost import account
from fedinterp.data import Dataset
from fedinterp.lora import PRESETS, FedSALoRA, FFALoRA, FRLoRA, factors, opt_from_config, preset, preset_data, presets
from fedinterp.private import travelling
from fedinterp.run import unpack
from fedinterp.strategy import FedAvg, Upload, get_strategy
from fedinterp.train import train

pytest.importorskip("transformers"), pytest.importorskip("peft")
from fedinterp.causal import CausalLM  # noqa: E402
STRATEGIES = {"fedsa_lora": {}, "ffa_lora": {}, "frlora": dict(fold=True)}


def counting(n, seed):
    draws = np.random.default_rng(seed)
    rows = [[[1, *(int(draws.integers(3, 8)) + (i % 3 + 1)*np.arange(6)), 2], [0]*3 + [1]*5] for i in range(n)]
    return torch.from_numpy(np.array(rows)), torch.arange(n) % 3


@pytest.fixture(scope="module")
def data():
    return Dataset(*counting(60, 0), *counting(30, 1), ("one", "two", "three"), "counting", groups=np.arange(60) % 3)


@pytest.fixture(scope="module")
def opt(tmp_path_factory): return str(opt_from_config(tmp_path_factory.mktemp("opt"), vocab=32, width=16, layers=1, context=16))


@pytest.fixture(scope="module")
def config(opt):
    return Config(dataset="counting", model="causal_lm", model_args=dict(path=opt, rank=2, alpha=8, targets=["q_proj", "fc1", "fc2"]), partition="groups",
                  clients=3, rounds=2, local_steps=2, batch_size=4, optimizer="adamw", lr=1e-2, weight_decay=0.1)


def setting(config, strategy): return config.replace(strategy=strategy, model_args={**config.model_args, **STRATEGIES[strategy]})


@pytest.fixture(scope="module")
def runs(config, data, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {s: train(setting(config, s), root, workers=1, data=data, progress=False) for s in STRATEGIES}


def named(state, *letters): return {n: v for n, v in state.items() if any(f".lora_{letter}." in n for letter in letters)}
def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
def kept(run): return unpack((run.path/"rounds"/f"{run.done:04d}"/"strategy.safetensors").read_bytes())


def test_fedsa_averages_a_and_never_b(runs):
    run = runs["fedsa_lora"]
    for r in (1, 2):
        trained = [run.client(r, k) for k in range(3)]
        assert same(named(run.server(r), "A"), weighted_mean([named(t, "A") for t in trained], [20, 20, 20]))
        assert same(named(run.server(r), "B"), named(run.server(0), "B")) and not same(named(run.server(r), "A"), named(run.server(0), "A"))
        assert not any(same(named(trained[0], "B"), named(t, "B")) for t in trained[1:])


def test_in_fedsa_each_client_keeps_and_starts_from_the_b_of_its_own_training(runs):
    run = runs["fedsa_lora"]
    for k in range(3):
        own = {n.split("/", 1)[1]: v for n, v in kept(run).items() if n.startswith(f"client_{k:03d}/")}
        assert same({n.removeprefix("own/"): v for n, v in own.items()}, named(run.client(2, k), "B"))
        begin = FedSALoRA().broadcast(run.server(2), {}, own)
        assert same(named(begin, "A"), named(run.server(2), "A")) and same(named(begin, "B"), named(run.client(2, k), "B"))


def test_ffa_never_moves_a_anywhere_not_even_by_weight_decay(runs):
    run = runs["ffa_lora"]
    states = [run.server(r) for r in (1, 2)] + [run.client(r, k) for r in (1, 2) for k in range(3)]
    assert all(same(named(s, "A"), named(run.server(0), "A")) for s in states)
    assert same(named(run.server(2), "B"), weighted_mean([named(run.client(2, k), "B") for k in range(3)], [1, 1, 1]))
    assert all(not torch.equal(v, run.server(0)[n]) for n, v in named(run.server(2), "B").items())


def test_with_a_frozen_the_mean_of_b_gives_the_mean_of_the_changes_and_with_both_moving_it_does_not(runs):
    def gap(run, r):
        (a, b), trained = next(iter(factors(run.server(0)).values())), [run.client(r, k) for k in range(3)]
        mean = weighted_mean([named(t, "A", "B") for t in trained], [1, 1, 1])
        changes = sum(t[b] @ t[a] for t in trained) / 3
        return float((mean[b] @ mean[a] - changes).norm() / changes.norm())
    assert gap(runs["ffa_lora"], 2) < 1e-5 < 1e-2 < gap(runs["fedsa_lora"], 2)


def test_frlora_folds_the_mean_change_into_the_base_and_resets_the_factors(runs):
    run = runs["frlora"]
    for r in (1, 2):
        before, after = run.server(r - 1), run.server(r)
        mean = weighted_mean([named(run.client(r, k), "A", "B") for k in range(3)], [1, 1, 1])
        assert same(named(after, "A", "B"), named(run.server(0), "A", "B"))
        for layer, (a, b) in factors(before).items():
            change = 4.0 * (mean[b].double() @ mean[a].double() - before[b].double() @ before[a].double())
            base = layer + ".base_layer.weight"
            assert torch.allclose(after[base].double(), before[base].double() + change, atol=1e-6) and change.norm() > 1e-4
            assert all(torch.equal(run.client(r, k)[base], before[base]) for k in range(3))


@pytest.mark.parametrize("start", ["zero B", "random B"])
def test_after_a_round_of_equal_updates_the_folded_model_is_the_clients_model(opt, data, start):
    model, rng = CausalLM(opt, rank=2, alpha=8, targets=["q_proj", "fc1"], fold=True).eval(), torch.Generator().manual_seed(0)
    begin = {n: torch.randn(v.shape, generator=rng) if "lora_B" in n and start == "random B" else v.clone() for n, v in model.state_dict().items()}
    trained = {n: torch.randn(v.shape, generator=rng) / 3 if "lora" in n else v for n, v in begin.items()}
    def logits(state):
        model.load_state_dict(state)
        with torch.no_grad(): return model(data.x_test)
    strategy = FRLoRA()
    weights, server = strategy.explore(begin, strategy.init_server(begin, 3), SimpleNamespace(model=model))
    uploads = [Upload(k, 1, 1.0, trained, {}, tuple(n for n in trained if "lora" in n)) for k in range(3)]
    after, server = strategy.aggregate(weights, uploads, server)
    assert {float(v) for v in server.values()} == {4.0}
    assert (logits(after) - logits(trained)).abs().max() < 1e-4 < (logits(begin) - logits(trained)).abs().max()
    assert all(torch.equal(after[n], begin[n]) for n in begin if "lora" in n)


def test_the_account_bills_what_travels(runs):
    size = {letter: sum(4*v.numel() for v in named(runs["ffa_lora"].server(0), letter).values()) for letter in "AB"}
    for name, letters in dict(fedsa_lora="A", ffa_lora="B", frlora="AB").items():
        bill = account(runs[name], sends=travelling(runs[name]))
        for metric in ("bytes up", "bytes down"):
            assert bill[(bill.metric == metric) & (bill["round"] > 0)].value.tolist() == [3*sum(size[x] for x in letters)]*2


@pytest.mark.parametrize("changes", [{}, dict(participation=0.67, eval_clients_every=2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_lora_strategy_gives_equal_bytes_on_one_and_on_two_workers_and_after_a_resume(runs, config, data, tmp_path, strategy, changes):
    config = setting(config, strategy).replace(**changes)
    one = train(config, tmp_path/"one", workers=1, data=data, progress=False) if changes else runs[strategy]
    assert digest(train(config, tmp_path/"two", workers=2, data=data, progress=False)) == digest(one)
    assert digest(gone_on_with(one, data, tmp_path, rounds=1)) == digest(one)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_without_factors_is_refused_in_one_sentence(tiny, tmp_path, strategy):
    config = Config(dataset="tiny", strategy=strategy, clients=2, rounds=1, local_steps=1, partition="iid", model_args=dict(channels=[2, 2, 2]))
    with pytest.raises(InputError, match=f"^{strategy}: this model has no LoRA factors.*rank in its model_args"):
        train(config, tmp_path, workers=1, data=tiny, progress=False)


def test_frlora_refuses_what_it_cannot_fold(runs, config, data, tmp_path):
    with pytest.raises(InputError, match="fold.*True"): train(config.replace(strategy="frlora"), tmp_path, workers=1, data=data, progress=False)
    with pytest.raises(InputError, match="scale = -1.0 should be > 0"): get_strategy("frlora", scale=-1.0)
    state = runs["frlora"].server(0)
    with pytest.raises(InputError, match=r"the scale of '.*' is not in the model: give it"): FRLoRA().explore(state, {}, SimpleNamespace(model=torch.nn.Linear(2, 2)))
    _, server = FRLoRA(scale=3.0).explore(state, {}, SimpleNamespace(model=None))
    assert {float(v) for v in server.values()} == {3.0}
    layer = torch.nn.Linear(2, 2)
    layer.scaling, layer.fan_in_fan_out = {"default": 1.0}, True
    odd = {"q.lora_A": torch.zeros(1, 2), "q.lora_B": torch.zeros(2, 1)}
    with pytest.raises(InputError, match="keeps its weight transposed"): FRLoRA().explore(odd, {}, SimpleNamespace(model=torch.nn.ModuleDict({"q": layer})))


def test_fedavg_on_factors_is_what_it_says_and_gradients_of_b_pass_ffa(runs):
    grads = {"q.lora_A.default.weight": torch.ones(1), "q.lora_B.default.weight": torch.ones(1)}
    out = FFALoRA().local_grad(grads, None)
    assert out["q.lora_A.default.weight"] is None and torch.equal(out["q.lora_B.default.weight"], torch.ones(1))
    assert FFALoRA().travels("q.lora_B.default.weight") and not FFALoRA().travels("q.lora_A.default.weight")
    one, other = {"q.lora_A": torch.ones(1, 1), "q.lora_B": torch.ones(1, 1)}, {"q.lora_A": -torch.ones(1, 1), "q.lora_B": -torch.ones(1, 1)}
    mean, _ = FedAvg().aggregate(one, [Upload(0, 1, 1, one, {}), Upload(1, 1, 1, other, {})], {})
    assert float(mean["q.lora_B"] @ mean["q.lora_A"]) == 0.0  # both clients' change is 1


def test_a_small_opt_is_the_same_for_the_same_seed_and_leaves_the_global_generator_alone(tmp_path):
    before = torch.get_rng_state()
    a, b, c = (opt_from_config(tmp_path/str(i), vocab=16, width=8, layers=1, context=8, seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert torch.equal(torch.get_rng_state(), before)
    read = lambda p: (p/"model.safetensors").read_bytes()
    assert read(a) == read(b) != read(c)
    with pytest.raises(InputError, match="width = 10 should be a multiple of 4"): opt_from_config(tmp_path/"x", width=10)


def test_presets_are_valid_configs_and_every_figure_is_marked():
    for name, figures in PRESETS.items():
        chosen = preset(name)
        assert Config(**chosen["config"]).model == "causal_lm" and chosen["data"]["clients"] == "task"
        assert {mark for _, mark in figures.values()} <= {"published", "proposed"}
        assert all(figures[f"config.{k}"][1] == "proposed" for k in ("rounds", "clients", "lr", "local_steps")) and figures["model_args.rank"] == (8, "proposed")
    assert PRESETS["llama-3.2-1b/flan"]["published.pflalign"] == (.4431, "published")
    assert preset("opt-1.3b/dolly")["config"]["model_args"]["targets"][-1] == "out_proj"
    preset("opt-1.3b/dolly")["config"]["model_args"]["targets"].clear()  # a copy each time
    assert len(preset("opt-1.3b/dolly")["config"]["model_args"]["targets"]) == 4
    with pytest.raises(InputError, match="did you mean 'opt-1.3b/dolly'"): preset("opt-1.3b/doly")
    shown = presets("llama-3.2-1b/flan", "tiny-opt/flan")
    assert shown.loc["model_args.path", "llama-3.2-1b/flan"] == "meta-llama/Llama-3.2-1B (published)" and shown.loc["published.data", "tiny-opt/flan"] == ""
    assert list(presets().columns) == list(PRESETS)


def test_a_preset_names_its_model_without_a_path_of_this_machine(tmp_path, monkeypatch):
    (tmp_path/"stories260k").mkdir()
    monkeypatch.setenv("FEDINTERP_DATA", str(tmp_path))
    assert preset("stories260k/flan")["config"]["model_args"]["path"] == "stories260k"
    assert preset("stories260k/flan", path="else/where")["config"]["model_args"]["path"] == "else/where"


@pytest.fixture(scope="module")
def letters():
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    signs = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz 0123456789\nA:?"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(signs)}, []))
    made.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def test_the_preset_of_a_tiny_opt_runs_from_its_recipe(tmp_path, letters):
    rows = [dict(instruction=f"is {i} even?", output=("no", "yes")[i % 2 == 0], task=t, dataset=1) for i in range(12) for t in ("a", "b")]
    for part in ("train", "test"): (tmp_path/f"flan16_{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chosen = preset("tiny-opt/flan", path=opt_from_config(tmp_path/"opt", letters, width=16, layers=1, context=64))
    data = preset_data(chosen["data"] | dict(length=48), letters, tmp_path)
    assert (data.classes, len(data.y_train), len(data.y_test)) == (("a", "b"), 24, 24)
    assert preset_data(chosen["data"] | dict(length=48, tasks=["b"]), letters, tmp_path).classes == ("b",)
    config = Config(**chosen["config"] | dict(clients=2, rounds=1, local_steps=1), dataset=data.name, strategy="ffa_lora")
    run = train(config, tmp_path, workers=1, data=replace(data, x_test=data.x_test[:4], y_test=data.y_test[:4]), progress=False)
    assert run.done == 1 and len(factors(run.server())) == 4
    split = preset_data({k: v for k, v in chosen["data"].items() if k not in ("test", "federation")} | dict(length=48, share=.25), letters, tmp_path)
    assert (len(split.y_train), len(split.y_test)) == (18, 6)
