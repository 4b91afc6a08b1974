"""Docstrings of the package as Markdown, for mkdocstrings: their lists of arguments become lists."""

import re
from typing import Any

import griffe

NAMED = re.compile(r"(\w+)(, \w+)*( \[[^\]]*\])?: ")  # "x: ...", "x, y [n, d]: ..."


class Lists(griffe.Extension):
    """Rewrites each docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """The same text, in which a paragraph of "name: meaning" is a list."""
    docstring = re.sub(r"(?<=[^\n])\n(?=(- |\d\. ))", "\n\n", docstring.replace("][", "]\\["))  # a list is a paragraph
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(_listed(paragraph.splitlines()) for paragraph in paragraphs)


def _listed(lines: list[str]) -> str:
    named = [bool(NAMED.match(line)) for line in lines]
    if not any(named) or not all(name or line.startswith("    ") for name, line in zip(named, lines, strict=True)):
        return "\n".join(lines)
    return "\n".join(re.sub(r"^(\S.*?): ", r"- `\1`: ", line, count=1) for line in lines)
