"""Several files, what is typed, errors, and damaged files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from src.config import compose_arguments, compose_keywords
from src.config.imports import import_files
from src.errors import UserError
from src.estimate import estimate, run
from src.report.as_json import request_dict
from tests.import_files import write

LORA = """
base_model: opt-125m
adapter: lora
lora_r: 4
lora_target_linear: true
micro_batch_size: 2
sequence_len: 128
"""
LAUNCH = "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\nnum_machines: 1\n"


def error_of(written: Any, **typed: Any) -> str:
    with pytest.raises(UserError) as raised:
        import_files(written, typed)
    line = str(raised.value)
    assert "\n" not in line
    assert line.startswith("from=")
    assert len(line) < 700
    return line


def test_training_goes_before_launching_in_any_order(tmp_path: Path) -> None:
    zero = "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: fp16\n"
    launch = write(tmp_path, "l.yaml", zero + "deepspeed_config: {gradient_accumulation_steps: 1}")
    train = write(
        tmp_path, "t.json", {"output_dir": "x", "gradient_accumulation_steps": 8, "bf16": True}
    )
    for files in ([launch, train], [train, launch]):
        imported = import_files(files, {})
        assert imported.values["grad_accum"] == 8
        assert imported.values["precision"] == "bf16-mixed"
        assert sum("goes before" in line for line in imported.warnings) == 1


def test_of_two_of_a_kind_the_later_goes_first(tmp_path: Path) -> None:
    one = write(tmp_path, "1.json", {"output_dir": "x", "per_device_train_batch_size": 1})
    two = write(tmp_path, "2.json", {"output_dir": "x", "per_device_train_batch_size": 2})
    assert import_files([one, two], {}).values["micro_batch"] == 2
    assert import_files([two, one], {}).values["micro_batch"] == 1


def test_deepspeed_beside_or_inside_a_file(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 1}}
    write(tmp_path, "z.json", zero)
    beside = write(tmp_path, "a.json", {"output_dir": "x", "deepspeed": "z.json"})
    inside = write(tmp_path, "b.json", {"output_dir": "x", "deepspeed": zero})
    missing = write(tmp_path, "c.json", {"output_dir": "x", "deepspeed": "none_such.json"})
    assert import_files(beside, {}).values["method"] == ["zero1"]
    assert import_files(inside, {}).values["method"] == ["zero1"]
    imported = import_files(missing, {})
    assert "method" not in imported.values
    assert any("no such file here" in line for line in imported.warnings)


def test_what_is_typed_goes_first(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", LORA)
    cfg = compose_arguments([f"from={file}", "micro_batch=5", "finetune.r=9"])
    assert (cfg.micro_batch, cfg.finetune.r, cfg.seq_len) == (5, 9, 128)
    assert compose_arguments(["seq_len=7", f"from=[{file}]"]).seq_len == 7
    cfg = compose_keywords({"from": Path(file), "finetune": "full"})
    assert (cfg.finetune.kind, cfg.finetune.r) == ("full", None)


def test_a_typed_value_replaces_one_that_is_not_represented(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", LORA + "optimizer: ademamix\n")
    line = error_of(file)
    assert f"from={file}: optimizer=ademamix: not among the optimizers here" in line
    imported = import_files(file, {"optimizer": "adamw"})
    assert "optimizer" not in imported.values
    assert "optimizer (optimizer is typed)" in imported.warnings[0]
    zero = write(tmp_path, "z.json", {"zero_optimization": {}, "optimizer": {"type": "Lamb"}})
    assert "optimizer.type=Lamb" in error_of(zero)
    assert import_files(zero, {"optimizer": "adamw"}).values == {}


def test_the_answer_is_that_of_the_same_keys_typed(tmp_path: Path) -> None:
    files = [write(tmp_path, "a.yaml", LORA), write(tmp_path, "l.yaml", LAUNCH)]
    report = estimate(gpu="v100-16gb", **{"from": files})
    values = import_files(files, {}).values
    typed = estimate(gpu="v100-16gb", **values)
    assert report.request == typed.request
    assert report.methods == typed.methods
    assert report.request.job.finetune.r == 4
    assert any(line.startswith(f"from={files[0]}") for line in report.warnings)


def test_the_request_can_be_passed_again(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", LORA)
    report = estimate(gpu="v100-16gb", **{"from": file})
    request = request_dict(report.request)
    assert "from" not in request
    keys = {key: value for key, value in request.items() if key not in ("model", "arch")}
    again = estimate(model="opt-125m", **keys)
    assert again.methods == report.methods


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("micro_batch_size: 0", "micro_batch_size=0: a whole number, 1 or more (here micro_batch"),
        ("micro_batch_size: many", "micro_batch_size=many: a whole number"),
        ("micro_batch_size: 1.5", "micro_batch_size=1.5: a whole number"),
        ("micro_batch_size: [[1]]", "micro_batch_size=[...]: a whole number"),
        ("lora_dropout: 1.5", "lora_dropout=1.5: 0 or more and below 1 (here finetune.dropout"),
        ("base_model: opt-9.9z", "base_model=opt-9.9z: not in the zoo"),
        ("lora_target_modules: '.*proj'", "regular expressions are not read"),
        ("rl: dpo", "rl=dpo: only supervised"),
        ("context_parallel_size: 2", "context_parallel_size=2: the sequence is not split"),
        ("gradient_checkpointing: unsloth", "gradient_checkpointing=unsloth"),
        ("load_in_4bit: true\nadapter: ''", "load_in_4bit=true: a quantised model"),
        ("load_in_4bit: true\nload_in_8bit: true", "4 bits or 8"),
        ("flex_attention: true", "flex_attention=true: not among the kernels"),
    ],
)
def test_errors_name_the_files_key(tmp_path: Path, lines: str, words: str) -> None:
    kept = [
        line for line in LORA.splitlines() if line.partition(":")[0] not in lines.replace(":", " ")
    ]
    file = write(tmp_path, "a.yaml", "\n".join([*kept, "sample_packing: false", lines]))
    typed = {} if "base_model" in lines else {"model": "opt-125m"}
    with pytest.raises(UserError) as raised:
        estimate(**typed, **{"from": file})
    assert str(raised.value).startswith(f"from={file}: ")
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LORA + "torch_compile: true", "torch_compile=true: compiled code"),
        (LORA + "sample_packing: true", "sample_packing=true: packed sequences"),
        (LORA + "processor_type: AutoProcessor", "no vision tower"),
        (LORA + "lora_modules_to_save: [lm_head]", "lora_modules_to_save=[lm_head]: modules"),
        (LORA + "trust_remote_code: true", "never taken from a file"),
    ],
)
def test_what_matters_and_is_not_counted_is_a_warning(
    tmp_path: Path, content: str, words: str
) -> None:
    warnings = import_files(write(tmp_path, "a.yaml", content), {}).warnings
    assert sum(words in line for line in warnings) == 1
    assert not any("\n" in line for line in warnings)


DAMAGED: list[tuple[str, bytes, str]] = [
    ("a.yaml", b"", "empty"),
    ("a.json", b"", "empty"),
    ("a.yaml", b"just words", "holds no keys but a str"),
    ("a.json", b"[1]", "holds no keys but a list"),
    ("a.json", b'{"output_dir": ', "no JSON"),
    ("a.yaml", b"a: [1", "no YAML"),
    ("a.yaml", b"a: !!python/object/apply:os.system ['true']", "no YAML"),
    ("a.yaml", b"--- {a: 1}\n--- {b: 2}", "no YAML"),
    ("a.yaml", b"? [a]\n: 1\n", "no YAML"),
    ("a.yaml", b"\xff\xfe\x00a", "no text"),
    ("a.yaml", b"a: \x00", "binary"),
    ("a.yaml", b"a: \x07\x1b[31m", "no YAML"),
    ("a.yaml", b"a: " + b"x" * 1024**2, "larger"),
    ("a.yaml", b"a: " + b"[" * 200_000, "nest"),
    ("a.yaml", b"a: " + b"{b: " * 200, "nested deeper"),
    ("a.json", b'{"a": ' + b"[" * 200_000, "no JSON"),
    ("a.yaml", b"colour: red\nsize: 3", "none of the kinds that are recognised: TrainingArg"),
    ("a.yaml", b"{}", "it has no keys"),
    ("a.yaml", b"base_model: a\ncutoff_len: 2", "keys of more than one kind of file (axolotl"),
]


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_a_damaged_file_is_one_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert words in error_of(str(file))


def test_no_file_is_one_line(tmp_path: Path) -> None:
    assert "no such file" in error_of(str(tmp_path / "none.yaml"))
    assert "a folder" in error_of(str(tmp_path))
    assert "no such file" in error_of("a\0b")
    for written in ([], [""], 3, ["a", None]):
        assert "FILE | [FILE,FILE]" in error_of(written)
    assert "at most" in error_of(["a"] * 9)


def test_aliases_that_grow_are_not_written_out(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    file = write(tmp_path, "a.yaml", "\n".join([*lines, "base_model: opt-125m", "optimizer: *a11"]))
    assert "optimizer=[...]" in error_of(file)


def test_the_command_prints_one_line_and_exits_with_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "src.estimate", f"from={tmp_path / 'none.yaml'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_the_command_tells_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "a.yaml", LORA)
    assert run([f"from={file}", "gpu=v100-16gb", "format=json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["request"]["finetune"]["r"] == 4
    assert any("(axolotl): took base_model, adapter" in line for line in answer["warnings"])


def test_the_readmes_file_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[4] / "README.md").read_text("utf-8")
    file = write(tmp_path, "sft.yaml", text.split("```yaml\n")[1].split("```")[0])
    imported = import_files(file, {})
    assert imported.values["finetune.r"] == 32
    assert imported.values["precision"] == "bf16-true"
    assert "ignored" not in imported.warnings[0]


def test_a_question_without_files_loads_no_tables() -> None:
    code = "import sys, src.estimate; print([m for m in sys.modules if 'imports.settle' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_length_that_no_file_says_is_told(tmp_path: Path) -> None:
    file = write(tmp_path, "a.json", {"output_dir": "x"})
    assert any("how long sequences are" in line for line in import_files(file, {}).warnings)
    typed = import_files(file, {"seq_len": 64}).warnings
    assert not any("how long sequences are" in line for line in typed)


@pytest.mark.parametrize(("size", "count"), [(1e9, 0), ("auto", 0), (5e8, 1)])
def test_a_usual_value_of_what_is_not_counted_is_no_warning(
    tmp_path: Path, size: Any, count: int
) -> None:
    zero = {"zero_optimization": {"stage": 3, "sub_group_size": size}}
    warnings = import_files(write(tmp_path, "z.json", zero), {}).warnings
    assert sum("1e9 is counted" in line for line in warnings) == count
