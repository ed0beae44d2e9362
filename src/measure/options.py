"""Options of the training loop that the job's spec does not have, with the Trainer's defaults."""

from __future__ import annotations

from dataclasses import dataclass

from src.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopOptions:
    """What the training loop around the model does; defaults are Hugging Face Trainer's.

    Attributes:
        max_grad_norm: `clip_grad_norm_`'s limit; 0 switches clipping off.
        reentrant_checkpointing: the reentrant autograd function instead of saved-tensor hooks.
        hold_outputs: keep the model's outputs (logits) through `backward()`, as hand-written loops
        do. trainer_groups: two parameter groups, with and without weight decay, as the Trainer
        makes them;
            otherwise one.
        attention_mask_input: put a third int64 input on the GPU. It is dropped before the model,
        which
            sees no mask: a full mask without padding takes the same path.
        autocast_half_weights: autocast although the weights are bf16 (`bf16=True` with a model
            loaded in bf16); with `precision=bf16-true` only.
        fsdp1: `FullyShardedDataParallel` instead of `fully_shard`, for `method=fsdp`.
        fsdp_split_root: embedding and head as FSDP units of their own (accelerate 1.15), instead of
            parts of the root.
        use_cache: leave the config's key-value cache on, as `from_pretrained` does; some models
        keep it even
            under checkpointing.
        fp32_adapters: PEFT's `autocast_adapter_dtype`.
    """

    max_grad_norm: float = 1.0
    reentrant_checkpointing: bool = False
    hold_outputs: bool = False
    trainer_groups: bool = True
    attention_mask_input: bool = False
    use_cache: bool = False
    fp32_adapters: bool = True
    autocast_half_weights: bool = False
    fsdp1: bool = False
    fsdp_split_root: bool = False

    def __post_init__(self) -> None:
        if self.max_grad_norm < 0:
            raise UserError(
                key="loop.max_grad_norm",
                value=self.max_grad_norm,
                allowed="0 or more; 0: no clipping",
            )
