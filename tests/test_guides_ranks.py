"""Commands of the pages that start several processes run; test_guides.py has the others.

Ranks are forks in a group over gloo, at most eight: guides.py says what was scaled down.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import guide_inputs
from tests.guides import PAGES, perform_all, starts_ranks
from tests.test_guides import directory, materials, named

pytestmark = pytest.mark.slow

__all__ = ["directory", "materials"]  # fixtures


@pytest.mark.parametrize("page", named([page for page in PAGES if starts_ranks(page)]))
def test_commands_of_a_page_run(
    page: Path, materials: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide_inputs.given(page, materials, directory)
    perform_all(page, monkeypatch)
