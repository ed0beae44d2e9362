"""DeepSpeed's JSON; `auto` is what the training's own file says."""

from __future__ import annotations

from typing import Any

from src.config.imports.rules import (
    Format,
    NotRepresentedError,
    Refuse,
    Rule,
    Take,
    Warn,
    names,
    one_of,
    switch,
    whole,
)


def _switch_or_auto(value: Any) -> bool | None:
    return None if value == "auto" else switch(value)


def _size(value: Any) -> int | str | None:
    """Elements; `auto` is filled by transformers from the model's hidden size."""
    return "auto" if value == "auto" else whole(value)


def _host(place: str) -> Any:
    def convert(value: Any) -> str | None:
        if value in (None, "none"):
            return None
        if value not in ("cpu", "nvme"):
            raise NotRepresentedError("cpu, nvme or none")
        return place

    return convert


_OPTIMIZERS = {"adamw": "adamw-fused", "adam": "adamw-fused", "sgd": "sgd"}
_FP32 = {"fp32": True, "fp16": False, "bf16": False, "none": False}
_REDUCED = {"fp32": True, "fp16": False, "bf16": False}
_STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
_ZERO = "zero_optimization"

_RULES: dict[str, Rule] = {
    f"{_ZERO}.stage": Take("spread", one_of(_STAGES)),
    f"{_ZERO}.offload_optimizer.device": Take("offload_states", _host("optimizer")),
    f"{_ZERO}.offload_param.device": Take("offload_weights", _host("all")),
    f"{_ZERO}.cpu_offload": Take("offload_states", lambda on: "optimizer" if switch(on) else None),
    f"{_ZERO}.reduce_bucket_size": Take("zero.reduce_bucket_size", _size),
    f"{_ZERO}.stage3_prefetch_bucket_size": Take("zero.prefetch_bucket_size", _size),
    f"{_ZERO}.stage3_param_persistence_threshold": Take("zero.param_persistence_threshold", _size),
    f"{_ZERO}.stage3_max_live_parameters": Take("zero.max_live_parameters", whole),
    f"{_ZERO}.zero_hpz_partition_size": Refuse("ZeRO++ is not counted", (1,)),
    f"{_ZERO}.zero_quantized_weights": Refuse("ZeRO++ is not counted"),
    f"{_ZERO}.zero_quantized_gradients": Refuse("ZeRO++ is not counted"),
    f"{_ZERO}.sub_group_size": Warn("DeepSpeed's 1e9 is counted", (10**9, "auto")),
    f"{_ZERO}.allgather_bucket_size": Warn("one bucket size is counted, reduce_bucket_size"),
    f"{_ZERO}.mics_shard_size": Refuse("MiCS is not counted", (-1, 0)),
    "bf16.enabled": Take("bf16", _switch_or_auto),
    "bfloat16.enabled": Take("bf16", _switch_or_auto),
    "fp16.enabled": Take("fp16", _switch_or_auto),
    "data_types.grad_accum_dtype": Take("zero.fp32_gradients", one_of(_FP32)),
    "communication_data_type": Take("fp32_reduce", one_of(_REDUCED)),
    "train_micro_batch_size_per_gpu": Take("micro_batch", whole),
    "gradient_accumulation_steps": Take("grad_accum", whole),
    "train_batch_size": Take("global_batch", whole),
    "optimizer.type": Take("engine_optimizer", one_of(_OPTIMIZERS, "type optimizer=...; ")),
    "tensor_parallel.autotp_size": Take("tp", whole),
    "sequence_parallel_size": Refuse("the sequence is not split by DeepSpeed-Ulysses", (1,)),
    "compression_training": Warn("compression is not counted"),
    "amp.enabled": Refuse("NVIDIA's Apex is not here; bf16 or fp16"),
}

DEEPSPEED = Format(
    name="DeepSpeed",
    marks=names(f"""
        {_ZERO} train_micro_batch_size_per_gpu train_batch_size steps_per_print
        wall_clock_breakdown zero_allow_untested_optimizer
        """),
    rules=_RULES,
    harmless=names(f"""
        gradient_clipping steps_per_print wall_clock_breakdown
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer scheduler
        optimizer.params prescale_gradients gradient_predivide_factor dump_state
        comms_logger flops_profiler tensorboard wandb csv_monitor aio
        activation_checkpointing memory_breakdown checkpoint seed disable_allgather
        fp16.loss_scale fp16.loss_scale_window fp16.initial_scale_power fp16.hysteresis
        fp16.min_loss_scale fp16.auto_cast fp16.consecutive_hysteresis
        {_ZERO}.overlap_comm {_ZERO}.contiguous_gradients {_ZERO}.allgather_partitions
        {_ZERO}.reduce_scatter {_ZERO}.round_robin_gradients
        {_ZERO}.offload_optimizer {_ZERO}.offload_param {_ZERO}.load_from_fp32_weights
        {_ZERO}.stage3_max_reuse_distance
        {_ZERO}.stage3_gather_16bit_weights_on_model_save
        {_ZERO}.stage3_gather_fp16_weights_on_model_save {_ZERO}.ignore_unused_parameters
        {_ZERO}.elastic_checkpoint {_ZERO}.memory_efficient_linear
        """),
    is_training=False,
)
