"""Stand-ins for the programs of Slurm: jobs are processes of this machine, and what is known of them lies in files.

`install(folder)` puts them into a folder for PATH. A job that is requeued starts again when its process has ended.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("sbatch", "srun", "sacct", "squeue", "scontrol", "scancel")


def install(folder: Path) -> None:
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {folder} {name} "$@"\n')
        program.chmod(0o755)


def jobs(folder: Path) -> dict[str, dict]:
    """What is known of each job: its state, how often it was requeued, and its options of sbatch."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*_*.json"))}


def note(folder: Path, job: str, **what: object) -> None:
    path = folder / f"{job}.json"
    known = json.loads(path.read_text()) if path.exists() else {"requeued": 0}
    path.with_suffix(".part").write_text(json.dumps(known | what))
    path.with_suffix(".part").replace(path)


def sbatch(folder: Path, script: str) -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", Path(script).read_text(), re.MULTILINE))
    last = int(re.match(r"0-(\d+)", options["array"])[1]) if "array" in options else 0
    number = str(1 + len(list(folder.glob("*.sh"))))
    copy = folder / f"{number}.sh"
    copy.write_text(Path(script).read_text())
    print(f"Submitted batch job {number}")
    for task in range(last + 1):
        job = f"{number}_{task}"
        note(folder, job, state="PENDING", options=options)
        words = [sys.executable, __file__, folder, "node", str(copy), job, str("array" in options)]
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def node(folder: Path, script: str, job: str, array: str) -> None:
    number, task = job.split("_")
    environment = {**os.environ, "SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    if array == "True":
        environment |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task}
    while True:
        note(folder, job, state="RUNNING")
        code = subprocess.run(["bash", script], env=environment).returncode
        again = folder / f"{job}.requeue"
        if not again.exists():
            return note(folder, job, state="COMPLETED" if code == 0 else "FAILED")
        again.unlink()
        note(folder, job, state="REQUEUED", requeued=jobs(folder)[job]["requeued"] + 1)


def srun(folder: Path, *words: str) -> None:
    words = list(words)
    output = words[words.index("--output") + 1]
    job, task = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_ARRAY_TASK_ID", "")
    for pattern, value in (("%A", job), ("%a", task), ("%j", job), ("%t", "0")):
        output = output.replace(pattern, value)
    with open(output, "a") as sink:
        sys.exit(subprocess.run(words[words.index(sys.executable) :], stdout=sink, stderr=sink).returncode)


def sacct(folder: Path, *_: str) -> None:
    print("JobID|State|NodeList")
    for job, known in jobs(folder).items():
        whole = job if "array" in known["options"] else job.partition("_")[0]
        print(f"{whole}|{known['state']}|node")


def squeue(folder: Path, *_: str) -> None:
    for job, known in jobs(folder).items():
        if known["state"] in ("PENDING", "RUNNING", "REQUEUED"):
            print(job, known["state"])


def scontrol(folder: Path, action: str, job: str) -> None:
    assert action == "requeue"
    (folder / f"{job if '_' in job else f'{job}_0'}.requeue").write_text("")


def scancel(folder: Path, job: str, *_: str) -> None:
    (folder / f"{job}.cancelled").write_text(str(signal.SIGTERM) + str(time.time()))


if __name__ == "__main__":
    globals()[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
