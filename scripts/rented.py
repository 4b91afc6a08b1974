"""Use a GPU that is rented by the minute: bare, without network, and gone when its time is over.

    python scripts/rented.py OUT --wheels wheels --data data.tar --state state.tar --minutes 9

One call installs what is missing from a folder of wheels, unpacks the data and the state of the last call, runs the
next commands of a list (scripts/rented.txt) until its time is nearly over, interrupts the one that runs, and packs the
state into OUT. Give OUT/state.tar to the next call as --state: commands that ended are not run again, and one that was
interrupted resumes from its checkpoints. Needs nothing but this repository, and imports only the standard library.

OUT has two files: state.tar (records, checkpoints, tables, the ledger and what the commands printed, but no weights of
finished runs) and summary.txt, which is also printed. Exit code 0: everything on the list has ended; 3: call again; 1:
a command failed, which summary.txt names; the others were run.
"""

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "antlr4": "antlr4-python3-runtime",
    "opacus": "opacus",
    "prv_accountant": "prv-accountant",
    "hydra_plugins.hydra_joblib_launcher": "hydra-joblib-launcher",
}
INSTALLED = ROOT / "build" / "rented"  # packages that the machine lacks
PRINTED = Path("results") / "rented"  # what each command printed, and whether it ended
PACK_SECONDS = 20  # kept for packing
GRACE_SECONDS = 15  # from an interrupt to a kill
ENDED, FAILED, INTERRUPTED = "ended", "failed", "interrupted"


def install(wheels: Path | None) -> None:
    """Install what is missing from a folder of wheels, without network. SystemExit names what is not there."""
    sys.path.insert(0, str(INSTALLED))
    missing = [name for module, name in PACKAGES.items() if not importable(module)]
    if not missing:
        return
    if wheels is None:
        sys.exit(f"rented.py: {', '.join(missing)} missing: give --wheels FOLDER")
    words = ["install", "--no-index", "--no-deps", "--quiet", "--find-links", str(wheels), "--target", str(INSTALLED)]
    if subprocess.run([sys.executable, "-m", "pip", *words, *missing], check=False).returncode:
        sys.exit(f"rented.py: {wheels} lacks a wheel of one of {', '.join(missing)}")


def importable(module: str) -> bool:
    """Return whether a module is there; it is not imported."""
    importlib.invalidate_caches()  # a folder may be there since
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False


def unpack(archive: Path | None, folder: Path) -> None:
    """Unpack a tar file, if one is given. SystemExit if it does not read."""
    if archive is None:
        return
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        sys.exit(f"rented.py: {archive} cannot be unpacked: {error}")


def commands(path: Path) -> list[str]:
    """Return the commands of a list; lines that begin with # are remarks."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def run(command: str, place: int, end: float) -> str:
    """Run one command until `end`, a time.monotonic(): how it ended. What it prints is added to a separate file."""
    words = shlex.split(command)
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    path = os.pathsep.join([str(ROOT), str(INSTALLED), os.environ.get("PYTHONPATH", "")])
    with open(PRINTED / f"{place}.txt", "a", encoding="utf-8") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
        )
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(process)
            return INTERRUPTED
    return ENDED if code == 0 else f"{FAILED} with exit code {code}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command and all that it has started, and kill them if they do not end."""
    for kind in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return


def worth_keeping() -> Iterator[Path]:
    """Yield the files of results that the next call needs, and those that are wanted."""
    for path in sorted(Path("results").rglob("*")):
        finished = path.name == "model.pt" and (path.parent / "result.json").exists()
        if path.is_file() and not finished and path.name != "lock" and path.suffix != ".part":
            yield path


def main() -> int:
    """Do the next piece of the list; the exit code says what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for state.tar and summary.txt")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of what is missing")
    parser.add_argument("--data", type=Path, help="tar file that is unpacked into data/")
    parser.add_argument("--state", type=Path, help="state.tar of the last call")
    parser.add_argument("--minutes", type=float, default=9.0, help="until all is packed; 9 by default")
    parser.add_argument("--list", type=Path, default=Path(__file__).with_suffix(".txt"), help="file with the commands")
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes - PACK_SECONDS - GRACE_SECONDS

    # paths are the user's until here, and the repository's from here on
    out, listed = asked.out.resolve(), commands(asked.list)
    given = {name: path and path.resolve() for name, path in vars(asked).items() if name in ("wheels", "data", "state")}
    os.chdir(ROOT)
    for folder in (out, PRINTED, ROOT / "data"):
        folder.mkdir(parents=True, exist_ok=True)
    install(given["wheels"])
    unpack(given["data"], ROOT / "data")
    unpack(given["state"], ROOT)

    states = []
    for place, command in enumerate(listed):
        mark = PRINTED / f"{place}.state"
        state = mark.read_text() if mark.exists() else ""
        if state.partition("\n")[2] != command or INTERRUPTED in state:
            state = f"{run(command, place, end) if time.monotonic() < end else INTERRUPTED}\n{command}"
            mark.write_text(state)
        states.append(state.partition("\n")[0])

    summary = "".join(f"{state:12} {command}\n" for state, command in zip(states, listed, strict=True))
    (out / "summary.txt").write_text(summary)
    with tarfile.open(out / "state.tar", "w") as packed:
        for path in worth_keeping():
            packed.add(path)
    print(summary, end="")
    if any(state.startswith(FAILED) for state in states):
        return 1
    return 3 if INTERRUPTED in states else 0


if __name__ == "__main__":
    sys.exit(main())
