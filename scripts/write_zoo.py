"""Write conf/model/*.yaml and conf/gpu/*.yaml from a zoo file and a table of GPUs.

    python scripts/write_zoo.py ZOO_JSON GPUS_CSV [CONF_FOLDER]

Every entry is built as the spec that the program will build from it; a bad one stops everything
before the first file is written, with one line. Files that an earlier run wrote and that have no
entry any more are removed; running twice changes nothing.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from src.errors import UserError  # noqa: E402
from src.spec import Gpu, Interconnect, Model  # noqa: E402

HEADER = "# Written by scripts/write_zoo.py; change its input and run it again.\n"
INDEX = "index.json"
Entry = dict[str, Any]


class BadRowError(Exception):
    """A row that cannot become a spec; the message is one line that names it."""


def model_entry(name: str, row: Mapping[str, Any]) -> Entry:
    """The content of conf/model/<name>.yaml."""
    entry: Entry = {
        "name": name,
        "hf_id": row["hf_id"],
        "aliases": list(row["aliases"]),
        "num_parameters": row["meta_params"],
        "config": dict(row["config"]),
        "source": row["source"],
    }
    if row.get("note"):
        entry["note"] = row["note"]
    if not isinstance(entry["num_parameters"], int) or entry["num_parameters"] < 1:
        raise BadRowError(f"{name}: meta_params has to be a whole number, 1 or more")
    Model(name=name, hf_id=entry["hf_id"], config=entry["config"])
    return entry


def _number(text: str) -> int | float | None:
    """A cell of the table; None where it is empty."""
    if not text.strip():
        return None
    value = float(text)
    return int(value) if value.is_integer() else value


def gpu_entry(row: Mapping[str, str]) -> Entry:
    """The content of conf/gpu/<sku>.yaml."""
    major, minor = row["compute_capability"].split(".")
    entry: Entry = {
        "sku": row["sku"],
        "name": row["vendor_name"],
        "aliases": row["aliases"].split(),
        "compute_capability": [int(major), int(minor)],
        "usable_gib": _number(row["usable_total_gib"]),
        "context_mib": _number(row["context_mib"]),
        "memory_bandwidth_gbps": _number(row["mem_bw_gbps"]),
        "bf16_tflops": _number(row["dense_bf16_tflops"]),
        "fp16_tflops": _number(row["dense_fp16_tflops"]),
        "tf32_tflops": _number(row["tf32_tflops"]),
        "fp32_tflops": _number(row["fp32_tflops"]),
        "interconnect": str(Interconnect(row["interconnect"])),
        "link_gbps": _number(row["p2p_bw_gbps"]),
        "gpus_per_node": _number(row["typical_gpus_per_node"]),
        "sm_count": _number(row["sm_count"]),
        "source": row["source"],
        "usable_status": row["usable_status"],
        "spec_status": row["spec_status"],
    }
    if entry["context_mib"] is not None:
        entry["context_status"] = row["context_status"]
    if row["notes"]:
        entry["note"] = row["notes"]
    may_be_empty = {"context_mib", "bf16_tflops", "tf32_tflops"}
    for field in Gpu.__dataclass_fields__:
        value = entry[field]
        if value in (None, "") and field not in may_be_empty:
            raise BadRowError(f"{row['sku']}: {field} is empty")
        if isinstance(value, int | float) and not value > 0:
            raise BadRowError(f"{row['sku']}: {field}={value} has to be above 0")
    return entry


def build(rows: Iterable[tuple[str, Any]], make: Callable[[str, Any], Entry]) -> dict[str, Entry]:
    """Entries by name; the first bad row raises BadRowError."""
    entries: dict[str, Entry] = {}
    for name, row in rows:
        if not name or name != name.casefold() or "/" in name or name in entries:
            raise BadRowError(f"{name!r}: a name is lower case, has no slash and occurs once")
        try:
            entries[name] = make(name, row)
        except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
            raise BadRowError(f"{name}: {type(error).__name__}: {error}") from error
    return entries


def index(entries: Mapping[str, Entry], *, identifier: str) -> dict[str, list[str]]:
    """Name -> every other way to write it, `identifier` first; no two entries share one."""
    owner: dict[str, str] = {}
    table = {}
    for name, entry in entries.items():
        table[name] = [entry[identifier], *entry["aliases"]]
        for written in {name, *(other.casefold() for other in table[name])}:
            if owner.setdefault(written, name) != name:
                raise BadRowError(f"{name}: {written} is also a name of {owner[written]}")
    return table


def write_folder(folder: Path, entries: Mapping[str, Entry], table: Mapping[str, Any]) -> None:
    """One YAML file per entry and the index of names; removes what earlier runs left."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, entry in entries.items():
        text = yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=100)
        (folder / f"{name}.yaml").write_text(HEADER + text, encoding="utf-8")
    (folder / INDEX).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for path in folder.glob("*.yaml"):
        is_ours = path.read_text(encoding="utf-8").startswith(HEADER)
        if is_ours and path.name.removesuffix(".yaml") not in entries:
            path.unlink()


def main(arguments: list[str]) -> int:
    """Write both folders; 1 and one line on stderr where an input is wrong."""
    if len(arguments) not in (2, 3):
        print("usage: write_zoo.py ZOO_JSON GPUS_CSV [CONF_FOLDER]", file=sys.stderr)
        return 1
    conf = Path(arguments[2]) if len(arguments) == 3 else ROOT / "conf"
    try:
        zoo = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        with Path(arguments[1]).open(encoding="utf-8", newline="") as stream:
            gpu_rows = [(row["sku"], row) for row in csv.DictReader(stream)]
        models = build(zoo.items(), model_entry)
        gpus = build(gpu_rows, lambda _, row: gpu_entry(row))
        tables = index(models, identifier="hf_id"), index(gpus, identifier="name")
    except (OSError, KeyError, AttributeError, json.JSONDecodeError, BadRowError) as error:
        print(f"write_zoo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    write_folder(conf / "model", models, tables[0])
    write_folder(conf / "gpu", gpus, tables[1])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
