"""Public reports of runs that trained every weight."""

from __future__ import annotations

from tests.report_claims import Claim, Happened

GB = 10**9

# DeepSpeed-Chat's first step: fp16 by DeepSpeed, transformers 4 of early 2023 (eager attention, no
# checkpointing together with its own LoRA), sequences of 512.
CHAT = {
    "model": "opt-1.3b",
    "seq_len": 512,
    "precision": "fp16-mixed",
    "checkpointing": "none",
    "attention": "eager",
    "loss": "standard-4x",
}
# Alpaca's script: Trainer of early 2023 under FSDP and bf16 autocast, sequences of up to 512.
_ALPACA = {
    "model": "llama-7b",
    "seq_len": 512,
    "checkpointing": "none",
    "attention": "eager",
    "loss": "standard-4x",
    "optimizer": "adamw-loop",
}
_VICUNA = {**_ALPACA, "seq_len": 2048, "checkpointing": "full", "gpu": "a100-40gb"}

FULL = (
    Claim(
        report="O03",
        happened=Happened.OOM,
        keys={**CHAT, "gpu": "a100-40gb", "micro_batch": 16},
        unknown={"method": (["single"], ["zero1"])},
        filled="the adapters on top of trained weights are left out; stage 0 keeps a master copy, "
        "as single does with fp32 weights and zero1 beside half ones",
    ),
    Claim(
        report="O05",
        happened=Happened.OOM,
        keys={**CHAT, "gpu": "t4", "micro_batch": 16},
        unknown={"method": (["single"], ["zero1"])},
        filled="batch and sequence: the script's",
    ),
    Claim(
        report="O07",
        happened=Happened.OOM,
        keys={**_ALPACA, "gpu": "a100-80gb", "micro_batch": 1},
        filled="sequence, optimizer: the script's; one GPU has nothing to shard",
    ),
    Claim(
        report="O07",
        happened=Happened.RAN,
        keys={**_ALPACA, "gpu": "a100-80gb", "gpus": 2, "method": ["fsdp"], "micro_batch": 1},
        unknown={"optimizer": ("adamw-loop", "adamw")},
        filled="the same",
    ),
    Claim(
        report="O09",
        happened=Happened.RAN,
        keys={**_ALPACA, "gpu": "a100-40gb", "gpus": 8, "method": ["fsdp"], "micro_batch": 2},
        filled="sequence, optimizer: the script's",
    ),
    Claim(
        report="O11",
        happened=Happened.OOM,
        keys={**_ALPACA, "gpus": 4, "method": ["fsdp"], "micro_batch": 1},
        unknown={"gpu": ("a10", "rtx-3090")},
        filled="the card is an A10 by its owner's word and has the bytes of a 3090",
    ),
    Claim(
        report="O13",
        happened=Happened.RAN,
        keys={**_VICUNA, "gpus": 8, "method": ["fsdp"]},
        unknown={"micro_batch": (1, 2)},
        filled="sequence and checkpointing: the command of its page",
    ),
    Claim(
        report="O15",
        happened=Happened.OOM,
        keys={
            "model": "llama-2-7b",
            "gpu": "v100-16gb",
            "gpus": 8,
            "method": ["fsdp"],
            "precision": "fp16-mixed",
            "optimizer": "adamw",
            "attention": "eager",
            "loss": "standard-4x",
        },
        unknown={
            "micro_batch": (1, 4),
            "seq_len": (256, 4096),
            "checkpointing": ("full", "none"),
        },
        filled="nothing: it failed in the optimizer's step, which no batch changes",
    ),
    Claim(
        report="O19",
        happened=Happened.OOM,
        keys={
            "model": "qwen2.5-72b",
            "gpu": "a100-80gb",
            "gpus": 4,
            "method": ["zero3"],
            "seq_len": 2048,
            "micro_batch": 1,
        },
        filled="the language model alone: its vision tower only adds",
    ),
    Claim(
        report="O31",
        happened=Happened.OOM,
        keys={"model": "gpt-j-6b", "gpu": "a100-40gb", "precision": "fp32", "micro_batch": 1},
        unknown={"seq_len": (64, 1024), "checkpointing": ("none", "full")},
        filled="nothing: the states alone are twice the card",
    ),
    Claim(
        report="O35",
        happened=Happened.OOM,
        keys={
            "model": "gpt-j-6b",
            "gpu": "a100-40gb",
            "precision": "fp16-mixed",
            "seq_len": 512,
            "micro_batch": 1,
        },
        filled="the run without offloading",
    ),
    Claim(
        report="O35",
        happened=Happened.RAN,
        keys={
            "model": "gpt-j-6b",
            "gpu": "t4",
            "method": ["zero3"],
            "offload": "all",
            "precision": "fp16-mixed",
            "attention": "eager",
            "seq_len": 512,
            "micro_batch": 1,
            "loss": "standard-4x",
        },
        unknown={"checkpointing": ("none", "full")},
        filled="method and offloading: the configuration it links",
    ),
    Claim(
        report="O37",
        happened=Happened.OOM,
        keys={
            "model": "llama-2-7b",
            "gpu": "a100-40gb",
            "gpus": 8,
            "method": ["ddp"],
            "micro_batch": 1,
            "seq_len": 64,
        },
        unknown={"checkpointing": ("none", "full")},
        filled="Megatron's data parallelism keeps what DDP keeps, and gradients in fp32",
    ),
    Claim(
        report="O67",
        happened=Happened.RAN,
        keys={
            "model": "llama-3.1-70b",
            "gpu": "rtx-4090",
            "gpus": 8,
            "method": ["fsdp"],
            "offload": "all",
            "precision": "bf16-true",
            "seq_len": 1000,
        },
        unknown={"micro_batch": (1, 2)},
        host_bytes=500 * GB,
        filled="checkpointing, pure bf16: the recipe's",
    ),
    Claim(
        report="O93",
        happened=Happened.RAN,
        keys={
            "model": "qwen2.5-3b",
            "gpu": "a100-80gb",
            "gpus": 8,
            "method": ["fsdp"],
            "seq_len": 4096,
            "micro_batch": 1,
            "loss": "liger",
        },
        unknown={"checkpointing": ("full", "none")},
        filled="the run with the fused loss",
    ),
)
