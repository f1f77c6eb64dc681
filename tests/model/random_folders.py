"""Random config.json files of each family and random models of run files, tiny, for `against_transformers`.

A config is drawn within the support that Shoal claims; every second one is then changed in one to three places: a field
at its edge, of another type, of another family, unknown, null.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from pydantic import ValidationError

from shoal.decide.checks import trainable
from shoal.errors import SpecError
from shoal.spec.families import FAMILIES
from shoal.spec.hf.fields import ROPE_FIELDS
from shoal.spec.rules import broken
from shoal.spec.run import Run
from shoal.spec.shape import Shape, shape_of

VOCAB = 40
Config = dict[str, Any]


def drawn(family: str, rng: Random) -> tuple[Config, bool]:
    """A config, and whether it stays within what is claimed."""
    config = within(family, rng)
    if rng.random() < 0.5:
        return config, True
    for _ in range(rng.randint(1, 3)):
        rng.choice(CHANGES)(config, rng)
    return config, False


def within(family: str, rng: Random) -> Config:
    heads = rng.choice([2, 4])
    config: Config = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": rng.choice([16, 32]),
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([k for k in (1, 2, 4) if k <= heads]),
        "initializer_range": rng.choice([0.02, 0.2, 1.0]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 1e-2]),
        "max_position_embeddings": rng.choice([8, 16, 24, 64]),
    }
    maybe(config, rng, "tie_word_embeddings", [True, False])
    maybe(config, rng, "hidden_act", ["silu", "swish"])
    if family in ("llama", "bamba"):
        maybe(config, rng, "num_key_value_heads", [None] if family == "llama" else [1])
        maybe(config, rng, "mlp_bias", [True, False])
    if family in ("llama", "qwen3", "qwen3_moe", "dots1", "bamba", "gemma3_text", "deepseek_v3"):
        maybe(config, rng, "attention_bias", [True, False])
    if family in ("qwen3", "gemma3_text") or (family != "deepseek_v3" and rng.random() < 0.5):
        config["head_dim"] = rng.choice([8, 12, 16] if family == "bamba" else [4, 8, 12, 16])
    _rope(config, rng)
    if family == "gemma3_text":
        _two_kinds_of_layers(config, rng)
    if family == "deepseek_v3":
        _latent(config, rng)
    if family == "bamba":
        _states(config, rng)
    _window(config, family, rng)
    if FAMILIES[family].experts:
        _experts(config, family, rng)
    _beside(config, rng)
    return config


def maybe(config: Config, rng: Random, key: str, values: Sequence[Any], often: float = 0.4) -> None:
    if rng.random() < often:
        config[key] = rng.choice(values)


def _rope(config: Config, rng: Random) -> None:
    """All five kinds, in the spelling of transformers 4 or 5."""
    kind = rng.choice(["default", "default", "linear", "dynamic", "llama3", "yarn"])
    rope: Config = {rng.choice(["rope_type", "type"]): kind}
    if kind != "default":
        rope["factor"] = rng.choice([1.0, 2, 4.0, 8.5])
    if kind == "llama3":
        rope |= {"low_freq_factor": rng.choice([0.5, 1, 2.0]), "high_freq_factor": rng.choice([2.5, 4, 8.0])}
    if kind in ("llama3", "yarn"):
        maybe(rope, rng, "original_max_position_embeddings", [4, 8, 16], 0.8)
    if kind == "yarn":
        maybe(rope, rng, "beta_fast", [8, 32.0, 0])
        maybe(rope, rng, "beta_slow", [1, 2.0])
        maybe(rope, rng, "attention_factor", [1.0, 1.3])
        maybe(rope, rng, "truncate", [True])
        if rng.random() < 0.4:
            rope |= {"mscale": rng.choice([1.0, 0.7]), "mscale_all_dim": rng.choice([1.0, 0.8])}
    theta = rng.choice([10_000.0, 500_000, 100.0])
    spelling = rng.choice(["4", "4", "5", "none"])
    if spelling == "5":
        config["rope_parameters"] = {**rope, "rope_theta": theta}
    elif spelling == "4":
        config |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope}
    if config["model_type"] != "bamba":  # whose class has one of its own
        maybe(config, rng, "partial_rotary_factor", [1.0, None], 0.1)


def _two_kinds_of_layers(config: Config, rng: Random) -> None:
    """A pattern of windows, and rotary positions for each kind of layer."""
    layers = config["num_hidden_layers"]
    maybe(config, rng, "hidden_activation", ["gelu_pytorch_tanh"])
    maybe(config, rng, "query_pre_attn_scalar", [4, 16, 100])
    maybe(config, rng, "sliding_window", [3, 7, 64], 0.8)
    every = rng.choice([1, 2, 3, 6])
    maybe(config, rng, rng.choice(["sliding_window_pattern", "_sliding_window_pattern"]), [every])
    if rng.random() < 0.6:
        kinds = ["sliding_attention", "full_attention"]
        config["layer_types"] = [kinds[(i + 1) % every == 0] for i in range(layers)]
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        rope["rope_type"] = rope.pop("type", None) or rope["rope_type"]
        config["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": rng.choice([100.0, 10_000])},
        }
    elif scaling := config.get("rope_scaling"):
        scaling["rope_type"] = scaling.pop("type", None) or scaling["rope_type"]
    maybe(config, rng, "rope_local_base_freq", [50.0, 10_000])
    maybe(config, rng, "use_bidirectional_attention", [False], 0.2)
    maybe(config, rng, "final_logit_softcapping", [None], 0.2)


def _latent(config: Config, rng: Random) -> None:
    """Attention of short vectors; experts in groups come with the others'."""
    config["num_key_value_heads"] = rng.choice([config["num_attention_heads"], None])
    config |= {"kv_lora_rank": rng.choice([4, 12]), "q_lora_rank": rng.choice([None, 6, 16])}
    config |= {"qk_nope_head_dim": rng.choice([4, 6, 12]), "qk_rope_head_dim": rng.choice([4, 8])}
    config["v_head_dim"] = rng.choice([2, 5, 8])
    maybe(config, rng, "rope_interleave", [True, False])
    maybe(config, rng, "head_dim", [config["qk_rope_head_dim"]], 0.2)
    maybe(config, rng, "num_nextn_predict_layers", [0, 1], 0.3)
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if "yarn" not in rope.values():
            rope.pop("mscale_all_dim", None)


def _states(config: Config, rng: Random) -> None:
    layers = config["num_hidden_layers"]
    config["attn_layer_indices"] = rng.choice([None, [], [layers - 1], [0], list(range(layers))])
    config["mamba_n_heads"] = rng.choice([2, 4, 8])
    config["mamba_d_state"] = rng.choice([4, 8, 16])
    maybe(config, rng, "mamba_expand", [1, 2, 3])
    maybe(config, rng, "mamba_d_head", ["auto"])
    maybe(config, rng, "mamba_n_groups", [1, 2])
    maybe(config, rng, "mamba_d_conv", [1, 2, 4, 5])
    maybe(config, rng, "mamba_chunk_size", [4, 16, 256])
    maybe(config, rng, "mamba_conv_bias", [True, False])
    maybe(config, rng, "mamba_proj_bias", [True, False])
    maybe(config, rng, "time_step_limit", [[0.0, {"__float__": "Infinity"}]])
    maybe(config, rng, "z_loss_coefficient", [0.0, 1e-4], 0.2)


def _window(config: Config, family: str, rng: Random) -> None:
    layers = config["num_hidden_layers"]
    sliding = rng.random() < 0.5
    if family in ("bamba", "gemma3_text", "deepseek_v3"):
        return
    if family == "llama":
        maybe(config, rng, "layer_types", [["full_attention"] * layers], 0.1)
        return
    config["sliding_window"] = rng.choice([3, 7, 64]) if sliding else rng.choice([None, None, 4096])
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        config["use_sliding_window"] = sliding
    if family in ("qwen2", "qwen3", "dots1"):
        maybe(config, rng, "max_window_layers", [0, 1, 2, 28], 0.6)
        if sliding and rng.random() < 0.3:
            full = rng.randint(0, layers)
            config["layer_types"] = ["full_attention"] * full + ["sliding_attention"] * (layers - full)


def _experts(config: Config, family: str, rng: Random) -> None:
    count, layers = rng.choice([2, 4, 5]), config["num_hidden_layers"]
    about = FAMILIES[family].routed
    assert about is not None
    config[about.counts[0]] = count
    config["num_experts_per_tok"] = rng.randint(1, min(count, 3))
    maybe(config, rng, "output_router_logits", [True, False], 0.2)
    if family == "mixtral":
        maybe(config, rng, "router_jitter_noise", [0.0], 0.3)
        return
    config["moe_intermediate_size"] = rng.choice([8, 16])
    maybe(config, rng, "norm_topk_prob", [True, False], 0.7)
    if family == "qwen3_moe":
        maybe(config, rng, "mlp_only_layers", [[], list(range(rng.randint(0, layers - 1)))])
        maybe(config, rng, "decoder_sparse_step", [1])
    else:
        config["n_shared_experts"] = rng.choice([1, 2])
        maybe(config, rng, "first_k_dense_replace", [0, rng.randint(0, layers - 1)])
        if family == "deepseek_v3":
            config["first_k_dense_replace"] = rng.randint(0, layers - 1)
            _expert_groups(config, rng)
            return
        maybe(config, rng, "n_group", [1])
        maybe(config, rng, "topk_group", [1])
        maybe(config, rng, "routed_scaling_factor", [1.0])


def _expert_groups(config: Config, rng: Random) -> None:
    groups = rng.choice([1, 2, 3])
    config |= {"n_routed_experts": groups * rng.choice([2, 4]), "n_group": groups, "topk_group": rng.randint(1, groups)}
    config["num_experts_per_tok"] = rng.randint(1, config["n_routed_experts"] // groups * config["topk_group"])
    maybe(config, rng, "routed_scaling_factor", [1.0, 2.5, 0.3], 0.7)
    maybe(config, rng, "scoring_func", ["sigmoid"], 0.3)
    maybe(config, rng, "topk_method", ["noaux_tc"], 0.3)


def _beside(config: Config, rng: Random) -> None:
    """What folders carry that changes nothing."""
    maybe(config, rng, "torch_dtype", ["bfloat16", "float32"])
    maybe(config, rng, "architectures", [[FAMILIES[config["model_type"]].architecture]])
    maybe(config, rng, "transformers_version", ["4.44.0", "5.0.0"])
    maybe(config, rng, "_name_or_path", ["somebody/some-model"])
    maybe(config, rng, "use_cache", [True, False])
    maybe(config, rng, "pad_token_id", [0, 2, None])
    maybe(config, rng, "bos_token_id", [1, None])
    maybe(config, rng, "eos_token_id", [2, [2, 3], None])
    maybe(config, rng, "attention_dropout", [0.0, 0.1])
    maybe(config, rng, "max_length", [20], 0.1)
    maybe(config, rng, "temperature", [0.7], 0.1)
    maybe(config, rng, "pretraining_tp", [1, 2], 0.1)


def _a_number(config: Config, rng: Random) -> None:
    keys = [k for k, v in config.items() if isinstance(v, int | float) and not isinstance(v, bool)]
    edges = [0, 1, -1, 2, 3, 5, 7, 1 << 7, 1 << 62, 1.5, 2.0, "4", True, None, [], 1e300]
    config[rng.choice(keys)] = rng.choice(edges)


def _a_flag(config: Config, rng: Random) -> None:
    keys = [k for k, v in config.items() if isinstance(v, bool)] or ["tie_word_embeddings"]
    config[rng.choice(keys)] = rng.choice([True, False, 0, 1, "true", None])


def _a_null(config: Config, rng: Random) -> None:
    config[rng.choice([k for k in config if k != "model_type"])] = None


def _left_out(config: Config, rng: Random) -> None:
    big = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type")
    if keys := [k for k in config if k not in big]:
        del config[rng.choice(keys)]


def _some_rope(config: Config, rng: Random) -> None:
    key = rng.choice(["rope_scaling", "rope_parameters"])
    rope = dict(config.get(key) or {"rope_type": rng.choice(["linear", "dynamic", "yarn", "llama3"]), "factor": 2.0})
    rope[rng.choice(_OF_ROPE)] = rng.choice(
        [0, 1, 2, 0.5, 4.0, 16, None, False, True, "yarn", "longrope", -1, {"rope_type": "default"}]
    )
    config[key] = rope


def _layer_types(config: Config, rng: Random) -> None:
    layers = config.get("num_hidden_layers")
    layers = layers if isinstance(layers, int) and 0 < layers < 9 else 2
    full, sliding = "full_attention", "sliding_attention"
    config["layer_types"] = rng.choice(
        [
            [full] * layers,
            [sliding] * layers,
            ([full, sliding] * layers)[:layers],
            ([sliding, full] * layers)[:layers],
            [full] * (layers + 1),
            ["attention"] * layers,
            ["chunked_attention"] * layers,
            full,
        ]
    )


def _a_field(config: Config, rng: Random) -> None:
    """Known to some class, to older ones or to nobody."""
    name, values = rng.choice(list(_OTHERS.items()))
    config[name] = rng.choice(values)


_OF_ROPE = [*ROPE_FIELDS, "foreign", "full_attention", "sliding_attention"]
_OTHERS: dict[str, list[Any]] = {
    "is_causal": [False, True],
    "sliding_window": [1, 3, 7, None, 0, -1],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, -1],
    "partial_rotary_factor": [0.5, 1.0, 0.25],
    "original_max_position_embeddings": [4, 8, None],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh", "silu", "swish"],
    "num_experts": [2, 3, 4, 8],
    "num_local_experts": [2, 3, 4, 8],
    "n_routed_experts": [2, 4],
    "n_shared_experts": [0, 1, 3],
    "n_group": [1, 2, 0],
    "topk_group": [0, 1, 2],
    "routed_scaling_factor": [1.0, 2.5, 0],
    "norm_topk_prob": [True, False],
    "first_k_dense_replace": [0, 1, 9],
    "decoder_sparse_step": [0, 1, 2, 3],
    "mlp_only_layers": [[0], [1], [0, 1], [0, 1, 2], [7], "x"],
    "num_experts_per_tok": [1, 2, 3, 9],
    "moe_intermediate_size": [8, 24],
    "router_jitter_noise": [0.0, 0.1],
    "head_dim": [2, 4, 6, 7, 16, None],
    "num_key_value_heads": [1, 2, 3, 4, 8, None],
    "attention_dropout": [0.0, 0.5, None, 2],
    "quantization_config": [{}, {"quant_method": "gptq", "bits": 4}],
    "auto_map": [{}, {"AutoModelForCausalLM": "modeling_x.X"}, {"AutoTokenizer": ["tok.T", None]}],
    "per_layer_config": [{}, {"0": {"sliding_window": 2}}, {"0": {"intermediate_size": 8}}],
    "attention_chunk_size": [4],
    "chunk_size_feed_forward": [0, 1],
    "query_pre_attn_scalar": [4, 0, 2.5],
    "sliding_window_pattern": [0, 1, 2, "x"],
    "rope_local_base_freq": [0, 7, "x"],
    "use_bidirectional_attention": [True, False],
    "attn_logit_softcapping": [50.0],
    "hidden_activation": ["gelu", "silu", "gelu_pytorch_tanh"],
    "scale_embeddings": [True],
    "logit_scale": [2.0],
    "q_lora_rank": [None, 0, 3],
    "kv_lora_rank": [1, 0, "x"],
    "qk_rope_head_dim": [3, 6, 0],
    "qk_nope_head_dim": [0, 5],
    "v_head_dim": [1, 16, None],
    "qk_head_dim": [8, 20],
    "rope_interleave": [True, False, None],
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "noaux_tc"],
    "num_nextn_predict_layers": [0, 1, 2],
    "final_logit_softcapping": [30.0],
    "residual_multiplier": [0.5],
    "qk_norm": [True, False],
    "no_rope_layers": [[0, 1]],
    "tie_word_embeddings": [True, False],
    "rope_theta": [1, 1.0, 0.5, 1e6, None, 0],
    "pad_token_id": [-1, 5, 1000],
    "vocab_size": [40, 41, 64],
    "default_theta": [5.0],
    "attn_layer_indices": [[0], [1, 7], [-1], "x", [True]],
    "mamba_expand": [0, 1, 2, 1.5],
    "mamba_d_head": [4, 8, "auto", "x"],
    "mamba_n_groups": [0, 3],
    "time_step_limit": [[0.0, 1.0], [0.001, {"__float__": "Infinity"}], None],
    "attribute_map": [{"num_hidden_layers": "x"}],
}
CHANGES: list[Callable[[Config, Random], None]] = [
    _a_field, _a_field, _a_field, _a_number, _a_flag, _a_null, _left_out, _some_rope, _some_rope, _layer_types,
]  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """The model section of a run file."""

    model: dict[str, Any]

    @property
    def family(self) -> str:
        return str(self.model["family"])

    def shape(self) -> Shape:
        """SpecError where `shoal show` or `shoal train` refuses it."""
        values = {
            "name": "x",
            "model": self.model,
            "data": {"train": ["data"], "seq_len": 8},
            "train": {"steps": 10, "batch": 4, "optimizer": {"lr": 1e-3}},
        }
        try:
            run = Run.model_validate(values)
        except ValidationError as e:
            raise SpecError(str(e.errors()[0]["msg"])) from e
        if problems := broken(run):
            raise SpecError(problems[0][1])
        trainable(run)
        return shape_of(run.model, VOCAB)


def run_of(rng: Random) -> Drawn:
    family = rng.choice(list(FAMILIES))
    about = FAMILIES[family]
    heads = rng.choice([1, 2, 4])
    model: dict[str, Any] = {
        "family": family,
        "vocab_size": rng.choice([VOCAB, 64, "auto"]),
        "dim": rng.choice([8, 16, 24, 32]),
        "layers": rng.choice([1, 2, 3]),
        "heads": heads,
        "qk_norm": about.qk_norm,
        "max_seq_len": rng.choice([8, 16, 64]),
    }
    maybe(model, rng, "kv_heads", ["auto", 1, 2, heads])
    maybe(model, rng, "head_dim", ["auto", 2, 4, 8, 12])
    maybe(model, rng, "ffn_dim", ["auto", 24, 40])
    maybe(model, rng, "norm_eps", [1e-6, 1e-3, 1])
    maybe(model, rng, "rope_theta", [1, 100.0, 1e6, 0.5])
    maybe(model, rng, "tie_embeddings", [True, False])
    maybe(model, rng, "init_std", [0.02, 1.0, 1.5, 30])
    if family == "qwen2":
        model["qkv_bias"] = True
    elif about.attention_bias and rng.random() < 0.4:
        model |= {"qkv_bias": True, "out_bias": True}
    maybe(model, rng, "qkv_bias", [True, False], 0.05)
    maybe(model, rng, "mlp_bias", [True], 0.3 if family == "llama" else 0.03)
    if rng.random() < (0.4 if family != "llama" else 0.05):
        model["sliding_window"] = rng.choice([1, 3, 7, 64])
        maybe(model, rng, "full_attention_layers", range(model["layers"] + 1), 0.5)
    maybe(model, rng, "full_attention_layers", [1, 3], 0.05)
    if family == "gemma3_text":
        model.pop("full_attention_layers", None)
    often = 0.5 if family == "gemma3_text" and "sliding_window" in model else 0.02
    maybe(model, rng, "full_attention_every", [2, 3, 6], often)
    maybe(model, rng, "sliding_rope_theta", [50.0, 1e4], 0.8 if often == 0.5 else often)
    maybe(model, rng, "query_pre_attn_scalar", [3, 64], often)
    if rng.random() < 0.6:
        model["rope_scaling"] = _scaling(rng)
    if about.mamba or rng.random() < 0.03:
        model["mamba"] = _states_of_run(rng, model["layers"])
    if about.mla is not None or rng.random() < 0.02:
        model.pop("kv_heads", None)
        model.pop("head_dim", None)
        model["mla"] = {
            "q_lora_rank": rng.choice([None, 6]),
            "kv_lora_rank": rng.choice([4, 10]),
            "qk_nope_head_dim": rng.choice([2, 6]),
            "qk_rope_head_dim": rng.choice([2, 4, 3]),
            "v_head_dim": rng.choice([1, 2, 4] if rng.random() < 0.9 else [16]),
            "rope_interleave": rng.choice([True, False]),
        }
    if about.experts or rng.random() < 0.05:
        model["experts"] = _experts_of_run(family, rng)
    return Drawn(model)


def _scaling(rng: Random) -> dict[str, Any]:
    kind = rng.choice(["linear", "dynamic", "llama3", "yarn"])
    scaling: dict[str, Any] = {"kind": kind, "factor": rng.choice([1, 2.0, 8.5])}
    maybe(scaling, rng, "original_max_seq_len", [4, 8, 64], 0.9 if kind == "llama3" else 0.5)
    maybe(scaling, rng, "low_freq_factor", [0.5, 2.0])
    maybe(scaling, rng, "high_freq_factor", [4.0, 8.0])
    maybe(scaling, rng, "beta_fast", [8.0, 64.0])
    maybe(scaling, rng, "beta_slow", [0.5, 2.0])
    maybe(scaling, rng, "attention_factor", [0.5, 1.0, 1.5], 0.3)
    return scaling


def _states_of_run(rng: Random, layers: int) -> dict[str, Any]:
    mamba: dict[str, Any] = {
        "attention_layers": rng.choice([[], [0], [layers - 1]]),
        "heads": rng.choice([2, 4, 8]),
        "state_dim": rng.choice([4, 16]),
    }
    maybe(mamba, rng, "head_dim", ["auto", 8, 12], 0.3)
    maybe(mamba, rng, "groups", [1, 2], 0.4)
    maybe(mamba, rng, "conv_width", [1, 3], 0.3)
    maybe(mamba, rng, "conv_bias", [True, False])
    maybe(mamba, rng, "proj_bias", [True, False])
    maybe(mamba, rng, "attention_layers", [[9]], 0.05)
    return mamba


def _experts_of_run(family: str, rng: Random) -> dict[str, Any]:
    count = rng.choice([2, 4, 5])
    experts: dict[str, Any] = {
        "count": count,
        "top_k": rng.randint(2, min(3, count)) if rng.random() < 0.8 else 1,
        "ffn_dim": rng.choice([8, 16]),
        "score": "sigmoid" if family in ("dots1", "deepseek_v3") else "softmax",
        "shared": rng.choice([1, 2]) if family in ("dots1", "deepseek_v3") else 0,
    }
    if family == "deepseek_v3":
        maybe(experts, rng, "groups", [1, 2])
        maybe(experts, rng, "top_groups", [1, 2])
    maybe(experts, rng, "routed_scale", [1.0, 2.5], 0.5 if family == "deepseek_v3" else 0.03)
    maybe(experts, rng, "normalize", [True, False])
    if family != "mixtral":
        maybe(experts, rng, "dense_layers", [0, 1, 2])
    maybe(experts, rng, "balance_rate", [0.0, 1e-3], 0.2)
    maybe(experts, rng, "shared", [0, 1], 0.05)
    maybe(experts, rng, "score", ["softmax", "sigmoid"], 0.05)
    return experts
