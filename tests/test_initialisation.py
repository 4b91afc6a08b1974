"""GEP, Figure 1: noise and gradient of wider and wider networks."""

import math

import pandas
import pytest
from test_draw import asked

from pubsel.messages import UsageError
from pubsel.papers import draw
from pubsel.papers.theory import initialisation

WORDS = "+experiment=quickstart algorithm=dp_sgd epsilon=5 training.batch_size=20 threads=1 device=cpu"


def test_the_noise_grows_with_the_root_of_the_parameters(tmp_path, monkeypatch):
    monkeypatch.setattr(initialisation, "FILTERS", (4, 8))
    draw.run(asked("gep_figure1", tmp_path, *WORDS.split(), "model=resnet20", f"data_root={tmp_path}"))
    frame = pandas.read_csv(tmp_path / "figures" / "gep_figure1-digits.csv", comment="#")
    assert list(frame["filters"]) == [4, 8]
    assert frame["noise"][1] / frame["noise"][0] == pytest.approx(math.sqrt(frame["p"][1] / frame["p"][0]), rel=1e-4)
    assert (frame["gradient"] > 0).all()
    assert (frame["gradient"] <= 10).all()  # the clip norm
    assert list(frame["ratio"]) == pytest.approx(list(frame["noise"] / frame["gradient"]), rel=1e-4)


@pytest.mark.parametrize("word", ["model=mnist_cnn", "epsilon=inf"])
def test_it_is_of_dp_sgd_on_resnet20(tmp_path, word):
    with pytest.raises(UsageError, match="is of DP-SGD"):
        draw.run(asked("gep_figure1", tmp_path, *WORDS.split(), "model=resnet20", word))
