from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src.config.model import resolve_model
from src.errors import UserError
from src.spec import Model

CONFIG = {"model_type": "gpt2", "n_layer": 2, "rope_scaling": {"type": "linear", "factor": 2.0}}


def resolve(written: str, **arch: Any) -> tuple[Model, tuple[str, ...]]:
    return resolve_model(written, arch=arch, trust_remote_code=False)


def put_config(folder: Path, content: object) -> Path:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("written", ["opt-1.3b", "OPT-1.3B", "opt1.3b", "facebook/OPT-1.3b"])
def test_the_zoo_knows_names_ids_and_aliases(written: str) -> None:
    model, warnings = resolve(written)
    assert (model.name, model.hf_id, model.model_type) == ("opt-1.3b", "facebook/opt-1.3b", "opt")
    assert warnings == ()


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    path = put_config(tmp_path, CONFIG)
    for written in (str(path), str(tmp_path)):
        model, warnings = resolve(written)
        assert (model.name, model.hf_id, dict(model.config)) == (written, None, CONFIG)
        assert warnings == ()


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("\ufeff" + json.dumps(CONFIG), encoding="utf-8")
    assert dict(resolve(str(path))[0].config) == CONFIG


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_config(tmp_path, CONFIG)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/config.json")[0].model_type == "gpt2"


def test_the_zoo_comes_before_a_folder_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    put_config(tmp_path / "gpt2", CONFIG)
    monkeypatch.chdir(tmp_path)
    model, (warning,) = resolve("gpt2")
    assert model.hf_id == "openai-community/gpt2"
    assert "model=./gpt2" in warning
    assert resolve("./gpt2")[0].config["n_layer"] == 2


BROKEN = {
    "{bad": "not JSON",
    "": "the file is empty",
    "  \n": "the file is empty",
    "[1]": "holds a JSON list, not an object",
    "3": "holds a JSON int, not an object",
    "[" * 100_000: "not JSON",
}


@pytest.mark.parametrize(("content", "reason"), BROKEN.items(), ids=[key[:6] for key in BROKEN])
def test_a_broken_file_is_told_in_one_line(tmp_path: Path, content: str, reason: str) -> None:
    path = put_config(tmp_path, content)
    with pytest.raises(UserError, match=reason) as caught:
        resolve(str(path))
    assert (caught.value.key, caught.value.value) == ("model", str(path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a JSON file"):
        resolve(str(path))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("./nothing", "there is no such file"),
        ("nothing.json", "there is no such file"),
        ("empty", "the folder has no config.json"),
        ("weights.bin", "larger than any config.json"),
    ],
)
def test_what_is_not_there(
    written: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    with (tmp_path / "weights.bin").open("wb") as stream:
        stream.truncate(1 << 30)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=reason):
        resolve(written)


def test_a_config_without_model_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has to name its model_type"):
        resolve(str(put_config(tmp_path, {"n_layer": 2})))


def test_a_nested_text_config_is_used_and_told(tmp_path: Path) -> None:
    nested = {"model_type": "gemma3", "text_config": CONFIG, "vision_config": {}}
    model, (warning,) = resolve(str(put_config(tmp_path, nested)))
    assert dict(model.config) == CONFIG
    assert "only its text_config (model_type gpt2)" in warning


def test_a_quantised_checkpoint_is_told(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    _, (warning,) = resolve(str(put_config(tmp_path, config)))
    assert "quantization_config (fp8)" in warning
    assert "ignored" in warning


def test_arch_overrides_fields_and_parts_of_fields(tmp_path: Path) -> None:
    path = str(put_config(tmp_path, CONFIG))
    model, warnings = resolve(path, n_layer=4, rope_scaling={"factor": 8.0})
    assert model.config["n_layer"] == 4
    assert model.config["rope_scaling"] == {"type": "linear", "factor": 8.0}
    assert warnings == ()


def test_arch_may_add_a_field_and_the_nearest_is_told(tmp_path: Path) -> None:
    model, (warning,) = resolve(str(put_config(tmp_path, CONFIG)), n_layers=4)
    assert model.config["n_layers"] == 4
    assert "nearest: n_layer" in warning


@pytest.mark.parametrize("written", ["opt-1.3", "llama-3-8c", "gpt3"])
def test_an_unknown_name_gets_the_nearest_of_the_zoo(written: str) -> None:
    with pytest.raises(UserError, match="not in the zoo; nearest: "):
        resolve(written)


def test_nothing_near_tells_what_is_allowed() -> None:
    with pytest.raises(UserError, match="not in the zoo; allowed: a name of list=models"):
        resolve("qqqqqqqqqqqq")


class FakeHub:
    """Stands for transformers and huggingface_hub; `cached` and `online` are configs or errors."""

    def __init__(self, *, cached: object, reachable: bool = True, online: object = None) -> None:
        self.cached, self.reachable, self.online = cached, reachable, online
        self.trusted: list[bool] = []

    def from_pretrained(
        self, hub_id: str, *, trust_remote_code: bool, local_files_only: bool = False
    ) -> SimpleNamespace:
        assert hub_id.count("/") == 1
        self.trusted.append(trust_remote_code)
        outcome = self.cached if local_files_only else self.online
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(to_dict=lambda: outcome)

    def get_hf_file_metadata(self, url: str, *, timeout: float) -> None:
        assert url.endswith("/config.json")
        assert timeout > 0
        if not self.reachable:
            raise ConnectionError("Name or service not known.\nMore text")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        transformers = SimpleNamespace(AutoConfig=self)
        hub = SimpleNamespace(
            hf_hub_url=lambda hub_id, file: f"hub://{hub_id}/{file}",
            get_hf_file_metadata=self.get_hf_file_metadata,
        )
        monkeypatch.setitem(sys.modules, "transformers", transformers)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


NOT_CACHED = OSError("not in the cache")


@pytest.mark.parametrize("trust", [True, False])
@pytest.mark.parametrize(
    "hub",
    [{"cached": CONFIG, "reachable": False}, {"cached": NOT_CACHED, "online": CONFIG}],
    ids=["cache", "download"],
)
def test_another_id_goes_to_the_hub(
    monkeypatch: pytest.MonkeyPatch, trust: bool, hub: dict[str, Any]
) -> None:
    fake = FakeHub(**hub)
    fake.install(monkeypatch)
    model, warnings = resolve_model("someone/new", arch={}, trust_remote_code=trust)
    assert set(fake.trusted) == {trust}
    assert (model.name, model.hf_id, dict(model.config)) == ("someone/new", "someone/new", CONFIG)
    assert warnings == ()


@pytest.mark.parametrize(
    ("hub_id", "hint"), [("facebook/opt-1.4b", "nearest: opt-1.3b"), ("qq/zz", "allowed: ")]
)
@pytest.mark.parametrize(
    ("hub", "reason"),
    [
        ({"cached": NOT_CACHED, "reachable": False}, "ConnectionError Name or service not known;"),
        (
            {"cached": ValueError("type x is not known.\nMore text")},
            "ValueError type x is not known;",
        ),
        ({"cached": NOT_CACHED, "online": OSError("gated.\nMore text")}, "OSError gated;"),
        ({"cached": NOT_CACHED, "online": RuntimeError()}, "RuntimeError;"),
    ],
    ids=["offline", "unknown type", "gated", "no message"],
)
def test_the_hubs_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, hub_id: str, hint: str, hub: dict[str, Any], reason: str
) -> None:
    FakeHub(**hub).install(monkeypatch)
    with pytest.raises(UserError) as caught:
        resolve(hub_id)
    told = str(caught.value)
    assert told.startswith(f"model={hub_id}: not in the zoo, and from the hub: {reason} ")
    assert "More text" not in told
    assert hint in told
