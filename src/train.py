"""Learn what the formula misses: `python -m src.train`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from src.config import EXIT_DRIFT, EXIT_OK, compose_arguments, emit, run_command, run_flag, warn
from src.config.calibration import PROJECT
from src.config.champion import find_champion, go_back, keep, need_champion
from src.config.train_keys import TRAIN
from src.config.training import TrainingRequest, to_training
from src.measure.case import parse_case
from src.plan.pace import pace_of_rows, pace_values
from src.record import Row, read_rows
from src.report.card import render_card
from src.report.training import render_drift, render_training
from src.residual.dataset import Dataset, join
from src.residual.drift import check_drift, names_outside
from src.residual.gate import decide
from src.residual.origin import origin_of
from src.residual.training import train
from src.tracking import Registry, default_uri, logged_rows, resolve_uri


def run(arguments: list[str]) -> int:
    """Do what the command line asks for; the exit code."""
    if run_flag(arguments, TRAIN):
        return EXIT_OK
    asked = to_training(compose_arguments(arguments, TRAIN))
    uri = resolve_uri(asked.tracking_uri or default_uri(PROJECT)) if asked.uses_mlflow else None
    if asked.rollback:
        champion = go_back(asked.folder)
        registered = "" if uri is None else f", version {Registry(uri).roll_back()} of the registry"
        emit(f"champion is {champion.version} again{registered}\n")
        return EXIT_OK
    rows, left_out = asked.selection.of(gather(asked, uri))
    dataset = join(rows, lambda case: parse_case(case).step)
    warn([f"{left_out} rows left out by sources, gpus or versions"] if left_out else [])
    warn(f"row {one.row_id}: {one.reason}" for one in dataset.refused)
    if asked.check:
        return check(asked, dataset)
    pace = pace_of_rows(rows, lambda row: parse_case(row.case).step)
    return learn(asked, dataset, pace_values(pace), uri)


def gather(asked: TrainingRequest, uri: str | None) -> list[Row]:
    """Rows of the files, or of MLflow; what is none is told."""
    if uri is not None and not asked.files:
        found = logged_rows(uri)
        warn(f"row {one.row_id}: {one.reason}" for one in found.unread)
        return list(found.rows)
    files = {file: read_rows(file) for file in asked.files}
    for file, held in files.items():
        warn(f"{file}:{bad.line}: no row: {bad.reason}" for bad in held.damaged)
    return [row for held in files.values() for row in held.rows]


def learn(
    asked: TrainingRequest, dataset: Dataset, pace: Mapping[str, float], uri: str | None
) -> int:
    """Train, judge, and keep what is better, with the pace of the same rows; the exit code."""
    training = train(dataset, asked.options, origin_of(dataset, asked.options), pace=pace)
    decision = decide(dataset, training, find_champion(asked.folder), asked.options)
    emit(render_training(dataset, training, decision))
    if decision.is_better:
        keep(training.champion, asked.folder, render_card(dataset, training, decision))
        if uri is not None:
            Registry(uri).register(asked.folder, training.champion.metrics, dataset.rows_hash)
    return EXIT_OK


def check(asked: TrainingRequest, dataset: Dataset) -> int:
    """Whether fresh rows follow the champion; the exit code."""
    champion = need_champion(asked.folder)
    drifts = check_drift(champion, dataset)
    emit(render_drift(champion, drifts, names_outside(champion, dataset)))
    return EXIT_DRIFT if any(one.drifted for one in drifts) else EXIT_OK


if __name__ == "__main__":
    sys.exit(run_command(lambda: run(sys.argv[1:])))
