"""Configurations that earlier versions wrote, read with today's keys."""

from __future__ import annotations

from typing import Any

SAMPLERS = {"fixed": "uniform", "poisson": "binomial"}
"""What `federation.sampling` was in earlier versions -> `federation.sampler`; `cyclic` is `turns`."""


def today(data: Any) -> Any:
    """The data of a run, a search or a study with today's keys. What has no such form stays as it is."""
    if isinstance(data, list):
        return [today(each) for each in data]
    if not isinstance(data, dict):
        return data
    found = {key: today(value) for key, value in data.items()}
    if found.get("name") == "parquet" and not found.get("stand_in"):
        found = table_of(found)
    if isinstance(found.get("engine"), dict):
        found["engine"].pop("port", None)  # earlier versions had connections of their own between nodes
    if isinstance(found.get("federation"), dict):
        found["federation"] = with_sampler(found["federation"], "")
    return with_sampler(found, "federation.")


def table_of(parquet: dict[str, Any]) -> dict[str, Any]:
    """The workload `table` that reads what the workload `parquet` of earlier versions did. parquet: its settings."""
    root, folder = parquet.get("data_root"), parquet.get("folder", "table")
    left_out = ("data_root", "folder", "shape", "classes", "stand_in")
    found = {"input": "input", **{key: value for key, value in parquet.items() if key not in left_out}}
    found |= {"name": "table", "path": f"{root}/{folder}" if root else folder}
    if "shape" in parquet and not isinstance(found["input"], list | tuple):
        found["reshape"] = parquet["shape"]
    return {**found, "class_names": [str(number) for number in range(parquet.get("classes", 2))]}


def with_sampler(keys: dict[str, Any], section: str) -> dict[str, Any]:
    """The keys with one key for the sampler. section: what stands before its name, as in the levels of a study."""
    old = [keys.get(f"{section}{name}") for name in ("sampling", "separation")]
    if old == [None, None]:
        sampler = keys.get(f"{section}sampler")
    elif (sampler := sampler_of(*old)) is None:
        return keys
    elif old[0] == "fixed":
        sampler = keys.get(f"{section}sampler", sampler)
    found = {key: value for key, value in keys.items() if key not in (f"{section}sampling", f"{section}separation")}
    return found if sampler is None else {**found, f"{section}sampler": sampler}


def sampler_of(sampling: Any, separation: Any) -> Any:
    """`federation.sampler` for the two settings that it had in earlier versions; None if they name none."""
    if sampling == "cyclic" and separation is not None:
        return {"name": "turns", "separation": separation}
    return SAMPLERS.get(sampling) if isinstance(sampling, str) and separation is None else None


def one_key_for_the_sampler(federation: dict[str, Any]) -> str:
    """The message for a section `federation` that has a key of earlier versions, "" if it has none."""
    old = {name: federation[name] for name in ("sampling", "separation") if name in federation}
    if not old:
        return ""
    sampler = sampler_of(old.get("sampling"), old.get("separation"))
    text = sampler if isinstance(sampler, str) else f"{{name: turns, separation: {old.get('separation', '…')}}}"
    got = " with ".join(f"{name}={value}" for name, value in old.items())
    return f"{next(iter(old))} is a part of federation.sampler now, got {got}; write federation.sampler: {text}"


def before_samplers(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted key as earlier versions had them, so that the digests of configurations stay."""
    name = settings.get("federation.sampler.name", settings.get("federation.sampler"))
    old = {"binomial": "poisson", "turns": "cyclic"}.get(name if isinstance(name, str) else "")
    if old is None:
        return settings
    found = {key: value for key, value in settings.items() if not key.startswith("federation.sampler")}
    more = {"federation.separation": settings["federation.sampler.separation"]} if old == "cyclic" else {}
    return {**found, "federation.sampling": old, **more}
