"""Synthetic records for tests, and streams."""

from pubsel import distances
from pubsel import records as results
from pubsel.papers import join, measured
from pubsel.privacy.randomness import Secret
from pubsel.settings.methods import option

STATED = {"epsilon": 2.0, "delta": 1e-5, "valid": True, "statement": "s", "steps": 1, "noise_multiplier": 1.0}
STATED |= {"accountant": "a", "noise_source": "seeded"}  # what a record says of its guarantee, at least


def secret_named(name="key", secure=False, place="here"):
    """The secret streams of a release that a test makes up."""
    plan = {"noise_multiplier": 1.0, "rate": 0.2, "steps": 10, "delta": 1e-5, "epsilon": 2.0}
    return Secret({"settings": name}, plan, [f"0 {place}"], secure)


def distance(name, **changes):
    """The distance of conf/distance/NAME.yaml, with other settings."""
    return distances.build(option("distance", name) | changes)


def record(seed=0, utility=0.8, values=(0.3, 0.4), public="fashion_mnist", algorithm="gep", label="paper", **settings):
    """A synthetic record; `settings` as dotted keys with __ for the dot."""
    made = {
        "identity": f"synthetic-{public}-{algorithm}-{label}-{settings}-seed{seed}",
        "label": label,
        "seed": seed,
        "private": "fashion_mnist",
        "public": public,
        "model": "fmnist_cnn",
        "algorithm": algorithm,
        "epsilon": 2.0,
        "metric": "accuracy",
        "utility": utility,
        "commit": "a",
        "distance": {"name": "gsd", "mean": sum(values) / len(values), "values": list(values)} if values else None,
        "privacy": {"valid": True},
        "settings": {"seed": seed, "pair": {"public": public, "m": 2000}, "algorithm": {"k": 1000, "labels": "random"}},
    }
    for key, value in settings.items():
        group, name = key.split("__")
        made["settings"][group][name] = value
    return made


def save(folder, *records):
    for number, one in enumerate(records):
        results.write_record(folder / "runs" / f"{number:03d}" / "result.json", one)
    return folder


def table(name, folder):
    """The frame of a table, of the records in a folder."""
    return join.make(name, results.read_records(folder), measured.read_ranks(folder)).frame
