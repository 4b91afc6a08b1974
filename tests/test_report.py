import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from pubsel import records, report
from pubsel.cli import main
from pubsel.messages import UserError
from pubsel.settings import CONF, command_line
from pubsel.settings.keys import ReportConfig
from pubsel.tables import join
from tests.synthetic import record, save

HOSTILE = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>\"'`&$x^2{{ 7 * 7 }}"
KEPT = records.read_records(CONF.parent / "results")
EMPTY = {"meta", "wbr", "link", "img", "input", "br", "path", "use", "rect", "circle", "image"}


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, ids, and the data."""

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


@pytest.fixture(scope="module")
def kept():
    return report.page(KEPT)


def three():
    sets = {"fashion_mnist": (0.1, 0.9), "mnist": (0.3, 0.8), "flowers5": (0.5, 0.85)}
    return [record(seed, u, (d, d + 0.02), p) for p, (d, u) in sets.items() for seed in (0, 1)]


def hurting():
    return [one | {"label": HOSTILE, "identity": f"{HOSTILE}{i}", "notes": [HOSTILE]} for i, one in enumerate(three())]


def test_the_page_is_well_formed_with_unique_ids_and_links_that_lead_somewhere(kept):
    page = Page(kept)
    assert page.open == []
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    data = json.loads(page.data)
    for link in page.all("href"):
        assert link.startswith("#")
        assert link[1:] in ids or link[1:] in data["behind"], link
    used = set(re.findall(r"url\(#([^)]+)\)", kept)) | {h[1:] for h in page.all("xlink:href")}
    assert used <= set(ids)


def test_the_page_needs_no_network(kept):
    assert set(re.findall(r"https?://[^\s\"'<]+", kept)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"@import|src=\"(?!data:)|url\((?!#)", kept)
    policy = next(a["content"] for tag, a in Page(kept).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_with_all_records_it_stays_small(kept):
    assert len(kept.encode()) < 4e6


def test_behind_each_number_stand_its_runs_with_the_command(kept):
    data = json.loads(Page(kept).data)

    def run(number):
        return {key: data["pool"][place] for key, place in zip(data["keys"], data["runs"][number], strict=False)}

    by_identity = {one["identity"]: one for one in KEPT}
    for name in ("gsd_table2", "medical_ours"):
        made = join.make(name, KEPT)
        for i, cell in enumerate(made.cells):
            if cell is None:
                assert f"{name}/{i + 1}" not in data["behind"]
                continue
            found = [run(number) for number in data["behind"][f"{name}/{i + 1}"]]
            assert [one["identity"] for one in found] == [one["identity"] for one in cell.records]
            for one in found:
                whole = by_identity[one["identity"]]
                for group in ("settings", "privacy"):
                    inner = {key.partition(".")[2]: one[key] for key in one if key.startswith(f"{group}.")}
                    for key in inner.keys() | whole[group].keys():  # a key that other runs have is null
                        assert inner.get(key) == whole[group].get(key)
                assert one["command"].startswith("pubsel run ")
                assert one["utility"] == whole["utility"]
        assert any(key.startswith(f"{name}/rank/") for key in data["behind"])


def test_the_number_in_the_cell_is_the_mean_of_the_runs_that_it_links_to(tmp_path):
    text = report.page(records.read_records(save(tmp_path, *three())))
    data = json.loads(Page(text).data)
    places = data["keys"].index("utility")
    links = re.findall(r'class="number ours"[^>]*><a href="#(gsd_table2/\d+)">([\d.]+)</a>', text)
    assert len(links) == 3
    for key, number in links:
        values = [data["pool"][data["runs"][run][places]] for run in data["behind"][key]]
        assert float(number) == pytest.approx(100 * sum(values) / len(values))


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
    mine = record(utility=0.7) | {"private": "./mine", "identity": "mine"}
    page = report.page(records.read_records(save(tmp_path, record(1), mine)))
    assert "Other runs" in page
    assert "pubsel table others" not in page
    data = json.loads(Page(page).data)
    (run,) = data["behind"]["others/1"]
    assert data["pool"][data["runs"][run][data["keys"].index("identity")]] == "mine"
    assert "Other runs" not in report.page(records.read_records(save(tmp_path / "known", record(1))))


def test_oracle_selection_and_mixed_versions_are_marked(kept):
    section = kept.split('<section id="adamix_ours"')[1].split("</section>")[0]
    assert "oracle selection" in section
    assert "Settings were selected on the test set (oracle)" in section
    section = kept.split('<section id="gsd_table2"')[1].split("</section>")[0]
    assert "mixed versions" in section
    assert "Mixed versions of the code: 53321c0 (6 runs)" in section


def test_names_are_text_and_never_markup(tmp_path):
    hostile = [*hurting(), record(0, 0.7, (0.7,), HOSTILE, label=HOSTILE) | {"identity": "last"}]
    drawing = '<svg xmlns="http://www.w3.org/2000/svg"><script>window.hurt = 1</script></svg>'
    text = report.page(hostile, others={"mine": drawing})
    page = Page(text)
    assert page.open == []
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert "onerror" not in {key for _, attributes in page.elements for key in attributes}
    assert json.loads(page.data)["pool"].count(HOSTILE) == 1
    assert HOSTILE in "".join(page.texts)


def test_the_command_writes_the_file_and_takes_other_drawings_in(tmp_path):
    save(tmp_path, *three())
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "cluster_map.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (tmp_path / "figures" / "pillar_k.svg").write_text("drawn by the page itself")
    said = report.run(ReportConfig(results=str(tmp_path), output=None, debug=False))
    assert "6 records" in said
    text = (tmp_path / "report.html").read_text()
    assert 'id="figure-cluster_map"' in text
    assert "figure-pillar_k" not in text
    other = tmp_path / "elsewhere" / "page.html"
    report.run(ReportConfig(results=str(tmp_path), output=str(other), debug=False))
    assert other.read_text() == text


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install .[dev]")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for word in (
        "headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def address(kept, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(kept)
    return path.as_uri()


def opened(browser, address, width=1280, scheme="light"):
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in media.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get("about:blank")  # an address that differs behind # alone would load nothing
    browser.get(address)
    return browser


def complaints(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def keys(browser, *pressed):
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*pressed).perform()


def until(browser, condition):
    """Waits for what a key has set off."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 10).until(lambda _: condition())


def column(browser, table, head):
    """The texts of a column of a table, without what stands beside its numbers."""
    return browser.execute_script(
        """const table = document.querySelector(`#${arguments[0]} table`);
        const heads = [...table.tHead.rows[0].cells].map((cell) => cell.innerText.trim());
        const place = heads.indexOf(arguments[1]);
        return [...table.tBodies[0].rows].map((row) => {
          const cell = row.cells[place];
          return (cell.querySelector("a, span[title]") || cell).textContent.trim();
        });""", table, head,
    )  # fmt: skip


def header(browser, table, head):
    heads = browser.find_elements("css selector", f"#{table} > .scroll th")
    return next(found for found in heads if found.text.strip().startswith(head))


def test_a_column_sorts_by_click_and_by_keyboard_and_gaps_come_last(browser, address):
    from selenium.webdriver import Keys

    opened(browser, address)
    before = column(browser, "gsd_table2", "Ours")
    head = header(browser, "gsd_table2", "Ours")
    assert head.get_attribute("aria-sort") == "none"
    head.find_element("tag name", "button").click()
    numbers = sorted((text for text in before if text != "—"), key=float)
    assert column(browser, "gsd_table2", "Ours") == numbers + ["—"] * before.count("—")
    assert head.get_attribute("aria-sort") == "ascending"
    keys(browser, Keys.ENTER)  # the button has the focus
    assert column(browser, "gsd_table2", "Ours") == numbers[::-1] + ["—"] * before.count("—")
    assert head.get_attribute("aria-sort") == "descending"
    keys(browser, Keys.TAB, Keys.SPACE)
    assert head.get_attribute("aria-sort") == "none"
    assert header(browser, "gsd_table2", "Paper").get_attribute("aria-sort") == "ascending"
    assert column(browser, "gsd_table2", "Paper")[0] == "52.16"
    assert "Paper, ascending" in browser.find_element("id", "said").get_attribute("textContent")
    assert complaints(browser) == []


def test_a_number_leads_to_its_runs_by_keyboard_and_back(browser, address):
    from selenium.webdriver import Keys

    opened(browser, address)
    cell = next(cell for cell in join.make("gsd_table2", KEPT).cells if cell and len(cell.records) == 3)
    place = join.make("gsd_table2", KEPT).cells.index(cell) + 1
    link = browser.find_element("css selector", f'a[href="#gsd_table2/{place}"]:not([tabindex])')
    browser.execute_script("arguments[0].focus()", link)
    keys(browser, Keys.ENTER)
    dialog = browser.find_element("id", "runs")
    until(browser, dialog.is_displayed)
    text = dialog.text
    assert "3 runs behind this number" in text
    assert "dp_sgd on fashion_mnist without public data, ε 2" in text
    assert cell["privacy"]["statement"] in text
    assert command_line.command(cell.records[0]) in text
    runs = dialog.find_elements("css selector", "details.run")
    assert [found.get_attribute("open") for found in runs] == ["true", None, None]
    assert cell.records[2]["identity"] in text
    keys(browser, Keys.ESCAPE)
    until(browser, lambda: not dialog.is_displayed())
    assert browser.switch_to.active_element == link
    assert "#" not in browser.current_url
    keys(browser, Keys.ENTER)  # a second time
    until(browser, dialog.is_displayed)
    assert complaints(browser) == []


def test_every_row_with_runs_has_one_stop_for_the_keyboard(kept):
    for row in re.findall(r"<tr.*?</tr>", kept, re.DOTALL):
        links = re.findall(r'<a href="#([^"]+)"( tabindex="-1")?>', row)
        if links:
            assert len({key for key, _ in links}) == 1
            assert sum(not hidden for _, hidden in links) == 1


def test_a_measured_distance_alone_leads_to_its_command(browser, tmp_path):
    rank = {
        "identity": "digits-probe-1", "private": "ham10000_224", "model": "probe", "commit": "c", "seed": 0,
        "settings": {"seed": 0, "private": "ham10000_224", "public": ["kagskin"], "model": {"name": "probe"}},
        "public": "kagskin", "label": "paper", "algorithm": None, "epsilon": None, "utility": None,
        "distance": {"values": [0.25, 0.35]},
    }  # fmt: skip
    path = tmp_path / "report.html"
    path.write_text(report.page([], [rank]))
    opened(browser, path.as_uri())
    link = browser.find_element("css selector", "#gsd_table14 td a:not([tabindex])")
    assert link.text == "1"  # seeds
    assert column(browser, "gsd_table14", "Distance").count("0.300") == 1
    link.click()
    text = browser.find_element("id", "runs").text
    assert "Distance of kagskin to ham10000" in text
    assert "distance 0.25, 0.35" in text
    assert "pubsel rank" in text
    assert complaints(browser) == []


def test_links_from_elsewhere_open_the_runs(browser, address, tmp_path):
    one = next(r for r in KEPT if r["algorithm"] == "gep" and r["private"] == "fashion_mnist")
    for key, part in {"medical_ours/3": "dp_md on ham10000", f"run/{one['identity']}": "gep on fashion_mnist"}.items():
        opened(browser, f"{address}#{key}")
        assert part in browser.find_element("id", "runs-title").text
    opened(browser, f"{address}#gsd_table2/rank/4")
    assert "behind this number" in browser.find_element("id", "runs").text
    (tmp_path / "small.html").write_text(report.page([record()]))
    for wrong in ("nosuch/1", "run/nosuch", "%E0%A4%A", "toString", "__proto__"):
        opened(browser, f"{(tmp_path / 'small.html').as_uri()}#{wrong}")
        assert not browser.find_element("id", "runs").is_displayed()
    assert complaints(browser) == []


def test_rows_are_filtered_by_their_words(browser, address):
    opened(browser, address)
    browser.find_element("css selector", "#pillar_ours .filter").send_keys("PILLAR kagchest")
    rows = browser.find_elements("css selector", "#pillar_ours > .scroll tbody tr")
    shown = [row.text for row in rows if row.is_displayed()]
    assert 0 < len(shown) < len(rows)
    assert all("kagchest" in text and "pillar" in text for text in shown)


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_nothing_overflows_and_text_can_be_read(browser, address, width, scheme, tmp_path):
    opened(browser, f"{address}#gsd_table2/12", width, scheme)
    for name in ("runs", "page"):
        inside = "document.documentElement.scrollWidth <= innerWidth"
        body = "document.getElementById('runs-body')"
        assert browser.execute_script(f"return {inside} && {body}.scrollWidth <= {body}.clientWidth")
        assert browser.save_screenshot(str(tmp_path / f"{name}.png"))
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000
        browser.execute_script("document.getElementById('runs').close()")
    for details in browser.find_elements("css selector", "details"):
        browser.execute_script("arguments[0].open = true", details)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    contrasts = browser.execute_script(CONTRAST)
    assert contrasts["least"] >= 4.5, contrasts
    assert (contrasts["page"] < 0.1) == (scheme == "dark")
    assert complaints(browser) == []


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
    path = tmp_path / "report.html"
    drawing = "<svg xmlns='http://www.w3.org/2000/svg' onload='window.hurt = 1'/>"
    path.write_text(report.page(hurting(), others={"mine": drawing}))
    opened(browser, path.as_uri())
    browser.find_element("css selector", ".ours a").click()
    assert "window.hurt" in browser.find_element("id", "runs").text
    assert browser.execute_script("return window.hurt === undefined")
    assert complaints(browser) == []


@pytest.mark.attack
def test_a_private_choice_is_shown_as_one_and_never_to_be_deleted(tmp_path, monkeypatch, capsys):
    """The page and every table said that it lacks `values`: delete it, which would delete a private release."""
    monkeypatch.chdir(tmp_path)
    words = ["private=digits", "public=[digits,noise]", "model=digits_cnn", "distance.m=100", "distance.k=4"]
    assert main(["rank", *words, "distance.initialisations=1", "epsilon_select=0.5"]) == 0
    assert main(["rank", *words, "distance.initialisations=1"]) == 0
    (choice,) = records.read_choices(tmp_path / "results")
    assert {one["public"] for one in records.read_ranks(tmp_path / "results")} == {"digits", "noise"}
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
    assert "epsilon_select=0.5" in told

    path = next(path for path in tmp_path.glob("results/ranks/*/result.json") if "values" in path.read_text())
    path.write_text(path.read_text().replace('"values"', '"worths"'))
    with pytest.raises(UserError, match=r"lacks 'values': delete it to run the cell again$"):
        records.read_ranks(tmp_path / "results")  # a measurement without noise: nothing is spent again
