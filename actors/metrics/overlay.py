"""Overlay: the built-in catalogue and the operator's TOML files, merged into one list of declarations.

An overlay's entry adds a metric, or changes one declared before it, and says so:
`override = true` with a whole declaration, `rename = "new_name"` alone, or `disable = true` alone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tinsmith.actors.metrics.declaration import Declaration, declare, invalid

BUILTIN = "builtin.toml"


@dataclass(frozen=True)
class Declared:
    """A declaration, and the file and entry that made it."""

    declaration: Declaration
    file: str
    entry: str


def read_all(overlays: Sequence[Path]) -> list[Declared]:
    """The built-in declarations with the overlays applied in order.

    Raises InvalidCatalogue that names the file and the entry.
    """
    merged: dict[str, Declared] = {}
    text = files("tinsmith.actors.metrics").joinpath(BUILTIN).read_bytes()
    _apply(merged, BUILTIN, text)
    for path in overlays:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise invalid(str(path), None, f"can't be read ({error.strerror})", "Name a readable TOML file.") from error
        _apply(merged, str(path), text)
    return list(merged.values())


def _apply(merged: dict[str, Declared], file: str, text: bytes) -> None:
    for name, fields in _parse(file, text).items():
        if not isinstance(fields, dict):
            raise invalid(file, name, "is not a table", f"Write [{name}] and its fields below it.")
        changes = [field for field in ("override", "rename", "disable") if field in fields]
        if not changes:
            _add(merged, file, name, fields)
        else:
            _change(merged, file, name, fields, changes)


def _parse(file: str, text: bytes) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text.decode())
    except UnicodeDecodeError as error:
        raise invalid(file, None, f"is not UTF-8 ({error})", "Save it as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        # An entry written twice in one file ends here: "Cannot declare ('loss',) twice".
        raise invalid(
            file, None, f"is not valid TOML: {error}", "Correct that line; declare each metric once."
        ) from error


def _add(merged: dict[str, Declared], file: str, name: str, fields: Mapping[str, Any]) -> None:
    if name in merged:
        raise invalid(
            file,
            name,
            f"is already declared in {merged[name].file}",
            "Give it another name, or set override = true, rename or disable.",
        )
    merged[name] = Declared(declare(file, name, fields), file, name)


def _change(
    merged: dict[str, Declared], file: str, name: str, fields: Mapping[str, Any], changes: Sequence[str]
) -> None:
    if name not in merged:
        raise invalid(
            file, name, f"{changes[0]}: nothing of that name is declared before", f"Declared: {', '.join(merged)}."
        )
    change = changes[0]
    others = [field for field in fields if field != change]
    if change == "override":
        _require_true(file, name, change, fields)
        if len(changes) > 1:
            raise invalid(file, name, f"has both {' and '.join(changes)}", "Use one of them.")
        merged[name] = Declared(declare(file, name, {field: fields[field] for field in others}), file, name)
    elif others:
        raise invalid(file, name, f"{change} stands alone, but there is {', '.join(others)}", "Use override = true.")
    elif change == "disable":
        _require_true(file, name, change, fields)
        del merged[name]
    else:
        _rename(merged, file, name, fields["rename"])


def _rename(merged: dict[str, Declared], file: str, name: str, new: Any) -> None:
    if not isinstance(new, str):
        raise invalid(file, name, f"rename must be a string (got {new!r})", 'Write rename = "new_name".')
    if new in merged:
        raise invalid(file, name, f"rename: {new!r} is already declared in {merged[new].file}", "Choose another name.")
    old = merged.pop(name).declaration
    fields = old.model_dump(exclude={"name"})
    merged[new] = Declared(declare(file, new, fields), file, name)


def _require_true(file: str, name: str, field: str, fields: Mapping[str, Any]) -> None:
    if fields[field] is not True:
        raise invalid(file, name, f"{field} must be true (got {fields[field]!r})", f"Write {field} = true.")
