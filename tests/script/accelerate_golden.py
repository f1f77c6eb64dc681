"""Makes accelerate_golden.json: what the real `accelerate launch` tells a script, for each row of `CASES`.

    python -m pip install --target SITE --no-deps accelerate deepspeed hjson msgpack py-cpuinfo einops
    PYTHONPATH=SITE python tests/script/accelerate_golden.py

Made with accelerate 1.15.0 and deepspeed 0.19.8. The script that is launched prints its environment and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("accelerate_golden.json")
PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
TWO = ["--num_processes", "2", "--num_machines", "1"]
FSDP = [*TWO, "--use_fsdp", "--fsdp_version", "2"]
# name → the section of the run file, and the options that say the same
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, ["--multi_gpu", *TWO]),
    "bf16": ({"mixed_precision": "bf16"}, ["--multi_gpu", *TWO, "--mixed_precision", "bf16"]),
    "compiled": (
        {"dynamo": {"backend": "inductor", "mode": "max-autotune", "use_fullgraph": True, "use_dynamic": True,
                    "use_regional_compilation": True}},
        ["--multi_gpu", *TWO, "--dynamo_backend", "inductor", "--dynamo_mode", "max-autotune",
         "--dynamo_use_fullgraph", "--dynamo_use_dynamic", "--dynamo_use_regional_compilation"],
    ),
    "fsdp": ({"fsdp": {}}, FSDP),
    "fsdp with all": (
        {"mixed_precision": "fp16",
         "fsdp": {"reshard_after_forward": False, "offload_params": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                  "transformer_layer_cls_to_wrap": ["GPT2Block", "LlamaDecoderLayer"], "min_num_params": 1000,
                  "state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False,
                  "activation_checkpointing": "offload"}},
        [*FSDP, "--mixed_precision", "fp16", "--fsdp_reshard_after_forward", "false", "--fsdp_offload_params", "true",
         "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
         "--fsdp_transformer_layer_cls_to_wrap", "GPT2Block,LlamaDecoderLayer", "--fsdp_min_num_params", "1000",
         "--fsdp_state_dict_type", "SHARDED_STATE_DICT", "--fsdp_cpu_ram_efficient_loading", "false",
         "--fsdp_activation_checkpointing", "true", "--fsdp_activation_checkpointing_offload", "true"],
    ),
    "mesh": (
        {"fsdp": {}, "parallelism": {"dp_replicate": 2, "dp_shard": 4, "tp": 8}},
        [*FSDP, "--use_parallelism_config", "--parallelism_config_dp_replicate_size", "2",
         "--parallelism_config_dp_shard_size", "4", "--parallelism_config_tp_size", "8"],
    ),
    "mesh with context": (
        {"fsdp": {}, "parallelism": {"cp": 2, "cp_comm_strategy": "alltoall"}},
        [*FSDP, "--use_parallelism_config", "--parallelism_config_cp_size", "2",
         "--parallelism_config_cp_comm_strategy", "alltoall"],
    ),
    "deepspeed": ({"deepspeed": {}}, [*TWO, "--use_deepspeed"]),
    "deepspeed with all": (
        {"mixed_precision": "bf16",
         "deepspeed": {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
                       "offload_optimizer_device": "cpu", "offload_param_device": "nvme", "zero3_init_flag": True,
                       "zero3_save_16bit_model": False, "moe_layer_cls_names": ["MoE", "Experts"]}},
        [*TWO, "--use_deepspeed", "--mixed_precision", "bf16", "--zero_stage", "3",
         "--gradient_accumulation_steps", "4", "--gradient_clipping", "1.0",
         "--offload_optimizer_device", "cpu", "--offload_param_device", "nvme",
         "--zero3_init_flag", "true", "--zero3_save_16bit_model", "false",
         "--deepspeed_moe_layer_cls_names", "MoE,Experts"],
    ),
    "deepspeed from a file": (
        {"deepspeed": {"config_file": "/etc/ds.json"}},
        [*TWO, "--use_deepspeed", "--deepspeed_config_file", "/etc/ds.json"],
    ),
}  # fmt: skip


def launched(options: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        script, said = Path(folder, "train.py"), Path(folder, "said.json")
        place = f"{str(said)!r} + os.environ['RANK']"
        script.write_text(f"import json, os\njson.dump(dict(os.environ), open({place}, 'w'))")
        launch = [sys.executable, "-m", "accelerate.commands.launch"]
        command = [*launch, *options, "--main_process_port", "0", str(script)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
        clean |= {"HF_HOME": folder, "DS_ACCELERATOR": "cpu"}  # no file of `accelerate config`
        subprocess.run(command, check=True, env=clean)
        ranks = [json.loads(Path(f"{said}{rank}").read_text()) for rank in (0, 1)]
    first, second = ({n: v for n, v in sorted(told.items()) if n.startswith(PREFIXES)} for told in ranks)
    assert first == second
    return first


if __name__ == "__main__":
    made = {name: {"section": section, "env": launched(options)} for name, (section, options) in CASES.items()}
    FILE.write_text(json.dumps(made, indent=1) + "\n")
