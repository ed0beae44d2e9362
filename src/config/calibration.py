"""The champion that answers: found, read, and told about; numpy loads here and no earlier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from src.config.zoo import CONF
from src.plan.result import Calibration, Report
from src.spec import Step

if TYPE_CHECKING:
    from src.residual.champion import Champion
    from src.residual.estimator import Calibrated

PROJECT = CONF.parent
CHAMPION = PROJECT / "models" / "residual"
"""Where the champion lies unless another folder is asked for."""


def load_calibrated(folder: Path) -> tuple[Calibrated | None, str]:
    """The formula with the champion of a folder, or None and why there is none to use."""
    from src.residual.estimator import Calibrated
    from src.residual.files import ChampionError, read_champion

    try:
        return Calibrated(read_champion(folder)), ""
    except ChampionError as error:
        return None, f"no calibration, the formula answers alone: {error}"


def with_calibration(report: Report, calibrated: Calibrated) -> Report:
    """A corrected formula's report that says what it was calibrated on, and whether it is there."""
    request = report.request
    rows = [report.methods[0]] if report.recommended is not None else report.methods
    steps = [
        Step(
            job=request.job,
            method=row.method,
            layout=row.layout,
            gpu=request.cluster.gpu,
            micro_batch=row.micro_batch,
        )
        for row in rows
    ]
    champion = calibrated.champion
    calibration = Calibration(
        model=champion.version,
        rows=len(champion.origin.row_ids),
        source=champion.origin.source,
        in_range=calibrated.in_range(steps),
    )
    warnings = (*report.warnings, _told(champion, calibration))
    return replace(report, calibration=calibration, warnings=warnings)


def _told(champion: Champion, calibration: Calibration) -> str:
    """What it was calibrated on, and how far each level can be trusted."""
    parts = []
    for level, model in champion.levels.items():
        if model.log_margin is None:
            parts.append(f"{level}: {model.bound_rows} rows, too few for a bound of its own")
        else:
            kind = model.corrector.kind.value
            parts.append(f"{level}: {kind}, bound from {model.bound_rows} rows")
    gpus = ", ".join(champion.origin.gpus)
    coverage = champion.origin.options.get("coverage", 0.95)
    where = "in range" if calibration.in_range else "out of range here: see the rows' notes"
    return (
        f"calibrated on {calibration.rows} rows ({calibration.source}; {gpus}), bounds for "
        f"{coverage:.0%} of steps like those ({'; '.join(parts)}); {where}"
    )
