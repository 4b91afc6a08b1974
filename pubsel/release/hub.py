"""A folder that may be given away, in a repository of the hub of Hugging Face."""

from collections.abc import Iterable
from pathlib import Path

from pubsel.messages import UsageError, UserError

OF_HUB = {".gitattributes"}  # files that the hub makes in each repository


def check_hub(hub: str) -> None:
    """Raise UsageError if this is no name of a repository, or if there is no token to write to it; the hub is not
    asked."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(hub)
        owner, _, name = hub.partition("/")
    except ValueError:
        owner = name = ""
    if not (owner and name):
        raise UsageError(f"hub={hub}: give the name of a repository, hub=OWNER/NAME")
    if get_token() is None:
        raise UsageError(f"hub={hub}: there is no token to write with: run hf auth login, or set HF_TOKEN")


def upload(folder: Path, names: Iterable[str], hub: str) -> str:
    """Send a folder with files of these `names` to the hub, in one commit, and return a sentence about it. A new
    repository is private. UserError if it has other files, so that no two models are mixed, or if the hub rejects
    it."""
    from huggingface_hub import HfApi

    try:
        # a repository that is there keeps its visibility
        api = HfApi(library_name="pubsel")
        url = api.create_repo(hub, private=True, exist_ok=True)
        info = api.model_info(hub)
        others = {file.rfilename for file in info.siblings or []} - OF_HUB - {*names}
        if others:
            raise UserError(f"hub={hub}: the repository has other files, such as {min(others)}: give a new name")
        api.upload_folder(repo_id=hub, folder_path=folder, commit_message="pubsel export")
    except UserError:
        raise
    except Exception as error:  # whatever the hub, the network or the library says
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        text = f"hub={hub}: the folder is made, but not uploaded ({reason}): check name, token and network"
        raise UserError(text) from None
    seen = "private: its page can make it public" if info.private else "public"
    return f"Uploaded to {url}, which is {seen}."
