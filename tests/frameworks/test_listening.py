"""Where coordinator and sidecars listen: on loopback unless somebody must come from another host."""

import pytest

from holter.config import Settings
from holter.frameworks.attach import _listen_host
from holter.frameworks.place import RankPlace


@pytest.mark.parametrize(
    ("listen_host", "is_one_host", "expected"),
    [("", True, "127.0.0.1"), ("", False, "0.0.0.0"), ("10.0.0.7", False, "10.0.0.7"), ("::1", True, "::1")],  # noqa: S104
)
def test_nobody_listens_wider_than_needed(listen_host: str, is_one_host: bool, expected: str) -> None:  # noqa: FBT001
    here = RankPlace(rank=1, world_size=2, local_rank=1, is_one_host=is_one_host, address="node-0")
    assert expected == _listen_host(Settings(listen_host=listen_host), here)
