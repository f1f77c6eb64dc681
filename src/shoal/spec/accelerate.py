"""What `accelerate launch` would be told, for a script that uses Accelerate or the Trainer of transformers. Names and
defaults are those of its options (without `fsdp_`, `dynamo_` and `parallelism_config_` … `_size` around them)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shoal.spec.base import LocalPath, Positive, Strict

Names = Annotated[tuple[str, ...], Field(min_length=1)]


def _no(value: object) -> object:
    """YAML reads a bare `no` as false."""
    return "no" if value is False else value


class Dynamo(Strict):
    """torch.compile of what the script gives to `accelerator.prepare`."""

    backend: Annotated[Literal["no", "eager", "aot_eager", "inductor", "cudagraphs"], BeforeValidator(_no)] = Field(
        "no", description="Of torch.compile; `no`: nothing is compiled."
    )
    mode: Literal["default", "reduce-overhead", "max-autotune"] = Field("default", description="Of torch.compile.")
    use_fullgraph: bool = Field(False, description="Refuse what would be compiled in parts.")
    use_dynamic: bool = Field(False, description="Compile for any shape.")
    use_regional_compilation: bool = Field(False, description="Compile repeated blocks once.")


class Fsdp(Strict):
    """FSDP2 (`fully_shard`); FSDP1, which PyTorch has given up, is not offered."""

    reshard_after_forward: bool = Field(True, description="Free gathered parameters after the forward pass.")
    offload_params: bool = Field(False, description="Keep parameters and gradients on the host.")
    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] | None = Field(
        None, description="What is sharded by itself; empty: Accelerate's choice."
    )
    transformer_layer_cls_to_wrap: Names | None = Field(
        None, description="Classes of layers, for TRANSFORMER_BASED_WRAP; empty: those that the model names."
    )
    min_num_params: Positive = Field(100_000_000, description="Of a module, for SIZE_BASED_WRAP.")
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] | None = Field(
        None, description="How it saves; empty: Accelerate's choice."
    )
    cpu_ram_efficient_loading: bool = Field(True, description="Only rank 0 reads a model of transformers.")
    activation_checkpointing: bool | Literal["offload"] = Field(
        False, description="Compute activations again in the backward pass; `offload`: from what is kept on the host."
    )


class DeepSpeed(Strict):
    """DeepSpeed, which must be installed."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = Field(None, description="Empty: 2.")
    gradient_accumulation_steps: Positive | None = Field(None, description="Empty: what the script says.")
    gradient_clipping: Annotated[float, Field(gt=0)] | None = Field(None, description="Norm; empty: the script's.")
    offload_optimizer_device: Literal["none", "cpu", "nvme"] | None = Field(None, description="Empty: none.")
    offload_param_device: Literal["none", "cpu", "nvme"] | None = Field(None, description="Empty: none.")
    zero3_init_flag: bool | None = Field(None, description="Make large models in shards (stage 3).")
    zero3_save_16bit_model: bool | None = Field(None, description="Save whole 16-bit weights (stage 3).")
    moe_layer_cls_names: Names | None = Field(None, description="Classes of layers with experts.")
    config_file: LocalPath | None = Field(None, description="DeepSpeed's own file, in place of all other names here.")


class Parallelism(Strict):
    """Sizes of the mesh; their product is `script.processes`. With `fsdp` only."""

    dp_replicate: Positive = Field(1, description="Copies of the model.")
    dp_shard: Positive = Field(1, description="Processes that share one copy.")
    tp: Positive = Field(1, description="Tensor parallel.")
    cp: Positive = Field(1, description="Context parallel.")
    cp_comm_strategy: Literal["allgather", "alltoall"] = Field("allgather", description="How they exchange keys.")

    @property
    def processes(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp


class Accelerate(Strict):
    mixed_precision: Annotated[Literal["no", "fp16", "bf16"], BeforeValidator(_no)] = Field(
        "no", description="What `Accelerator()` computes in where the script does not say."
    )
    dynamo: Dynamo = Field(Dynamo(), description="torch.compile.")
    fsdp: Fsdp | None = Field(None, description="Shard with FSDP2.")
    deepspeed: DeepSpeed | None = Field(None, description="Shard with DeepSpeed.")
    parallelism: Parallelism | None = Field(None, description="A mesh of several kinds of parallelism.")
