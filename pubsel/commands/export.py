"""`pubsel export RUN to=FOLDER`: a finished run as a folder that may be given away."""

from pubsel.release.bundle import made, write
from pubsel.settings import outputs
from pubsel.settings.keys import ExportConfig


def run(settings: ExportConfig) -> str:
    """Make the folder, whole or not at all, and return a line about it. UserError says why a run may not or cannot be
    given away."""
    target = outputs.folder(settings.to, settings.results)
    files, statement = made(settings)
    write(target, files, settings.to, private=bool(statement.against))
    warned = ", which may NOT be given away" if statement.against else ""
    return f"{settings.to}: {', '.join(files)}{warned}. {statement.text}"
