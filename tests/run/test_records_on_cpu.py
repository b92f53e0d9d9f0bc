"""Records beside a run's results: written whole or not at all, and claimed by the settings that fill a folder."""

import json
import os
import re
from pathlib import Path

import pytest

from gtpo_verl.run import records
from gtpo_verl.run.records import atomic_write, read_record
from recipes.claim import claim


def test_a_file_is_replaced_as_a_whole_and_leaves_nothing_beside_it(tmp_path):
    atomic_write(tmp_path / "a.json", "old")
    atomic_write(tmp_path / "a.json", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]


def test_a_full_disk_keeps_the_old_file_and_leaves_no_part_of_the_new_one(tmp_path, monkeypatch):
    atomic_write(tmp_path / "a.json", "old")

    def full(path, data):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left.*/a\.json'$"):
        atomic_write(tmp_path / "a.json", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


def test_two_writers_of_one_file_share_no_temporary_name(tmp_path, monkeypatch):
    partial, write = set(), Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: partial.add(path.name) or write(path, data))
    for _ in range(2):
        atomic_write(tmp_path / "a.json", "x")
    assert len(partial) == 2


def test_a_device_a_pipe_and_a_link_are_written_through(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        atomic_write(Path("/dev/full"), "x")
    assert Path("/dev/full").is_char_device()
    reader, writer = os.pipe()
    atomic_write(Path(f"/dev/fd/{writer}"), "through")
    os.close(writer)
    assert os.read(reader, 9) == b"through"
    (tmp_path / "link").symlink_to(tmp_path / "target")
    atomic_write(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "x"


def test_a_record_without_end_is_named_and_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_MAX_BYTES", 1 << 10)
    (tmp_path / "record.json").write_text(json.dumps({"key": "x" * 2000}))
    with pytest.raises(ValueError, match=r"record\.json is not .*restore or remove"):
        read_record(tmp_path / "record.json")


def test_a_folder_belongs_to_the_settings_that_filled_it_first(tmp_path):
    record = tmp_path / "run/settings.json"
    for _ in range(2):
        claim(record, {"seed": 1, "lr": 0.1}, "give another folder")
    with pytest.raises(ValueError, match=f"^{tmp_path}/run .*: give another folder$") as error:
        claim(record, {"seed": 2, "model": "m"}, "give another folder")
    (changes,) = re.findall(r"\((.*)\)", str(error.value))
    assert changes.split("; ") == ["seed=2, was 1", "model=m, was unset", "lr=unset, was 0.1"]
    assert read_record(record) == {"seed": 1, "lr": 0.1}
