"""The callback on real runs of the Trainer on the CPU; the GPU's statistics are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from src.integrations import PeakcastCallback, trainer
from src.integrations.trainer import Machine
from src.measure.case import A100_80GB, parse_case
from src.measure.cuda_statistics import DeviceBytes, Memory
from src.measure.predict import Predictor
from src.memory import estimate_step
from src.record import Outcome, Row, Source, read_rows
from src.spec import Checkpointing, FinetuneKind, Method, Optimizer, Precision
from src.units import GIB, MIB

# torch's and transformers' own affair: a CPU has no pinned memory, and no AMP.
pytestmark = pytest.mark.filterwarnings("ignore")


class Statistics:
    """A GPU whose answers a test decides."""

    def __init__(self, *, method: str = "nvml", num_others: int = 0, held: int = 10 * MIB) -> None:
        self.calls: list[str] = []
        self._method, self._num_others, self._held = method, num_others, held

    def reset_peaks(self) -> None:
        self.calls.append("reset")

    def memory(self) -> Memory:
        self.calls.append("memory")
        return Memory(
            allocated_bytes=self._held,
            reserved_bytes=3 * GIB,
            peak_allocated_bytes=2 * GIB,
            peak_reserved_bytes=4 * GIB,
        )

    def device(self) -> DeviceBytes:
        others = self._num_others if self._method == "nvml" else None
        return DeviceBytes(num_bytes=int(3.5 * GIB), method=self._method, num_others=others)

    def synchronize(self) -> None:
        self.calls.append("synchronize")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Statistics]:
    """Makes this process believe that it trains on a GPU."""

    def start(**more: Any) -> Statistics:
        statistics = Statistics(**more)
        machine = Machine(
            statistics=statistics, gpu=A100_80GB, environment={"gpu": "NVIDIA A100-SXM4-80GB"}
        )
        monkeypatch.setattr(trainer, "this_machine", lambda: machine)
        return statistics

    return start


def tiny() -> Any:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config)


def samples(lengths: list[int], **more: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": [1] * length, "labels": [1] * length, **more} for length in lengths]


def train(
    folder: Path,
    *,
    model: Any = None,
    data: list[dict[str, list[int]]] | None = None,
    callbacks: list[TrainerCallback] | None = None,
    kind: type[Trainer] = Trainer,
    optimizers: Any = (None, None),
    **arguments: Any,
) -> float:
    """Three steps; the loss of the run."""
    torch.manual_seed(0)
    asked: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    run = kind(
        model=model if model is not None else tiny(),
        args=TrainingArguments(**asked | arguments),
        train_dataset=data or samples([8] * 24),  # type: ignore[arg-type]
        callbacks=callbacks if callbacks is not None else [PeakcastCallback()],
        optimizers=optimizers,
    )
    return float(run.train().training_loss)


def written(folder: Path) -> Row:
    found = read_rows(folder / "out" / "peakcast.jsonl")
    assert found.damaged == ()
    (row,) = found.rows
    return row


def test_one_line_gives_a_row_of_the_second_step(
    tmp_path: Path, on: Callable[..., Statistics]
) -> None:
    statistics = on()
    train(tmp_path, gradient_accumulation_steps=2, gradient_checkpointing=True)
    row = written(tmp_path)
    assert (row.outcome, row.source, row.comm) == (Outcome.OK, Source.MEASURED, "none")
    assert row.peak_bytes == {
        "allocated": 2 * GIB,
        "reserved": 4 * GIB,
        "device": 4 * GIB + GIB // 2,
    }
    assert statistics.calls.count("reset") == 1
    case = parse_case(row.case)
    step, job = case.step, case.step.job
    assert (step.method, step.micro_batch, job.seq_len, job.grad_accum) == (Method.SINGLE, 2, 8, 2)
    assert (job.precision, job.optimizer) == (Precision.FP32, Optimizer.ADAMW_FUSED)
    assert job.checkpointing is Checkpointing.FULL
    assert job.finetune.kind is FinetuneKind.FULL
    assert (job.model.name, job.model.hf_id) == ("llama", None)
    assert case.loop.trainer_groups
    assert not case.loop.reentrant_checkpointing
    assert not case.loop.attention_mask_input
    assert row.numbers["num_parameters"] == sum(p.numel() for p in tiny().parameters())
    assert row.numbers["step_seconds"] > 0
    assert row.versions["torch"] == torch.__version__
    assert row.environment["gpu"] == "NVIDIA A100-SXM4-80GB"
    with Predictor() as predict:  # what `src.profile sync=true` compares it with
        found = predict(row)
    assert found["formula"].allocated == estimate_step(step).peak_bytes.allocated
    assert found["dry_run"].allocated > 0


def test_the_training_is_the_same_with_it(tmp_path: Path, on: Callable[..., Statistics]) -> None:
    statistics = on()
    without = train(tmp_path, callbacks=[])
    assert train(tmp_path) == without
    assert statistics.calls
    written(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "optimizer", "precision"),
    [
        ({"optim": "adamw_torch"}, Optimizer.ADAMW, Precision.FP32),
        ({"optim": "sgd"}, Optimizer.SGD, Precision.FP32),
        ({"optim": "adafactor"}, None, None),
        ({"bf16": True}, Optimizer.ADAMW_FUSED, Precision.BF16_MIXED),
    ],
)
def test_optimizer_and_precision_are_those_that_run(
    tmp_path: Path,
    on: Callable[..., Statistics],
    arguments: dict[str, Any],
    optimizer: Optimizer | None,
    precision: Precision | None,
) -> None:
    on()
    train(tmp_path, **arguments)
    row = written(tmp_path)
    job = parse_case(row.case).step.job
    assert job.optimizer is (optimizer or Optimizer.ADAFACTOR)
    assert job.precision is (precision or Precision.FP32)


def test_lora_and_half_precision_weights_are_read(
    tmp_path: Path, on: Callable[..., Statistics]
) -> None:
    import peft

    on()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny().to(torch.bfloat16), config)
    train(tmp_path, model=model, bf16=True)
    row = written(tmp_path)
    case = parse_case(row.case)
    finetune = case.step.job.finetune
    assert (finetune.kind, finetune.r, finetune.alpha) == (FinetuneKind.LORA, 4, 8)
    assert finetune.targets == ("q_proj", "v_proj")
    assert case.step.job.precision is Precision.BF16_TRUE
    assert case.loop.autocast_half_weights
    assert case.loop.fp32_adapters
    assert row.numbers["num_trainable_parameters"] == 2 * 4 * (32 + 32 + 32 + 16)
    assert row.numbers["num_parameters"] == sum(p.numel() for p in tiny().parameters())


def test_padding_is_noted_and_the_length_is_the_padded_one(
    tmp_path: Path, on: Callable[..., Statistics]
) -> None:
    on()
    data = samples([8] * 24, attention_mask=[1] * 6 + [0] * 2)
    train(tmp_path, data=data)
    row = written(tmp_path)
    case = parse_case(row.case)
    assert case.loop.attention_mask_input
    assert case.step.job.seq_len == 8
    assert "25.0% of the positions are padding" in row.notes


class Growing(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Long sequences in the first step, short ones after it."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return samples([16 if index < 2 else 8])[0]


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
        return torch.utils.data.SequentialSampler(Growing())


def test_what_a_larger_step_left_reserved_is_left_out(
    tmp_path: Path, on: Callable[..., Statistics]
) -> None:
    on()
    train(tmp_path, data=Growing(), kind=InOrder)  # type: ignore[arg-type]
    row = written(tmp_path)
    assert row.peak_bytes == {"allocated": 2 * GIB}
    assert parse_case(row.case).step.job.seq_len == 8
    assert any("something larger ran before" in note for note in row.notes)


def test_without_nvml_the_device_level_is_left_out(
    tmp_path: Path, on: Callable[..., Statistics]
) -> None:
    on(method="mem_get_info")
    train(tmp_path)
    assert written(tmp_path).peak_bytes == {"allocated": 2 * GIB, "reserved": 4 * GIB}


def test_beside_other_processes_it_is_invalid(
    tmp_path: Path, on: Callable[..., Statistics]
) -> None:
    on(num_others=1)
    train(tmp_path)
    assert written(tmp_path).outcome is Outcome.INVALID


def told(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [record.getMessage() for record in caplog.records if record.name == "peakcast"]
    return line


def test_without_a_gpu_it_says_so_once_and_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, callbacks=[PeakcastCallback(out=tmp_path / "rows.jsonl")])
    assert told(caplog) == "peakcast wrote no row: torch sees no CUDA GPU"
    assert not (tmp_path / "rows.jsonl").exists()


def patched() -> Any:
    model = tiny()
    model.model.norm.forward = lambda x: x * 1.0
    return model


def with_a_bias() -> Any:
    model = tiny()
    model.model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.zeros(64))
    return model


def frozen() -> Any:
    model = tiny()
    model.model.embed_tokens.weight.requires_grad = False
    return model


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: no case says"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: no case says"),
        ({"model": patched}, "model=model.norm: its forward was replaced"),
        ({"model": with_a_bias}, "a parameter that the case's model and this one do not share"),
        ({"model": frozen}, "a parameter that the case's model and this one do not share"),
        ({"data": samples([8] * 24, position_ids=list(range(8)))}, "batch=position_ids"),
        ({"held": GIB}, "bytes on the GPU before the step that are not this model's"),
        ({"optimizer": torch.optim.Adagrad}, "optimizer=torch.Adagrad"),
    ],
)
def test_what_no_case_says_is_refused_and_trained_on(
    tmp_path: Path,
    on: Callable[..., Statistics],
    caplog: pytest.LogCaptureFixture,
    more: dict[str, Any],
    why: str,
) -> None:
    on(**{key: more[key] for key in more.keys() & {"held"}})
    asked = {key: value for key, value in more.items() if key not in ("held", "optimizer")}
    model = asked.pop("model", tiny)()
    if "optimizer" in more:
        asked["optimizers"] = (more["optimizer"](model.parameters()), None)
    assert train(tmp_path, model=model, **asked) > 0
    assert why in told(caplog)
    assert not (tmp_path / "out" / "peakcast.jsonl").exists()


@pytest.mark.parametrize("moment", ["reset_peaks", "device"])
def test_no_failure_reaches_the_training(
    tmp_path: Path,
    on: Callable[..., Statistics],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    def fail(_: Statistics) -> None:
        raise RuntimeError("driver\nshut down")

    on()
    monkeypatch.setattr(Statistics, moment, fail)
    assert train(tmp_path) > 0
    assert told(caplog) == "peakcast wrote no row: RuntimeError: driver shut down"


def test_a_file_that_cannot_be_written_is_a_warning(
    tmp_path: Path, on: Callable[..., Statistics], caplog: pytest.LogCaptureFixture
) -> None:
    on()
    (tmp_path / "file").touch()
    callback = PeakcastCallback(out=tmp_path / "file" / "rows.jsonl")
    assert train(tmp_path, callbacks=[callback]) > 0
    assert "cannot be written" in told(caplog)


def test_a_second_run_is_a_second_row_and_nothing_is_left_on_the_model(
    tmp_path: Path, on: Callable[..., Statistics]
) -> None:
    on()
    callback, model = PeakcastCallback(out=tmp_path / "rows.jsonl"), tiny()
    for _ in range(2):
        train(tmp_path, model=model, callbacks=[callback])
        assert not model._forward_pre_hooks
    first, second = read_rows(tmp_path / "rows.jsonl").rows
    assert first.case_id == second.case_id
    assert first.row_id != second.row_id
