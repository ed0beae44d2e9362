"""The keys of `src.profile`: every campaign composes, and what is wrong is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from src.config.campaign import SIMULATED_ROWS, Campaign, gpu_of, to_campaign, to_options
from src.config.compose import compose_arguments
from src.config.profile_keys import CAMPAIGNS, LAUNCHERS, PROFILE
from src.config.program import HELP_WIDTH
from src.errors import UserError
from src.launch import Jobs
from src.measure.case import parse_case

ROOT = Path(__file__).resolve().parents[2]


def campaign(*arguments: str) -> Campaign:
    return to_campaign(compose_arguments(["device=simulated", *arguments], PROFILE))


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_every_campaign_composes_into_steps_that_the_worker_takes(name: str) -> None:
    found = campaign(f"campaign={name}", "campaign.num_cases=12")
    assert found.conditions.campaign == name
    assert len(found.steps) == len(set(found.case_ids)) == 12
    for planned, case in zip(found.steps, found.cases, strict=True):
        assert parse_case(case).step == planned.step
        assert case["device"] == "simulated"
    assert found.rows == SIMULATED_ROWS / found.gpu.sku / f"{name}.jsonl"


def test_the_campaigns_are_the_files() -> None:
    files = (ROOT / "conf" / "campaign").glob("*.yaml")
    assert {file.name.removesuffix(".yaml") for file in files} == set(CAMPAIGNS)


def test_the_launchers_are_the_files() -> None:
    files = (ROOT / "conf" / "launcher").glob("*.yaml")
    assert {file.name.removesuffix(".yaml") for file in files} == set(LAUNCHERS)


def test_cases_run_here_unless_they_are_to_be_jobs(tmp_path: Path) -> None:
    assert campaign("campaign.num_cases=1").jobs is None
    found = campaign(
        "campaign.num_cases=1",
        "launcher=slurm",
        "launcher.partition=gpu",
        "launcher.account=12",
        "launcher.sbatch=--nice=100 --exclusive",
        "timeout_s=61",
        f"out={tmp_path / 'rows.jsonl'}",
    )
    assert found.jobs == Jobs(
        cluster="slurm",
        folder=tmp_path / "rows.jobs",
        max_jobs=8,
        gpus_per_node=8,
        minutes=7,
        partition="gpu",
        account="12",
        sbatch={"nice": "100", "exclusive": True},
    )
    asked = ["launcher=slurm", "launcher.minutes=3", f"launcher.folder={tmp_path}"]
    jobs = campaign("campaign.num_cases=1", *asked).jobs
    assert jobs is not None
    assert (jobs.minutes, jobs.folder) == (3, tmp_path)


def test_a_cluster_needs_no_gpu_here_but_the_name_of_its_own() -> None:
    asked = ["device=cuda", "launcher=slurm", "gpu=h100-80gb", "campaign.num_cases=1"]
    found = to_campaign(compose_arguments(asked, PROFILE))
    assert (found.gpu.sku, found.warnings) == ("h100-80gb", ())


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("launcher=pbs", "launcher=pbs: allowed: local, slurm"),
        ("launcher.partition=gpu", "launcher.partition=gpu: only with launcher=slurm"),
        ("launcher=slurm launcher.cluster=pbs", "launcher.cluster=pbs: allowed: slurm, local"),
        ("launcher=slurm launcher.max_jobs=0", "launcher.max_jobs=0: a whole number, 1 or more"),
        ("launcher=slurm launcher.gpus_per_node=null", "launcher.gpus_per_node=null: a whole"),
        ("launcher=slurm launcher.minutes=0", "launcher.minutes=0: a whole number, 1 or more"),
        ("launcher=slurm launcher.minutes=1.5", "launcher.minutes=1.5: 1 or more | null"),
        ("launcher=slurm launcher.sbatch=-n", "launcher.sbatch=-n: long options with ="),
        ("launcher=slurm device=cuda", "gpu=auto: the cluster's, as gpu=h100-80gb"),
        (
            "launcher=slurm launcher.cluster=local device=cuda gpu=a100-80gb",
            "launcher.max_jobs=8: 1 with device=cuda",
        ),
        ("launcher=slurm partition=gpu", "partition=gpu: unknown key; did you mean launcher."),
    ],
)
def test_a_wrong_launcher_is_one_line(asked: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        campaign("campaign.num_cases=1", *asked.split())
    assert str(error.value).startswith(line)


def test_every_key_is_documented_and_nothing_else() -> None:
    cfg = compose_arguments([], PROFILE)
    names = set()
    for key, value in cfg.items_ex(resolve=False):
        names |= {f"{key}.{inner}" for inner in value} if OmegaConf.is_dict(value) else {str(key)}
    own = {f"campaign.{name}" for name in ("name", "gpu", "budget_minutes", "timeout_s")}
    own |= {"launcher.kind"}
    assert names - own | {"campaign", "launcher"} == set(map(PROFILE.field_of, PROFILE.keys))
    lines = PROFILE.help_text({}).splitlines()
    for name in PROFILE.keys:
        assert len([line for line in lines if line.startswith(f"  {name} ")]) == 1, name
    assert max(map(len, lines)) <= HELP_WIDTH


def test_what_is_asked_is_what_is_planned() -> None:
    found = campaign(
        "gpu=v100-16gb",
        "budget_minutes=1.5",
        "timeout_s=7",
        "campaign.models=gpt2,opt-125m",
        "campaign.num_cases=5",
        "campaign.methods=single",
        "campaign.seq_lens=128",
        "campaign.beyond=0",
        "campaign.fill=[0.5,0.9]",
        "out=rows.jsonl",
    )
    assert found.gpu.sku == "v100-16gb"
    assert (found.conditions.budget_s, found.conditions.timeout_s) == (90, 7)
    assert {step.step.job.model.name for step in found.steps} <= {"gpt2", "opt-125m"}
    assert {step.step.job.seq_len for step in found.steps} == {128}
    assert all(0.5 <= step.fill <= 0.9 for step in found.steps)
    assert found.rows == Path.cwd() / "rows.jsonl"


def test_another_seed_is_another_campaign() -> None:
    assert campaign("seed=1").case_ids != campaign().case_ids == campaign().case_ids


WRONG = [
    ("campaign=smok", "campaign=smok: not among the values of campaign; nearest: smoke"),
    ("device=gpu", "device=gpu: allowed: simulated, cuda"),
    ("gpu=a1000", "gpu=a1000: not among the known GPUs"),
    ("budget_minutes=0", "budget_minutes=0.0: more than 0"),
    ("budget_minutes=nan", "budget_minutes=nan: more than 0"),
    ("budget_minutes=long", "budget_minutes=long: more than 0"),
    ("timeout_s=0", "timeout_s=0: a whole number, 1 or more"),
    ("seed=-1", "seed=-1: a whole number, 0 or more"),
    ("out=rows.csv", "out=rows.csv: FILE.jsonl"),
    ("cases=cases.jsonl", "cases=cases.jsonl: only with plan_only=true"),
    ("plan_only=maybe", "plan_only=maybe: true | false"),
    ("campaign.models=opt-1.3", "model=opt-1.3: "),
    ("campaign.models=[]", r"campaign\.models=\[\]: "),
    (
        "campaign.methods=fsdp2",
        r"campaign\.methods=fsdp2: not among the values of campaign\.method",
    ),
    ("campaign.num_gpus=0", r"campaign\.num_gpus=0: a whole number, 1 or more"),
    ("campaign.fill=[0.9,0.2]", r"campaign\.fill=\[0.9, 0.2\]: "),
    ("campaign.fill=0.5", r"campaign\.fill=\[0.5\]: "),
    ("campaign.beyond=2", r"campaign\.beyond=2.0: 0 to 1"),
    ("campaign.num_cases=0", r"campaign\.num_cases=0: a whole number, 1 or more"),
    ("campaign.finetunes=adapter", r"campaign\.finetunes=adapter: allowed: full"),
    ("models=gpt2", r"models=gpt2: unknown key; did you mean campaign\.models\?"),
    ("budget=5", "budget=5: unknown key; did you mean budget_minutes"),
    ("trackin.uri=x", r"trackin\.uri=x: unknown key; did you mean tracking\.uri"),
]


@pytest.mark.parametrize(("argument", "said"), WRONG, ids=[argument for argument, _ in WRONG])
def test_what_is_wrong_is_said(argument: str, said: str) -> None:
    def both() -> None:
        cfg = compose_arguments(["device=simulated", argument], PROFILE)
        to_options(cfg)
        to_campaign(cfg)

    with pytest.raises(UserError, match=said):
        both()


def probed(**changes: Any) -> dict[str, Any]:
    return {
        "gpu": "NVIDIA A100-SXM4-80GB",
        "compute_capability": [8, 0],
        "capacity_bytes": 84_987_740_160,
        "sm_count": 108,
    } | changes


def test_this_machines_gpu_has_the_bytes_that_torch_sees() -> None:
    gpu = gpu_of(probed())
    assert gpu.sku == "a100-80gb"
    assert gpu.usable_bytes == 84_987_740_160
    assert gpu.context_mib == 481


def test_a_gpu_that_nobody_knows_gets_a_name_of_its_own() -> None:
    gpu = gpu_of(probed(gpu="NVIDIA Next (TM) 9000", compute_capability=[13, 1], sm_count=200))
    assert gpu.sku == "nvidia-next-tm-9000"
    assert (gpu.compute_capability, gpu.sm_count, gpu.context_mib) == ((13, 1), 200, None)


def test_measured_steps_are_for_this_machines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.config.campaign.visible_gpus", lambda: [probed()] * 2)
    found = to_campaign(compose_arguments(["device=cuda", "gpu=t4"], PROFILE))
    assert (found.gpu.sku, found.conditions.num_gpus) == ("a100-80gb", 2)
    assert found.rows == ROOT / "profiling" / "a100-80gb" / "smoke.jsonl"
    assert {case["device"] for case in found.cases} == {"cuda"}
    assert found.warnings == ("gpu=t4 has no effect: device=cuda runs on this machine's",)
    planned = to_campaign(compose_arguments(["device=cuda", "gpu=t4", "plan_only=true"], PROFILE))
    assert planned.gpu.sku == "t4"
