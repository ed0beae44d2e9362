"""Benchmark files of other projects as rows: what is understood becomes one, the rest is told."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from src.config.published import read_published, take_files
from src.errors import UserError
from src.measure.case import parse_case
from src.record import LENGTHS, VARYING, Row, Source, add_rows, read_rows
from src.residual.dataset import check_usable
from src.spec import FinetuneKind
from src.units import MIB

FMS = {
    "bf16": "",
    "fp16": "",
    "framework_config": "none",
    "lora_alpha": "16",
    "lora_dropout": "0.1",
    "mem_nvidia_mem_reserved": "20000.5",
    "mem_peak_torch_mem_alloc_in_bytes": "19000000512.0",
    "model_name_or_path": "mistralai/Mistral-7B-v0.1",
    "num_gpus": "1",
    "peft_method": "lora",
    "per_device_train_batch_size": "2",
    "r": "8",
    "target_modules": "q_proj k_proj v_proj o_proj",
    "torch_dtype": "bfloat16",
    "train_loss": "1.5",
}
PINS = "accelerate==1.0.1\npeft==0.13.2\n-e git+https://example.org/x#egg=x\ntorch==2.4.1\n"


def fms(folder: Path, *lines: dict[str, str], pins: str | None = PINS) -> Path:
    path = folder / "a100_80gb.csv"
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, FMS)
        writer.writeheader()
        writer.writerows(lines)
    if pins is not None:
        (folder / "requirements.txt").write_text(pins + "transformers==4.48.1\n")
    return path


def peft(
    folder: Path,
    kind: dict[str, Any] | None,
    *,
    system: dict[str, str] | None = None,
    name: str = "lora--llama-3.2-3B-rank8",
    **train: Any,
) -> Path:
    content = {
        "run_info": {
            "created_at": "2025-08-01T12:00:00+00:00",
            "train_config": {
                "model_id": "meta-llama/Llama-3.2-3B",
                "dtype": "bfloat16",
                "max_seq_length": 640,
                "batch_size": 3,
                "compile": False,
                "optimizer_type": "AdamW",
                "use_amp": False,
                "autocast_adapter_dtype": True,
                "attn_implementation": None,
                **train,
            },
            "peft_config": kind,
        },
        "train_info": {"accelerator_memory_max": 21000000000, "status": "success"},
        "meta_info": {
            "package_info": {
                "torch-version": "2.8.0+cu128",
                "transformers-version": "4.55.0",
                "peft-version": "0.17.0",
            },
            "system_info": system or {"accelerator": "NVIDIA L40S"},
        },
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0}
LORA |= {"target_modules": ["v_proj", "q_proj"], "bias": "none", "rank_pattern": {}}


def only(path: Path) -> Row:
    found = read_published(path)
    assert not found.refused
    (row,) = found.rows
    return row


def test_a_line_of_fms_acceleration(tmp_path: Path) -> None:
    row = only(fms(tmp_path, FMS))
    assert row.source is Source.PUBLISHED
    assert row.peak_bytes == {"allocated": 19000000512, "device": round(20000.5 * MIB)}
    assert row.versions["transformers"] == "4.48.1"
    assert row.versions["torch"] == "2.4.1"
    assert row.case["seq_len"] == 4096
    assert row.case["micro_batch"] == 2
    assert row.case["method"] == "single"
    assert row.case["gpu"]["sku"] == "a100-80gb"
    assert (row.case["finetune"]["r"], row.case["finetune"]["dropout"]) == (8, 0.1)
    assert row.case["checkpointing"] == "full"
    assert row.provenance.url is not None
    assert row.provenance.url.endswith("refs/a100_80gb.csv#L2")
    check_usable(row)


def test_runs_on_several_gpus_are_fsdp1(tmp_path: Path) -> None:
    row = only(fms(tmp_path, FMS | {"num_gpus": "2", "peft_method": ""}))
    assert (row.case["method"], row.case["layout"]["shard"]) == ("fsdp", 2)
    assert row.case["loop"]["fsdp1"] is True
    assert row.case["finetune"]["kind"] == "full"


@pytest.mark.parametrize(
    ("config", "upcast"), [("baseline-peft-bnb", "norms"), ("accelerated-peft-bnb", "none")]
)
def test_quantised_runs_say_how_they_are_prepared(tmp_path: Path, config: str, upcast: str) -> None:
    row = only(fms(tmp_path, FMS | {"framework_config": config, "bf16": "True"}))
    assert (row.case["finetune"]["kind"], row.case["finetune"]["upcast"]) == ("qlora", upcast)
    assert row.case["loop"]["autocast_half_weights"] is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"framework_config": "foak-fast-kernels"}, "line 2: framework_config=foak-fast-kernels"),
        ({"mem_peak_torch_mem_alloc_in_bytes": ""}, "no peak"),
        ({"torch_dtype": "float16"}, "line 2: torch_dtype=float16"),
        ({"fp16": "True"}, "without fp16"),
        ({"target_modules": "q_proj"}, "line 2: target_modules=q_proj"),
        ({"model_name_or_path": "no/such"}, "model_id=no/such"),
        ({"mem_peak_torch_mem_alloc_in_bytes": "much"}, "measured_value=much"),
    ],
)
def test_runs_that_are_none_of_ours_are_told(
    tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    found = read_published(fms(tmp_path, FMS, FMS | changes, FMS))
    assert len(found.rows) == 2
    assert [said.replace("line 2", "line 3") in line.reason for line in found.refused] == [True]


def test_versions_decide_on_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"import=a100_80gb.csv: needs .* requirements.txt"):
        read_published(fms(tmp_path, FMS, pins=None))


def test_the_file_names_the_gpu(tmp_path: Path) -> None:
    fms(tmp_path, FMS).rename(tmp_path / "summary.csv")
    with pytest.raises(UserError, match="named GPU_SIZEgb"):
        read_published(tmp_path / "summary.csv")


def test_a_result_of_peft(tmp_path: Path) -> None:
    row = only(peft(tmp_path, LORA))
    assert row.peak_bytes == {"reserved": 21000000000}
    assert row.case["finetune"]["targets"] == ["q_proj", "v_proj"]
    assert (row.case["micro_batch"], row.case["seq_len"]) == (3, 640)
    assert (row.case["gpu"]["sku"], row.case["precision"]) == ("l40s", "bf16-true")
    assert (row.case["checkpointing"], row.case["loss"]) == ("none", "standard")
    assert row.provenance.started == "2025-08-01T00:00:00+00:00"
    assert row.versions == {"torch": "2.8.0+cu128", "transformers": "4.55.0", "peft": "0.17.0"}
    assert row.environment[LENGTHS] == VARYING
    assert any("640 tokens" in note and "evaluation" in note for note in row.notes)
    loop = parse_case(row.case).loop
    assert loop.hold_outputs
    assert loop.attention_mask_input
    assert not loop.trainer_groups


def test_older_results_name_the_gpu_otherwise(tmp_path: Path) -> None:
    row = only(peft(tmp_path, LORA, system={"gpu": "NVIDIA L40S"}))
    assert row.case["gpu"]["sku"] == "l40s"
    with pytest.raises(UserError, match="but for 'gpu'"):
        read_published(peft(tmp_path, LORA, system={"system": "Linux"}))


@pytest.mark.parametrize(
    ("use_gc", "checkpointing"), [(None, "none"), (False, "none"), (True, "full")]
)
def test_checkpointing_is_what_the_run_had(
    tmp_path: Path, use_gc: bool | None, checkpointing: str
) -> None:
    assert only(peft(tmp_path, LORA, use_gc=use_gc)).case["checkpointing"] == checkpointing
    assert only(peft(tmp_path, LORA)).case["checkpointing"] == "none"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (None, FinetuneKind.FULL),
        (LORA | {"use_dora": True}, FinetuneKind.LORA),
        (LORA | {"target_modules": ["up_proj", "down_proj"]}, FinetuneKind.LORA),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 9}, FinetuneKind.PROMPT),
        (
            {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 9, "prefix_projection": False},
            FinetuneKind.PREFIX,
        ),
    ],
)
def test_kinds_that_peft_trains(
    tmp_path: Path, config: dict[str, Any] | None, kind: FinetuneKind
) -> None:
    case = only(peft(tmp_path, config)).case["finetune"]
    assert case["kind"] == kind
    assert case["dora"] is bool(config and config.get("use_dora"))
    if config and "num_virtual_tokens" in config:
        assert case["num_virtual_tokens"] == 9


def test_what_is_of_any_length_teaches_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="any length"):
        check_usable(only(peft(tmp_path, LORA)))


@pytest.mark.parametrize(
    ("config", "train", "said"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type=IA3"),
        (LORA | {"bias": "all"}, {}, "bias=all"),
        (LORA | {"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern="),
        (LORA | {"target_modules": ".*"}, {}, "finetune=lora"),
        (LORA | {"use_bdlora": {"nblocks": 3}}, {}, "use_bdlora="),
        (LORA | {"kasa_config": {"beta": 0.2}}, {}, "kasa_config="),
        (LORA | {"velora_config": {"num_groups": 8}}, {}, "velora_config="),
        (LORA | {"use_qalora": True}, {}, "use_qalora=True"),
        (LORA | {"target_parameters": ["w"]}, {}, "target_parameters="),
        (LORA | {"exclude_modules": ["q_proj"]}, {}, "exclude_modules="),
        (LORA | {"init_lora_weights": "mica"}, {}, "init_lora_weights=mica"),
        (LORA | {"some_day": 1}, {}, "some_day=1"),
        (LORA, {"optimizer_kwargs": {"fused": True}}, "fused=True"),
        (LORA, {"optimizer_kwargs": {"foreach": False}}, "foreach=False"),
        (LORA, {"optimizer_kwargs": {"amsgrad": True}}, "amsgrad=True"),
        (LORA, {"use_gc": "yes"}, "use_gc=yes"),
        (LORA, {"optimizer_type": "lora-fa"}, "optimizer_type=lora-fa"),
        (LORA, {"compile": True}, "compile=True"),
        (LORA, {"dtype": "float32"}, "dtype=float32"),
        (LORA, {"batch_size": 0}, "micro_batch_per_gpu=0"),
    ],
)
def test_results_that_are_none_of_ours_are_told(
    tmp_path: Path, config: dict[str, Any], train: dict[str, Any], said: str
) -> None:
    found = read_published(peft(tmp_path, config, **train))
    assert not found.rows
    assert [said in line.reason for line in found.refused] == [True]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"run_info": {}}', "\x00", "[" * 100_000])
def test_files_that_are_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(UserError, match="import=") as caught:
        read_published(path)
    assert "\n" not in str(caught.value)


def test_a_result_without_a_part_is_told(tmp_path: Path) -> None:
    path = peft(tmp_path, LORA)
    content = json.loads(path.read_text())
    del content["meta_info"]["package_info"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="package_info"):
        read_published(path)


def test_a_line_that_was_cut(tmp_path: Path) -> None:
    path = fms(tmp_path, FMS)
    path.write_text(path.read_text().rstrip().rsplit(",", 4)[0] + "\n")
    with pytest.raises(UserError, match="fewer fields"):
        read_published(path)


def test_what_a_plain_lora_leaves_empty_is_no_obstacle(tmp_path: Path) -> None:
    empty = {
        "kasa_config": None,
        "use_bdlora": None,
        "loftq_config": {},
        "ensure_weight_tying": False,
        "target_parameters": None,
    }
    told = {"peft_version": "0.19.0", "use_rslora": True, "init_lora_weights": True}
    row = only(peft(tmp_path, LORA | empty | told, optimizer_kwargs={"lr": 0.5}))
    assert row.case == only(peft(tmp_path, LORA)).case


def test_files_without_rows_are_told_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = peft(tmp_path, LORA), peft(tmp_path, {"peft_type": "IA3"}, name="ia3--small")
    out = tmp_path / "rows.jsonl"
    assert take_files([bad], out) == []
    assert not out.exists()
    assert capsys.readouterr().out == f"{bad}: no rows; 1 lines are none\n"
    assert take_files([bad, good], out) == [out]
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "2 files: 1 rows; 1 lines are no rows"
    assert "peft_type=IA3" in said.err


def test_files_are_taken_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, out = fms(tmp_path, FMS, FMS | {"fp16": "True"}), tmp_path / "rows.jsonl"
    for num_new in (1, 0):
        assert take_files([table], out) == [out]
        said = capsys.readouterr()
        assert said.out == f"{out}: {num_new} of 1 rows are new; 1 lines are no rows\n"
        assert "without fp16" in said.err
    assert len(read_rows(out).rows) == 1


def test_rows_of_another_machine_stay_in_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = tmp_path / "mine.jsonl", tmp_path / "other.jsonl"
    add_rows(mine, read_published(fms(tmp_path, FMS)).rows)
    before = mine.read_bytes()
    mine.write_bytes(before + b'{"row_id": 1}\n')
    assert take_files([mine], None) == [mine]
    said = capsys.readouterr()
    assert said.out == f"{mine}: 1 rows; 1 lines are no rows\n"
    assert f"{mine}:2 not imported: " in said.err
    assert mine.read_bytes().startswith(before)
    assert take_files([mine], other) == [other]
    assert read_rows(other).rows == read_rows(mine).rows
    with pytest.raises(UserError, match="a file of rows that exists"):
        take_files([tmp_path / "none.jsonl"], None)
