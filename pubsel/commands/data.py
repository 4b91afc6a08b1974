"""`pubsel data list`, `prepare`, `check` and `forget`: which datasets there are and are present, how to get one, how it
is read, and what is kept of a user's own.

`listing` imports no torch, so it answers at once."""

from pathlib import Path

from pubsel.files import left_of
from pubsel.messages import UsageError, UserError, aligned
from pubsel.settings.datasets import UNREADABLE, dataset_info, dataset_names, decoded_folder, is_there, kept_folder
from pubsel.settings.identity import is_path
from pubsel.settings.keys import DataConfig, read_of

HEAD = ("name", "what", "classes", "image", "MB", "licence", "present", "what to do")


def listing(data_root: str) -> str:
    """Return a table of all named datasets: what they are, their size as a download, licence, and whether they are in
    `data_root` (as npz, prepared, as original files, built in, or absent)."""
    rows = [HEAD, *(_row(name, Path(data_root).expanduser()) for name in dataset_names())]
    lines = aligned(rows)
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", f"data folder: {data_root}"])


def present(name: str, root: Path) -> str:
    """Return how a named dataset is present: npz, prepared, files, built in or absent."""
    info = dataset_info(name)
    if (root / f"{name}.npz").exists() and f"{name}.npz" not in info.options.get("files", ()):
        return "npz"
    if kept_folder(name, info, root).exists():
        return "prepared"
    if info.source == "embedded":
        return "built in"

    # any one of the sets of original files is enough
    originals, folder = [info.options["files"]] if "files" in info.options else [], info.options.get("folder")
    if folder and not originals:
        originals = [[folder], *([[f"{folder}.zip"]] if "md5" in info.options else [])]
    return "files" if any(all(is_there(root / file) for file in files) for files in originals) else "absent"


def prepare_data(name: str | None, data_root: str) -> str:
    """Fetch a dataset, or turn its original files into images of one size under <data_root>/prepared, and return what
    was done. For data that needs an account or a form, return the steps and the expected layout, until it is present.

    UsageError for an unknown name; UserError if a download fails or the original files cannot be read.
    """
    if not name:
        raise UsageError(f"name has no value: give name=..., one of {', '.join(dataset_names())}")
    info, root = dataset_info(name), Path(data_root).expanduser()
    if info.source == "embedded":
        return f"{name} is built in: nothing to prepare"

    from pubsel.data import Missing, open_dataset  # imports torch

    try:
        source = open_dataset(name, data_root, download=True)
    except Missing as error:
        if info.instructions is None:
            raise
        return f"{error}\n\n{info.title} ({info.licence})\n{info.url}\n\n{info.instructions}\ndata folder: {root}"

    counts = f"{len(source.train.x):,} training and {len(source.test.x):,} test images"
    return "\n".join([f"{name} is ready in {root} ({present(name, root)}): {counts}", *source.notes])


def check_data(settings: DataConfig) -> str:
    """Return what a run reads of a dataset or of a user's path, what is done to it first, and what may be wrong with
    it. UserError names a file that cannot be read, or what no run can use; what was read is printed before. UsageError
    without a name."""
    name = settings.name
    if not name:
        raise UsageError("name has no value: give name=..., a path or the name of a dataset")

    from pubsel import data  # imports torch
    from pubsel.data.examples import Role
    from pubsel.data.findings import NOTE, not_accepted, reason

    source, table, findings = data.checked(name, settings.data_root, settings.keep, settings.unit, read_of(settings))
    lines = f"{name}: {source!r}".splitlines()
    if not is_path(name):
        return "\n".join(lines)
    parts = [int(table.has(role).sum()) for role in (Role.private, Role.test)]
    if sum(parts) < len(table.role):
        lines.insert(1, f"of these, {parts[0]:,} training and {parts[1]:,} test {source.kind} remain: see below")

    wrong = not_accepted(findings, settings.accept or [])
    for finding in findings:
        if finding not in wrong:
            lines.append(finding.text if finding.severity == NOTE else f"warning: {finding.line()}")
    if wrong:
        print(*lines, sep="\n")
        raise UserError(reason(wrong))
    return "\n".join(lines)


def forget_data(name: str | None, data_root: str) -> str:
    """Delete what is kept of a user's own images, and their features; return what was done. The user's files stay. The
    path need not be there any more. UsageError for a name that is no path."""
    if not name:
        raise UsageError("name has no value: give name=..., the path of your images")
    if not is_path(name):
        raise UsageError(f"name={name}: is no path: give that of your images, such as ./{name}")
    folder = decoded_folder(Path(name), Path(data_root))
    if not folder.exists() and not left_of(folder) and not folder.with_suffix(UNREADABLE).exists():
        return f"no image is kept of {name} in {folder.parent}; features of small sets stay in {data_root}/features"

    from pubsel.data import decoded  # imports torch

    decoded.forget_decoded(folder)
    return f"deleted what was kept of {name} in {folder.parent}"


def _row(name: str, root: Path) -> tuple[str, ...]:
    info, how = dataset_info(name), present(name, root)
    channels, height, width = info.shape
    command = f"pubsel data prepare {name}" + (" (shows the steps)" if info.instructions else "")
    return (
        name,
        info.title,
        str(info.classes),
        f"{height}x{width}x{channels}",
        f"{info.size_mb:g}",
        info.licence,
        how,
        command if how == "absent" else "",
    )
