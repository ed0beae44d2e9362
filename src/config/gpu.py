"""`gpu=`: a name of the table, or the GPU of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from src.config import zoo
from src.errors import UserError
from src.spec import Gpu, Interconnect

DEFAULT_SKU = "a100-80gb"
_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_SMI_SECONDS = 5


def build_gpu(entry: dict[str, Any]) -> Gpu:
    """The spec of one file of conf/gpu."""
    fields = {name: entry[name] for name in Gpu.__dataclass_fields__}
    major, minor = fields.pop("compute_capability")
    interconnect = Interconnect(fields.pop("interconnect"))
    return Gpu(compute_capability=(major, minor), interconnect=interconnect, **fields)


def load_gpu(sku: str) -> Gpu:
    """The GPU of conf/gpu/<sku>.yaml."""
    return build_gpu(zoo.load("gpu", sku))


def every_gpu() -> list[Gpu]:
    """Every GPU of conf/gpu."""
    return [load_gpu(sku) for sku in zoo.index("gpu")]


def resolve_gpu(written: str) -> tuple[Gpu, tuple[str, ...]]:
    """The GPU that is called `written`, and what the reader has to know about the choice.

    Raises:
        UserError: no GPU has that name.
    """
    if written.casefold() == "auto":
        return _this_machine()
    sku = zoo.find("gpu", written)
    if sku is not None:
        return load_gpu(sku), ()
    if written.isdecimal():
        allowed = f"a name of list=gpus; did you mean gpus={written}?"
        raise UserError(key="gpu", value=written, allowed=allowed)
    close = zoo.nearest_names("gpu", written)
    hint = f"nearest: {', '.join(close)}" if close else "list=gpus prints them"
    raise UserError(key="gpu", value=written, allowed=f"not among the known GPUs; {hint}")


def _this_machine() -> tuple[Gpu, tuple[str, ...]]:
    names = local_gpu_names()
    if not names:
        warning = f"gpu=auto: no NVIDIA GPU in this machine; {DEFAULT_SKU} is assumed"
        return load_gpu(DEFAULT_SKU), (warning,)
    sku = zoo.find("gpu", names[0])
    if sku is None:
        warning = f"gpu=auto: {names[0]} is not among list=gpus; {DEFAULT_SKU} is assumed"
        return load_gpu(DEFAULT_SKU), (warning,)
    if len(set(names)) > 1:
        return load_gpu(sku), (f"gpu=auto: different GPUs in this machine; {sku} is taken",)
    return load_gpu(sku), ()


def local_gpu_names() -> list[str]:
    """Names of this machine's NVIDIA GPUs: from the driver's files, else from nvidia-smi."""
    files = sorted(_DRIVER_FOLDER.glob("*/information"))
    names = [name for file in files if (name := _model_line(file)) is not None]
    return names or _names_from_smi()


def _model_line(file: Path) -> str | None:
    """The value of `Model:` in one of the driver's files."""
    try:
        lines = file.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    values = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return values[0] if values and values[0] else None


def _names_from_smi() -> list[str]:
    import shutil

    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    import subprocess

    try:
        done = subprocess.run(
            [command, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
