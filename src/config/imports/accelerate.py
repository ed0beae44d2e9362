"""accelerate's YAML, as `accelerate config` writes it."""

from __future__ import annotations

from src.config.imports.deepspeed import DEEPSPEED
from src.config.imports.rules import (
    Companion,
    Format,
    Refuse,
    Rule,
    Take,
    Warn,
    names,
    one_of,
    whole,
)
from src.config.imports.words import NO_CONTEXT_PARALLEL, fsdp_rules

_LAUNCHERS = {
    "no": "single",
    "multi_gpu": "ddp",
    "fsdp": "sharded",
    "deepspeed": "engine",
    "tp": "tp",
}
_PRECISIONS = {"no": "no", "bf16": "bf16", "fp16": "fp16"}
_DS = "deepspeed_config"
_zero = DEEPSPEED.rules
_PARALLEL: dict[str, Rule] = {
    "tp_size": Take("tp", whole),
    "cp_size": Refuse(NO_CONTEXT_PARALLEL, (1,)),
    "sp_size": Refuse(NO_CONTEXT_PARALLEL, (1,)),
}

_RULES: dict[str, Rule] = {
    "distributed_type": Take("launcher", one_of(_LAUNCHERS, "only CUDA GPUs; ")),
    "mixed_precision": Take("autocast", one_of(_PRECISIONS, "not among the precisions; ")),
    "num_processes": Take("gpus", whole),
    "num_machines": Take("nodes", whole),
    "use_cpu": Refuse("training is on CUDA GPUs here"),
    "compute_environment": Refuse("only this machine's kind", ("LOCAL_MACHINE", "local_machine")),
    **fsdp_rules("fsdp_config."),
    f"{_DS}.deepspeed_config_file": Companion(),
    f"{_DS}.zero_stage": _zero["zero_optimization.stage"],
    f"{_DS}.offload_optimizer_device": _zero["zero_optimization.offload_optimizer.device"],
    f"{_DS}.offload_param_device": _zero["zero_optimization.offload_param.device"],
    f"{_DS}.gradient_accumulation_steps": Take("grad_accum", whole),
    **{
        f"parallelism_config.{prefix}{name}": rule
        for prefix in ("", "parallelism_config_")
        for name, rule in _PARALLEL.items()
    },
    "megatron_lm_config": Refuse("Megatron-LM is not among the methods"),
    "dynamo_config": Warn("compiled code keeps other tensors, and is not counted"),
    "fp8_config": Refuse("fp8 is not among the precisions"),
}

ACCELERATE = Format(
    name="accelerate",
    marks=names("""
        compute_environment distributed_type num_processes num_machines machine_rank
        mixed_precision main_training_function rdzv_backend downcast_bf16 deepspeed_config
        main_process_port same_network
        """),
    rules=_RULES,
    harmless=names(f"""
        debug machine_rank main_process_ip main_process_port main_training_function
        rdzv_backend same_network gpu_ids enable_cpu_affinity downcast_bf16 tpu_env
        tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm mpirun_config command_file commands
        ipex_config fsdp_config {_DS}.gradient_clipping {_DS}.zero3_init_flag
        {_DS}.zero3_save_16bit_model {_DS}.deepspeed_multinode_launcher
        {_DS}.deepspeed_hostfile {_DS}.deepspeed_moe_layer_cls_names
        {_DS}.deepspeed_exclusion_filter {_DS}.deepspeed_inclusion_filter
        {_DS}.offload_optimizer_nvme_path {_DS}.offload_param_nvme_path parallelism_config
        """),
    is_training=False,
)
