"""`pubsel export RUN to=FOLDER`: a finished run as a folder that may be given away."""

from pubsel.messages import UsageError
from pubsel.release.bundle import made, write
from pubsel.release.hub import check_hub, upload
from pubsel.settings import outputs
from pubsel.settings.keys import ExportConfig


def run(settings: ExportConfig) -> str:
    """Make the folder, whole or not at all, upload it if a hub is named, and return a line about it. UserError says why
    a run may not or cannot be given away, UsageError that it may not be uploaded."""
    target = outputs.folder(settings.to, settings.results)
    if settings.hub is not None:
        check_hub(settings.hub)
    files, statement = made(settings)
    if settings.hub is not None and statement.against:
        raise UsageError(f"hub={settings.hub}: this model may not be given away: leave it out")
    write(target, files, settings.to, private=bool(statement.against))
    warned = ", which may NOT be given away" if statement.against else ""
    text = f"{settings.to}: {', '.join(files)}{warned}. {statement.text}"
    return text if settings.hub is None else f"{text} {upload(target, files, settings.hub)}"
