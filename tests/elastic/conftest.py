"""What tests with real workers share."""

from collections.abc import Iterator

import pytest

from tests.elastic.job import Template


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    """A process with torch imported, from which the workers of one file are forked."""
    template = Template()
    yield template
    template.close()
