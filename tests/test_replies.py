"""replies: generation in batches, scores of replies, and the clients' three models."""
import sys
import numpy as np
import pytest
import torch
from fedinterp.core import Config, InputError, RunError, minus, plus
from fedinterp.lora import opt_from_config
from fedinterp.models import outcomes
from fedinterp.replies import FLOOR, MODELS, WHICH, answered, asked, exact_match, generate, lookalikes, option_tasks, reply_scores, rouge_l, row_scores
from fedinterp.text import decode, encode_prompt, instruction_data
from fedinterp.train import train

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
pytest.importorskip("rouge_score")
from fedinterp.causal import CausalLM  # noqa: E402
SIGNS = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz 0123456789"]
TEXTS = ["a cat", "what is a heron", "no", "two and two are", "grey", "x", "0 1 2 3 4 5 6 7 8 9"]


@pytest.fixture(scope="module")
def letters():
    from tokenizers import Tokenizer, decoders, models
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(SIGNS)}, []))
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=48, bos_token_id=1, eos_token_id=2, initializer_range=.3)).save_pretrained(root/"llama")
    opt_from_config(root/"opt", vocab=40, width=16, layers=2, context=48)
    return {name: str(root/name) for name in ("llama", "opt")}


@pytest.fixture(scope="module")
def models(folders):
    "A Llama, an OPT with louder weights, and a Llama with adapters that do something."
    made = dict(llama=CausalLM(folders["llama"], rank=None), opt=CausalLM(folders["opt"], rank=None), adapted=CausalLM(folders["llama"], rank=2))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made["opt"].parameters(): p.add_(torch.randn(p.shape, generator=rng), alpha=.3)
        for n, p in made["adapted"].named_parameters():
            if "lora_B" in n: p.copy_(torch.randn(p.shape, generator=rng) / 3)
    return made


@pytest.fixture(scope="module")
def data(letters):
    vowel = [dict(instruction=f"{w} {a} is", context="", answer="yes" if a in "aeiou" else "no", task="vowel") for w in ("the", "a") for a in "abcdefghij"]
    after = [dict(r, answer=r["instruction"].split()[1]*2 + "x", task="after") for r in vowel]
    return instruction_data(vowel + after, vowel[::2] + after[::2], letters, length=16, template="{instruction} ")


@pytest.fixture(scope="module")
def run(folders, data, tmp_path_factory):
    config = Config(dataset=data.name, model="causal_lm", model_args=dict(path=folders["llama"], rank=4), partition="groups", clients=2, rounds=2,
                    local_steps=20, batch_size=10, optimizer="adamw", lr=1e-2)
    return train(config, tmp_path_factory.mktemp("runs"), workers=1, data=data, progress=False)


def test_rouge_l_on_hand_cases():
    said = ["the cat sat", "sat cat", "The CAT sat on the mat!", "", "a dog", "…", "the cat sat on the mat and slept there too long"]
    assert np.allclose(rouge_l(said, ["the cat sat on the mat"]*7), [2/3, 1/4, 1, 0, 0, 0, 2*(6/11)/(6/11 + 1)])
    assert rouge_l(["running"], ["run"]) == 0 and len(rouge_l([], [])) == 0  # no stemming
    assert rouge_l(["", "a"], ["", ""]).tolist() == [0, 0]
    with pytest.raises(InputError, match="1 replies and 2 references"): rouge_l(["a"], ["a", "b"])


def test_exact_match_passes_over_case_and_spaces_only():
    assert exact_match([" Yes", "yes.", "", "two  words\n", ""], ["yes", "yes", "no", "two words", ""]).tolist() == [1, 0, 0, 1, 1]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(InputError, match=r"rouge-score.*pip install 'fedinterp\[lora\]'"): rouge_l(["a"], ["a"])


@pytest.mark.parametrize("name", ["llama", "opt", "adapted"])
def test_a_batch_gives_the_replies_of_one_at_a_time_and_those_of_the_library(models, letters, name):
    model = models[name]
    alone = [generate(model, [t], letters, 12)[0] for t in TEXTS]
    for batch in (2, 3, 32): assert generate(model, TEXTS, letters, 12, batch=batch) == alone
    for text, reply in zip(TEXTS[:3], alone):
        ids = torch.tensor([encode_prompt(dict(instruction=text, context=""), letters, 99, "{instruction}")])
        how = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
        theirs = model.net.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how)[0, ids.shape[1]:]
        assert letters.decode(theirs, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip() == reply
    assert len(set(alone)) > 3


def test_replies_stop_at_eos_at_the_asked_length_and_where_the_context_is_full(models, letters):
    long, short = generate(models["llama"], TEXTS, letters, 12), generate(models["llama"], TEXTS, letters, 4)
    assert all(a.startswith(b) and len(b) <= 4 for a, b in zip(long, short)) and max(map(len, long)) == 12
    full = generate(models["llama"], ["a"*46, "a"], letters, 20)
    assert len(full[0]) <= 1 and full == [generate(models["llama"], [t], letters, 20)[0] for t in ("a"*46, "a")]
    with pytest.raises(InputError, match="prompt 1 has 48 tokens, and the model reads 1 to 47"): generate(models["llama"], ["a", "a"*47], letters)
    with pytest.raises(InputError, match="max_new_tokens = 0"): generate(models["llama"], ["a"], letters, 0)
    with pytest.raises(InputError, match="should be a list"): generate(models["llama"], "a", letters)
    assert generate(models["llama"], [], letters) == []


def test_a_model_that_ends_at_once_gives_an_empty_reply(models, letters):
    class Ends(torch.nn.Module):
        config = models["llama"].net.config
        weight = torch.nn.Parameter(torch.zeros(1))
        def parameters(self): return iter([self.weight])
        def forward(self, input_ids, **_):
            logits = torch.zeros(*input_ids.shape, 40)
            logits[..., 2] = 1
            out = {"logits": logits, "cache": None}
            return type("Output", (dict,), {"logits": logits})(out)
    said = generate(Ends(), TEXTS, letters)
    assert said == [""]*len(TEXTS) and rouge_l(said, TEXTS).sum() == 0


def test_generation_leaves_modes_and_random_state_alone(models, letters):
    model = models["llama"].train()
    before = torch.get_rng_state()
    first = generate(model, TEXTS[:2], letters, 6)
    assert model.training and model.net.training and torch.equal(torch.get_rng_state(), before) and first == generate(model.eval(), TEXTS[:2], letters, 6)


def test_texts_rows_and_encoded_rows_ask_the_same(models, letters, data):
    x = data.x_test[:5]
    texts = [decode(row, letters)[0] + " " for row in x]
    rows = [dict(instruction=t.strip(), context="") for t in texts]
    said = generate(models["llama"], x, letters, 8)
    assert said == generate(models["llama"], texts, letters, 8) == generate(models["llama"], rows, letters, 8, template="{instruction} ")
    assert asked(x)[0] == encode_prompt(rows[0], letters, 99, "{instruction} ") and answered(x)[0][-1] == 2
    assert letters.decode(answered(x)[0], skip_special_tokens=True) == "yes"


def test_tasks_with_options_are_those_with_few_answers_in_training(data):
    assert option_tasks(data) == ("vowel",) and option_tasks(data, most=1) == ()


def test_row_scores_are_the_scores_of_single_rows(models, letters, data):
    model, x = models["adapted"], data.x_test
    got = row_scores(model, x, letters, max_new_tokens=5, batch=7)
    right, loss = outcomes(model.eval(), x, None)
    assert np.allclose(got["loss"], loss.detach().numpy(), atol=1e-5) and np.allclose(got["token accuracy"], right.numpy())
    said = generate(model, x, letters, 5)
    assert got["ROUGE-L"].tolist() == rouge_l(said, [decode(r, letters)[1] for r in x]).tolist()
    assert row_scores(model, x, letters, ("exact match",), references=said, max_new_tokens=5)["exact match"].all()
    with pytest.raises(InputError, match="unknown metric 'bleu'"): row_scores(model, x, letters, ("bleu",))


def test_an_end_that_the_model_never_learnt_is_told_from_one_that_it_did(run, letters):
    import warnings
    model = run.model()
    rows = model.net.get_output_embeddings().weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, ["a cat"], letters, 2)
    end, other = letters.eos_token_id, len(letters) - 1
    with torch.no_grad(): rows[other] = 1.001*rows[end]
    assert lookalikes(model, end) == [other] and lookalikes(model, other) == [end] and lookalikes(model, 3) == []
    with pytest.warns(UserWarning, match="cannot tell it from 1 other tokens"): generate(model, ["a cat"], letters, 2)
    with pytest.raises(InputError, match="token = 999"): lookalikes(model, 999)


def test_the_three_models_of_a_client_are_what_they_are_called(run, data, letters):
    got = reply_scores(run, data, letters, which=("loss",), rows_per_task=99).set_index(["client", "model"]).value
    model = run.model(2)
    for k in range(2):
        offset = plus(run.server(2), minus(run.client(2, k), run.server(1)))
        for name, state in zip(MODELS, (run.client(2, k), offset, run.server(2))):
            model.load_state_dict(state)
            own = row_scores(model, data.x_test[data.y_test == k], letters, ("loss",))["loss"].mean()
            assert got[str(k), name] == pytest.approx(own, abs=1e-6)
    assert got["1", MODELS[0]] < got["1", MODELS[2]]


def test_the_table_has_every_metric_with_its_interval_and_exact_match_where_there_are_options(run, data, letters):
    got = reply_scores(run, data, letters, rows_per_task=6)
    assert {"run", "round", "client", "metric", "value", "lo", "hi", "n", "model"} == set(got) and set(got["round"]) == {2}
    assert (got.lo <= got.value).all() and (got.value <= got.hi).all() and set(got[got.client != "all"].n) == {6}
    assert {c: set(rows.metric) for c, rows in got.groupby("client")} == {"0": set(WHICH), "1": set(WHICH) - {"exact match"}, "all": set(WHICH)}
    assert got[got.metric.isin(["ROUGE-L", "exact match", "token accuracy"])].value.between(0, 1).all()
    again = reply_scores(run, data, letters, rows_per_task=6, batch=2)
    assert np.allclose(got.value, again.value, atol=1e-6) and got.equals(reply_scores(run, data, letters, rows_per_task=6))
    earlier = reply_scores(run, data, letters, round=1, which=("loss",), models=("global",))
    assert len(earlier) == 3 and set(earlier["round"]) == {1}


def test_the_mean_over_clients_is_of_those_with_a_score_and_its_interval_is_narrower_than_theirs(run, data, letters):
    got = reply_scores(run, data, letters, rows_per_task=6).set_index(["client", "metric", "model"])
    both, one = ("all", "token accuracy", MODELS[0]), ("all", "exact match", MODELS[0])
    own = got.loc[["0", "1"]].xs(both[1:], level=[1, 2])
    assert got.value[both] == pytest.approx(own.value.mean(), abs=1e-9) and got.n[both] == 12
    assert got.hi[both] - got.lo[both] < (own.hi - own.lo).max()
    assert got.value[one] == got.value[("0", *one[1:])] and got.n[one] == 6


def test_the_commonest_answer_stands_beside_the_models_as_the_floor_of_their_replies(run, data, letters):
    got = reply_scores(run, data, letters, rows_per_task=99).query("model == @FLOOR").set_index(["client", "metric"]).value
    answers = lambda x, y, c: [decode(row, letters)[1] for row in x[y == c]]
    for c in (0, 1):
        taught, asked_ = answers(data.x_train, data.y_train, c), answers(data.x_test, data.y_test, c)
        usual = max(taught, key=taught.count)
        assert got[str(c), "ROUGE-L"] == pytest.approx(rouge_l([usual]*len(asked_), asked_).mean(), abs=1e-9)
        if c == 0: assert got["0", "exact match"] == pytest.approx(asked_.count(usual)/len(asked_), abs=1e-9)
    alone = reply_scores(run, data, letters, models=(), rows_per_task=99)  # no model is asked
    assert set(alone.model) == {FLOOR} and alone.set_index(["client", "metric"]).value["0", "ROUGE-L"] == got["0", "ROUGE-L"]
    assert ("1", "exact match") not in got and FLOOR not in set(reply_scores(run, data, letters, which=("loss",)).model)


def test_a_client_of_two_tasks_is_scored_by_its_own_mix(folders, data, letters, tmp_path):
    config = Config(dataset=data.name, model="causal_lm", model_args=dict(path=folders["llama"], rank=2), partition="dirichlet:0.5", clients=2, rounds=1,
                    local_steps=1, batch_size=4, optimizer="sgd", lr=1e-2, seed=3, strategy="fedsa_lora")
    run = train(config, tmp_path, workers=1, data=data, progress=False)
    got = reply_scores(run, data, letters, which=("loss", "exact match"), models=("global",)).query("model == 'global'").set_index(["client", "metric"])
    model = run.model(1)
    loss = row_scores(model, data.x_test, letters, ("loss",))["loss"]
    for k in range(2):
        share = np.bincount(data.y_train.numpy()[run.partition[k]], minlength=2) / len(run.partition[k])
        assert got.value[str(k), "loss"] == pytest.approx(sum(share[c]*loss[data.y_test == c].mean() for c in (0, 1)), abs=1e-6) and (share > 0).all()
        assert got.n[str(k), "exact match"] == 10 and got.n[str(k), "loss"] == 20


def test_wrong_questions_are_refused(run, data, letters):
    with pytest.raises(RunError, match="no client's model of round 0"): reply_scores(run, data, letters, round=0)
    with pytest.raises(InputError, match="unknown model 'local'"): reply_scores(run, data, letters, models=("local",))
    with pytest.raises(InputError, match="unknown metric 'bleu'"): reply_scores(run, data, letters, which=("bleu",))
    with pytest.raises(InputError, match="rows_per_task = 0"): reply_scores(run, data, letters, rows_per_task=0)
    from dataclasses import replace
    few = replace(data, x_test=data.x_test[data.y_test == 0], y_test=data.y_test[data.y_test == 0])
    with pytest.raises(InputError, match="task 'after' has no test rows"): reply_scores(run, few, letters)
