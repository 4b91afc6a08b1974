"""The pages quote the benchmark as its file has it, with its worst work as well as its best."""

import re
import sys

from pages import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "scripts"))

from verdict import read, table, verdicts

ROWS = read(CHECKOUT / "results" / "benchmark.csv")


def test_a_verdict_is_that_of_the_fastest_peer_that_does_the_same_work():
    row = {"work": "w", "ratio": "", "memory_ratio": "2.0"}
    peers = {"slow": "3.0", "fast": "1.5", "plain SGD (NHWC, 8)": "0.4", "two matrix products alone (x W^T)": "0.3"}
    rows = [row | {"peer": peer, "ratio": ratio} for peer, ratio in peers.items()]
    rows.append({"work": "worse", "peer": "other", "ratio": "0.9", "memory_ratio": "0.5"})
    worst, line = verdicts(rows)
    assert (worst.work, worst.time, worst.plain) == ("worse", 0.9, None)
    assert (line.peer, line.time, line.plain) == ("fast", 1.5, 0.4)


def test_results_show_the_verdict_on_each_work_first():
    page = (CHECKOUT / "results" / "README.md").read_text()
    section = page[page.index("## Speed and memory") :]
    shown = section[section.index("| work |") :].partition("\n\n")[0]
    assert shown == table(verdicts(ROWS))


def test_the_readme_quotes_the_worst_work_beside_the_best():
    page = " ".join((CHECKOUT / "README.md").read_text().split())
    lines = verdicts(ROWS)
    (worst, best), *others = re.findall(r"from ([\d.]+) \(.*?\) to ([\d.]+) times", page)
    assert not others
    assert (float(worst), float(best)) == (lines[0].time, lines[-1].time)
