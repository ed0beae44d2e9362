from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from src.config import compose_arguments, compose_keywords, to_output, to_request
from src.config.arguments import parse_value
from src.config.keys import FILES_KEY, KEYS
from src.errors import UserError
from src.report.as_json import request_dict
from src.spec import (
    Cluster,
    EstimatorKind,
    Finetune,
    Job,
    Method,
    Model,
    Request,
    Runtime,
    ZeroBuffers,
)

FINETUNES = sorted(
    path.name.removesuffix(".yaml")
    for path in (Path(__file__).resolve().parents[2] / "conf" / "finetune").glob("*.yaml")
)


def request_of(**keys: Any) -> Request:
    return to_request(compose_keywords({"model": "opt-125m", "gpu": "a100-80gb", **keys})).request


def warnings_of(**keys: Any) -> tuple[str, ...]:
    return to_request(compose_keywords({"model": "opt-125m", "gpu": "a100-80gb", **keys})).warnings


def test_defaults_are_those_of_the_specs() -> None:
    request = request_of()
    model = Model(name="m", hf_id=None, config={"model_type": "opt"})
    default = Job(model=model)
    for field in fields(Job):
        if field.name != "model":
            assert getattr(request.job, field.name) == getattr(default, field.name), field.name
    assert request.cluster.internode_gbps == Cluster.__dataclass_fields__["internode_gbps"].default
    assert request.job.zero == ZeroBuffers()
    assert (request.methods, request.tp, request.micro_batch) == ((), None, None)
    assert (request.cluster.num_gpus, request.cluster.gpus_per_node) == (1, 8)


@pytest.mark.parametrize("kind", FINETUNES)
def test_every_finetune_composes_with_the_specs_defaults(kind: str) -> None:
    finetune = request_of(finetune=kind).job.finetune
    assert finetune == Finetune(kind=finetune.kind)
    assert finetune.kind == kind


def test_every_key_is_documented_and_nothing_else() -> None:
    cfg = compose_keywords({"finetune": "lora"})
    names = set()
    for key, value in cfg.items_ex(resolve=False):
        is_group = OmegaConf.is_dict(value) and key != "arch"
        names |= {f"{key}.{inner}" for inner in value} if is_group else {str(key)}
    assert names - {"finetune.kind"} | {"finetune"} == set(KEYS) - {FILES_KEY}


def test_arguments_and_keywords_ask_the_same() -> None:
    arguments = [
        "model=OPT-125M",
        "gpu=A100",
        "gpus=16",
        "gpus_per_node=4",
        "internode_gbps=50",
        "method=fsdp,ddp+tp",
        "tp=2",
        "finetune=lora",
        "finetune.r=8",
        "finetune.targets=[q_proj,v_proj]",
        "zero.reduce_bucket_size=1000",
        "micro_batch=4",
        "arch.num_hidden_layers=2",
        "arch.extra={a: [1, x]}",
    ]
    keywords = {
        "model": "OPT-125M",
        "gpu": "A100",
        "gpus": 16,
        "gpus_per_node": 4,
        "internode_gbps": 50,
        "method": (Method.FSDP, "ddp+tp"),
        "tp": 2,
        "finetune": {"kind": "lora", "r": 8, "targets": ["q_proj", "v_proj"]},
        "zero": {"reduce_bucket_size": 1000},
        "micro_batch": 4,
        "arch": {"num_hidden_layers": 2, "extra": {"a": [1, "x"]}},
    }
    asked = to_request(compose_arguments(arguments))
    assert asked == to_request(compose_keywords(keywords))
    assert asked.request.job.model.config["num_hidden_layers"] == 2
    assert asked.request.job.finetune.targets == ("q_proj", "v_proj")
    assert asked.request.methods == (Method.FSDP, Method.DDP_TP)


def test_dotted_keywords_are_nested_ones() -> None:
    dotted = {"finetune": "lora", "finetune.r": 8, "arch.dropout": 0.5}
    nested = {"finetune": {"kind": "lora", "r": 8}, "arch": {"dropout": 0.5}}
    assert request_of(**dotted) == request_of(**nested)


def test_calls_do_not_leave_traces() -> None:
    before = request_of()
    request_of(arch={"num_hidden_layers": 1}, finetune="lora", seq_len=8)
    assert request_of() == before


@pytest.mark.parametrize("finetune", FINETUNES)
def test_the_request_of_an_answer_asks_the_same_again(finetune: str) -> None:
    request = request_of(finetune=finetune, gpus=4, method=["fsdp", "zero2"], seq_len=128)
    assert to_request(compose_keywords(request_dict(request))).request == request


TYPE_ERRORS = {
    "gpus": ["four", 1.5, None, "", [1], True],
    "seq_len": ["abc", 2.5, None],
    "micro_batch": ["x", 1.5],
    "tp": ["x"],
    "grad_accum": [0.5],
    "internode_gbps": ["fast", float("nan"), float("inf"), 0],
    "trust_remote_code": ["maybe"],
    "method": ["fsdp2", [], [["fsdp"]], [None], ""],
    "finetune": ["galore", ""],
    "precision": ["bf16", None],
    "optimizer": ["adam"],
    "checkpointing": [False, "some"],
    "attention": ["flash3"],
    "loss": ["dpo"],
    "estimator": ["simulated"],
    "runtime": ["jax"],
    "policy": ["cheapest"],
    "gpus_per_node": [0, "x"],
    "zero.reduce_bucket_size": ["big", 0],
    "zero.max_live_parameters": [-1],
    "arch": [5],
    "gpu": [4, "a1000", ""],
    "model": ["", "opt-1.3", "nothing-like-it"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in TYPE_ERRORS.items() for value in values]
)
def test_a_wrong_value_is_named_with_its_key(key: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        request_of(**{key: value})
    assert caught.value.key == key
    assert caught.value.allowed
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gpuss", "gpus"),
        ("batch_size", "micro_batch"),
        ("bs", "micro_batch"),
        ("seq-len", "seq_len"),
        ("SEQ_LEN", "seq_len"),
        ("lora_r", "finetune.r"),
        ("finetune.rank", "finetune.r"),
        ("zero", "zero.reduce_bucket_size"),
        ("zzz", "--help"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, hint: str) -> None:
    for compose in (
        lambda: compose_arguments([f"{key}=1"]),
        lambda: compose_keywords({key: 1}),
    ):
        with pytest.raises(UserError) as caught:
            compose()
        assert caught.value.key == key
        assert hint in caught.value.allowed


def test_lora_options_need_lora() -> None:
    with pytest.raises(UserError, match=r"finetune\.r=8: only together with finetune=lora"):
        request_of(**{"finetune.r": 8})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"gpus_per_node": 4}, "gpus_per_node has no effect with gpus=1"),
        ({"internode_gbps": 50, "gpus": 8}, "internode_gbps has no effect on one node"),
        ({"method": "fsdp", "zero": {"reduce_bucket_size": 5}}, "zero.* has no effect"),
        ({"method": "fsdp", "gpus": 4, "tp": 2}, "tp has no effect"),
        ({"gpus": 16}, "2 nodes of 8 GPUs are assumed"),
        ({"arch": {"hiden_size": 8}}, "arch.hiden_size is no field"),
        ({"trust_remote_code": True}, "trust_remote_code has no effect"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_warned_about(keys: dict[str, Any], expected: str) -> None:
    (warning,) = warnings_of(**keys)
    assert expected in warning


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"gpus": 8, "gpus_per_node": 4},
        {"gpus": 16, "gpus_per_node": 8, "internode_gbps": 50},
        {"method": ["fsdp", "zero3"], "zero": {"reduce_bucket_size": 5}},
        {"method": "fsdp+tp", "gpus": 4, "tp": 2},
        {"arch": {"hidden_size": 8}},
    ],
    ids=str,
)
def test_nothing_is_said_about_options_with_an_effect(keys: dict[str, Any]) -> None:
    assert warnings_of(**keys) == () or "assumed" in warnings_of(**keys)[0]


def test_a_number_that_is_a_name_stays_as_it_was_typed() -> None:
    with pytest.raises(UserError) as caught:
        to_request(compose_arguments(["model=1_1_1"]))
    assert (caught.value.key, caught.value.value) == ("model", "1_1_1")


def test_a_line_end_of_windows_is_not_of_the_value() -> None:
    cfg = compose_arguments(["model=opt-1.3b\r", "gpus=4\r", "gpu=t4"])
    assert (cfg.model, cfg.gpus, cfg.gpu) == ("opt-1.3b", 4, "t4")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="ascii", exclude_characters="$\x00\r\n"), min_size=1))
def test_any_text_is_taken_as_it_stands(text: str) -> None:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if not is_quoted:
        assert compose_arguments([f"model={text}"]).model == text


@pytest.mark.parametrize(
    "path",
    ["a=b.png", "with space.png", "it's.png", "(1).png", "[x].png", "a,b.png", "a\\.png", "ü.png"],
)
def test_a_path_needs_no_quoting_for_hydra(path: str, tmp_path: Path) -> None:
    written = str(tmp_path / path)
    assert str(to_output(compose_arguments([f"plot={written}"])).plot) == written
    assert str(to_output(compose_arguments([f"plot='{tmp_path}/x.png'"])).plot).endswith("/x.png")


@pytest.mark.parametrize("text", ["fsdp,ddp+tp", "[fsdp,ddp+tp]", "[fsdp, 'ddp+tp']"])
def test_words_with_commas_are_a_list(text: str) -> None:
    assert parse_value("method", text) == ["fsdp", "ddp+tp"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("gpus", "4", 4),
        ("gpus", "-4", -4),
        ("arch.n_inner", "null", None),
        ("arch.dropout", "0.5", 0.5),
        ("arch.tie", "true", True),
        ("arch.name", "'4'", "4"),
        ("arch", "{a: [1, x]}", {"a": [1, "x"]}),
        ("plot", "null", None),
        ("plot", "'null'", "null"),
        ("model", "null", "null"),
        ("model", "1_1_1", "1_1_1"),
    ],
)
def test_other_values_follow_hydras_grammar(key: str, text: str, value: object) -> None:
    assert parse_value(key, text) == value


def test_output_defaults_and_choices() -> None:
    output = to_output(compose_keywords({}))
    assert (output.format, output.plot, output.listing) == ("table", None, None)
    for keys in ({"format": "xml"}, {"list": "x"}, {"plot": "a.jpg"}, {"plot": "/no/where/a.png"}):
        with pytest.raises(UserError):
            to_output(compose_keywords(keys))


@pytest.mark.parametrize(
    ("keys", "estimator", "runtime"),
    [
        ({}, EstimatorKind.AUTO, Runtime.PYTORCH),
        ({"runtime": "pytorch"}, EstimatorKind.AUTO, Runtime.PYTORCH),
        ({"runtime": "pytorch", "estimator": "dryrun"}, EstimatorKind.DRYRUN, Runtime.PYTORCH),
        ({"estimator": "llmem"}, EstimatorKind.LLMEM, Runtime.GEMINI),
        ({"runtime": "gemini"}, EstimatorKind.LLMEM, Runtime.GEMINI),
        ({"runtime": "gemini", "estimator": "llmem"}, EstimatorKind.LLMEM, Runtime.GEMINI),
    ],
    ids=str,
)
def test_llmem_and_gemini_imply_each_other(
    keys: dict[str, Any], estimator: EstimatorKind, runtime: Runtime
) -> None:
    request = request_of(**keys)
    assert (request.estimator, request.runtime) == (estimator, runtime)
    said = request_dict(request)
    assert (said["estimator"], said["runtime"]) == (estimator.value, runtime.value)
    assert request_of(**{key: said[key] for key in ("estimator", "runtime")}) == request


@pytest.mark.parametrize(
    ("runtime", "estimator"),
    [("gemini", "formula"), ("gemini", "dryrun"), ("pytorch", "llmem")],
)
def test_another_runtime_than_the_estimators_is_refused(runtime: str, estimator: str) -> None:
    with pytest.raises(UserError, match=rf"^runtime={runtime}: estimator={estimator} does not"):
        request_of(runtime=runtime, estimator=estimator)


@pytest.mark.parametrize("estimator", ["formula", "llmem"])
def test_a_time_limit_of_dry_runs_is_for_those_who_make_them(estimator: str) -> None:
    keys = {"estimator": estimator, "dryrun": {"time_limit_s": 5}}
    (said,) = warnings_of(**keys)
    assert said == f"dryrun.time_limit_s has no effect with estimator={estimator}"
    assert warnings_of(dryrun={"time_limit_s": 5}) == ()
