"""The architectures of transformers that Shoal reads and writes: one file each, with every fact that is its own.

All are settings of one decoder (`shoal.model.decoder`). A family is added by its file, a line here and its name in
`shoal.spec.model.Model.family`.
"""

from shoal.spec.families import bamba, deepseek_v3, dots1, gemma3_text, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from shoal.spec.families.family import Family, Routed, Window

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "dots1": dots1.FAMILY,
    "bamba": bamba.FAMILY,
    "gemma3_text": gemma3_text.FAMILY,
    "deepseek_v3": deepseek_v3.FAMILY,
}

__all__ = ["FAMILIES", "Family", "Routed", "Window"]
