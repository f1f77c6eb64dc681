"""A model that is made from a seed in a moment, and tasks of every kind for it, as lm-eval was asked (golden.json).

Nothing here depends on a library's random numbers but numpy's RandomState, whose stream is frozen, so the golden values
stay those of this model.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import save_file

_WORDS = """
the whale sea ship captain white old crew sail boat storm wind harbour night day sailor anchor rope deck mast
hunts follows sees fears loves leaves finds calls takes brings and of in on with over under near red blue green
"""
WORDS = _WORDS.split()
CONTEXT = 96
DIM, HEADS, KEYS, LAYERS, HIDDEN = 32, 4, 2, 2, 64


def sentence(random: np.random.RandomState, words: int) -> str:
    return " ".join(WORDS[i] for i in random.randint(0, len(WORDS), words))


def merges_of(text: str, count: int) -> list[tuple[str, str]]:
    """Byte-pair merges, the most frequent first, ties by the letters."""
    words = Counter("Ġ" + word for word in text.split())
    split = {word: list(word) for word in words}
    found = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        found.append(best)
        for word, parts in split.items():
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1
            split[word] = parts
    return found


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def write_model(folder: Path, begins: bool) -> None:
    """`begins`: whether its tokenizer puts a start token before every text."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = merges_of(" ".join(WORDS) * 3 + " the the the of of and", 90)
    vocab = {letter: i for i, letter in enumerate(byte_letters())}
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    specials = ["<s>", "</s>"]
    ids = {name: len(vocab) + i for i, name in enumerate(specials)}
    added = [
        {
            "id": ids[s],
            "content": s,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for s in specials
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}},
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": template if begins else level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"bos_token": "<s>"}))
    size = len(vocab) + len(specials)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": DIM,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.RandomState(7)

    def weight(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * (2.0 / shape[-1] ** 0.5)).astype(np.float32)

    head = DIM // HEADS
    tensors = {"model.embed_tokens.weight": weight(size, DIM), "lm_head.weight": weight(size, DIM)}
    tensors["model.norm.weight"] = np.ones(DIM, np.float32)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors[at + "self_attn.q_proj.weight"] = weight(HEADS * head, DIM)
        tensors[at + "self_attn.k_proj.weight"] = weight(KEYS * head, DIM)
        tensors[at + "self_attn.v_proj.weight"] = weight(KEYS * head, DIM)
        tensors[at + "self_attn.o_proj.weight"] = weight(DIM, HEADS * head)
        tensors[at + "mlp.gate_proj.weight"] = weight(HIDDEN, DIM)
        tensors[at + "mlp.up_proj.weight"] = weight(HIDDEN, DIM)
        tensors[at + "mlp.down_proj.weight"] = weight(DIM, HIDDEN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[at + norm + ".weight"] = np.ones(DIM, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


TASKS: dict[str, dict[str, object]] = {
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{' ' + last}}",
        "metric_list": [
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        ],
    },
    "border": {  # an answer without a blank: tokens go across the border
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{last}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{text}}\nAnswer:",
        "doc_to_choice": "options",
        "doc_to_target": "right",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm", "acc_bytes")
        ],
    },
    "choice_few_shot": {
        "output_type": "multiple_choice",
        "description": "Answer what the sailors ask.\n\n",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{right}}",
        "fewshot_split": "test",
        "num_fewshot": 1,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "choice_first": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}} is",
        "doc_to_choice": ["red", "blue", " green"],
        "doc_to_target": "{{['red', 'blue', ' green'][colour]}}",
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": 2,
        "target_delimiter": ": ",
        "fewshot_delimiter": "\n---\n",
    },
    "either": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{right}}",
        "doc_to_choice": "options",
        "doc_to_target": "last",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "several": {
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "options",
        "doc_to_target": "rights",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "exact_match")
        ],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}} and",
        "doc_to_target": "{{last}}",
        "fewshot_split": "train",
        "num_fewshot": 1,
        "generation_kwargs": {"until": ["\n", "ea"], "do_sample": False, "max_gen_toks": 12},
        "filter_list": [
            {
                "name": "letters",
                "filter": [
                    {"function": "regex", "regex_pattern": "([a-z])", "group_select": -1},
                    {"function": "take_first"},
                ],
            },
            {
                "name": "flat",
                "filter": [{"function": "remove_whitespace"}, {"function": "uppercase"}, {"function": "take_first"}],
            },
        ],
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": True,
                "regexes_to_ignore": [" ", "[^a-f]"],
            }
        ],
    },
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{long}}"},
}
ITEMS = 24


def items(seed: int, count: int) -> list[dict[str, object]]:
    random = np.random.RandomState(seed)
    made = []
    for number in range(count):
        options = [sentence(random, n) for n in (1, 2, 3, 1)]
        right = int(random.randint(0, 4))
        made.append(
            {
                "text": sentence(random, int(random.randint(3, 9))),
                "last": WORDS[int(random.randint(0, len(WORDS)))],
                "options": options,
                "right": right,
                "rights": [right, (right + 1) % 4],
                "colour": int(random.randint(0, 3)),
                "long": sentence(random, int(random.randint(20, 240))) + "é\n  end. ",
                "passage": f"p{number // 4}",
            }
        )
    # Longer than the model sees: its beginning is lost.
    made[0]["text"] = sentence(random, 150) + "  "
    return made


def write_tasks(folder: Path) -> list[Path]:
    """The task files and their items; they name them as from within the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, seed, count in (("test", 1, ITEMS), ("train", 2, 5)):
        lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in items(seed, count)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    files = []
    for name, keys in TASKS.items():
        data = {"data_files": {"test": "test.jsonl", "train": "train.jsonl"}}
        said = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **keys}
        said["metadata"] = {"version": 1.0}
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(said, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return files
