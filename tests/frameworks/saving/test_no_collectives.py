"""A save that meets nobody, in its own thread alone."""

import threading

import pytest
import torch.distributed as dist

from holter.errors import SaveError
from holter.frameworks.saving.no_collectives import no_collectives


def test_barriers_return_and_whatever_talks_is_refused_by_name() -> None:
    before = dist.barrier
    with no_collectives():
        assert dist.barrier() is None
        with pytest.raises(SaveError, match="all_gather_object"):
            dist.all_gather_object([], 0)
    assert before is dist.barrier


def test_another_thread_has_the_functions_as_they_were() -> None:
    found: list[Exception] = []

    def call() -> None:
        try:
            dist.barrier()
        except Exception as error:  # noqa: BLE001
            found.append(error)

    with no_collectives():
        other = threading.Thread(target=call)
        other.start()
        other.join()
    assert 1 == len(found), "there is no process group, and so it raises"
    assert not isinstance(found[0], SaveError)
