"A tokenizer of bytes and checkpoints of a few thousand weights, for the tests of language models."
from fedinterp.core import seeded
from fedinterp.text import extra

WORDS = {"colour": "red green blue grey white black".split(), "animal": "wren pear heron otter vole newt".split()}


def rows(n, tasks=("colour", "animal")):
    "n rows a task: a word and a number are asked for, the word is the answer."
    return [dict(instruction=f"Say {WORDS[t][i % 6]} in {i}", context="", answer=WORDS[t][i % 6], task=t) for t in tasks for i in range(n)]


def save_tokenizer(folder, **special):
    "Bytes and a few merges; BOS and EOS unless `special` says otherwise, and no pad token."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    level, made = pre_tokenizers.ByteLevel, Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator([r["instruction"] for r in rows(20)], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=level.alphabet(), show_progress=False))
    extra("transformers").PreTrainedTokenizerFast(tokenizer_object=made, **{"bos_token": "<s>", "eos_token": "</s>", **special}).save_pretrained(folder)
    return folder


def save_model(folder, kind="llama", **changes):
    "A Llama or an OPT of two layers with random weights, as safetensors."
    transformers = extra("transformers")
    common = dict(vocab_size=320, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    config = {"llama": lambda: transformers.LlamaConfig(**{**common, "intermediate_size": 32, "num_key_value_heads": 1, "tie_word_embeddings": True, **changes}),
              "opt": lambda: transformers.OPTConfig(**{**common, "ffn_dim": 32, "word_embed_proj_dim": 16, **changes})}[kind]()
    with seeded(0, "tiny", kind): transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
