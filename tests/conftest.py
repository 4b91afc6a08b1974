import os

import pytest
import torch

from pubsel import records

torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items):
    """gpu and data tests skip with a reason where their means are absent."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("data") and "PUBSEL_DATA" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="PUBSEL_DATA names no folder with real data"))


@pytest.fixture(autouse=True, scope="session")
def noise_that_no_edit_changes():
    """Seeded noise follows from the source of the package: each edit would be another throw of the dice for tests that
    train. tests/test_releases.py has what that digest is for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_package", lambda: "the package")
        yield
