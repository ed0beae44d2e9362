"""A callback for Hugging Face Trainer: one row of the run that it is added to.

It looks at the second optimizer step, as a campaign does, and changes nothing of the training:
whatever goes wrong is a line in the log.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from src.errors import UserError
from src.integrations.checking import check_nothing_else, check_same_model
from src.integrations.reading import Seen, check_arguments, padding_share, read_case
from src.measure.case import A100_80GB, Case
from src.measure.client import case_of
from src.measure.cuda import environment, this_gpu
from src.measure.cuda_statistics import DeviceBytes, Memory, Statistics, TorchStatistics
from src.measure.dry_run import library_versions
from src.measure.measurement import MEASURED_STEP
from src.measure.rows import RankEnd, make_row
from src.record import Outcome, Provenance, open_rows
from src.spec import Gpu

_LOG = logging.getLogger("peakcast")
_CAMPAIGN = "trainer"
_LOCK_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The GPU that this process trains on.

    Attributes:
        statistics: its memory's.
        gpu: what it is.
        environment: what the row says about it.
    """

    statistics: Statistics
    gpu: Gpu
    environment: dict[str, object]


def this_machine() -> Machine | None:
    """This process's GPU; None where torch sees none."""
    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    gpu = this_gpu(A100_80GB, index)
    slug = "".join(letter if letter.isalnum() else " " for letter in gpu.name.casefold())
    return Machine(
        statistics=TorchStatistics(index),
        gpu=replace(gpu, sku="-".join(slug.split())),
        environment=environment(index),
    )


def _harmless(work: Callable[..., None]) -> Callable[..., None]:
    """The same; an error ends the recording, not the training."""

    @functools.wraps(work)
    def guarded(self: PeakcastCallback, *arguments: Any, **keywords: Any) -> None:
        if self._is_over:
            return
        try:
            work(self, *arguments, **keywords)
        except UserError as error:
            self._stop(f"this run is no case: {error}")
        except Exception as error:
            self._stop(f"{type(error).__name__}: {error}")

    return guarded


class PeakcastCallback(TrainerCallback):
    """Writes one row after the second step: `Trainer(..., callbacks=[PeakcastCallback()])`.

    The first process writes; the others do nothing. A run that no case describes gets no row, and
    the log says why.

    Args:
        out: the file of rows; None: `peakcast.jsonl` in the Trainer's `output_dir`.
    """

    def __init__(self, out: str | Path | None = None) -> None:
        self._out = None if out is None else Path(out)
        self._hook: Any = None
        self._begin()

    def _begin(self) -> None:
        self._is_over = False
        self._machine: Machine | None = None
        self._started = ""
        self._step = 0
        self._batches: list[Seen] = []
        self._most_before = 0
        self._was_evaluated = False
        self._held_bytes = 0
        self._begun = 0.0

    def _stop(self, why: str | None = None) -> None:
        """Look no further; `why` there is no row."""
        self._is_over = True
        self._batches = []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if why is not None:
            _LOG.warning("peakcast wrote no row: %s", " ".join(why.split())[:500])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start anew, and find out whether there is a GPU."""
        self._stop()
        self._begin()
        self._prepare(args, state)

    @_harmless
    def _prepare(self, args: Any, state: Any) -> None:
        if not state.is_world_process_zero:
            self._stop()
            return
        self._machine = this_machine()
        self._started = datetime.now(UTC).isoformat(timespec="milliseconds")
        if self._machine is None:
            self._stop("torch sees no CUDA GPU")
            return
        check_arguments(args)  # before anything is hooked: a compiled model is not touched

    @_harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins; from the second one's beginning its peaks count."""
        assert self._machine is not None
        self._step += 1
        self._batches = []
        if self._hook is None:
            self._hook = kwargs["model"].register_forward_pre_hook(self._see, with_kwargs=True)
        if self._step == MEASURED_STEP:
            statistics = self._machine.statistics
            statistics.synchronize()
            self._held_bytes = statistics.memory().allocated_bytes
            statistics.reset_peaks()
            self._begun = time.perf_counter()

    def _see(self, module: Any, arguments: Any, inputs: dict[str, Any]) -> None:
        if module.training:
            self._note(inputs)

    @_harmless
    def _note(self, inputs: dict[str, Any]) -> None:
        self._batches.append(Seen.of(inputs))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What an evaluation reserves is not the step's."""
        self._was_evaluated = True

    @_harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is over, after the second one the row is written."""
        assert self._machine is not None
        if self._step < MEASURED_STEP:
            self._most_before = max((seen.num_positions for seen in self._batches), default=0)
            return
        statistics = self._machine.statistics
        statistics.synchronize()
        seconds, memory = time.perf_counter() - self._begun, statistics.memory()
        device, peak = statistics.device(), memory.peak_allocated_bytes
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        case = read_case(args, model, optimizer, self._batches, self._machine.gpu)
        check_same_model(case, model)
        check_nothing_else(case, model, optimizer, held_bytes=self._held_bytes, peak_bytes=peak)
        answer = {
            "peak_bytes": peak,
            "step_seconds": seconds,
            "after_step_bytes": memory.allocated_bytes,
            "comm": "none" if case.step.layout.num_gpus == 1 else "nccl",
            "reservation": self._reservation(memory, device),
            "environment": self._machine.environment | {"trainer_arguments": type(args).__name__},
            "versions": library_versions(),
            "notes": self._notes(args, case),
            **_parameters(model),
        }
        outcome = Outcome.INVALID if device.num_others else Outcome.OK
        self._write(args, case, RankEnd(outcome=outcome, answer=answer))

    @property
    def _is_first_peak(self) -> bool:
        """Whether what is reserved is this step's, and not what something larger left."""
        most = max(seen.num_positions for seen in self._batches)
        return most >= self._most_before and not self._was_evaluated

    def _reservation(self, memory: Memory, device: DeviceBytes) -> dict[str, Any]:
        found: dict[str, Any] = {
            "num_alloc_retries": memory.num_alloc_retries,
            "num_ooms": memory.num_ooms,
            "num_other_processes": device.num_others,
        }
        is_own = device.method == "nvml"  # anything else counts other processes' bytes too
        if is_own:
            found["outside_bytes"] = device.num_bytes - memory.reserved_bytes
        if self._is_first_peak:
            found["reserved_bytes"] = memory.peak_reserved_bytes
        if self._is_first_peak and is_own:
            found["device_bytes"] = memory.peak_reserved_bytes + found["outside_bytes"]
            found["device_bytes_method"] = device.method
        return found

    def _notes(self, args: Any, case: Case) -> list[str]:
        notes = ["recorded from a training run"]
        padding = padding_share(self._batches)
        if padding > 0:
            notes.append(f"{padding:.1%} of the positions are padding")
        if not self._is_first_peak:
            notes.append("reserved and device are left out: something larger ran before")
        if case.step.layout.num_gpus > 1:
            notes.append("bytes of rank 0; the others were not looked at")
        if type(args).__module__.partition(".")[0] != "transformers":
            notes.append(f"with {type(args).__name__}: its trainer may hold more")
        return notes

    def _write(self, args: Any, case: Case, end: RankEnd) -> None:
        provenance = Provenance(
            campaign=_CAMPAIGN,
            started=self._started,
            duration_s=round(time.perf_counter() - self._begun, 3),
        )
        raw = {**case_of(case.step), "device": case.device, "loop": asdict(case.loop)}
        path = self._out or Path(args.output_dir) / "peakcast.jsonl"
        with open_rows(path, wait_s=_LOCK_S) as file:
            file.append(make_row(raw, [end], provenance))
        _LOG.info("peakcast wrote a row to %s", path)
        self._stop()


def _parameters(model: torch.nn.Module) -> dict[str, int]:
    sizes = [(p.numel(), p.requires_grad, name) for name, p in model.named_parameters()]
    return {
        "num_parameters": sum(size for size, _, name in sizes if ".lora_" not in name),
        "num_trainable_parameters": sum(size for size, is_trained, _ in sizes if is_trained),
    }
