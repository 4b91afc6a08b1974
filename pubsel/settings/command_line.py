"""From a record to the words of a command line that has its settings. This file imports no torch."""

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from pubsel.settings.methods import GROUPS

PLAIN = re.compile(r"[A-Za-z_./][\w./+@-]*")  # a text that Hydra's grammar reads as itself
NOT_TEXT = ("null", "true", "false", "inf", "nan", "yes", "no", "on", "off")


def command(record: dict[str, Any], changes: Mapping[str, Any] | None = None) -> str:
    """Return the command, quoted for a shell, that starts from the settings of `record` on the same kind of device:
    `pubsel run`, or `pubsel rank` for a measured distance. changes: other values, by dotted key."""
    words = {"like": record["identity"]} | dict(changes or {})
    device = str(record.get("device", "auto")).partition(":")[0]  # noise depends on it
    if device != "auto":
        words["device"] = device
    name = "run" if "pair" in record["settings"] else "rank"
    return shlex.join(["pubsel", name, *(f"{key}={written(value)}" for key, value in words.items())])


def overrides(settings: Mapping[str, Any], free: tuple[str, ...] = ()) -> list[str]:
    """Return the words of Hydra's grammar that compose to the `settings` of a record. free: keys that are left out,
    since the command line chooses another option or value of them."""
    words = []
    for key, value in settings.items():
        unread = key == "epsilon" and value == 0  # no private example is read, whatever epsilon is given
        if key in free or unread:
            continue
        if key in GROUPS and value is None:
            words.append(f"{key}=none")
            continue

        # The keys of another method would stay; in other groups a record leaves out keys that change no result.
        words += [f"~{key}"] if key in GROUPS else []
        words.append(f"++{key}={written(value)}")
    return words


def written(value: Any) -> str:
    """Return a JSON value in Hydra's grammar of overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if value == "inf" or (PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT):
        return value

    # Hydra reads two backslashes before a quote as one; elsewhere a backslash is itself.
    escaped = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), value)
    return f"'{escaped}'"


def unquoted(text: str) -> str:
    """Return the text that `written`, or a person, has put between quotes; any other text as it is."""
    quote = text[:1]
    if len(text) < 2 or quote not in ("'", '"') or text[-1] != quote:
        return text
    return re.sub(rf"(\\+)({quote}|$)", lambda match: "\\" * (len(match[1]) // 2) + match[2], text[1:-1])
