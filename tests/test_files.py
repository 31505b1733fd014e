"""Files that are written whole."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from ringkv import files
from ringkv.errors import RingkvError
from ringkv.files import utf8_text, write_whole


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


def test_the_file_keeps_its_permissions(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(0o664)
    before = os.umask(0o077)
    try:
        write_whole(tmp_path / "file", b"new")
        write_whole(tmp_path / "other", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o664
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o600


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to(tmp_path / "no" / "file")
    for name, why in (("loop", "Too many levels of symbolic links"), ("gone", f"there is no folder '{tmp_path}/no'")):
        with pytest.raises(RingkvError, match=f"^output = '.*/{name}': {why}"):
            write_whole(tmp_path / name, b"x")
    assert sorted(os.listdir(tmp_path)) == ["gone", "loop"]


def test_what_an_earlier_write_left_is_not_followed(tmp_path):
    (tmp_path / "file.ringkv.tmp").symlink_to("mine")
    (tmp_path / "mine").write_bytes(b"mine")
    write_whole(tmp_path / "file", b"new")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"new", "mine": b"mine"}


WRITES = re.compile(r"os\.(replace|rename)\(|\.write_(bytes|text)\(|open\(([^)\n]*, *)?[\"'][wax]")
# A cache in which only files of our own may lie, a file of the kernel, what stands for a closed stream, and a file that
# is written row by row to the descriptor of ``files.replacing``.
ALLOWED = {"files.py", "kernels/cache.py", "apps/measure/bench.py", "apps/process.py", "apps/jobs/settings.py"}


def test_nothing_else_writes_whole_files():
    """Oracle: the source."""
    root = Path(files.__file__).parent
    found = [path for floor in ("apps", "engine", "models", "kernels") for path in (root / floor).rglob("*.py")]
    writing = {path for path in (*found, *root.glob("*.py")) if WRITES.search(path.read_text())}
    assert {path.relative_to(root).as_posix() for path in writing} <= ALLOWED
    for line in ("os.replace(a, b)", "path.write_text(x)", 'with open(path, "wb") as file:', "path.open('a')"):
        assert WRITES.search(line)


@pytest.mark.parametrize("text", ["a\r\nb\rc\n", "", "\n", "a\x85b\u2028c", "x\ufeff"])
def test_a_text_is_what_its_bytes_say(text):
    assert utf8_text(text.encode()) == utf8_text(b"\xef\xbb\xbf" + text.encode()) == text
    with pytest.raises(UnicodeDecodeError):
        utf8_text(b"\xff" + text.encode())
