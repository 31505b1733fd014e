"""Files that are written whole."""

from __future__ import annotations

import os
import stat

import pytest

from ringkv import files
from ringkv.errors import RingkvError
from ringkv.files import write_whole


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to("file")
    for text in (b"one", b"two"):
        write_whole(tmp_path / "link", text)
        assert (tmp_path / "file").read_bytes() == text
    assert (tmp_path / "link").is_symlink()


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(RingkvError, match=f"^save = '.*/{name}': accepted is a regular file$"):
            write_whole(tmp_path / name, b"x", "save")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file.tmp").write_bytes(b"somebody's")
    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(RingkvError, match=r"^output = '.*/file': No space left on device$"):
        write_whole(tmp_path / "file", b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"old", "file.tmp": b"somebody's"}
