"""The page of all tables and figures of the papers against conf/ and results/."""

import re
import sys

import pytest

from pubsel.papers import make
from pubsel.papers.join import read_work
from pubsel.settings import CONF

sys.path.insert(0, str(CONF.parent / "scripts"))
import papers_page

TEXT = papers_page.PAGE.read_text(encoding="utf-8")
WORKS = {name: read_work(kind, path, "") for name, (path, kind) in make.works().items()}


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    assert papers_page.page() == TEXT, "run: python scripts/papers_page.py"


def test_each_file_has_a_line_with_its_notes() -> None:
    """Without what the cells name, which takes a minute."""
    for name, work in WORKS.items():
        (line,) = (row for row in TEXT.splitlines() if f"| `make {work.target(name)}`" in row)
        assert line.endswith(f"| {work.notes} |"), "run: python scripts/papers_page.py"


def test_targets_that_notes_name_can_be_made() -> None:
    named = {name for work in WORKS.values() for name in re.findall(r"`([a-z0-9]+-[a-z0-9-]+)`", work.notes)}
    assert {"medical-ours", "pillar-ours", "adamix-figure4"} <= named
    assert all(make.work_of(name.replace("-", "_")) for name in named)


def test_lines_are_in_the_order_of_the_papers() -> None:
    labels = ["Figure 12", "Figures 3 (left)", "Table 11b", "Figure 1", "Table IX", "Table 11a", "Table 10", "Table 2"]
    want = ["Table 2", "Table IX", "Table 10", "Table 11a", "Table 11b", "Figure 1", "Figures 3 (left)", "Figure 12"]
    assert sorted(labels, key=papers_page.order) == want


def test_data_without_a_record_are_needed() -> None:
    """A generated set is always there, and data that something else has been run on are named."""
    wanted = papers_page.wanted("gep_table6")
    assert wanted == {"cifar10", "imagenet", "resnet20"}
    assert papers_page.here("gep_table6", WORKS["gep_table6"], wanted - {"imagenet"}) == "needs imagenet"
    assert papers_page.here("gep_table6", WORKS["gep_table6"], wanted) == "not run yet"
    known = {"cifar10", "fashion_mnist", "resnet50_sl"}
    text = papers_page.here("pillar_figure3", WORKS["pillar_figure3"], known)
    assert text == "run on flowers5, kagchest; needs cifar100"


def test_rows_of_a_shared_figure_count_only_if_they_are_of_the_target() -> None:
    """And of a table, those with a distance alone too."""
    ours = {"cifar10", "flowers5", "ham10000", "kagchest", "mobilenetv2"}
    want = {"pillar_ours": ours, "pillar_figure10": {"cifar10", "resnet50_byol"}, "gsd_table14": {"probe"}}
    have = {name: papers_page.there(name, WORKS[name], names) for name, names in want.items()}
    assert have == {"pillar_ours": ours, "pillar_figure10": set(), "gsd_table14": {"ham10000", "probe"}}


def test_dp_sgd_needs_no_public_data() -> None:
    settings = {"pair": {"private": "mnist", "public": ["svhn"]}, "model": {"name": "linear"}}
    assert papers_page.names_in(settings | {"algorithm": {"name": "gep"}}) == {"mnist", "svhn", "linear"}
    assert papers_page.names_in(settings | {"algorithm": {"name": "dp_sgd"}}) == {"mnist", "linear"}
