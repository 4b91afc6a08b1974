"""The words of a command line: those that have the settings of a record, and those that a person types, in Hydra's
grammar. This file imports no torch."""

import json
import os
import re
import shlex
import unicodedata
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from pubsel.messages import UsageError
from pubsel.settings.methods import GROUPS

PLAIN = re.compile(r"[A-Za-z_./][\w./+@-]*", re.ASCII)  # a text that Hydra's grammar reads as itself
NOT_TEXT = ("null", "true", "false", "inf", "nan", "yes", "no", "on", "off")

# Hydra's grammar of overrides (hydra/grammar/OverrideLexer.g4), which has no letters but those of ASCII
KEY = re.compile(r"[+~]{0,2}[\w./@$:-]+", re.ASCII)
UNQUOTED = re.compile(r"(?:\\[\\()\[\]{}:=, \t]|\$\{[^}]+\}|[\w/\\+.$%*@?|: \t-])+", re.ASCII)
QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
INTERPOLATION = re.compile(r"\$\{[^}]+\}")
CALL = re.compile(r"(\w+)[ \t]*\(.*\)", re.ASCII | re.DOTALL)
FUNCTIONS = "choice range interval glob shuffle sort tag int float str bool".split()
NUMBER_OR_TRUTH = re.compile(r"[+-]?(?:\.?\d[\d_.]*(?:e[+-]?\d[\d_]*)?|inf|nan)|true|false", re.ASCII | re.IGNORECASE)
CLOSES = {"(": ")", "[": "]", "{": "}"}
QUOTES = "'\""
BLANK = " \t"
CONTROL = {"Cc", "Cs", "Zl", "Zp"}  # Unicode's categories of control characters, bytes that are not UTF-8, line ends


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
    """Return a JSON value, a path or a member of an Enum in Hydra's grammar of overrides; no part of a text is an
    interpolation."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, Path | Enum):
        value = value.name if isinstance(value, Enum) else str(value)
    if not isinstance(value, str):
        # numbers and arrays of numpy, as a program has them; the schema refuses what is none
        return json.dumps(value, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
    if value == "inf" or (PLAIN.fullmatch(value) and value.lower() not in NOT_TEXT):
        return value
    return in_quotes(uninterpolated(value))


def in_quotes(text: str, quote: str = "'") -> str:
    """Return a text between quotes, as Hydra reads it."""
    # Hydra reads two backslashes before a quote as one; elsewhere a backslash is itself.
    escaped = re.sub(rf"(\\*)({quote}|\Z)", lambda match: 2 * match[1] + (f"\\{quote}" if match[2] else ""), text)
    return f"{quote}{escaped}{quote}"


def unquoted(text: str) -> str:
    """Return the text that `written`, or a person, has put between quotes; any other text as it is."""
    quote = text[:1]
    if len(text) < 2 or quote not in ("'", '"') or text[-1] != quote:
        return text
    return re.sub(rf"(\\+)({quote}|\Z)", lambda match: "\\" * (len(match[1]) // 2) + match[2], text[1:-1])


def uninterpolated(text: str) -> str:
    """Return a text that OmegaConf reads as `text`, even if that has ${...} in it."""
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", text)


def override(word: str, text: bool = False, sweeps: bool = True) -> str:
    """Return a word in Hydra's grammar of overrides. The word is key=VALUE as a person types it, without quotes around
    letters and signs that the grammar lacks; any other word is returned as it is, and so is a list that does not close.

    text: the key takes texts alone, so that 1.10 is no number. sweeps: a comma separates values of a sweep. UsageError
    for letters that no file of results could hold.
    """
    if not word.isprintable() and not CONTROL.isdisjoint(map(unicodedata.category, word.replace("\t", " "))):
        raise UsageError(f"cannot read {word!a}: it is not UTF-8, or has control characters: rename the file")
    key, equals, value = word.partition("=")
    parts, bare = elements(value), value.strip(BLANK)
    if not equals or not KEY.fullmatch(key) or parts is None:
        return word

    # A path keeps the blanks at its ends; a path with commas is recognised by the file that is there.
    if os.sep in value and bare[0] not in (*QUOTES, "[", "{"):
        with_blanks = text and len(parts) == 1 and value != bare and not INTERPOLATION.search(value)
        if with_blanks or (len(parts) > 1 and os.path.exists(os.path.expanduser(value))):
            return f"{key}={in_quotes(uninterpolated(value))}"

    if not sweeps and len(parts) > 1:
        return f"{key}={in_quotes(value)}"
    return f"{key}={','.join(_element(part, text) for part in parts)}"


def elements(value: str) -> list[str] | None:
    """Return the parts of a value between those of its commas that are in no quotes and no brackets; None if the
    bracket of a list does not close at its end, or a bracket before a comma does not close at all."""
    parts, opened, start, at = list[str](), list[str](), 0, 0
    before = ","  # the last letter that is no blank
    while at < len(value):
        # a quote within a text, as in it's, is a letter
        char = value[at]
        if char in QUOTES and before in "([{,:=" and (quoted := QUOTED.match(value, at)):
            at, before = quoted.end(), char
            continue

        if char == "\\":
            at += 1  # the next letter is a letter, whatever it is
        elif char in CLOSES:
            opened.append(CLOSES[char])
        elif opened and char == opened[-1]:
            opened.pop()
        elif char == "," and not opened:
            parts.append(value[start:at])
            start = at + 1
        before = before if char in BLANK else char
        at += 1

    parts.append(value[start:])
    bare = [part.strip(BLANK) for part in parts]
    if (opened and "," in value) or any(part[:1] in ("[", "{") and part[-1] != CLOSES[part[0]] for part in bare):
        return None
    return parts


def _element(part: str, text: bool) -> str:
    """Return one part of a value in Hydra's grammar."""
    inner = part.strip(BLANK)
    if not inner or QUOTED.fullmatch(inner):
        return part
    if UNQUOTED.fullmatch(inner) and not (text and NUMBER_OR_TRUTH.fullmatch(inner)):
        return part
    if (call := CALL.fullmatch(inner)) and call[1] in FUNCTIONS:
        return part

    # Each value of a list or a dictionary is one more part.
    if inner[0] in ("[", "{") and inner[-1] == CLOSES[inner[0]]:
        several = elements(inner[1:-1])
        if several is None:
            return part
        pairs = [each.partition(":") if inner[0] == "{" else ("", "", each) for each in several]
        return inner[0] + ",".join(f"{key}{colon}{_element(each, text)}" for key, colon, each in pairs) + inner[-1]

    return in_quotes(inner if INTERPOLATION.search(inner) else uninterpolated(inner))
