"""Public reports of fine-tuning runs, as requests of ours: what was run, and what happened.

The reports themselves are in `../shared/reports/oom.csv` (id, address, settings, numbers). What one
leaves open takes the default of the framework that it ran; what no default settles is listed under
`unknown`, and every combination of it is asked about.
"""

from __future__ import annotations

from tests.reports_of_adapters import ADAPTERS
from tests.reports_of_full import FULL

CLAIMS = (*FULL, *ADAPTERS)

OUT_OF_SCOPE = {
    "O23": "a model of its owner's code, on an unknown number of GPUs",
    "O39": "DeepSpeed's sequence parallelism on a model whose shape is not given",
    "O47": "LLaMA-Adapter v2 trains biases, scales and prompts: no kind of ours",
    "O57": "an encoder with a classification head",
    "O59": "a sum on paper for blocks with dropout and without gates, no run",
    "O69": "another framework's own kernels and checkpoints",
    "O75": "the model's own code left checkpointing off; its batch is not given",
    "O81": "one request of 300 GB: a faulty mask of packed samples, no tensor of a step",
    "O91": "neither batch nor sequence is given, and what fills the card first is a cache",
}
"""Reports of strength A or B that no request of ours is, and why."""

UNEXPLAINED = {
    "O17": "Qwen1.5-7B by ZeRO-2 on 8 A100-40 at one sequence of 512: the engine's own tensors are "
    "34.9 GB in the optimizer's step and leave 5 GB; the report does not show what failed",
}
"""Reports that ran out of memory where the formula says `fits`, and how far it came."""

NOT_ASKED = {
    ("O09", "four sequences"): "FSDP 1 before PyTorch 2.1 did not limit its all-gathers: blocks of "
    "its stream's pool pile up that fully_shard's do not",
    ("O13", "30 GB"): "the same, seen by nvidia-smi",
    ("O13", "four GPUs"): "the same; its page says that four such cards suffice",
    ("O35", "12 GB"): "buffers of DeepSpeed's first releases, and a cache, seen by nvidia-smi",
    ("O45", "out of memory"): "another process held 32 GiB of the card",
    ("O45", "67,775 MiB"): "cache of 15,000 steps of samples of any length",
    ("O51", "81,076 MiB"): "the whole card: what the cache left, not what the step took",
    ("O55", "19.6 GB"): "FSDP 1 keeps what enters frozen blocks, and its gradient, to the end of "
    "the backward pass: 5.4 GB that fully_shard does not",
    ("O67", "14 GB"): "torchtune shards embeddings and head apart; Trainer's root keeps them whole",
    (
        "O89",
        "10.83 and 16.39 GiB",
    ): "the longest sample is not given; caches of samples of any length",
    ("O93", "step 21"): "twenty steps went well: growth, not the step; its request is of 11,500 "
    "tokens",
}
"""(report, what of it is not asked) -> why."""
