"""Configs on disk: dataclass to TOML and back, checked key by key."""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path

from .config import require
from .errors import InputError


def load_toml(path: Path) -> dict:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from error


def to_table(config) -> dict:
    """A flat TOML-ready table: paths as text, None left out."""
    table = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None and field.name != "config":
            table[field.name] = str(value) if isinstance(value, Path) else value
    return table


def from_table(cls, table: dict, where: str):
    """The config a TOML table describes, over ``cls``'s defaults; unknown keys and wrong types are refused."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        require(name in fields, f"{where}: unknown option {key!r}")
        values[name] = _convert(value, str(fields[name].type), f"{where}: {key}")
    return cls(**values)


def _convert(value, annotation: str, what: str):
    kinds = {"bool": bool, "int": int, "float": (int, float), "str": str}
    base = annotation.removesuffix(" | None")
    if base in ("Path", "NewRunPath"):
        require(isinstance(value, str), f"{what} must be a path in quotes, not {value!r}")
        return Path(value)
    if base.startswith("Literal["):
        choices = ast.literal_eval(base.removeprefix("Literal"))
        right = any(value == choice and type(value) is type(choice) for choice in choices)
        require(right, f"{what} = {value!r} is not one of {', '.join(map(str, choices))}")
        return value
    require(base in kinds, f"{what} cannot be set in a file")
    right = isinstance(value, kinds[base]) and (base == "bool" or not isinstance(value, bool))
    require(right, f"{what} must be {base}, not {value!r}")
    return float(value) if base == "float" else value
