"""Generate pages of the site from the code, conf/ and results/: the reference, the API, the results and the files next
to the package. mkdocs generates them at each build (`hooks` in mkdocs.yml), so no text is kept twice."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from pubsel.cli import SCHEMAS
from pubsel.data.findings import NAMES
from pubsel.records import RECORD
from pubsel.settings import CONF, compose, explain
from pubsel.settings.datasets import dataset_info, dataset_names

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {  # files of the repository: pages of the site
    "CONTRIBUTING.md": "extend.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CITATION.cff": "cite.md",
    "LICENSE": "licence.md",
}
METHODS = {"algorithm": "run", "distance": "rank"}  # a group whose options are methods: a command that has it
OPTIONS = ("model", "training", "privacy", "pair", "experiment")  # groups whose files speak for themselves

UNTITLED = "show_root_heading: false, show_root_toc_entry: false"  # of mkdocstrings, below a title of the page


# For mkdocs


def on_config(config: Any) -> Any:
    """Fill in the pages of the API in the navigation."""
    pages = [path for path in api() if path != "api/index.md"]
    for entry in config.nav:
        if "API" in entry:
            entry["API"] = ["api/index.md", {"Modules": [{Path(path).stem: path} for path in pages]}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and what results/ holds."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for path in shown_results():
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/, as a reader of the repository needs them, lead to the same pages of the site. Tables of
    results, and pages for readers, have the whole width."""
    if page.file.src_uri.startswith(("results/tables/", "for_")):
        page.meta["hide"] = ["toc"]
    for name, target in BESIDE.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}")
    if "/" not in page.file.src_uri:
        return markdown.replace("](../results/", "](results/")
    return markdown.replace("](../docs/", "](../")


@cache
def generated() -> dict[str, str]:
    """Every page that is made here, as Markdown, by its path in the site."""
    return {
        "reference/settings.md": settings(),
        "reference/algorithms.md": methods("algorithm", "Algorithms"),
        "reference/distances.md": methods("distance", "Distances"),
        "reference/datasets.md": named_datasets(),
        "reference/findings.md": findings(),
        "reference/options.md": options(),
        "reference/record.md": record(),
        **api(),
        "index.md": front(),
        **{page: beside(ROOT / file) for file, page in BESIDE.items()},
    }


def shown_results() -> list[Path]:
    """Return the pages of results/ that the site shows as they are."""
    folder = ROOT / "results"
    return [*folder.glob("*.md"), *folder.glob("tables/*.md")]


def beside(file: Path) -> str:
    """Return a page from next to the package, with links as in the site."""
    text = file.read_text(encoding="utf-8").replace("](docs/", "](")
    if file.suffix != ".md":
        return f"# {file.name}\n\n```\n{text}```\n"
    for name, page in BESIDE.items():
        text = text.replace(f"]({name}", f"]({page}")
    return text


def front() -> str:
    """The README as the front page, with the pictures that fit the theme that the reader has chosen."""
    picture = re.compile(r'<picture>.*?<img alt="(.*?)"\s+src="docs/(\S+?)-light\.svg">\s*</picture>', re.DOTALL)
    both = r"![\1](\2-light.svg#only-light){ .wide }![\1](\2-dark.svg#only-dark){ .wide }"
    return "---\nhide: [toc]\n---\n\n" + picture.sub(both, beside(ROOT / "README.md"))


# Settings


def settings() -> str:
    """Every setting of every command, with its meaning, type, range and default."""
    lines = [
        "# Settings",
        "",
        "This page lists every setting of every command. It is generated from the code; `pubsel COMMAND --help` prints",
        "the same in the terminal. Give a setting as `KEY=VALUE`. The values below are the defaults of the command;",
        "an option such as `algorithm=pillar` or an experiment sets other values. A setting that is marked ◦ cannot",
        "change a result, so runs that differ only in such settings are the same run.",
        "",
    ]
    seen: dict[str, explain.Setting] = {}
    for command, schema in SCHEMAS.items():
        sections = explain.sections(schema, composed(command), methods=True)
        lines += [f"## pubsel {command} {{ #{command} }}", ""]
        lines += _again(sections, seen)
        for section in sections:
            lines += _section(section, seen)
        seen = {setting.key: setting for section in sections for setting in section.settings} | seen
    return "\n".join(lines)


def _new(setting: explain.Setting, seen: dict[str, explain.Setting]) -> bool:
    """Whether no earlier command has this setting, or it means something else there."""
    before = seen.get(setting.key)
    return before is None or before._replace(value=setting.value) != setting


def _again(made: list[explain.Section], seen: dict[str, explain.Setting]) -> Iterator[str]:
    """What a command shares with those above it, and the values that differ."""
    groups, names, others = [], [], []
    for section in made:
        known = [setting for setting in section.settings if not _new(setting, seen)]
        if section.name and known and len(known) == len(section.settings):
            groups.append(f"[`{section.name}`](#{section.name})")
        else:
            names += [f"[`{setting.key}`](#{setting.key})" for setting in known]
        others += [f"`{s.key}={s.value}`" for s in known if s.value != seen[s.key].value]
    if names:
        yield f"Settings as above: {', '.join(names)}.\n"
    if groups:
        yield f"Groups as above: {', '.join(groups)}.\n"
    if others:
        yield f"These have other values: {', '.join(others)}.\n"


def _section(section: explain.Section, seen: dict[str, explain.Setting]) -> Iterator[str]:
    """The new settings of a group, below a heading."""
    new = [setting for setting in section.settings if _new(setting, seen)]
    if new and section.name:
        yield f"### `{section.name}` {{ #{section.name} }}\n"
        yield f"{text(section.about)}.\n" if section.about else ""
    for setting in new:
        yield definition(setting, anchor=setting.key not in seen)


def definition(setting: explain.Setting, anchor: bool = False, key: str = "") -> str:
    """A setting as an entry of a definition list."""
    name = f"**`{key or setting.key}`**" + (f"{{ #{setting.key} }}" if anchor else "")
    value = "" if setting.value == explain.REQUIRED else f" = `{setting.value}`"
    kind = "; ".join(filter(None, [setting.kind, "" if value else "has to be given"]))
    mark = " ◦" if setting.neutral else ""
    told = f" <small>{kind}</small>" if kind else ""
    return f"{name}{value}{mark}{told}\n:   {text(setting.about)}\n"


def text(words: str) -> str:
    """Words of the code as Markdown, in which, outside of code, brackets are no links and a star is no emphasis."""
    parts = words.split("`")
    parts[::2] = [re.sub(r"([\[\]*_|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def composed(command: str, *words: str) -> dict[str, Any]:
    """The values that a command has with these words."""
    with compose.composed(command, words) as values:
        return OmegaConf.to_container(values, resolve=False)  # type: ignore[return-value]


# Methods


def methods(group: str, title: str) -> str:
    """Each class of a group with its settings, and the options of conf/ that differ in their values."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in explain.option_names(group):
        values = composed(METHODS[group], f"{group}={name}")[group]
        target = values.get("_target_") or ""  # none: nothing is measured
        found.setdefault(target, {})[name] = values
    lines = [
        f"# {title}",
        "",
        f"This page lists the values of `{group}=NAME`. It is generated from `conf/{group}` and the code.",
        "[Guarantees](../guarantees.md) states the guarantee of each.",
        "",
    ]
    for target, options in found.items():
        lines += _method(group, target, options)
    return "\n".join(lines)


def _method(group: str, target: str, options: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A class with its paper and its settings, and the options that set them."""
    module, _, name = target.rpartition(".")
    main = min(options, key=lambda option: (option != module.rpartition(".")[2], len(option)))
    yield f"## {name or f'`{main}`'} {{ #{main} }}\n"
    if module and find_spec(module):
        yield f"::: {module}\n    options: {{{UNTITLED}, members: false}}\n"

    schema = explain.method_class(target) if name else None
    if schema is not None:
        yield f"{text(explain.about(schema))}. The values are those of `{group}={main}`:\n"
        (section, *_) = explain.sections(schema, options[main])
        for setting in section.settings:
            yield definition(setting, key=f"{group}.{setting.key}")

    for option, values in options.items():
        told = text(explain.heading(CONF / group / f"{option}.yaml"))
        other = [
            f"`{key}={explain.type_text(value)}`" for key, value in values.items() if value != options[main].get(key)
        ]
        yield f"- `{group}={option}`: " + " ".join(filter(None, [told, other and f"Differs in {', '.join(other)}."]))
    yield ""


# What conf/ names


def findings() -> str:
    """Return the page of the findings on data."""
    rows = [f"| `{name}` | {about} |" for name, about in NAMES.items()]
    lead = "What may be wrong with data, by the name that `accept=[NAME]` takes ([Your own data](../data.md))."
    return "\n".join(["# Findings", "", lead, "", "| name | what was met |", "|---|---|", *rows, ""])


def named_datasets() -> str:
    """Every data set of conf/dataset, and how to get those that cannot be fetched without a person."""
    lines = [
        "---\nhide: [toc]\n---\n",
        "# Data sets",
        "",
        "This page lists the named data sets. It is generated from `conf/dataset`. pubsel downloads a set when it is",
        "first needed, or with `pubsel data prepare NAME`, unless there are instructions for it below. Your own images",
        "need no name: give the path of a folder, a CSV or an npz.",
        "",
        "| name | what it is | classes | shape | measured by | MB | licence |",
        "|---|---|---:|---|---|---:|---|",
    ]
    known = {name: dataset_info(name) for name in dataset_names()}
    for name, info in known.items():
        link = f"[`{name}`](#{name})" if info.instructions else f"`{name}`"
        shape = "×".join(map(str, info.shape))
        row = (link, text(info.title), info.classes, shape, info.metric.name, f"{info.size_mb:g}", text(info.licence))
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines += ["", "## Sets that you have to download yourself", ""]
    for name, info in known.items():
        if info.instructions:
            steps = "\n".join(f"    {line}" for line in info.instructions.strip().splitlines())
            lines += [f"### `{name}` {{ #{name} }}", "", f"<{info.url}>" if info.url else "", "", steps, ""]
    return "\n".join(lines)


def options() -> str:
    """The other groups of conf/: what each of their files is for."""
    lines = [
        "# Models, schedules, experiments",
        "",
        "This page lists the other groups in conf/.",
        "`pubsel run --help GROUP=NAME` explains the settings of one option. An experiment needs a plus:",
        "`+experiment=NAME`.",
        "",
    ]
    for group in OPTIONS:
        lines += [f"## `{group}`", ""]
        for name in explain.option_names(group):
            told = text(explain.heading(CONF / group / f"{name}.yaml"))
            lines.append(f"- `{name}`" + (f": {told}" if told else ""))
        lines.append("")
    lines += ["## `tables`", "", "For `pubsel table NAME`:", ""]
    for name in explain.option_names("tables"):
        title = yaml.safe_load((CONF / "tables" / f"{name}.yaml").read_text(encoding="utf-8"))["title"]
        lines.append(f"- `{name}`: {text(title)}")
    return "\n".join([*lines, ""])


def record() -> str:
    """Every key of a record."""
    lines = [
        "# The record",
        "",
        "Each run writes one file, `results/runs/NAME/result.json`. These are its keys; a dot separates levels.",
        "",
    ]
    for key, told in RECORD.items():
        lines.append(f"**`{key}`**{{ #{key} }}\n:   {text(told)}\n")
    return "\n".join(lines)


# API


def api() -> dict[str, str]:
    """A page for each module or sub-package at the top of the package, and an index with what each is for."""
    pages, rows = {}, []
    for path in sorted((ROOT / "pubsel").iterdir()):
        if path.name.startswith(("_", ".")) or not (path.suffix == ".py" or (path / "__init__.py").is_file()):
            continue
        files = [path] if path.suffix == ".py" else [path / "__init__.py", *sorted(path.glob("*.py"))]
        modules = [_module(file) for file in dict.fromkeys(files) if file == files[0] or not file.name.startswith("_")]
        pages[f"api/{path.stem}.md"] = _page(f"pubsel.{path.stem}", modules)
        rows.append(f"| [`pubsel.{path.stem}`]({path.stem}.md) | {text(_first_sentence(files[0]))} |")
    lines = ["# API\n", "These are the functions and classes that a program imports:\n", "::: pubsel\n", "## Modules\n"]
    pages["api/index.md"] = "\n".join([*lines, "| module | purpose |", "|---|---|", *rows, ""])
    return pages


def _page(title: str, modules: list[str]) -> str:
    """The first module has the title of the page for its heading."""
    first, *others = (f"::: {module}" for module in modules)
    return "\n\n".join([f"# {title}", f"{first}\n    options: {{{UNTITLED}}}", *others])


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _first_sentence(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(docstring.split("\n\n")[0].split()))[0]
