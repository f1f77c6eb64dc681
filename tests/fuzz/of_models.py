"""Folders of Hugging Face models: config.json, safetensors with and without an index, every dtype."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.json_values import encoded, mutated
from tests.fuzz.of_data import emptied
from tests.fuzz.raw_bytes import damaged
from tests.fuzz.reader import Finding, Folder, Target, reader
from tests.fuzz.samples import texts_of

CONFIGS: list[dict[str, Any]] = [
    {
        "model_type": kind,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "vocab_size": 40,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": [1, 2],
        "bos_token_id": 1,
        "head_dim": 8,
        **more,
    }
    for kind, more in (
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        (
            "llama",
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        ("mistral", {"sliding_window": 16, "layer_types": ["full_attention"]}),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 1, "sliding_window": None}),
        ("qwen3", {"attention_bias": False, "attention_dropout": 0.0}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}),
        (
            "qwen3_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
                "decoder_sparse_step": 1,
            },
        ),
        (
            "deepseek_v3",
            {
                "num_key_value_heads": 2,
                "head_dim": 4,
                "q_lora_rank": 6,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "v_head_dim": 8,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 8,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "first_k_dense_replace": 0,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        ),
        (
            "gemma3_text",
            {
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 8,
                "sliding_window": 16,
                "sliding_window_pattern": 6,
                "layer_types": ["sliding_attention"],
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 100.0,
            },
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            },
        ),
    )
]


@reader(
    "hf-config",
    "spec.hf.config",
    "spec.hf.experts",
    "spec.hf.mla",
    "spec.hf.rope",
    "spec.hf.windows",
    "spec.resolve",
    "checkpoint.foreign.shapes",
    "model.hf",
    quick=150,
    share=60,
)
def hf_config(folder: Path) -> Target:
    """By all ways in: `import` and `--like`, `sample --weights`, `model.weights`."""
    from shoal.errors import ShoalError
    from shoal.model.hf import load_shape
    from shoal.model.hf_tokenizer import save_tokenizer
    from shoal.spec.hf.folder import model_of_config
    from shoal.spec.resolve import _shape_of_weights

    file = folder / "config.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        taken: list[Any] = []
        wrong = None
        for way in (
            lambda: model_of_config(file),
            lambda: load_shape(folder),
            lambda: _shape_of_weights(folder, "run.yaml:1"),
        ):
            try:
                taken.append(way())
            except ShoalError as e:
                wrong = e
        if wrong is not None and taken:
            raise Finding("one way in takes what another refuses")
        if wrong is not None:
            raise wrong
        save_tokenizer(folder, taken[1], None, folder)

    return Target(texts_of(*CONFIGS), read, (ShoalError,))


@reader("any-config", "spec.hf.any_model", quick=150, share=40)
def any_config(folder: Path) -> Target:
    """Of a model that Shoal has no family for (`model.hf`): what is taken is a text that is read again as it was."""
    from shoal.errors import ShoalError
    from shoal.spec.hf.any_model import fields_of

    file = folder / "config.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        taken = fields_of(folder)
        if not (isinstance(taken["vocab_size"], int) and isinstance(taken["max_seq_len"], int)):
            raise Finding("a size that is not finite")
        file.write_text(taken["hf_config"], encoding="utf-8")
        if fields_of(folder) != taken:
            raise Finding("a config that is another after a round trip")

    return Target(texts_of(*CONFIGS, {**CONFIGS[0], "time_step_limit": [0.0, float("inf")]}), read, (ShoalError,))


def hf_folder(folder: Path) -> Folder:
    """A tiny model, in two files with an index."""
    import torch

    from shoal.model.decoder import Decoder
    from shoal.model.hf import save_folder
    from shoal.spec.hf.folder import model_of_config
    from shoal.spec.shape import shape_of

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[4]))
    shape = shape_of(model_of_config(folder / "config.json"))
    torch.manual_seed(0)
    decoder = Decoder(shape)
    decoder.init_weights(1)
    save_folder(folder / "out", shape, {n: p.detach() for n, p in decoder.named_parameters()})
    return Folder({p.name: p.read_bytes() for p in sorted((folder / "out").iterdir())})


def parts_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, body: bytes) -> bytes:
    text = encoded(header)
    return len(text).to_bytes(8, "little") + text + body


DTYPES = (
    "F32",
    "BF16",
    "F16",
    "F64",
    "I8",
    "U8",
    "I32",
    "I64",
    "BOOL",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F4",
    "U16",
    "X",
    None,
)


@reader(
    "hf-folder",
    "model.hf",
    "checkpoint.foreign.start_from",
    "checkpoint.foreign.bring_in",
    "checkpoint.foreign.incoming",
    "checkpoint.foreign.foreign_names",
    quick=60,
    share=8,
    most_mib=400,
)
def weights(folder: Path) -> Target:
    """Headers and indexes that lie, dtypes that are no weights, numbers that are none."""
    import torch

    from shoal.checkpoint.foreign.start_from import load_weights
    from shoal.errors import ShoalError
    from shoal.model.decoder import Decoder
    from shoal.model.hf import load_shape

    good = hf_folder(folder / "good")
    header, body = parts_of(good["model.safetensors"])
    names = [n for n in header if n != "__metadata__"]
    index = {
        "metadata": {"total_size": len(body)},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }

    def generate(rng: Random) -> Folder:
        case = Folder(good)
        roll = rng.random()
        if roll < 0.35:
            case["model.safetensors"] = joined(mutated(rng, header), body)
        elif roll < 0.5:  # a dtype of the same size, or of another with the shape changed to fit
            held = json.loads(json.dumps(header))
            for name in rng.sample(names, rng.choice((1, len(names)))):
                held[name]["dtype"] = rng.choice(DTYPES)
            case["model.safetensors"] = joined(held, body)
        elif roll < 0.6:
            raw = bytearray(body)
            at = 4 * rng.randrange(len(raw) // 4)
            raw[at : at + 4] = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"))
            case["model.safetensors"] = joined(header, bytes(raw))
        elif roll < 0.8:
            case["model.safetensors.index.json"] = encoded(mutated(rng, index))
            if rng.random() < 0.7:  # else both are there, and the index is not looked at
                case["model-00001-of-00001.safetensors"] = case.pop("model.safetensors")
        elif roll < 0.9:
            case["model.safetensors"] = damaged(
                rng, good["model.safetensors"], head=len(good["model.safetensors"]) - len(body)
            )
        else:
            case["config.json"] = encoded(mutated(rng, json.loads(good["config.json"])))
        return case

    def read(case: Folder) -> None:
        where = case.write(emptied(folder / "one"))
        decoder = Decoder(load_shape(where)) if len(case["config.json"]) < 5000 else None
        if decoder is None or sum(p.numel() for p in decoder.parameters()) > 1 << 20:
            return
        load_weights(decoder, where)
        held, _ = parts_of(next(data for name, data in case.items() if name.endswith(".safetensors")))
        if odd := [n for n in names if n in held and held[n]["dtype"] not in ("F32", "BF16", "F16", "F64")]:
            raise Finding(f"numbers of {held[odd[0]]['dtype']} are taken for weights")
        if not all(torch.isfinite(p).all() for p in decoder.parameters()):
            raise Finding("weights that are not finite are taken")

    return Target(generate, read, (ShoalError,))
