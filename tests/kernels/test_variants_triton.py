"""What is compiled after the first start would stop an answer for seconds: no variant of a kernel is new by then."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_checks import rows_of
from ringkv.engine.policies import POLICIES


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """One for each policy and number of lanes. In a process of its own: the interpreter has no variants."""
    return rows_of(Path(__file__).with_name("variants.py"), tmp_path_factory.mktemp("variants"))


def test_no_variant_is_new_after_the_warm_up(rows):
    assert {row["policy"] for row in rows} == set(POLICIES)
    assert all(row["evictions"] >= 1 for row in rows if row["policy"] != "full")
    assert [row for row in rows if row["late"]] == []


def test_the_variants_are_few(rows):
    assert max(row["warm"] for row in rows) <= 40
