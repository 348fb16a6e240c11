"Instructions: one form for every file, answers that stay whole, marks on what is taught, a data set that trains."
import json, os, sys
import pytest
from fedinterp.core import InputError

pytest.importorskip("transformers", reason="the extra lora is not installed")
from fedinterp.partition import partition
from fedinterp.text import (FITS, PROMPTS, by_task, coverage, decode, encode, encode_prompt, extra, hub, instruction_data, load_tokenizer, place, prompt,
                            read_instructions, split_instructions)
from tiny_lm import rows, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory): return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_flan_dolly_and_alpaca_files_come_in_one_form(tmp_path):
    file = write(tmp_path/"mixed.jsonl", dict(instruction="A?", output=" a ", task="t", category="c", dataset=1, client=4), "",
                 dict(instruction="B?", context="b is b", response="b", category="c"), dict(instruction="C?", input="", output="c"), dict(inputs="D?", targets="d", task="t"))
    a, b, c, d = read_instructions(file)
    assert a == dict(instruction="A?", context="", answer="a", task="t", federation=1, client=4)
    assert b == dict(instruction="B?", context="b is b", answer="b", task="c")
    assert c == dict(instruction="C?", context="", answer="c", task="mixed") and d["answer"] == "d"
    assert read_instructions(file, tasks=["c"]) == [b] and read_instructions(file, federation=1) == [a]


@pytest.mark.parametrize("line, words", [
    ("{", "line 2 is not JSON"), ("[]", "line 2 holds no JSON object"), ("{}", "line 2 has no instruction: it has nothing"),
    (dict(instruction="A?"), "line 2 has no answer: it has instruction, and one of answer, output, response, targets"),
    (dict(instruction="A?", output=["a"]), "line 2: answer = .* should be text"),
    (dict(instruction=" ", context="", output="a"), "line 2 asks nothing")])
def test_a_wrong_line_is_named(tmp_path, line, words):
    with pytest.raises(InputError, match=words): read_instructions(write(tmp_path/"x.jsonl", dict(instruction="A?", output="a"), line))


def test_what_is_asked_for_and_not_there_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDINTERP_DATA", str(tmp_path))
    file = write(tmp_path/"mine.jsonl", dict(instruction="A?", output="a", task="sums"))
    assert read_instructions("mine") == read_instructions(file)
    for call, words in ((lambda: read_instructions("yours"), "yours.jsonl was not found"), (lambda: read_instructions(tmp_path/"no.jsonl"), "there is no file"),
                        (lambda: read_instructions(file, tasks=["sum"]), "did you mean 'sums'"), (lambda: read_instructions(file, federation=1), "does not mark its rows"),
                        (lambda: read_instructions(write(tmp_path/"empty.jsonl", "")), "holds no rows")):
        with pytest.raises(InputError, match=words): call()
    (tmp_path/"latin.jsonl").write_bytes(b'{"instruction": "\xe9"}')
    with pytest.raises(InputError, match="not UTF-8"): read_instructions(tmp_path/"latin.jsonl")


def test_an_empty_instruction_with_a_context_asks_the_context(tmp_path):
    row, = read_instructions(write(tmp_path/"x.jsonl", dict(instruction="", input="2 + 2?", output="4")))
    assert (row["instruction"], row["context"], prompt(row)) == ("2 + 2?", "", "2 + 2?\nAnswer:\n")


def test_each_task_is_split_by_itself_and_a_task_of_one_row_keeps_it_for_training():
    many = rows(20) + [dict(instruction="once", context="", answer="x", task="single")]
    train, test = split_instructions(many, 0.25, seed=3)
    assert {t: len(r) for t, r in by_task(test).items()} == {"colour": 5, "animal": 5}
    assert [r["task"] for r in train].count("single") == 1
    assert sorted(map(str, train + test)) == sorted(map(str, many))
    assert by_task(split_instructions(rows(20, ("animal",)), 0.25, seed=3)[1]) == {"animal": by_task(test)["animal"]}
    assert split_instructions(rows(2, ("animal",)), 0.9)[0]  # something is always left to train on


@pytest.mark.parametrize("template", [*PROMPTS, "{instruction} -> ", "{context}|{instruction}: "])
@pytest.mark.parametrize("context", ["", "a background " * 30])
def test_an_answer_stays_whole_and_only_the_prompt_is_shortened(tokenizer, template, context):
    row = dict(instruction="What is it? " + "word " * 100 + "Say it now!", context=context, answer="a short answer", task="t")
    for length in (150, 200, 2000):
        ids, counts = encode(row, tokenizer, length, template)
        taught = [i for i, c in zip(ids, counts) if c]
        assert len(ids) == len(counts) <= length and ids[0] == tokenizer.bos_token_id and taught[-1] == tokenizer.eos_token_id == ids[-1]
        assert tokenizer.decode(taught, skip_special_tokens=True) == row["answer"] and counts == sorted(counts)
    whole = tokenizer.decode(encode_prompt(row, tokenizer, 2000, template), skip_special_tokens=True)
    short = tokenizer.decode(encode_prompt(row, tokenizer, 150, template), skip_special_tokens=True)
    assert whole == prompt(row, template) and " ... " in short and short.endswith(whole[-4:])
    if not context: assert "What is it?" in short and "now!" in short  # cut in the middle: both ends are left


def test_a_context_goes_before_the_instruction_does(tokenizer):
    row = dict(instruction="What is it?", context="long " * 200, answer="a", task="t")
    shown = tokenizer.decode(encode_prompt(row, tokenizer, 80), skip_special_tokens=True)
    assert shown.startswith("What is it?\nlong") and " ... " in shown


def test_an_empty_answer_and_one_that_is_too_long_are_counted_refused_or_left_out(tokenizer):
    good, bad = rows(6, ("colour",)), [dict(rows(1)[0], answer=" "), dict(rows(1)[0], answer="word " * 50)]
    with pytest.raises(InputError, match="answer empty: colour"): encode(bad[0], tokenizer, 64)
    with pytest.raises(InputError, match=r"answer too long: colour, .* \(\d+ tokens of length = 64\)"): encode(bad[1], tokenizer, 64)
    found = coverage(good + bad, tokenizer, 64).set_index("metric").value
    assert [round(8 * found[m]) for m in FITS] == [6, 0, 1, 1]
    with pytest.raises(InputError, match="2 of 8 training rows cannot be used with length = 64, first 'Say red in 0' of colour .answer empty"):
        instruction_data(good + bad, good, tokenizer, 64)
    assert len(instruction_data(good + bad, good, tokenizer, 64, misfits="leave out").x_train) == 6
    with pytest.raises(InputError, match="no training row of other can be used"):
        instruction_data(good + [dict(bad[0], task="other")], good, tokenizer, 64, misfits="leave out")


def test_a_prompt_that_was_shortened_is_counted_so_even_where_room_is_left(tokenizer):
    row = dict(rows(1)[0], instruction="Say 😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀😀 to me, and then say red")
    whole, spare = encode_prompt(row, tokenizer, 1 << 30), 0
    for length in range(60, len(whole) + 12):
        ids, counts = encode(row, tokenizer, length)
        found = coverage([row], tokenizer, length).set_index("metric").value
        shortened = ids[:counts.index(1)] != whole
        spare += shortened and len(ids) < length
        assert found["prompt shortened"] == shortened and found["whole"] == (not shortened)
    assert spare  # a character is several tokens here, so some lengths are not used up


def test_text_that_looks_like_a_special_token_is_only_text(tokenizer):
    ids, counts = encode(dict(instruction="Say </s>", context="", answer="</s>", task="t"), tokenizer, 64)
    assert ids.count(tokenizer.eos_token_id) == 1 and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode([i for i, c in zip(ids, counts) if c][:-1]) == "</s>"


def test_a_data_set_of_instructions_is_deterministic_named_by_its_encoding_and_dealt_by_task(tokenizer):
    data = instruction_data(rows(8), rows(3), tokenizer, 48, name="words")
    again = instruction_data(rows(8), rows(3), tokenizer, 48, name="words")
    assert data.fingerprint == again.fingerprint and data.name == again.name and data.name.startswith("words-48-")
    assert len({instruction_data(rows(8), rows(3), tokenizer, n, t, name="words").name for n, t in ((48, "short"), (49, "short"), (48, "{instruction}="))}) == 3
    assert data.x_train.shape == (16, 2, 48) and data.classes == ("colour", "animal") and data.y_train.tolist() == [0] * 8 + [1] * 8
    assert repr(data) == f"Dataset({data.name}: 16 + 6 texts of 48 tokens, 2 classes, 2 groups)"
    parts = partition(data.y_train.numpy(), "groups", 2, 0, 1, data.groups)
    assert sorted(sorted(set(data.groups[p])) for p in parts) == [["animal"], ["colour"]]
    for x, row in zip(data.x_train, rows(8)):
        (ids, counts), n = encode(row, tokenizer, 48), int((x[0] != tokenizer.pad_token_id).sum()) + 1
        assert x[0, :n].tolist() == ids and x[1, :n].tolist() == counts and not x[1, n:].any() and (x[0, n:] == tokenizer.pad_token_id).all()
        assert decode(x, tokenizer) == (prompt(row).strip(), row["answer"])


def test_clients_can_be_any_field_of_the_rows(tokenizer):
    own = [dict(r, client=i % 3) for i, r in enumerate(rows(6))]
    assert instruction_data(own, rows(2), tokenizer, 48, clients="client").groups.tolist() == [str(i % 3) for i in range(12)]
    for call, words in ((dict(clients="client"), "names a field, and training row 0 has none"), (dict(length=4), "at least 8 tokens"), (dict(misfits="drop"), "leave out"),
                        (dict(template="alpacca"), "did you mean 'alpaca'")):
        with pytest.raises(InputError, match=words): instruction_data(rows(2), rows(2), tokenizer, **{"length": 48, **call})
    with pytest.raises(InputError, match="unknown task among test rows 'animal': choose from colour"):
        instruction_data(rows(2, ("colour",)), rows(2), tokenizer, 48)


def test_a_tokenizer_without_a_pad_token_pads_with_eos_and_one_without_eos_is_refused(tmp_path, tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1 and len(tokenizer) == load_tokenizer(save_tokenizer(tmp_path/"a")).vocab_size
    bare = extra("transformers").AutoTokenizer.from_pretrained(tmp_path/"a")
    assert bare.pad_token_id is None
    assert instruction_data(rows(2), rows(2), bare, 48).fingerprint == instruction_data(rows(2), rows(2), tokenizer, 48).fingerprint
    with pytest.raises(InputError, match="no EOS token"): load_tokenizer(save_tokenizer(tmp_path/"b", eos_token=None))
    no_begin = load_tokenizer(save_tokenizer(tmp_path/"c", bos_token=None))
    assert encode(rows(1)[0], no_begin, 48)[0] == encode(rows(1)[0], tokenizer, 48)[0][1:]


def test_a_missing_extra_names_what_to_install(monkeypatch, tmp_path):
    for package in ("transformers", "peft", "rouge_score"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InputError, match=rf"{package.replace('_', '-')} is needed .*pip install 'fedinterp\[lora\]'"): extra(package)
    with pytest.raises(InputError, match="pip install"): load_tokenizer(tmp_path)


class _Answer(Exception):
    def __init__(self, code): self.response = type("Response", (), dict(status_code=code))


@pytest.mark.parametrize("error, download, words", [
    (_Answer(403), True, "is gated: ask for access"), (_Answer(401), True, "is not on the hub, or not for everybody"), (RuntimeError("odd"), True, "cannot be loaded: page 1$")])
def test_what_the_hub_answers_is_one_sentence(error, download, words):
    with pytest.raises(InputError, match=words):
        with hub("owner/name", "model", download): raise OSError("page 1\npage 2") from error


def test_a_name_that_is_not_on_this_disk_says_how_to_fetch_it_and_nothing_is_fetched(tmp_path, monkeypatch):
    import socket
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises(InputError, match="owner/name is neither a folder here, nor .* in the hub's cache: .*download=True"): load_tokenizer("owner/name")
    with pytest.raises(InputError, match="there is no folder"): load_tokenizer(tmp_path/"absent")
    with pytest.raises(InputError, match="the tokenizer in .* cannot be loaded"): load_tokenizer(tmp_path)


def test_a_bare_name_is_a_folder_under_the_data_roots_before_it_is_a_name_on_the_hub(tmp_path, monkeypatch, tokenizer):
    save_tokenizer(tmp_path/"tiny-lm")
    (tmp_path/"owner"/"name").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path/"home"))
    monkeypatch.setenv("FEDINTERP_DATA", str(tmp_path))
    assert place("tiny-lm") == tmp_path/"tiny-lm" and place("owner/name") == "owner/name" and place("other-lm") == "other-lm"
    assert load_tokenizer("tiny-lm").get_vocab() == tokenizer.get_vocab()
    monkeypatch.delenv("FEDINTERP_DATA")
    with pytest.raises(InputError, match="tiny-lm is neither a folder here, nor one under FEDINTERP_DATA, nor in the hub's cache"): load_tokenizer("tiny-lm")
    (tmp_path/"home/.cache/fedinterp/tiny-lm").mkdir(parents=True)
    assert place("tiny-lm") == tmp_path/"home/.cache/fedinterp/tiny-lm"
    with pytest.raises(InputError, match="the tokenizer in tiny-lm cannot be loaded"): load_tokenizer("tiny-lm")
    monkeypatch.chdir(tmp_path)
    assert str(place("tiny-lm")) == "tiny-lm" and place("tiny-lm").is_dir()  # a folder where one stands comes first
    for wrong in ("", None, 3):
        with pytest.raises(InputError, match="is no place of a model"): load_tokenizer(wrong)


def test_loading_leaves_logging_warnings_and_the_environment_as_they_were(tokenizer):
    logs = extra("transformers").utils.logging
    before = logs.get_verbosity(), logs.is_progress_bar_enabled(), os.environ.get("TOKENIZERS_PARALLELISM")
    with hub("x", "model"): assert logs.get_verbosity() == logs.CRITICAL
    encode(rows(1)[0], tokenizer)
    assert before == (logs.get_verbosity(), logs.is_progress_bar_enabled(), os.environ.get("TOKENIZERS_PARALLELISM"))


def test_the_sixteen_tasks_of_flan_and_dolly_are_read_as_published():
    folder = os.environ.get("FEDINTERP_DATA")
    if not folder or not os.path.exists(f"{folder}/flan16_train.jsonl"): pytest.skip("FEDINTERP_DATA is not set, or holds no flan16_train.jsonl")
    for federation in (1, 2):
        train, test = (by_task(read_instructions(f"flan16_{part}", federation=federation)) for part in ("train", "test"))
        assert len(train) == 8 and set(train) == set(test) and {len(r) for r in train.values()} == {300} and {len(r) for r in test.values()} == {200}
    dolly = read_instructions("dolly15k")
    assert len(dolly) == 15_011 and len(by_task(dolly)) == 8 and sum(bool(r["context"]) for r in dolly) > 4000


def test_the_length_of_a_shortened_prompt_does_not_tell_its_answer(tokenizer):
    text = "Is it so that " + "the river runs by the mill and " * 8 + "ends there?"
    of = lambda answer: dict(instruction=text, context="", answer=answer, task="options")
    data = instruction_data([of("no"), of("the very same")], [of("no"), of("the very same"), of("the very same and more")], tokenizer, 96)
    prompts = [ids[:counts.tolist().index(1)].tolist() for ids, counts in data.x_test[:2]]
    assert prompts[0] == prompts[1] and len(prompts[0]) < len(encode_prompt(of("no"), tokenizer, 1 << 30))
    alone = [encode(of(answer), tokenizer, 96)[1].count(0) for answer in ("no", "the very same")]
    assert alone[0] > alone[1]  # which is what a row for itself would do
