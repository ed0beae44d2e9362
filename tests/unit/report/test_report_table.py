from __future__ import annotations

from dataclasses import replace

import pytest

from src.plan.result import Report
from src.report.table import render_table

SNAPSHOT = """\
tiny (someone/tiny): 1,234,567 parameters, all trained
4 x test-40gb, 39.50 GiB usable on each; estimator=formula
finetune=full precision=bf16-mixed optimizer=adamw-fused seq_len=512 grad_accum=1
checkpointing=full attention=sdpa loss=standard

Peaks per GPU: allocated (tensors), device (as NVML sees it), upper bound of device
                    micro  alloc.  device  upper                   max  tokens
method  layout      batch     GiB     GiB    GiB  peak set by    batch      /s  verdict
---------------------------------------------------------------------------------------
single  dp4 shard2      8   11.00   13.00  14.10  loss_backward     24  12,346  fits
ddp     dp4             8   31.00   33.00  36.10  loss_backward     24  12,346  tight
zero1   dp4             8   51.00   53.00  58.10  loss_backward   none       -  oom

device level is a first model

Recommended: single (dp4 shard2), micro batch 8: it is the fastest

Ledger of single (dp4 shard2, micro batch 8): allocated GiB per GPU, * marks the peak
allocated 11.00 -> reserved 12.00 -> device 13.00, upper bound 14.10 of 39.50 GiB

                                loss
                   forward  backward  optimizer
term         load      end         *       step
-----------------------------------------------
activations     -     6.00      6.00          -
weights      4.00     4.00      4.00       4.00
logits          -     0.50      1.00          -
gradients       -        -         -       2.00

total        4.00    10.50     11.00       6.00

warning: a100 is assumed
"""


def test_snapshot(report: Report) -> None:
    assert render_table(report) == SNAPSHOT


def test_plain_text_has_no_escape_codes_and_no_trailing_blanks(report: Report) -> None:
    text = render_table(report)
    assert "\x1b" not in text
    assert text.isascii()
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_terminal_gets_colours(report: Report) -> None:
    assert "\x1b[" in render_table(report, color=True)


@pytest.mark.parametrize("width", [80, 100])
def test_tables_keep_to_the_width(report_of_any_size: Report, width: int) -> None:
    lines = render_table(report_of_any_size, width=width).splitlines()
    sentences = ("Recommended", "Ledger", "allocated ", "4 x", "finetune=", "Peaks", "warning")
    tables = [line for line in lines if not line.startswith(sentences)]
    assert max(map(len, tables)) <= width
    assert all(method.method in "\n".join(tables) for method in report_of_any_size.methods)


def test_nothing_fits(nothing_fits: Report) -> None:
    text = render_table(nothing_fits)
    assert "Recommended: nothing fits" in text
    assert " none " in text


def test_no_method_at_all(report: Report) -> None:
    text = render_table(replace(report, methods=(), recommended=None))
    assert "Recommended: nothing fits" in text
    assert "Ledger" not in text


def test_a_note_is_told_once(report: Report) -> None:
    text = render_table(report)
    assert text.count("device level is a first model") == 1
