"Language models: adapters alone train, travel and are kept; what cannot be loaded is a sentence; workers and resumes change no byte."
import copy, json, os, pickle, subprocess, sys, warnings
import numpy as np, pytest, torch
from conftest import digest
from fedinterp.core import Config, InputError, nbytes, register, seeded
from fedinterp.models import build_model, loss_of, outcomes, predict

pytest.importorskip("peft", reason="the extra lora is not installed")
from torch.nn import functional as F
import fedinterp.causal as causal
from fedinterp.causal import CausalLM, memory
from fedinterp.cost import account
from fedinterp.text import extra, instruction_data, load_tokenizer
from fedinterp.train import train
from tiny_lm import rows, save_model, save_tokenizer

LENGTH, TARGETS = 32, {"llama": ["q_proj", "k_proj", "v_proj", "o_proj"], "opt": ["q_proj", "v_proj", "out_proj"]}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: str(save_tokenizer(save_model(root/kind, kind))) for kind in TARGETS}


@pytest.fixture(scope="module")
def data(places):
    tokenizer = load_tokenizer(places["llama"])
    return instruction_data(rows(12), rows(6), tokenizer, LENGTH, name="words")


def built(places, kind="llama", seed=0, **more):
    return build_model("causal_lm", classes=2, channels_in=2, size=LENGTH, seed=seed, **{"path": places[kind], "targets": TARGETS[kind], "rank": 2, "dropout": 0.2, **more})


def configured(data, places, kind="llama", more={}, **changes):
    arguments = {"path": places[kind], "targets": TARGETS[kind], "rank": 2, "dropout": 0.2, **more}
    return Config(**{**dict(dataset=data.name, model="causal_lm", model_args=arguments, partition="groups", clients=2, rounds=2, local_steps=2, batch_size=4,
                            optimizer="adam", lr=0.01, eval_clients_every=1), **changes})


def frozen(model):
    "The weights that do not train, by the names of the plain model."
    names = {n: n.removeprefix("net.base_model.model.").replace(".base_layer", "") for n, p in model.named_parameters() if not p.requires_grad}
    return {short: model.get_parameter(n) for n, short in names.items()}


def plain(path):
    return extra("transformers").AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("kind", TARGETS)
def test_frozen_weights_are_bit_identical_after_a_federated_run_and_only_adapters_are_kept_and_billed(data, places, tmp_path, kind):
    config = configured(data, places, kind)
    run = train(config, tmp_path, data=data, workers=1, progress=False)
    start, after = dict(plain(places[kind]).named_parameters()), run.model()
    assert frozen(after).keys() == start.keys() and all(p.equal(start[n]) for n, p in frozen(after).items())
    trained = [n for n, p in after.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained) and not run.server(2)[trained[1]].equal(run.server(0)[trained[1]])
    for state in (run.server(2), run.client(2, 0)): assert set(state) == set(trained)
    adapters = 4 * sum(p.numel() for p in after.parameters() if p.requires_grad)
    spent = account(run).pivot(index="round", columns="metric", values="value")
    assert nbytes(run.server(2)) == adapters and spent["bytes up"].tolist() == spent["bytes down"].tolist() == [0, 2 * adapters, 2 * adapters]
    assert spent["FLOPs"].iloc[1] > 0


@pytest.mark.parametrize("kind, more", [("llama", {}), ("opt", {}), ("llama", dict(rank=None)), ("llama", dict(fold=True))])
def test_resume_and_worker_count_change_no_byte_with_dropout_on(data, places, tmp_path, kind, more):
    config = configured(data, places, kind, more)
    one = train(config, tmp_path/"1", data=data, workers=1, progress=False)
    two = train(config, tmp_path/"2", data=data, workers=2, progress=False)
    half = train(config.replace(rounds=1), tmp_path/"3", data=data, workers=1, progress=False)
    resumed = half.path.with_name(config.id)
    half.path.rename(resumed)
    (resumed/"config.json").write_text((one.path/"config.json").read_text())
    three = train(config, tmp_path/"3", data=data, workers=1, progress=False)
    assert digest(one) == digest(two) == digest(three)


QUIET = """
import sys, fedinterp.causal
from fedinterp.core import Config
from fedinterp.text import instruction_data, load_tokenizer
from fedinterp.train import train
print(sorted({{"transformers", "peft", "tokenizers"}} & set(sys.modules)))
from tiny_lm import rows
data = instruction_data(rows(4), rows(2), load_tokenizer({path!r}), {length}, name="words")
train(Config(**{config!r}), {root!r}, data=data, workers=2, progress=False)
"""


def test_importing_the_library_loads_no_transformers_and_a_run_with_workers_says_nothing(data, places, tmp_path):
    code = QUIET.format(path=places["llama"], length=LENGTH, config=configured(data, places, rounds=1).changed(), root=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("kind", TARGETS)
def test_merging_reproduces_the_logits_and_leaves_a_plain_model(data, places, kind):
    model = built(places, kind, rank=4).eval()
    with seeded(0, "adapters"), torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n: p.normal_(std=0.1)
    merged, x = model.merged(), data.x_test
    with torch.no_grad(): mine, theirs, before = model(x), merged(input_ids=x[:, 0]).logits, plain(places[kind])(input_ids=x[:, 0]).logits
    assert (mine - theirs).abs().max() < 1e-4 < (mine - before).abs().max()
    assert type(merged) is type(plain(places[kind])) and not any("lora" in n for n, _ in merged.named_parameters())
    assert any("lora" in n for n, _ in model.named_parameters())


@pytest.mark.parametrize("kind", TARGETS)
def test_a_fresh_model_is_its_checkpoint_and_loss_is_over_the_answer_only(data, places, kind):
    model, x, y = built(places, kind).eval(), data.x_test, data.y_test
    logits = predict(model, x)
    with torch.no_grad(): assert logits.equal(plain(places[kind]).eval()(input_ids=x[:, 0]).logits) and logits.shape == (len(x), LENGTH, model.vocab)
    taught = torch.where(x[:, 1, 1:] > 0, x[:, 0, 1:], -100)
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), taught, reduction="none")
    with torch.no_grad(): loss, (right, losses) = loss_of(model, x, y), outcomes(model, x, y)
    assert torch.allclose(loss, F.cross_entropy(logits[:, :-1].transpose(1, 2), taught), atol=1e-5)
    assert torch.allclose(losses, each.sum(1) / (taught >= 0).sum(1), atol=1e-5)
    guessed = (logits[:, :-1].argmax(2) == taught).sum(1) / (taught >= 0).sum(1)
    assert torch.allclose(right.float(), guessed) and right.dtype == torch.float64
    with torch.no_grad(): assert torch.allclose(losses[2:3], outcomes(model, x[2:3], y[2:3])[1], atol=1e-5)
    with pytest.raises(InputError, match="marked as taught"): model.loss(x * torch.tensor([[1], [0]]))


def test_padding_changes_nothing(data, places):
    model, x = built(places).eval(), data.x_test.clone()
    x[:, 0][(x[:, 1].flip(1).cumsum(1).flip(1) == 0)] = 7  # everything behind the answers
    with torch.no_grad(): assert model.outcomes(x)[1].equal(model.outcomes(data.x_test)[1])


def test_adapters_are_drawn_from_the_seed_and_the_global_generators_are_left_alone(places):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    a, b, c = built(places), built(places), built(places, seed=1)
    assert before[0].equal(torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()
    states = [m.state_dict() for m in (a, b, c)]
    assert all(v.equal(states[1][k]) for k, v in states[0].items())
    assert not all(v.equal(states[2][k]) for k, v in states[0].items())
    assert all(not v.any() for k, v in states[0].items() if "lora_B" in k)


@pytest.mark.parametrize("more", [{}, dict(targets="all-linear"), dict(rank=None), dict(fold=True), dict(dtype="bfloat16")])
def test_a_state_holds_what_trains_and_is_what_can_be_loaded(data, places, more):
    model, other = built(places, **more), built(places, seed=1, **more)
    state, trained = other.state_dict(), [n for n, p in other.named_parameters() if p.requires_grad]
    if "fold" not in more: assert list(state) == trained
    else: assert set(state) - set(trained) == {n.replace("lora_A.default", "base_layer") for n in trained if "lora_A" in n}
    with torch.no_grad(): state = {k: v + 0.01 for k, v in state.items()}
    model.load_state_dict(state)
    assert all(v.equal(state[k]) for k, v in model.state_dict().items())
    twin = copy.deepcopy(model.eval())
    with torch.no_grad():
        assert twin(data.x_test).equal(model(data.x_test))
        next(p for p in twin.parameters() if p.requires_grad).add_(1)
    assert all(v.equal(state[k]) for k, v in model.state_dict().items())  # a copy shares nothing
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == state.keys()  # as workers that are spawned get it


def test_a_state_that_does_not_fit_is_one_sentence(places):
    model = built(places)
    name, *_ = state = model.state_dict()
    for wrong, words in (({}, r"lora_A.default.weight is missing \(16 such names\)"),
                         ({**state, "fc": torch.ones(1)}, "fc is not one of its tensors"), ({**state, name: torch.ones(3)}, r"has shape \(3,\), and here")):
        with pytest.raises(InputError, match="the state is not this model's: "): model.load_state_dict(wrong)
        with pytest.raises(InputError, match=words): model.load_state_dict(wrong)
    model.load_state_dict({name: state[name] + 1, "fc": torch.ones(1)}, strict=False)
    assert model.state_dict()[name].equal(built(places).state_dict()[name] + 1)


def test_tied_weights_are_one_tensor_when_every_weight_is_trained(data, places):
    model = built(places, rank=None)
    assert model.net.get_output_embeddings().weight is model.net.get_input_embeddings().weight and len(model.state_dict()) == len(list(model.parameters()))
    model.load_state_dict({k: v + 0.1 for k, v in model.state_dict().items()})
    assert model.net.get_output_embeddings().weight is model.net.get_input_embeddings().weight
    assert set(model.state_dict()) == {"net." + n for n, _ in plain(places["llama"]).named_parameters()}
    twin = copy.deepcopy(model)
    assert twin.net.get_output_embeddings().weight is twin.net.get_input_embeddings().weight


@pytest.mark.parametrize("more, words", [
    (dict(targets=["q_proj", "out_proj"]), "unknown linear layer to adapt 'out_proj': choose from down_proj, .*did you mean 'o_proj'"), (dict(targets=[]), "targets is empty"),
    (dict(rank=0), "rank = 0"), (dict(rank=2.5), "rank = 2.5"),
    (dict(alpha=0), "alpha = 0"), (dict(dropout=1.0), "dropout = 1.0"), (dict(rank=None, fold=True), "fold=True is for adapters"),
    (dict(dtype="int8"), "unknown dtype"), (dict(path=""), r"model_args=dict\(path=…\)"), (dict(ranks=3), "unknown option of causal_lm 'ranks'.*did you mean 'rank'")])
def test_wrong_settings_are_one_sentence(places, more, words):
    with pytest.raises(InputError, match=words): built(places, **more)


def test_rows_longer_than_the_context_are_refused_before_anything_is_loaded(places, tmp_path, monkeypatch):
    monkeypatch.setattr(causal, "_load", None)
    tokenizer = load_tokenizer(places["llama"])
    long = instruction_data(rows(3), rows(2), tokenizer, 65, name="long")
    with pytest.raises(InputError, match="rows have 65 tokens, and the context of .* holds 64: encode with length=64 or less"):
        train(configured(long, places), tmp_path, data=long, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_prompt_longer_than_the_context_is_shortened_and_trains(places, tmp_path):
    many = [dict(r, instruction=r["instruction"] + " please" * 200) for r in rows(4)]
    data = instruction_data(many, many[:5], load_tokenizer(places["llama"]), 64, name="long")
    run = train(configured(data, places, rounds=1), tmp_path, data=data, workers=1, progress=False)
    assert np.isfinite(run.metrics().query("metric == 'loss'").value).all()


def test_a_client_without_data_and_a_task_with_one_row_are_trained_around(places, tmp_path):
    tokenizer = load_tokenizer(places["llama"])
    data = instruction_data(rows(6, ("colour",)) + rows(1, ("animal",)), rows(3, ("colour",)), tokenizer, LENGTH, name="few")
    run = train(configured(data, places, partition="quantity:0.05", clients=3, min_samples=0, seed=1), tmp_path, data=data, workers=1, progress=False)
    empty = [k for k, p in enumerate(run.partition) if not len(p)]
    metrics = run.metrics()
    assert empty and (metrics[(metrics.client == str(empty[0])) & (metrics.metric == "weight")].value == 0).all()
    run = train(configured(data, places, rounds=1), tmp_path, data=data, workers=1, progress=False)
    assert sorted(len(p) for p in run.partition) == [1, 6] and set(run.metrics().query("client == 'server' and metric == 'accuracy'").cls) == {"all", "colour"}


@pytest.mark.parametrize("files, words", [
    ({"pytorch_model.bin": b"x"}, r"is a pickle \(pytorch_model.bin\), which can run code"),
    ({"model.safetensors": b"x"}, "cannot be loaded"), ({}, "holds no model"), (None, "there is no folder")])
def test_a_checkpoint_that_is_a_pickle_damaged_or_absent_is_one_sentence(places, tmp_path, files, words):
    path = tmp_path/"checkpoint"
    if files is not None:
        path.mkdir()
        (path/"config.json").write_bytes(open(f"{places['llama']}/config.json", "rb").read())
        for name, content in files.items(): (path/name).write_bytes(content)
    with pytest.raises(InputError, match=words) as caught: CausalLM(str(path))
    assert "\n" not in str(caught.value)


def test_weights_that_a_checkpoint_lacks_are_not_drawn_at_random(places, tmp_path):
    from safetensors.torch import load_file, save_file
    state = load_file(f"{places['llama']}/model.safetensors")
    gone = next(n for n in sorted(state) if "q_proj" in n)
    save_file({k: v for k, v in state.items() if k != gone}, tmp_path/"model.safetensors", metadata={"format": "pt"})
    (tmp_path/"config.json").write_bytes(open(f"{places['llama']}/config.json", "rb").read())
    with pytest.raises(InputError, match=f"lacks 1 of its model's weights, first {gone}"): CausalLM(str(tmp_path))


def test_code_beside_a_checkpoint_is_never_run(places, tmp_path):
    (tmp_path/"model.safetensors").write_bytes(open(f"{places['llama']}/model.safetensors", "rb").read())
    (tmp_path/"own.py").write_text("raise SystemExit('it ran')")
    (tmp_path/"config.json").write_text(json.dumps(dict(model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"})))
    with pytest.raises(InputError, match="cannot be loaded"): CausalLM(str(tmp_path))


def test_a_model_too_big_for_the_free_memory_is_refused_before_its_weights_are_read(places, monkeypatch):
    monkeypatch.setattr(causal, "_load", None)
    need = 4 * sum(p.numel() for p in plain(places["llama"]).parameters())
    monkeypatch.setattr(causal, "_free", lambda: need * 0.75)
    with pytest.raises(InputError, match="too big for this machine: its weights take .* GB are free: choose a smaller model, or dtype='bfloat16'"): built(places)
    monkeypatch.setattr(causal, "_free", lambda: 1)
    with pytest.raises(InputError, match="choose a smaller model$"): built(places)


@pytest.mark.parametrize("kind, rank", [("llama", 2), ("llama", None), ("opt", 2), ("opt", None)])
def test_the_memory_estimate_is_what_a_step_keeps(data, places, kind, rank):
    estimate = memory(places[kind], rank, TARGETS[kind], batch=8, length=LENGTH).set_index("metric").value
    model, kept, x = built(places, kind, rank=rank).train(), {}, data.x_train[:8, 0]
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    def pack(t): kept.setdefault(t.untyped_storage()._cdata, t); return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t): F.cross_entropy(model.net(input_ids=x).logits.transpose(1, 2), x)
    measured = sum(t.untyped_storage().nbytes() for k, t in kept.items() if k not in own)
    assert abs(estimate["activations"] / measured - 1) < 0.15
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert estimate["weights"] == 4 * sum(p.numel() for p in plain(places[kind]).parameters())
    assert (estimate["adapters"], estimate["gradients"], estimate["optimiser"]) == (trained if rank else 0, trained, 2 * trained)
    assert estimate["all"] == estimate.drop("all").sum()


def test_memory_needs_no_weights_and_names_what_is_wrong(places):
    config = extra("transformers").OPTConfig(vocab_size=50272, hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32, word_embed_proj_dim=2048)
    assert memory(config, 8, TARGETS["opt"], optimizer="sgd", dtype="bfloat16").set_index("metric").value[["weights", "optimiser"]].tolist() == [2 * 1_315_758_080, 0]
    for call, words in ((dict(path="owner/name"), "download=True"), (dict(path=config, targets=["o_proj"]), "did you mean 'out_proj'"),
                        (dict(path=config, optimizer="lion"), "unknown optimizer")):
        with pytest.raises(InputError, match=words): memory(**call)


def test_a_run_of_a_model_under_the_data_root_remembers_its_name_and_no_path(data, places, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDINTERP_DATA", os.path.dirname(places["llama"]))
    config = configured(data, {"llama": "llama"}, rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the libraries' talk to their own developers is no user's business
        run = train(config, tmp_path/"1", data=data, workers=1, progress=False)
        model = run.model()
    assert json.loads((run.path/"config.json").read_text())["model_args"]["path"] == "llama" and model.state_dict().keys() == run.server(1).keys()
    assert memory("llama", 2).value.equals(memory(places["llama"], 2).value)
    monkeypatch.setenv("FEDINTERP_DATA", os.path.dirname(places["llama"]) + "/")
    assert digest(train(config, tmp_path/"2", data=data, workers=2, progress=False)) == digest(run)
    monkeypatch.delenv("FEDINTERP_DATA")
    with pytest.raises(InputError, match="llama is neither a folder here"): CausalLM("llama")


def test_a_missing_extra_is_named_and_full_training_needs_no_peft(places, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert built(places, rank=None).scale == 0
    with pytest.raises(InputError, match=r"peft is needed .*pip install 'fedinterp\[lora\]'"): built(places)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="transformers is needed"): built(places)


def test_a_module_of_ones_own_trains_and_is_left_as_it_was(data, places, tmp_path):
    model = built(places)
    before = copy.deepcopy(model).state_dict()
    config = configured(data, places, model="mine", model_args={}, rounds=1)
    run = train(config, tmp_path, data=data, model=model, workers=1, progress=False)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items()) and run.done == 1
    register("model", "my_lm", CausalLM)
    assert build_model("my_lm", path=places["llama"], rank=2).input_shape == (2, 64)
