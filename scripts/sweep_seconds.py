"""Seconds of a sweep: PILLAR in 40 cells of 500 steps, batches of 1,024 of 50,000 examples with 1,280 features.

`python scripts/sweep_seconds.py` sweeps made-up data in a temporary folder; settings after it take their place or are
added, such as `model=mobilenetv2 pair.private=cifar10 pair.public=cifar10 data_root=FOLDER`.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from pubsel.data import Split, prepared

CELLS = ["algorithm.k=10,20,40,80,160", "epsilon=0.3,0.7,1,2", "seed=0,1"]
SETTINGS = "algorithm=pillar training=pillar distance=none pair.take=train pair.m=5000 threads=2"


def made_up(n: int) -> Split:
    """Return images of 32 x 40 grey pixels, which model=pixels takes as features: ten patterns, one a class, in
    noise."""
    torch.manual_seed(0)
    patterns, y = torch.randint(256, (10, 1, 32, 40), dtype=torch.int16), torch.randint(10, (n,))
    noise = torch.randint(2048, (n, 1, 32, 40), dtype=torch.int16)
    return Split(((patterns[y] + noise) // 9).byte(), y)


def main() -> None:
    """Sweep, and print how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        npz = Path(folder) / "examples.npz"
        prepared.write(npz, made_up(50_000), made_up(10_000))
        data = ["model=pixels", f"pair.private={npz}", f"pair.public={npz}", f"results={folder}"]
        command = [sys.executable, "-m", "pubsel", "run", "-m", *CELLS, *SETTINGS.split(), *data, *sys.argv[1:]]
        start = time.perf_counter()
        subprocess.run(command, check=True)
        print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
