from __future__ import annotations

import json
from dataclasses import fields, replace

from src.config import compose_keywords
from src.plan.result import Calibration, MethodReport, ModelSummary, Report
from src.report import render


def test_keys_are_those_of_schema_version_1(report: Report) -> None:
    answer = json.loads(render(report, "json"))
    assert list(answer) == [
        "schema_version",
        "request",
        "model",
        "lengths",
        "gpu",
        "estimator",
        "methods",
        "recommended",
        "advice",
        "solved",
        "measured",
        "calibration",
        "warnings",
    ]
    assert answer["schema_version"] == 1
    assert list(answer["model"]) == [field.name for field in fields(ModelSummary)]
    assert list(answer["gpu"]) == ["sku", "usable_bytes"]
    assert answer["estimator"] == "formula"
    method = answer["methods"][0]
    assert list(method) == [field.name for field in fields(MethodReport)]
    assert list(method["layout"]) == ["dp", "tp", "shard"]
    for key in ("peak_bytes", "upper_bytes"):
        assert list(method[key]) == ["allocated", "reserved", "device"]
    assert list(answer["recommended"]) == ["method", "layout", "micro_batch", "reason"]
    assert answer["calibration"] is None


def test_bytes_are_integers_and_values_are_kept(report: Report) -> None:
    answer = json.loads(render(report, "json"))
    for told, method in zip(answer["methods"], report.methods, strict=True):
        assert told["method"] == method.method
        assert told["verdict"] == method.verdict
        assert told["tokens_per_second"] == method.tokens_per_second
        assert told["ledger"] == method.ledger
        for num_bytes in (*told["peak_bytes"].values(), *told["upper_bytes"].values()):
            assert type(num_bytes) is int
        for terms in told["ledger"].values():
            assert all(type(num_bytes) is int for num_bytes in terms.values())
    assert type(answer["gpu"]["usable_bytes"]) is int


def test_request_has_every_key_of_the_configuration(report: Report) -> None:
    request = json.loads(render(report, "json"))["request"]
    cfg = compose_keywords({})
    only_for_the_command = {
        "format",
        "plot",
        "snapshot",
        "report",
        "list",
        "trust_remote_code",
        "dryrun",
        "champion",
        "layouts",
        "measured",
    }
    assert set(request) == {str(key) for key in cfg} - only_for_the_command
    assert set(request["finetune"]) == set(cfg.finetune)
    assert request["zero"] == dict(cfg.zero)
    assert request["arch"] == report.request.job.model.config


def test_nothing_recommended_is_null(nothing_fits: Report) -> None:
    assert json.loads(render(nothing_fits, "json"))["recommended"] is None


def test_calibration_is_told(report: Report) -> None:
    calibration = Calibration(model="residual-1", rows=120, source="measured", in_range=False)
    answer = json.loads(render(replace(report, calibration=calibration), "json"))
    assert answer["calibration"] == {
        "model": "residual-1",
        "rows": 120,
        "source": "measured",
        "in_range": False,
    }
