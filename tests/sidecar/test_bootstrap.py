"""What a sidecar is told, on one line."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.sidecar import spawn
from holter.sidecar.spawn import Bootstrap

words = st.builds(
    Bootstrap,
    address=st.text(),
    token=st.text(),
    run_id=st.text(),
    run_dir=st.text(),
    action=st.text(),
    starts_coordinator=st.booleans(),
)


@given(words)
def test_what_is_written_is_read_from_one_line(word):
    line = spawn.encode_bootstrap(word)
    assert 1 == line.count(b"\n")
    assert word == spawn.decode_bootstrap(line)


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"address": 1}', b'"word"'])
def test_garbage_is_refused(garbage):
    with pytest.raises(msgspec.MsgspecError):
        spawn.decode_bootstrap(garbage)


@given(st.binary(max_size=64))
def test_whatever_comes_is_refused_in_one_way(noise):
    with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
        spawn.decode_bootstrap(noise)
