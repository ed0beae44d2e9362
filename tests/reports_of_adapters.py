"""Public reports of LoRA and QLoRA runs (and, beside one of them, the full run of its table)."""

from __future__ import annotations

from src.units import MIB
from tests.report_claims import Claim, Happened, Number, lora, qlora
from tests.reports_of_full import CHAT

GB = 10**9

_CHAT = {
    **CHAT,
    "gpu": "v100-32gb",
    "method": ["zero2"],
    "finetune": lora(128, ("all-linear",)),
}
_LITGPT = {
    "model": "llama-2-7b",
    "gpu": "a100-40gb",
    "seq_len": 1304,
    "precision": "bf16-true",
    "checkpointing": "none",
    "finetune": lora(8, dropout=0.05),
}
_MINISTRAL = {
    "model": "mistral-7b-v0.1",
    "arch": {
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "vocab_size": 131072,
        "head_dim": 128,
        "sliding_window": None,
    },
    "gpu": "h100-80gb",
    "seq_len": 4096,
    "micro_batch": 1,
    "precision": "bf16-true",
    "checkpointing": "none",
    "loss": "standard-4x",
}
_DROPOUT = (0.0, 0.05)
_METAMATH = {
    "model": "llama-3.2-3b",
    "gpu": "l40s",
    "seq_len": 768,
    "micro_batch": 4,
    "precision": "bf16-true",
    "optimizer": "adamw",
    "checkpointing": "none",
}
_LLAMA_70B = {"model": "llama-2-70b", "gpus": 2, "seq_len": 2048, "micro_batch": 2}
_XTUNER = {
    "model": "llama-2-70b",
    "gpus": 8,
    "seq_len": 2048,
    "micro_batch": 1,
    "precision": "fp16-mixed",
    "finetune": qlora(64, ("gate_proj", "up_proj", "down_proj"), dropout=0.1),
    "loss": "standard-4x",
    "grad_accum": 16,
}

ADAPTERS = (
    Claim(
        report="O01",
        happened=Happened.OOM,
        keys={**_CHAT, "micro_batch": 16},
        filled="sequence and fp16: the script's",
    ),
    Claim(
        report="O01",
        happened=Happened.RAN,
        keys={**_CHAT, "micro_batch": 8},
        filled="the same",
    ),
    Claim(
        report="O41",
        happened=Happened.RAN,
        keys={**_LITGPT, "micro_batch": 1},
        number=Number(bytes=21.30 * GB, level="allocated"),
        filled="r, dropout, checkpointing: the script's",
    ),
    Claim(
        report="O41",
        happened=Happened.RAN,
        keys={**_LITGPT, "micro_batch": 2},
        number=Number(bytes=29.07 * GB, level="allocated"),
        filled="the same",
    ),
    Claim(
        report="O41",
        happened=Happened.OOM,
        keys={**_LITGPT, "micro_batch": 4},
        filled="the same",
    ),
    Claim(
        report="O43",
        happened=Happened.OOM,
        keys={
            "model": "falcon-40b",
            "gpu": "a100-80gb",
            "finetune": lora(8, ("query_key_value",)),
            "seq_len": 2048,
            "micro_batch": 1,
            "checkpointing": "none",
        },
        unknown={"precision": ("bf16-mixed", "bf16-true")},
        filled="r and checkpointing: the script's; on one GPU",
    ),
    Claim(
        report="O45",
        happened=Happened.RAN,
        keys={
            "model": "falcon-7b",
            "gpu": "a100-80gb",
            "finetune": lora(8, ("query_key_value",)),
            "seq_len": 1079,
            "micro_batch": 4,
            "precision": "bf16-true",
            "checkpointing": "none",
        },
        unknown={"attention": ("eager", "sdpa")},
        filled="r and checkpointing: the script's",
    ),
    Claim(
        report="O51",
        happened=Happened.RAN,
        keys=_MINISTRAL,
        unknown={
            "finetune": tuple(
                lora(r, ("all-linear",), dropout=d) for r in (16, 64) for d in _DROPOUT
            )
        },
        number=Number(bytes=72840 * MIB, level="device"),
        decided=False,
        filled="card: the fullest of its three numbers is an H100's capacity in MiB; no dropout of "
        "the adapters is given: none, or a twentieth as in most recipes, whose masks take 5 GB",
    ),
    Claim(
        report="O51",
        happened=Happened.RAN,
        keys=_MINISTRAL,
        unknown={
            "finetune": tuple(
                qlora(r, ("all-linear",), upcast="none", dropout=d)
                for r in (16, 64)
                for d in _DROPOUT
            ),
        },
        number=Number(bytes=63082 * MIB, level="device"),
        decided=False,
        filled="the same",
    ),
    Claim(
        report="O53",
        happened=Happened.RAN,
        keys={**_METAMATH, "finetune": lora(32)},
        number=Number(bytes=22_292_725_760, level="reserved"),
        filled="the longest batch, at the length at which samples are cut",
    ),
    Claim(
        report="O53",
        happened=Happened.RAN,
        keys={**_METAMATH, "finetune": lora(64)},
        number=Number(bytes=22_552_772_608, level="reserved"),
        filled="the same",
    ),
    Claim(
        report="O53",
        happened=Happened.RAN,
        keys={**_METAMATH, "finetune": lora(32, dora=True)},
        number=Number(bytes=24_532_484_096, level="reserved"),
        filled="the same",
    ),
    Claim(
        report="O53",
        happened=Happened.RAN,
        keys=_METAMATH,
        number=Number(bytes=38_868_615_168, level="reserved"),
        filled="the same",
    ),
    Claim(
        report="O55",
        happened=Happened.RAN,
        keys={**_LLAMA_70B, "gpu": "a100-40gb", "method": ["zero3"], "finetune": qlora(8)},
        number=Number(bytes=36.6 * GB, level="device"),
        filled="batch and sequence: the example's",
    ),
    Claim(
        report="O55",
        happened=Happened.RAN,
        keys={**_LLAMA_70B, "gpu": "a100-40gb", "method": ["fsdp"], "finetune": qlora(8)},
        number=Number(bytes=35.6 * GB, level="device"),
        filled="the same",
    ),
    Claim(
        report="O55",
        happened=Happened.RAN,
        keys={
            **_LLAMA_70B,
            "gpu": "rtx-3090",
            "method": ["fsdp"],
            "offload": "all",
            "finetune": qlora(8),
        },
        filled="the same",
    ),
    Claim(
        report="O61",
        happened=Happened.OOM,
        keys={
            "model": "llama-3-70b",
            "gpu": "a10g",
            "gpus": 4,
            "method": ["ddp"],
            "precision": "fp16-mixed",
            "finetune": qlora(8),
            "seq_len": 1024,
            "micro_batch": 1,
        },
        filled="GPTQ's four bits as NF4's; checkpointing: the framework's",
    ),
    Claim(
        report="O65",
        happened=Happened.RAN,
        keys={
            "model": "llama-3-8b",
            "gpu": "a100-80gb",
            "precision": "bf16-true",
            "finetune": lora(8),
            "seq_len": 8192,
            "micro_batch": 2,
            "loss": "standard-4x",
        },
        filled="r, targets, checkpointing: the recipe's",
    ),
    Claim(
        report="O79",
        happened=Happened.OOM,
        keys={
            "model": "llama-2-70b",
            "gpu": "rtx-3090",
            "gpus": 2,
            "method": ["fsdp"],
            "finetune": qlora(32),
            "seq_len": 512,
            "micro_batch": 1,
        },
        unknown={"offload": ("none", "all")},
        decided=False,
        filled="whether it offloads is not shown; with offloading two such cards suffice (O55)",
    ),
    Claim(
        report="O85",
        happened=Happened.OOM,
        keys={
            "model": "llama-65b",
            "gpu": "rtx-a6000",
            "finetune": qlora(64),
            "optimizer": "paged-adamw",
            "seq_len": 512,
            "micro_batch": 4,
            "loss": "standard-4x",
        },
        unknown={"precision": ("bf16-mixed", "fp32")},
        decided=False,
        filled="the block that failed is an fp32 weight: the script computes in fp32 unless told",
    ),
    Claim(
        report="O87",
        happened=Happened.OOM,
        keys={**_XTUNER, "gpu": "a100-40gb", "method": ["ddp"]},
        filled="sequence, adapters, accumulation: the framework's configuration for this model",
    ),
    Claim(
        report="O87",
        happened=Happened.RAN,
        keys={**_XTUNER, "gpu": "a100-80gb", "method": ["ddp"]},
        number=Number(bytes=55 * GB, level="device"),
        filled="the same; GB as written: in GiB, ZeRO-2's number is 14 % above the formula's",
    ),
    Claim(
        report="O87",
        happened=Happened.RAN,
        keys={**_XTUNER, "gpu": "a100-80gb", "method": ["zero2"]},
        number=Number(bytes=52 * GB, level="device"),
        filled="the same",
    ),
    Claim(
        report="O89",
        happened=Happened.RAN,
        keys={
            "model": "llama-3-8b",
            "gpu": "a100-80gb",
            "precision": "bf16-true",
            "finetune": qlora(8, ("q_proj", "v_proj"), upcast="none"),
            "micro_batch": 2,
            "loss": "standard-4x",
        },
        unknown={"seq_len": (512, 1304)},
        filled="lengths: the data set's, up to its longest",
    ),
)
