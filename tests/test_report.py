import contextlib
import copy
import json
import re
import shlex
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from pubsel import records
from pubsel.cli import main
from pubsel.messages import UsageError
from pubsel.papers import figures, join, measured, report
from pubsel.papers.report import own
from pubsel.privacy import composition, ledger
from pubsel.release import card
from pubsel.settings import CONF, command_line
from pubsel.settings.compose import composed
from pubsel.settings.keys import ReportConfig, RunConfig
from pubsel.settings.schema import check
from tests.made import write_npz
from tests.synthetic import record, save

HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>\"'`&$x^2{{ 7 * 7 }}"
KEPT = records.read_records(CONF.parent / "results")
FEW = KEPT[::400]  # a page of all takes twenty seconds
ALL_TABLES = join.table_names
TABLES = ["adamix_ours", "gep_table1", "gsd_table14", "gsd_table2", "medical_ours", "pillar_ours"]
EMPTY = {"meta", "wbr", "link", "img", "input", "br", "path", "use", "rect", "circle", "image"}


def runs_of(data):
    """Return the runs in a page's data as its script takes them: each has what differs from the one before."""
    places, runs = {}, []
    for changes in data["runs"]:
        places = places | {int(i): place for i, place in changes.items()}
        run = {data["keys"][i]: data["pool"][place] for i, place in sorted(places.items())}
        identity = joined(run, "identity", "-")
        runs.append(run | {"command": joined(run, "command", " ").replace("NAME", identity), "identity": identity})
    return runs


def joined(run, group, between):
    """Return the words of a list that the page has word by word."""
    words = {int(key.partition(".")[2]): word for key, word in run.items() if key.startswith(f"{group}.")}
    return between.join(words[i] for i in sorted(words) if words[i] is not None)


class Page(HTMLParser):
    """A page as a browser finds it: elements with their attributes, ids, and the data."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.data, self.texts = [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            self.data = self.data or text
        self.texts.append(text)

    def all(self, key):
        return [attributes[key] for _, attributes in self.elements if key in attributes]


@pytest.fixture(autouse=True, scope="module")
def few_tables():
    """Six of the tables; test_a_page_of_everything_is_well_formed_and_small has them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join, "table_names", lambda: TABLES)
        yield


@pytest.fixture(scope="module")
def shown():
    """All records of two tables, and some of two others."""
    every = {"gsd_table2": 1, "medical_ours": 1, "adamix_ours": 10, "pillar_ours": 10}
    chosen = [one for name, step in every.items() for one in join.make(name, KEPT).records()[::step]]
    return sorted({one["identity"]: one for one in chosen}.values(), key=lambda one: one["identity"])


@pytest.fixture(scope="module")
def kept(shown):
    return report.page(shown)


def three():
    sets = {"fashion_mnist": (0.1, 0.9), "mnist": (0.3, 0.8), "flowers5": (0.5, 0.85)}
    return [record(seed, u, (d, d + 0.02), p) for p, (d, u) in sets.items() for seed in (0, 1)]


def hurting():
    return [one | {"label": HOSTILE, "identity": f"{HOSTILE}{i}", "notes": [HOSTILE]} for i, one in enumerate(three())]


def leads_somewhere(text):
    """Check that elements are closed, ids are unique, and each link has its target."""
    page = Page(text)
    assert page.open == []
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    data = json.loads(page.data)
    for link in page.all("href"):
        assert link.startswith("#")
        assert link[1:] in ids or link[1:] in data["behind"], link
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | {h[1:] for h in page.all("xlink:href")}
    assert used <= set(ids)


def test_the_page_is_well_formed_with_unique_ids_and_links_that_lead_somewhere(kept):
    leads_somewhere(kept)


def test_the_page_needs_no_network(kept):
    assert set(re.findall(r"https?://[^\s\"'<]+", kept)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"@import|src=\"(?!data:)|url\((?!#)", kept)
    policy = next(a["content"] for tag, a in Page(kept).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


@pytest.mark.slow
def test_a_page_of_everything_is_well_formed_and_small(monkeypatch):
    monkeypatch.setattr(join, "table_names", ALL_TABLES)
    text = report.page(KEPT)
    assert len(text.encode()) < 400 * len(KEPT)  # a record itself has 3,400 bytes
    leads_somewhere(text)


def test_behind_each_number_stand_its_runs_with_the_command(kept):
    data = json.loads(Page(kept).data)
    runs = runs_of(data)
    for name in ("gsd_table2", "medical_ours"):
        for i, cell in enumerate(join.make(name, KEPT).cells):
            if cell is None:
                assert f"{name}/{i + 1}" not in data["behind"]
                continue
            behind = [runs[number] for number in data["behind"][f"{name}/{i + 1}"]]
            assert [run["identity"] for run in behind] == [record["identity"] for record in cell.records]
            for run, whole in zip(behind, cell.records, strict=True):
                for group in ("settings", "privacy"):
                    inner = {key.partition(".")[2]: run[key] for key in run if key.startswith(f"{group}.")}
                    for key in inner.keys() | whole[group].keys():  # a key that other runs have is null
                        assert inner.get(key) == whole[group].get(key)
                assert run["command"] == command_line.command(whole)
                assert run["utility"] == whole["utility"]
            mean = 100 * sum(run["utility"] for run in behind) / len(behind)
            links = re.findall(rf'class="number ours"[^>]*><a href="#{name}/{i + 1}"[^>]*>([\d.]+)</a>', kept)
            assert [float(number) for number in links] == [pytest.approx(mean, abs=0.006)]
        assert any(key.startswith(f"{name}/rank/") for key in data["behind"])


def test_missing_numbers_and_tables_without_records_are_shown(tmp_path):
    text = report.page(records.read_records(save(tmp_path, record())))
    assert "1 of 15 rows" in text
    assert '<td class="number gap ours"><span title="no number">—</span>' in text
    assert "Not run yet" in text
    assert "make gep-table1" in text
    empty = report.page([])
    assert "No record of any table yet" in empty
    assert Page(empty).open == []


def test_runs_of_no_table_have_one_of_their_own(tmp_path):
    mine = record(utility=0.7) | {"private": "mine", "identity": "mine"}
    page = report.page(records.read_records(save(tmp_path, record(1), mine)))
    assert "Other runs" in page
    assert "pubsel table others" not in page
    data = json.loads(Page(page).data)
    (run,) = data["behind"]["others/1"]
    assert runs_of(data)[run]["identity"] == "mine"
    assert "Other runs" not in report.page(records.read_records(save(tmp_path / "known", record(1))))


def test_oracle_selection_and_mixed_versions_are_marked(kept):
    section = kept.split('<section id="adamix_ours"')[1].split("</section>")[0]
    assert "oracle selection" in section
    assert "Settings were selected on the test set (oracle)" in section
    assert "mixed versions" in section
    assert re.search(r"Mixed versions of the code: [0-9a-f]{7}[^(]* \(\d+ runs\), ", section)


def hostile_page():
    drawing = "<svg xmlns='http://www.w3.org/2000/svg' onload='window.hurt = 1'><script>window.hurt = 1</script></svg>"
    return report.page(hurting(), others={"mine": drawing})


def test_names_are_text_and_never_markup():
    page = Page(hostile_page())
    assert page.open == []
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert not {"onerror", "onload"} & {key for _, attributes in page.elements for key in attributes}
    assert json.loads(page.data)["pool"].count(HOSTILE) == 1
    assert HOSTILE in "".join(page.texts)


def test_the_command_writes_the_file_and_takes_other_drawings_in(tmp_path):
    save(tmp_path, *three())
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "cluster_map.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (tmp_path / "figures" / "pillar_k.svg").write_text("drawn by the page itself")

    def written(to):
        return report.run(ReportConfig(results=str(tmp_path), to=to and str(to), debug=False))

    assert "6 records" in written(None)
    text = (tmp_path / "report.html").read_text()
    assert 'id="figure-cluster_map"' in text
    assert "figure-pillar_k" not in text
    other = tmp_path / "elsewhere" / "page.html"
    written(other)
    assert other.read_text() == text
    for read in (next(tmp_path.glob("runs/*/result.json")), tmp_path / "figures" / "cluster_map.svg"):
        with pytest.raises(UsageError, match="which the command reads"):
            written(read)


# The user's own data

HURTING = "<img src=x onerror=window.hurt=1> & 'q'"  # a folder may have this name
CLASSES = ["<script>window.hurt=1", "a&b {{ 7 * 7 }}", "z"]
SMALL = ["threads=1", "download=false"]


def images(folder, seed, names=CLASSES, each=60):
    """Grey images of 16 pixels, a folder a class, which differ in one bright row."""
    draw = np.random.default_rng(seed)
    for place, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            pixels = draw.integers(0, 90, (16, 16))
            pixels[4 * place : 4 * place + 4] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder in which somebody ranked, fitted and trained, on a folder of images and on an npz."""
    folder = tmp_path_factory.mktemp("workplace")
    images(folder / HURTING, 0)
    images(folder / "a", 1, ["p", "q"])
    images(folder / "b", 2, ["r", "s"])
    pixels = np.random.default_rng(3).integers(0, 255, (120, 6, 6)).astype(np.uint8)
    labels = np.arange(120) % 3
    write_npz(folder / "plain.npz", (pixels[:90], labels[:90]), (pixels[90:], labels[90:]))

    private = f"private={command_line.written(f'./{HURTING}')}"
    measure = ["model=scattering", "distance.m=60", "distance.k=4", "distance.initialisations=2", *SMALL]
    seeded = ["pair.private=./plain.npz", "pair.public=null", "model=linear", "algorithm=dp_sgd", "epsilon=2"]
    commands = [
        ["rank", private, "public=[./a,./b]", *measure],
        ["rank", private, "public=[./a,./b]", "epsilon_select=0.5", *measure],
        *(["fit", private, "public=[./a,./b]", "epsilon=1", f"seed={i}", f"to=r{i}", *SMALL] for i in range(3)),
        ["run", *seeded, "distance=none", "training.epochs=1", "training.batch_size=20", "threads=1"],
    ]
    with contextlib.chdir(folder):
        for words in commands:
            assert main(words) == 0
        assert main(["report"]) == 0
    return folder


@pytest.fixture(scope="module")
def text(workplace):
    return (workplace / "results" / "report.html").read_text()


def sets_of(folder):
    """Return the user's private data sets, by title."""
    results = folder / "results"
    read = (records.read_records, measured.read_ranks, measured.read_choices, ledger.ledgers)
    return {private.title: private for private in own.split_own(*(kind(results) for kind in read))}


def section_of(text, name):
    return text.split(f'<section id="{name}"')[1].split("</section>")[0]


def table_after(text, heading):
    """Return the rows of the first table below a heading, as texts."""
    rows = re.findall(r"<tr.*?</tr>", text.split(heading)[1].split("</table>")[0], re.DOTALL)
    cells = [re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL) for row in rows]
    return [[" ".join(Page(cell).texts).split() for cell in row] for row in cells]


def test_whoever_has_own_data_alone_reads_of_nothing_else(text):
    page = Page(text)
    assert [tag for tag, a in page.elements if a.get("id") in ("own-1", "own-2")] == ["section", "section"]
    for word in ("Other runs", "Not run yet", 'id="tables"', "paper's", "pubsel table", "gsd_table"):
        assert word not in text.partition("<style>")[0] + text.partition("</style>")[2].partition("<script")[0]
    leads_somewhere(text)


def test_own_data_come_before_the_tables_and_are_in_none_of_them(workplace):
    of_both = [*FEW, *records.read_records(workplace / "results")]
    text = report.page(of_both, released=ledger.ledgers(workplace / "results"))
    places = [text.index(f'id="{name}"') for name in ("own-1", "own-2", "tables", "gsd_table2")]
    assert places == sorted(places)
    assert "Not run yet" in text
    assert Page(text).open == []
    data = json.loads(Page(text).data)
    theirs = {i for key, runs in data["behind"].items() if key.startswith("own-") for i in runs}
    papers = {i for key, runs in data["behind"].items() if not key.startswith(("own-", *figures.CURVES)) for i in runs}
    assert len(theirs) == 4
    assert papers
    assert not theirs & papers


def test_without_own_data_nothing_is_added(kept, workplace, tmp_path):
    ledger.note(tmp_path, "content", ledger.Entry("cell", "digits", "training", 2.0, 1e-5, None))
    assert report.page(FEW, released=ledger.ledgers(tmp_path), results="elsewhere") == report.page(FEW)
    assert "own" not in "".join(Page(kept).all("class")).split()
    for asset in ("own.css", "own.js"):
        assert (report.HERE / asset).read_text() not in kept
        assert (report.HERE / asset).read_text() in (workplace / "results" / "report.html").read_text()


def test_what_is_spent_is_the_ledgers_sum_and_the_composition_of_what_is_known(workplace, text):
    private = sets_of(workplace)[HURTING]
    assert {line["what"] for line in private.lines if composition.mu_of(line)} == {"training", "measurement"}
    assert {line["what"] for line in private.lines if not composition.mu_of(line)} == {"choice"}
    for line in private.lines:
        if mu := composition.mu_of(line):  # which gives the epsilon that the ledger has
            parts = composition.Components(mu, ())
            assert composition.composed_epsilon(line["delta"], parts) == pytest.approx(line["epsilon"], rel=1e-6)

    total, less = ledger.cost_of(private.lines), composition.tighter(private.lines)
    assert total.epsilon == pytest.approx(3.5, rel=1e-6)
    assert less.epsilon < 2.5 < total.epsilon
    section = " ".join("".join(Page(section_of(text, "own-1")).texts).split())
    assert "(3.5, 3e-05)-differentially private for one example, against" in section
    assert f"({card.above(less.epsilon)}, 3e-05)-differentially private. This holds if nobody looked" in section
    assert sum(len(row) > 0 for row in table_after(section_of(text, "own-1"), "<summary>The 10 releases")) == 11


def test_what_the_ledger_lacks_is_named_and_in_the_sum(workplace, tmp_path):
    read, choices = records.read_records(workplace / "results"), measured.read_choices(workplace / "results")
    stated = ledger.stating(workplace / "results")
    lines = ledger.ledgers(workplace / "results", stated)
    assert "not in the ledger of this results folder" not in report.page(read, [], {}, choices, lines)
    text = " ".join(report.page(read, [], {}, choices, ledger.ledgers(tmp_path, stated)).split())
    assert "4 runs or choices with a guarantee are not in the ledger of this results folder, or not in full" in text
    assert "The sum has what their records say beyond it: epsilon 3.5, delta 3e-05." in text
    assert "beyond it: epsilon 2, delta 1e-05." in text
    assert "(3.5, 3e-05)-differentially private for one example" in text


def test_the_best_of_several_runs_costs_what_all_of_them_cost(workplace, text):
    section = " ".join("".join(Page(section_of(text, "own-1")).texts).split())
    assert f"If you publish the best of these 3 runs on {HURTING}, what all of them spend counts: " in section
    assert "for one example epsilon 3 at delta 3e-05, the sum; or " in section
    stated = "the best of these 3 runs on ham10000, what all of them spend counts: for one example epsilon 1.7 at delta"
    chosen = ("8c00b86009", "4ea95047a0", "75125136c3")  # epsilon 0.1 and 1 for an image, and 0.3 for a person
    page = report.page([record for record in KEPT if record["identity"].endswith(chosen)])
    assert f"{stated} 4.35e-05, the sum; for one person (lesion) epsilon 0.3 at delta 1e-05, the sum." in page


def test_people_and_images_have_a_sum_each(tmp_path):
    release = ledger.Entry("cell", "./mine", "training", 0.05, 1e-7, None)
    for i in range(200):
        ledger.note(tmp_path, "content", release._replace(cell=f"{i}"))
    assert "Composed tightly" in report.page([], released=ledger.ledgers(tmp_path))
    ledger.note(tmp_path, "content", release._replace(what="training, for a person (folder)"))
    text = report.page([], released=ledger.ledgers(tmp_path))
    section = " ".join("".join(Page(section_of(text, "own-1")).texts).split())
    assert "together are (10.1, 2.021e-05)-differentially private for one example" in section
    assert "people together are (0.05, 1e-07)-differentially private for one person (folder) with all" in section
    assert f"Some releases protect examples and others people: {ledger.OF_UNITS}." in section
    assert "The 201 releases" in text


def test_the_noisy_matrix_is_the_records_with_the_names_of_its_classes(workplace, text):
    latest = max(sets_of(workplace)[HURTING].records, key=lambda record: record["finished"])
    parts = [part for part in section_of(text, "own-1").split("<details") if 'class="matrix"' in part]
    shown = [table_after(part, "<table") for part in parts]
    assert len(shown) == 3
    counts = [[[f"{round(count)}".replace("-", "−")] for count in row] for row in latest["quality"]["counts"]]
    head, *rows = next(table for table in shown if [row[1:4] for row in table[1:]] == counts)
    assert [" ".join(name) for name in head[1:4]] == CLASSES == [" ".join(row[0]) for row in rows]
    recall = latest["quality"]["figures"]["recall of each class"]
    assert float(rows[0][4][0]) == pytest.approx(100 * recall[0][0], abs=0.05)
    assert f"deviation {latest['quality']['deviation']:.3g}" in text


def test_many_classes_and_histograms_have_their_figures_alone(workplace):
    one = copy.deepcopy(sets_of(workplace)[HURTING].records[0])
    many = own.MOST_CLASSES + 1
    one["quality"]["counts"] = np.zeros((many, many)).tolist()
    text = report.page([one])
    assert f"The table of {many} classes is too large" in text
    one["quality"] |= {"table": "histograms", "counts": np.zeros((1, 2, 32)).tolist()}
    one["quality"]["figures"] = {"auc": [0.9, 0.85, 0.95], "auc of each label": [[0.9], [0.85], [0.95]]}
    text = report.page([one])
    assert "auc 90.0 % [85.0, 95.0]" in text
    assert 'class="matrix"' not in text


def test_a_run_stands_with_what_was_measured_and_what_is_not_private(workplace, text):
    head, *rows = table_after(section_of(text, "own-1"), "<h3>Runs</h3>")
    heads = [" ".join(words) for words in head]
    assert heads[:5] == ["Run", "Measured privately", "On test images, not private", "ε", "Public data"]
    by_identity = {record["identity"]: record for record in sets_of(workplace)[HURTING].records}
    assert len(rows) == 3
    for row in rows:
        of_run = by_identity["".join(row[0])]
        estimate, low, high = (f"{100 * value:.1f}" for value in of_run["quality"]["figures"]["accuracy"])
        assert row[1] == [estimate, f"[{low},", f"{high}]"]
        assert row[2][0] == f"{100 * of_run['utility']:.1f}"
        assert " ".join(row[4]).endswith(", chosen privately")
    assert "Keep this page to yourself" in text


def test_a_distance_is_called_not_private_unless_it_is_a_release(workplace, text):
    head, *rows = table_after(section_of(text, "own-1"), "<h3>What was ranked</h3>")
    assert [" ".join(words) for words in head][:3] == ["Public data", "Distance", "Guarantee"]
    assert [row[2] for row in rows] == [["not", "private"]] * 2
    ranks = measured.read_ranks(workplace / "results")
    values = {rank["public"]: np.mean(rank["distance"]["values"]) for rank in ranks}
    assert {row[0][0]: row[1][0] for row in rows} == {name: f"{value:.3f}" for name, value in values.items()}
    assert float(rows[0][1][0]) <= float(rows[1][1][0])

    line = {"cell": ranks[0]["identity"].removesuffix(f" {ranks[0]['public']}"), "private": ranks[0]["private"]}
    line |= {"what": "DP-GSD", "epsilon": 1.0, "delta": 1e-5, "release": "r", "noise": "seeded", "state": "begun"}
    line["when"] = "2026-01-01"
    rows = table_after(report.page([], ranks, released=[[line]]), "<h3>What was ranked</h3>")[1:]
    assert [row[2] for row in rows] == [["a", "private", "release"]] * 2


def test_names_of_one_folder_are_one_set_and_named_sets_are_none():
    def of(private, identity):
        return {"private": private, "identity": identity}

    given = [of("./x", "1"), of("x/", "2"), of("./y.npz", "3"), of("digits", "4")]
    lines = [{"private": "./x"}, {"private": "/data/x"}, {"private": "digits"}]
    sets = own.split_own(given, [], [of("/data/x", "5")], [lines])
    assert [[record["identity"] for record in private.records] for private in sets] == [["1", "2"], ["3"]]
    assert [len(private.choices) for private in sets] == [1, 0]
    assert [len(private.lines) for private in sets] == [3, 0]
    assert [record["identity"] for record in own.without(given)] == ["4"]


def suggested(text, name="own-1"):
    commands = re.findall(r'<pre class="try".*?</pre>', section_of(text, name), re.DOTALL)
    return [shlex.split("".join(Page(part).texts)) for part in commands]


def test_what_is_suggested_fits_what_is_there_and_can_be_run(workplace, text, monkeypatch):
    fits, plain = sets_of(workplace)[HURTING], sets_of(workplace)["plain.npz"]
    latest = max(fits.records, key=lambda record: record["finished"])
    assert suggested(text) == [["pubsel", "predict", latest["identity"], "./new_images"]]

    # A ranking and nothing else.
    alone = report.page([], fits.ranks, choices=fits.choices, results="./else where")
    (words,) = suggested(alone)
    private = f"private={command_line.written(f'./{HURTING}')}"
    assert words == ["pubsel", "fit", private, "public=[./a,./b]", "epsilon=1", "results='./else where'"]
    monkeypatch.chdir(workplace)
    assert main([*words[1:], "dry=true", "to=new", *SMALL]) == 0

    # Seeded noise, and nothing measured.
    (words,) = suggested(text, "own-2")
    assert words[:2] == ["pubsel", "run"]
    with composed("run", records.expanded("run", words[2:])) as values:
        changed = check(RunConfig, values)
    assert changed.privacy.secure_noise
    assert changed.privacy.measure
    assert changed.pair.validation > 0
    assert changed.epsilon == 2
    assert "It spends epsilon 2 once more" in text

    # That run: it may be given away.
    assert main(words[1:]) == 0
    both = report.page(records.read_records(workplace / "results"))
    (words,) = suggested(both, "own-2")
    assert words[:2] == ["pubsel", "export"]
    assert words[3:] == ["to=release"]
    assert main(words[1:]) == 0

    # Nothing is suggested that its settings do not allow, nor a model whose accounting is unsound.
    person = copy.deepcopy(plain.records[0])
    person["settings"]["pair"] |= {"unit": "folder"}
    person["privacy"]["valid"] = False
    (words,) = suggested(report.page([person]), "own-1")
    assert {"privacy.secure_noise=true"} <= set(words)
    assert "privacy.accounting=paper" not in words


# In a browser


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install .[dev]")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    program = shutil.which("chromedriver")
    if not chromium or not program:
        pytest.skip("no chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for word in [*"headless=new no-sandbox no-first-run".split(), f"user-data-dir={profile}"]:
        options.add_argument(f"--{word}")
    for word in "gpu background-networking component-update sync dev-shm-usage".split():
        options.add_argument(f"--disable-{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(program))
    yield started
    started.quit()


@pytest.fixture
def browser(driver):
    """A browser that has nothing to complain of at the end of the test."""
    yield driver
    assert [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def address_of(folder, text):
    """Write a page into a folder."""
    (folder / "report.html").write_text(text)
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def address(kept, tmp_path_factory):
    return address_of(tmp_path_factory.mktemp("page"), kept)


@pytest.fixture(scope="module")
def own_address(workplace):
    return (workplace / "results" / "report.html").as_uri()


def opened(browser, address, width=1280, scheme="light"):
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get("about:blank")  # an address that differs behind # alone would load nothing
    browser.get(address)
    return browser


def keys(browser, *pressed):
    """Press keys by name: ENTER, TAB."""
    from selenium.webdriver import ActionChains, Keys

    ActionChains(browser).send_keys(*(getattr(Keys, key) for key in pressed)).perform()


def enter(browser, element):
    """Press Enter where an element has the focus."""
    browser.execute_script("arguments[0].focus()", element)
    keys(browser, "ENTER")


def until(browser, condition):
    """Waits for what a key has set off."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 10).until(lambda _: condition())


@contextlib.contextmanager
def runs_behind(browser, link):
    """The runs behind a link, opened by keyboard; Escape then leads back to it."""
    enter(browser, link)
    dialog = browser.find_element("id", "runs")
    until(browser, dialog.is_displayed)
    yield dialog
    keys(browser, "ESCAPE")
    until(browser, lambda: not dialog.is_displayed())
    assert browser.switch_to.active_element == link


def column(browser, table, head):
    """Return the texts of a column of a table, without what stands beside its numbers."""
    return browser.execute_script(
        """const table = document.querySelector(`#${arguments[0]} table`);
        const heads = [...table.tHead.rows[0].cells].map((cell) => cell.innerText.trim());
        const place = heads.indexOf(arguments[1]);
        return [...table.tBodies[0].rows].map((row) => {
          const cell = row.cells[place];
          return (cell.querySelector("a, span[title]") || cell).textContent.trim();
        });""",
        table,
        head,
    )


def header(browser, table, head):
    heads = browser.find_elements("css selector", f"#{table} > .scroll th")
    return next(cell for cell in heads if cell.text.strip().startswith(head))


def test_a_column_sorts_by_click_and_by_keyboard_and_gaps_come_last(browser, address):
    opened(browser, address)
    before = column(browser, "gsd_table2", "Ours")
    head = header(browser, "gsd_table2", "Ours")
    assert head.get_attribute("aria-sort") == "none"
    head.find_element("tag name", "button").click()
    numbers = sorted((text for text in before if text != "—"), key=float)
    assert column(browser, "gsd_table2", "Ours") == numbers + ["—"] * before.count("—")
    assert head.get_attribute("aria-sort") == "ascending"
    keys(browser, "ENTER")  # the button has the focus
    assert column(browser, "gsd_table2", "Ours") == numbers[::-1] + ["—"] * before.count("—")
    assert head.get_attribute("aria-sort") == "descending"
    keys(browser, "TAB", "SPACE")
    assert head.get_attribute("aria-sort") == "none"
    assert header(browser, "gsd_table2", "Paper").get_attribute("aria-sort") == "ascending"
    assert column(browser, "gsd_table2", "Paper")[0] == "52.16"
    assert "Paper, ascending" in browser.find_element("id", "said").get_attribute("textContent")


def test_a_number_leads_to_its_runs_by_keyboard_and_back(browser, address):
    opened(browser, address)
    cells = join.make("gsd_table2", KEPT).cells
    cell = next(cell for cell in cells if cell and cell["algorithm"] == "dp_sgd" and len(cell.records) == 3)
    place = cells.index(cell) + 1
    link = browser.find_element("css selector", f'a[href="#gsd_table2/{place}"]:not([tabindex])')
    with runs_behind(browser, link) as dialog:
        text = dialog.text
        assert "3 runs behind this number" in text
        assert "dp_sgd on fashion_mnist without public data, ε 2" in text
        assert cell["privacy"]["statement"] in text
        assert command_line.command(cell.records[0]) in text
        runs = dialog.find_elements("css selector", "details.run")
        assert [run.get_attribute("open") for run in runs] == ["true", None, None]
        assert cell.records[2]["identity"] in text
    assert "#" not in browser.current_url
    keys(browser, "ENTER")  # a second time
    until(browser, dialog.is_displayed)


def test_every_row_with_runs_has_one_stop_for_the_keyboard(kept):
    for row in re.findall(r"<tr.*?</tr>", kept, re.DOTALL):
        links = re.findall(r'<a href="#([^"]+)"( tabindex="-1")?>', row)
        if links:
            assert len({key for key, _ in links}) == 1
            assert sum(not hidden for _, hidden in links) == 1


def test_a_measured_distance_alone_leads_to_its_command(browser, tmp_path):
    rank = {
        "identity": "digits-probe-1",
        "private": "ham10000_224",
        "model": "probe",
        "commit": "c",
        "seed": 0,
        "settings": {"seed": 0, "private": "ham10000_224", "public": ["kagskin"], "model": {"name": "probe"}},
        "public": "kagskin",
        "label": "paper",
        "algorithm": None,
        "epsilon": None,
        "utility": None,
        "distance": {"values": [0.25, 0.35]},
    }
    opened(browser, address_of(tmp_path, report.page([], [rank])))
    link = browser.find_element("css selector", "#gsd_table14 td a:not([tabindex])")
    assert link.text == "1"  # seeds
    assert column(browser, "gsd_table14", "Distance").count("0.300") == 1
    link.click()
    text = browser.find_element("id", "runs").text
    assert "Distance of kagskin to ham10000" in text
    assert "distance 0.25, 0.35" in text
    assert "pubsel rank" in text


def test_links_from_elsewhere_open_the_runs(browser, address, shown, tmp_path):
    one = next(r for r in shown if r["algorithm"] == "gep" and r["private"] == "fashion_mnist")
    for key, part in {"medical_ours/3": "dp_md on ham10000", f"run/{one['identity']}": "gep on fashion_mnist"}.items():
        opened(browser, f"{address}#{key}")
        assert part in browser.find_element("id", "runs-title").text
    opened(browser, f"{address}#gsd_table2/rank/4")
    assert "behind this number" in browser.find_element("id", "runs").text
    small = address_of(tmp_path, report.page([record()]))
    for wrong in ("nosuch/1", "run/nosuch", "%E0%A4%A", "toString", "__proto__"):
        opened(browser, f"{small}#{wrong}")
        assert not browser.find_element("id", "runs").is_displayed()


def test_rows_are_filtered_by_their_words(browser, address):
    opened(browser, address)
    browser.find_element("css selector", "#pillar_ours .filter").send_keys("PILLAR kagchest")
    rows = browser.find_elements("css selector", "#pillar_ours > .scroll tbody tr")
    shown = [row.text for row in rows if row.is_displayed()]
    assert 0 < len(shown) < len(rows)
    assert all("kagchest" in text and "pillar" in text for text in shown)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
@pytest.mark.parametrize("page", ["address", "own_address"])
def test_nothing_overflows_and_text_can_be_read(browser, request, page, width, scheme):
    opened(browser, f"{request.getfixturevalue(page)}{'#gsd_table2/12' if page == 'address' else ''}", width, scheme)
    body = "document.getElementById('runs-body')"
    assert browser.execute_script(f"return {body}.scrollWidth <= {body}.clientWidth")
    browser.execute_script("document.getElementById('runs').close()")
    for details in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", details)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    contrasts = browser.execute_script(CONTRAST)
    assert contrasts["least"] >= 4.5, contrasts
    assert (contrasts["page"] < 0.1) == (scheme == "dark")


CONTRAST = """
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const linear = [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (colour.startsWith("rgb(")) return parts(colour);
  }
};
let least = 99, where = "";
for (const selector of ["p", "h1", "h2", "h3", "td", "th button", "td a", "li", ".spread", ".under", ".mark", ".made",
    "dd", "dt", ".gap", ".better", ".worse", "nav a", "summary", "code", ".program"]) {
  const found = document.querySelectorAll(`header ${selector}, main ${selector}, nav ${selector}`);
  for (const node of [...found].slice(0, 60)) {
    if (!node.textContent.trim()) continue;
    const [a, b] = [light(parts(getComputedStyle(node).color)), light(behind(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < least) [least, where] = [contrast, `${selector}: ${node.textContent.trim().slice(0, 30)}`];
  }
}
return {least, where, page: light(parts(getComputedStyle(document.body).backgroundColor))};
"""


def test_hostile_names_do_nothing_in_a_browser(browser, tmp_path):
    opened(browser, address_of(tmp_path, hostile_page()))
    browser.find_element("css selector", ".ours a").click()
    assert "window.hurt" in browser.find_element("id", "runs").text
    assert browser.execute_script("return window.hurt === undefined")


@pytest.mark.attack
def test_a_private_choice_is_shown_as_one_and_never_to_be_deleted(tmp_path, folder, capsys):
    """Reports and tables said that it lacks `values`: delete it, which would delete a private release."""
    words = ["private=digits", "public=[digits,noise]", "model=digits_cnn", "distance.m=100", "distance.k=4"]
    assert main(["rank", *words, "distance.initialisations=1", "epsilon_select=0.5"]) == 0
    assert main(["rank", *words, "distance.initialisations=1"]) == 0
    (choice,) = measured.read_choices(tmp_path / "results")
    assert {one["public"] for one in measured.read_ranks(tmp_path / "results")} == {"digits", "noise"}
    for words in (["report"], ["table", "all"], ["table", "gsd_table14"], ["table", "gsd_table2"]):
        capsys.readouterr()
        assert main(words) == 0
        said = capsys.readouterr()
        assert "delete" not in said.out + said.err
        if words[-1] == "all":
            assert f"Chosen privately for digits, of digits, noise: {choice['chosen']} (epsilon 0.5, seed 0" in said.out
    page = Page((tmp_path / "results" / "report.html").read_text())
    assert page.open == []
    told = " ".join(page.texts)
    assert choice["privacy"]["statement"] in told
    assert f"pubsel rank like={choice['identity']}" in told


# The user's own data in a browser


def test_own_numbers_lead_to_their_runs_by_keyboard_and_back(browser, own_address):
    opened(browser, own_address)
    assert browser.find_element("css selector", "#own-1-title").text == HURTING
    assert CLASSES[0] in browser.find_element("css selector", "#own-1 .matrix").text
    button = browser.find_element("css selector", "#own-1 .next .copy")
    enter(browser, button)
    until(browser, lambda: button.text == "Copied")

    opened(browser, own_address)
    keys(browser, "TAB")
    assert browser.switch_to.active_element.text == "Skip to your data"
    keys(browser, "ENTER")
    assert browser.current_url.endswith("#own")
    links = {".runs td a:not([tabindex])": "whitened_head on", "td a[href*=distance]": "Distance of"}
    for selector, part in links.items():
        link = browser.find_element("css selector", f"#own-1 {selector}")
        with runs_behind(browser, link) as dialog:
            assert part in browser.find_element("id", "runs-title").text
            assert HURTING in dialog.text
    assert browser.execute_script("return window.hurt === undefined")


def test_own_runs_are_sorted_and_what_has_no_number_comes_last(browser, workplace, tmp_path):
    one, *_ = sets_of(workplace)[HURTING].records
    none = copy.deepcopy(one) | {"identity": "none", "epsilon": None, "quality": None, "utility": 0.01}
    none["privacy"] = {"valid": False, "statement": "No privacy.", "epsilon": None}
    none["settings"]["seed"] = none["seed"] = 7
    opened(browser, address_of(tmp_path, report.page([*sets_of(workplace)[HURTING].records, none])))
    for head in browser.find_elements("css selector", "#own-1 .runs th button"):
        if head.text.startswith(("ε", "Measured")):
            for _ in range(2):
                head.click()
                rows = browser.find_elements("css selector", "#own-1 .runs tbody tr")
                assert rows[-1].text.startswith("none")
                assert "∞" in rows[-1].text
