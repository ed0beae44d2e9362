"""Every key of `src.profile`: what is allowed, what it means; the help text is made from this."""

from __future__ import annotations

from enum import StrEnum

from src.config.program import Key, Program, ValueKind
from src.measure.case import DEVICES
from src.spec import Attention, Checkpointing, FinetuneKind, Method, Optimizer, Precision

CAMPAIGNS = ("smoke", "base", "recalibrate", "paper")

LAUNCHERS = ("local", "slurm")
CLUSTERS = ("slurm", "local")

_COUNT = "a whole number, 1 or more"
_COUNTS = "[1 or more, ...]"


def _words(allowed: str, meaning: str = "") -> Key:
    return Key(allowed=allowed, meaning=meaning, kind=ValueKind.WORDS)


def _some(kind: type[StrEnum]) -> Key:
    return _words(" | ".join(kind), "one of them, or a list")


_CAMPAIGN_KEYS: dict[str, Key] = {
    "campaign.models": _words("[names as in model= of src.estimate]", "spread over their families"),
    "campaign.methods": _some(Method),
    "campaign.num_gpus": _words(_COUNTS, "more than there are: rank 0 alone"),
    "campaign.finetunes": _some(FinetuneKind),
    "campaign.precisions": _some(Precision),
    "campaign.optimizers": _some(Optimizer),
    "campaign.checkpointings": _some(Checkpointing),
    "campaign.attentions": _some(Attention),
    "campaign.seq_lens": _words(_COUNTS),
    "campaign.fill": _words(
        "[low,high], from 0 to 1", "share of the card that the formula aims at"
    ),
    "campaign.beyond": Key(allowed="0 to 1", meaning="share of the cases that are beyond the card"),
    "campaign.num_cases": Key(allowed=_COUNT, meaning=""),
}


def _slurm(meaning: str = "", allowed: str = "as sbatch takes it | null") -> Key:
    return Key(allowed=allowed, meaning=meaning, kind=ValueKind.OPTIONAL_TEXT)


_LAUNCHER_KEYS: dict[str, Key] = {
    "launcher": Key(
        allowed=" | ".join(LAUNCHERS),
        meaning="here, or each case as a SLURM job; launcher.* go with slurm",
        kind=ValueKind.TEXT,
    ),
    "launcher.cluster": Key(
        allowed=" | ".join(CLUSTERS),
        meaning="local: jobs as processes here, to try it out",
        kind=ValueKind.TEXT,
    ),
    "launcher.partition": _slurm(),
    "launcher.account": _slurm(),
    "launcher.qos": _slurm(),
    "launcher.constraint": _slurm(),
    "launcher.minutes": Key(
        allowed="1 or more | null", meaning="of a job; null: by timeout_s, and 5 more"
    ),
    "launcher.gpus_per_node": Key(allowed=_COUNT, meaning="a case on more: rank 0 alone"),
    "launcher.max_jobs": Key(allowed=_COUNT, meaning="at a time, waiting ones included"),
    "launcher.sbatch": _slurm("more of its options", "'--nice=100 --exclusive ...' | null"),
    "launcher.folder": _slurm(
        "of the jobs' files, on every node; null: out's, ending in .jobs", "a folder | null"
    ),
}

PROFILE = Program(
    name="profile",
    question="What do training steps really take? Runs a campaign of them and keeps every outcome.",
    keys={
        "campaign": Key(allowed=" | ".join(CAMPAIGNS), meaning="which steps", kind=ValueKind.TEXT),
        "device": Key(
            allowed=" | ".join(DEVICES),
            meaning="measure on this machine's GPUs, or simulate",
            kind=ValueKind.TEXT,
        ),
        "gpu": Key(
            allowed="a name of src.estimate's list=gpus | auto",
            meaning="auto: the campaign's if simulated, else this machine's",
            kind=ValueKind.TEXT,
        ),
        "budget_minutes": Key(
            allowed="more than 0 | null", meaning="no case is started later; null: the campaign's"
        ),
        "timeout_s": Key(allowed="1 or more | null", meaning="of one case; null: the campaign's"),
        "seed": Key(allowed="a whole number, 0 or more", meaning="another one, other cases"),
        "out": Key(
            allowed="FILE.jsonl | null",
            meaning="null: profiling/GPU/CAMPAIGN.jsonl, profiling/simulated/... if simulated",
            kind=ValueKind.OPTIONAL_TEXT,
        ),
        "plan_only": Key(allowed="true | false", meaning="list the cases and run none"),
        "cases": Key(
            allowed="FILE.jsonl | null",
            meaning="with plan_only: the cases for src.measure.worker --run-many elsewhere",
            kind=ValueKind.OPTIONAL_TEXT,
        ),
        "import": Key(
            allowed="FILE | [FILE,...]",
            meaning="run nothing; take over rows of another machine (.jsonl), tables of what "
            "others measured (.csv), benchmark files of fms-acceleration (.csv) and PEFT (.json)",
            kind=ValueKind.FILES,
        ),
        "sync": Key(allowed="true | false", meaning="run nothing; log what MLflow does not have"),
        "tracking.uri": Key(
            allowed="sqlite:///FILE | http://HOST:PORT | null",
            meaning="null: MLFLOW_TRACKING_URI, else mlflow.db of the project",
            kind=ValueKind.OPTIONAL_TEXT,
        ),
        **_CAMPAIGN_KEYS,
        **_LAUNCHER_KEYS,
    },
    fields={"import": "imported"},
    other_names={
        "mlflow_tracking_uri": "tracking.uri",
        "tracking_uri": "tracking.uri",
        "timeout": "timeout_s",
        "budget": "budget_minutes",
        "output": "out",
        "published": "import",
        "dry_run": "plan_only",
        "model": "campaign.models",
        "models": "campaign.models",
        "method": "campaign.methods",
        "gpus": "campaign.num_gpus",
        "finetune": "campaign.finetunes",
        "precision": "campaign.precisions",
        "seq_len": "campaign.seq_lens",
        "slurm": "launcher",
        "partition": "launcher.partition",
        "time": "launcher.minutes",
        "launcher.time": "launcher.minutes",
    },
    group="campaign",
    options=CAMPAIGNS,
    default_option="smoke",
    more_groups={"launcher": LAUNCHERS},
    instead_of_sweeps="a campaign is many cases: campaign.models=[...], campaign.num_cases=N",
    examples=(
        "campaign=smoke device=simulated",
        "campaign=recalibrate device=cuda budget_minutes=25",
        "campaign=base device=cuda plan_only=true",
        "campaign=base gpu=h100-80gb launcher=slurm launcher.partition=gpu",
        "sync=true tracking.uri=http://localhost:5000",
    ),
    ending="stdout holds the summary alone. Exit 0: done, 1: bad input, 130: interrupted.",
)
