"""The site, the README, the citation: they are built, complete, and say what the code and the records say."""

import csv
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pages
import pytest
import yaml

import pubsel
from pubsel import records
from pubsel.cli import SCHEMAS, main
from pubsel.privacy import accountant
from pubsel.settings import CONF, explain
from pubsel.settings.keys import Privacy
from pubsel.settings.schema import keys_of
from tests.made import only_record

CHECKOUT = pages.CHECKOUT


# What is generated


def test_the_reference_has_every_setting_with_its_meaning() -> None:
    page = pages.hooks().generated()["reference/settings.md"]
    for command, schema in SCHEMAS.items():
        for key in keys_of(schema):
            assert f"`{key}`" in page, (command, key)
    for about in (f.metadata["about"] for f in Privacy.__dataclass_fields__.values()):
        assert pages.hooks().text(about) in page
    assert "**`privacy.delta`**{ #privacy.delta } = `1e-05` <small>number, greater than 0, less than 1</small>" in page


@pytest.mark.parametrize(
    ("group", "page"),
    [
        ("algorithm", "algorithms"),
        ("distance", "distances"),
        ("dataset", "datasets"),
        ("tables", "options"),
        *((group, "options") for group in ("model", "training", "privacy", "pair", "experiment")),
    ],
)
def test_the_reference_has_every_file_of_conf(group: str, page: str) -> None:
    text = pages.hooks().generated()[f"reference/{page}.md"]
    names = explain.option_names(group)
    assert len(names) > 1
    for name in names:
        assert f"`{name}`" in text or f"`{group}={name}`" in text, name


def test_the_reference_has_every_setting_of_every_algorithm() -> None:
    text = pages.hooks().generated()["reference/algorithms.md"]
    for path in (CONF / "algorithm").glob("*.yaml"):
        for key in yaml.safe_load(path.read_text()):
            assert key in ("defaults", "_target_") or f"`algorithm.{key}`" in text, (path.name, key)


def test_the_reference_of_the_record_has_its_keys(folder: Path) -> None:
    words = "+experiment=quickstart training.epochs=1 training.batch_size=1297 epsilon=2 distance.initialisations=1"
    assert main(["run", *words.split()]) == 0
    record = only_record()
    told = {key for key in records.RECORD if "." not in key}
    assert set(record) == told - {"backbone", "content", "quality", "pool", "tuning"}  # there are none
    plan = accountant.Plan(*[1.0] * len(accountant.Plan._fields))
    weak = accountant.statement(plan, 1.0, True, True, [("first", plan)], "the public set", examples=2, unit="patient")
    assert {f"privacy.{key}" for key in {**record["privacy"], **weak}} == set(records.RECORD) - told


def test_the_reference_of_the_record_has_the_keys_of_the_records_in_the_repository() -> None:
    for record in records.read_records(CHECKOUT / "results"):
        assert {key for key in record if key not in records.RECORD} <= {"k", "m"}, record["identity"]


def test_the_differences_from_the_papers_are_those_of_conf() -> None:
    page = (CHECKOUT / "docs" / "reproduce.md").read_text().split("## Differences from the papers")[1].split("\n## ")[0]
    page = " ".join(page.split())

    def conf(name: str) -> dict:
        return yaml.safe_load((CONF / f"{name}.yaml").read_text())

    assert conf("distance/gsd")["parameters"] == "weights"
    assert "runs 50 epochs" in page
    assert conf("training/gep")["epochs"] == 50
    assert "/training" not in str(conf("experiment/gep_svhn")["defaults"])
    assert "three dampings, 0.001, 0.1 and 1." in page
    assert "run algorithm=adadps algorithm.damping=0.001,0.1,1" in conf("tables/pillar_table2")["runs"]
    assert "of the public training, 0.01 (CLIP: 5e-5)" in page
    assert (conf("paper/adamix")["pretrain_rate"], conf("algorithm/adamix_clip")["pretrain_rate"]) == (0.01, 5e-5)
    assert "private learning rates** are 0.001, 0.0025 and 0.005" in page
    assert conf("work/adamix_figures")["common"].startswith("training.learning_rate=0.001,0.0025,0.005")
    assert "20,000 steps in place of n^2 - 1" in page
    assert conf("algorithm/noisy_sgd")["steps"] == 20000


# The site


class Resources(HTMLParser):
    """What a page loads, and where it leads."""

    def __init__(self, page: Path):
        super().__init__()
        self.loads: set[str] = set()
        self.leads: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loads.add(str(found["src"]))
        elif tag == "link" and found.get("rel") not in ("next", "prev", "canonical"):
            self.loads.add(str(found["href"]))
        elif tag == "a" and found.get("href"):
            self.leads.add(str(found["href"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with strict links as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    done = built(CHECKOUT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def built(checkout: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """The site of a checkout. Not with --quiet, which silences the counter of warnings that --strict reads."""
    if not (find_spec("material") and find_spec("mkdocstrings")):
        pytest.skip("mkdocs-material and mkdocstrings are not installed: pip install .[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_link_to_nowhere_fails_the_build(tmp_path: Path) -> None:
    """Of a site with one page, and the settings of mkdocs.yml for links."""
    settings = (CHECKOUT / "mkdocs.yml").read_text()
    kept = ("site_name", "validation", "theme", "markdown_extensions")
    values = {key: value for key, value in yaml.load(settings, yaml.BaseLoader).items() if key in kept}
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(values))
    for anchor, code in (("here", 0), ("nowhere", 1)):
        (tmp_path / "docs" / "index.md").write_text(f"# Here\n\n[a link](#{anchor})\n")
        done = built(tmp_path, tmp_path / "site")
        assert (done.returncode, "#nowhere" in done.stderr) == (code, code == 1), done.stderr


@pytest.mark.slow
def test_the_site_needs_no_network_and_lacks_no_file(site: Path) -> None:
    found = sorted(site.rglob("*.html"))
    assert len(found) > 20
    for page in found:
        if page.name == "404.html":
            continue  # its links begin at the root of a server
        resources = Resources(page)
        assert not [name for name in resources.loads if "//" in name], page
        for name in resources.loads | {lead for lead in resources.leads if "//" not in lead}:
            path = unquote(re.split("[?#]", name)[0])
            assert path == "" or name.startswith(("mailto:", "data:")) or (page.parent / path).exists(), (page, name)
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", style.read_text()), style


@pytest.mark.slow
def test_the_site_has_the_pages_of_the_guide_and_of_the_api(site: Path) -> None:
    for page in [*(CHECKOUT / "docs").glob("*.md"), *map(Path, pages.hooks().generated())]:
        inside = page.relative_to(CHECKOUT / "docs") if page.is_absolute() else page
        assert (site / inside.with_suffix(".html")).is_file(), page
    assert "sensitivity" in (site / "api" / "algorithms.html").read_text()
    assert list(site.rglob("*.py")) == []


@pytest.mark.slow
def test_no_header_and_no_picture_is_without_words(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"<th[^>]*>\s*</th>", text), page
        assert not [tag for tag in re.findall(r"<img[^>]*>", text) if not re.search(r'alt="[^"]', tag)], page
        assert "site/access.js" in text, page


def test_each_reader_has_a_short_page_at_the_beginning() -> None:
    start, *_ = yaml.load((CHECKOUT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]
    _, *readers = start["Start"]
    names = [name for entry in readers for name in entry.values()]
    assert names.pop() == "extend.md"
    assert len(names) == 3
    for name in names:
        assert len((CHECKOUT / "docs" / name).read_text().split()) <= 250, name
        assert f"(docs/{name})" in (CHECKOUT / "README.md").read_text()


# README, pictures, citation, changelog


def test_the_readme_is_a_front_door() -> None:
    text = (CHECKOUT / "README.md").read_text()
    assert text.count("\n") <= 130
    assert len(re.findall(r"^- \*\*", text, re.MULTILINE)) == 5


def test_the_pictures_are_those_of_the_records(tmp_path: Path) -> None:
    """What is written in them and where the points are, as far as versions of matplotlib draw alike."""
    pages.load("pictures/draw.py").main(tmp_path)
    made = sorted(tmp_path.iterdir())
    assert len(made) == 4
    for path in made:
        now, kept = path.read_text(), (CHECKOUT / "docs" / "pictures" / path.name).read_text()
        assert len(kept) < 64 * 1024
        assert re.findall(r"<text[^>]*>([^<]*)", now) == re.findall(r"<text[^>]*>([^<]*)", kept)
        assert re.findall(r"<use [^>]*>", now) == re.findall(r"<use [^>]*>", kept)


def test_the_picture_of_tuning_has_the_points_of_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "scripts")
    import when_tuning_pays

    lines = [line for line in (CHECKOUT / "results" / "tuning.csv").open() if not line.startswith("#")]
    rows = [row | {"epsilon": float(row["epsilon"])} for row in csv.DictReader(lines)]
    when_tuning_pays.draw(rows, tmp_path / "tuning.svg")
    now, kept = (
        re.findall(r'<use [^>]*x="([^"]*)" y="([^"]*)"', path.read_text())
        for path in (tmp_path / "tuning.svg", CHECKOUT / "docs" / "pictures" / "tuning.svg")
    )
    assert len(now) > len(rows)
    assert now == kept


def test_citation_and_changelog_name_the_version() -> None:
    citation = yaml.safe_load((CHECKOUT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    assert citation["version"] == pubsel.__version__
    sections = re.findall(r"^## \[(.*?)\]", (CHECKOUT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", pubsel.__version__]
