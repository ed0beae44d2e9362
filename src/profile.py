"""Run a campaign of training steps: `python -m src.profile campaign=smoke device=simulated`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from src.config import EXIT_OK, compose_arguments, emit, run_command, run_flag, warn
from src.config.campaign import PROJECT, ROWS, Campaign, to_campaign, to_options
from src.config.profile_keys import PROFILE
from src.config.published import take_files
from src.launch import run_campaign
from src.measure.predict import Predictor
from src.record import open_rows, read_rows
from src.report.campaign import render_plan, render_summary, write_cases
from src.report.campaign_progress import campaign_progress
from src.report.page_row import draw_page
from src.report.plot_row import draw_row
from src.tracking import Log, Tracker, default_uri, resolve_uri, sync


def run(arguments: list[str]) -> int:
    """Do what the command line asks for; the exit code."""
    if run_flag(arguments, PROFILE):
        return EXIT_OK
    cfg = compose_arguments(arguments, PROFILE)
    options = to_options(cfg)
    uri = resolve_uri(options.tracking_uri or default_uri(PROJECT))
    if options.imported or options.sync:
        known = [options.rows] if options.rows else sorted(ROWS.rglob("*.jsonl"))
        log_missing(uri, take_files(options.imported, options.rows) if options.imported else known)
        return EXIT_OK
    campaign = to_campaign(cfg)
    warn(campaign.warnings)
    if not options.plan_only:
        measure(campaign, uri)
        return EXIT_OK
    if options.cases is not None:
        write_cases(campaign.cases, options.cases)
    done = {row.case_id for row in read_rows(campaign.rows).rows}
    emit(render_plan(campaign.steps, campaign.case_ids, done))
    return EXIT_OK


def measure(campaign: Campaign, uri: str) -> None:
    """Run the cases that have no row, log every row, and print what they came to.

    Raises:
        UserError: a row cannot be written.
    """
    ids = set(campaign.case_ids)
    with open_rows(campaign.rows) as file, Predictor() as predict:
        warn(f"{campaign.rows}:{bad.line}: no row: {bad.reason}" for bad in file.damaged)
        num_done = len(ids & {row.case_id for row in file.rows})
        log = Log(uri, compare=predict, draw=draw_row, page=draw_page)
        tracker = Tracker(log, campaign.rows, file.rows)
        try:
            with tracker, campaign_progress(len(ids), done=num_done) as tell:
                for row in run_campaign(campaign.cases, file, campaign.conditions, campaign.jobs):
                    tracker.add(row)
                    tell(row)
        finally:
            if tracker.problem is not None:
                warn([f"rows are missing in MLflow ({tracker.problem}); sync=true logs them"])
        rows = [row for row in file.rows if row.case_id in ids]
    emit(render_summary(rows, total=len(ids), file=campaign.rows, store=uri))


def log_missing(uri: str, files: Iterable[Path]) -> None:
    """Log what MLflow does not have of the files, and print how much that was."""
    with Predictor() as predict:
        log = Log(uri, compare=predict, draw=draw_row, page=draw_page)
        for file in files:
            num_new, num_rows = sync(log, file)
            emit(f"{file}: {num_new} of {num_rows} rows were missing\n")


if __name__ == "__main__":
    sys.exit(run_command(lambda: run(sys.argv[1:])))
