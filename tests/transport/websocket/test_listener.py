"""Where Prometheus is sent is where the sidecar speaks from, whatever it says."""

import pytest

from holter.transport.websocket.listener import reachable


@pytest.mark.parametrize(
    ("named", "remote", "expected"),
    [
        ("127.0.0.1:9100", "127.0.0.1", "127.0.0.1:9100"),
        ("0.0.0.0:9100", "10.0.0.7", "10.0.0.7:9100"),
        ("https://0.0.0.0:9100", "10.0.0.7", "https://10.0.0.7:9100"),
        ("[::]:9100", "fd00::7", "[fd00::7]:9100"),
        ("169.254.169.254:80", "10.0.0.7", "10.0.0.7:80"),
        ("internal.example/secrets?:80", "10.0.0.7", "10.0.0.7:80"),
        ("", "10.0.0.7", ""),
        ("node-a:", "10.0.0.7", ""),
        ("node-a:0", "10.0.0.7", ""),
        ("node-a:65536", "10.0.0.7", ""),
        ("node-a:" + "9" * 5000, "10.0.0.7", ""),
        ("node-a:\u0661\u0662", "10.0.0.7", ""),
        ("node-a:80/path", "10.0.0.7", ""),
    ],
)
def test_a_target_is_on_the_sidecars_own_host(named: str, remote: str, expected: str) -> None:
    assert expected == reachable(named, remote)
