import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from pubsel import records
from pubsel.messages import UserError
from pubsel.records import processor
from tests.synthetic import record, save

# Records


def test_a_record_comes_back_as_it_was_written_and_keys_are_sorted(tmp_path):
    path = tmp_path / "runs" / "x" / "result.json"
    one = record()
    records.write_record(path, one)
    assert records.read_record(path) == one
    assert list(json.loads(path.read_text())) == sorted(one)
    assert os.listdir(path.parent) == ["result.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("old", [None, "old"])
def test_a_write_that_fails_in_the_middle_leaves_the_folder_as_it_was(tmp_path, monkeypatch, step, number, old):
    path = tmp_path / "result.json"
    if old:
        path.write_text(old)
    monkeypatch.setattr(records.os, step, Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(UserError, match=os.strerror(number)) as caught:
        records.write_record(path, record())
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == (["result.json"] if old else [])
    assert not old or path.read_text() == old


def test_a_record_that_is_no_json_touches_no_file(tmp_path):
    with pytest.raises(TypeError):
        records.write_record(tmp_path / "runs" / "result.json", {"utility": object()})
    assert list(tmp_path.iterdir()) == []


def test_records_are_sorted_and_only_finished_runs_count(tmp_path):
    save(tmp_path, record(seed=5), record(seed=3))
    (tmp_path / "runs" / "unfinished").mkdir()
    (tmp_path / "runs" / "000" / ".result.json.1234.part").write_text("{")
    assert [one["seed"] for one in records.read_records(tmp_path)] == [3, 5]
    assert records.read_records(tmp_path / "nothing") == []
    with pytest.raises(UserError, match="unfinished"):
        records.read_record(tmp_path / "runs" / "unfinished" / "result.json")


def test_provenance_names_versions_and_hardware_but_no_host_user_or_path(monkeypatch):
    monkeypatch.setattr(records, "processor", processor)  # that of this machine
    found = records.provenance()
    assert set(found) == {"numbers", "versions", "commit", "hardware"}
    always = {"python", "pubsel", "torch", "numpy", "scipy", "scikit-learn", "opacus", "prv-accountant"}
    assert set(found["versions"]) == always
    assert found["versions"]["numpy"]
    assert found["hardware"].endswith("cores")
    text = json.dumps(found)
    assert os.uname().nodename not in text
    assert str(Path(__file__).parent.parent) not in text


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_the_commit_is_the_checkouts_own_and_says_when_code_was_changed(tmp_path):
    def git(*words):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    assert records._commit(tmp_path) is None
    git("init", "-q")
    assert records._commit(tmp_path) is None  # no commit yet
    (tmp_path / "pubsel").mkdir()
    (tmp_path / "pubsel" / "a.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    head = records._commit(tmp_path)
    assert head
    assert len(head) == 40
    (tmp_path / "table.csv").write_text("a table is no code")
    assert records._commit(tmp_path) == head
    assert records._commit(tmp_path / "pubsel") is None  # below another project's checkout
    (tmp_path / "pubsel" / "a.py").write_text("a = 2\n")
    assert records._commit(tmp_path) == head + "-dirty"
