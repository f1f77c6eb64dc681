"""What becomes of every field of a config.json: what all families have in common, and each one's own file beside it.

A field is *read*; or only some values of it are taken, since others would change what is computed; or it is *harmless*,
with a word that says why. One that is in no table is refused by name: transformers may compute something else by it, or
its author may have meant that it should. `null` says nothing, and is what left out is. A test compares the tables with
the classes of the transformers that is installed, so a new field of theirs is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError
from shoal.spec.families import FAMILIES
from shoal.spec.families.verdicts import READ, Harmless, Only, Verdict, harmless, read
from shoal.values import shown

_NO_CODE = "Shoal runs no code of a model's folder"
_OWN_SHAPE = "Shoal's decoder has one shape for all layers"
_PLAIN = "Shoal reads plain weights only; dequantise the model first"
_CAUSAL = "Shoal's attention is causal"

# Of all configs: transformers' base class, what older ones wrote, and what tools leave there.
_OF_ALL: dict[str, Verdict] = {
    "model_type": READ,
    **harmless(
        output="output_hidden_states output_attentions return_dict use_return_dict torchscript",
        storage="dtype torch_dtype use_bfloat16 tf_legacy_loss",
        label="""architectures transformers_version name_or_path _name_or_path _model_name_or_path _commit_hash
            transformers.js_config is_llama_config unsloth_fixed unsloth_version model_max_length max_sequence_length
            finetuning_task task_specific_params tokenizer_class prefix""",
        classifier="id2label label2id num_labels problem_type classifier_dropout",
        speed="""use_cache pretraining_tp gradient_checkpointing attn_implementation _attn_implementation
            _attn_implementation_autoset _attn_implementation_internal experts_implementation _experts_implementation
            _experts_implementation_internal _flash_attn_2_enabled use_flash_attn use_flash_attention
            use_flash_attention_2 ep_size""",
        token="bos_token_id eos_token_id unk_token_id sep_token_id decoder_start_token_id",
        said="pad_token_id attention_dropout",  # `shoal.spec.hf.folder.notes_of`
        generation="""assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
            diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty
            epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
            length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens
            num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores
            remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind
            temperature top_k top_p typical_p""",
    ),
    "transformers_weights": READ,  # by who opens the weights
    "is_causal": Only((True,), _CAUSAL),
    "is_decoder": Harmless("label"),
    "is_encoder_decoder": Only((False,), "Shoal reads decoders only"),
    "add_cross_attention": Only((False,), "Shoal reads decoders only"),
    "cross_attention_hidden_size": Only((), "Shoal reads decoders only"),
    "tie_encoder_decoder": Only((False,), "Shoal reads decoders only"),
    "chunk_size_feed_forward": Only((0,), "Shoal computes a feed-forward layer at once"),
    "pruned_heads": Only(({},), "Shoal's layers have all their heads"),
    "per_layer_config": Only(({},), _OWN_SHAPE),
    "fusion_config": Only(({},), "Shoal computes the plain modules"),
    "auto_map": READ,
    "quantization_config": Only((), _PLAIN),
    "compression_config": Only((), _PLAIN),
    "quantization": Only((), _PLAIN),
    **dict.fromkeys(
        ("dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        Only((0, 0.0), "Shoal trains without dropout"),
    ),
    "rope_interleaved": Only((False,), "Shoal rotates halves of a head"),
    "use_mrope": Only((False,), "Shoal's positions are one number a token"),
    "bias": Only((False,), "which layers are to have one is said by attention_bias and mlp_bias"),
    "attention_logit_cap": Only((), "Shoal's attention has no cap"),
}
# Of all families.
_OF_DECODERS = read(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act max_position_embeddings original_max_position_embeddings initializer_range rms_norm_eps
    tie_word_embeddings rope_parameters rope_scaling rope_theta partial_rotary_factor layer_types"""
)
FIELDS: dict[str, dict[str, Verdict]] = {
    kind: {**_OF_ALL, **_OF_DECODERS, **family.fields} for kind, family in FAMILIES.items()
}
# Of the one object inside, `rope_parameters` or `rope_scaling`.
ROPE_FIELDS = read(
    """rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast
    beta_slow attention_factor mscale mscale_all_dim truncate partial_rotary_factor finetuned"""
)


def refuse_the_unknown(config: Mapping[str, Any], kind: str) -> None:
    """One sentence about the first field that the tables do not let pass."""
    table = FIELDS[kind]
    for name, value in config.items():
        if value is None:
            continue
        verdict = table.get(name)
        if verdict is None:
            raise SpecError(
                f"config.json has {shown(name)} {shown(value)}, a field that Shoal does not know of model_type {kind}: "
                "remove it if the model is the same without it."
            )
        if isinstance(verdict, Only) and not any(type(v) is type(value) and v == value for v in verdict.values):
            raise SpecError(f"config.json has {name} {shown(value)}: {verdict.why}.")
    if theirs := config.get("auto_map"):
        classes = [key for key in theirs if not key.startswith("AutoTokenizer")] if isinstance(theirs, dict) else ["?"]
        if classes:
            raise SpecError(f"config.json has an auto_map, which names classes of its own: {_NO_CODE}.")
