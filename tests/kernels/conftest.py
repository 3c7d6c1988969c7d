"""Every native test runs once for each instruction set of this processor."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from holter_kernels import native

settings.register_profile("kernels", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("kernels")


@pytest.fixture(params=native.available())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.instruction_set()
    native.select(request.param)
    yield request.param
    native.select(before)
