"""The report of a small model, which several files read."""

import pytest

import fastvit
from report.models import make_vit_example


@pytest.fixture(scope="session")
def vit_report():
    """Returns the report of `make_vit_example`, which is not converted."""
    return fastvit.report(*make_vit_example())
