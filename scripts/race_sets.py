"""Sets of `make recipes` that anyone can make again: a table that scikit-learn contains, and texts of a generator.

    python scripts/race_sets.py [FOLDER]

writes tumours.csv, 569 real tumours with 30 measurements of each; and topics.csv, 6,000 made-up texts of 20 topics.
Words have frequencies by Zipf's law, as in language; each topic has its own order of a tenth of them, and a text mixes
its topic with one of the others.
"""

import sys
from pathlib import Path

import numpy as np
import pandas
from sklearn.datasets import load_breast_cancer

TOPICS, TEXTS, WORDS, LENGTH = 20, 6000, 4000, 60
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


def tumours() -> pandas.DataFrame:
    """Return a row for each tumour, with its diagnosis."""
    data = load_breast_cancer(as_frame=True)
    return data.data.assign(diagnosis=[data.target_names[i] for i in data.target])


def topics(seed: int = 0) -> pandas.DataFrame:
    """Return a row for each text, with its topic."""
    draw = np.random.RandomState(seed)
    words = np.array(["".join(draw.choice(LETTERS, size)) for size in draw.randint(3, 9, WORDS)])
    frequency = 1 / np.arange(2, WORDS + 2)

    # in each topic, some words change places
    of_topic = np.tile(frequency / frequency.sum(), (TOPICS, 1))
    for row in of_topic:
        some = draw.choice(WORDS, WORDS // 10, replace=False)
        row[some] = row[draw.permutation(some)]

    texts, labels = [], draw.randint(TOPICS, size=TEXTS)
    for label in labels:
        other = draw.randint(TOPICS)
        mixed = (of_topic[label] + of_topic[other]) / 2 if draw.rand() < 0.5 else of_topic[label]
        texts.append(" ".join(draw.choice(words, LENGTH, p=mixed)))
    return pandas.DataFrame({"text": texts, "label": [f"topic {label}" for label in labels]})


def main(folder: Path) -> None:
    """Write both sets to `folder`."""
    tumours().to_csv(folder / "tumours.csv", index=False)
    topics().to_csv(folder / "topics.csv", index=False)


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
