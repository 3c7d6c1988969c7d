"""A latch published to by native code has the bytes that the definition writes."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holter.page.layout import CONTROL, HEARTBEAT, NOTICE, Latch

native = pytest.importorskip("holter.page._latch", reason="there was no compiler")
WORDS = st.integers(-(1 << 63), (1 << 63) - 1)


def latch_of(form: struct.Struct, first_word: int = 0) -> tuple[Latch, memoryview]:
    data = memoryview(bytearray(8 + 2 * (8 + form.size)))
    words = data.cast("Q")
    words[0] = first_word
    return Latch(data, words, 0, form), data


@given(
    st.sampled_from([0, 1, (1 << 32) - 2, (1 << 64) - 2]), st.lists(st.tuples(WORDS, WORDS, WORDS, WORDS), max_size=4)
)
def test_words_are_published_as_defined(first_word, values):
    (ours, written), (theirs, defined) = latch_of(HEARTBEAT, first_word), latch_of(HEARTBEAT, first_word)
    for each in values:
        ours.publish(*each)
        theirs.publish_by_python(HEARTBEAT.pack(*each))
        assert each == ours.read()
    assert bytes(defined) == bytes(written)


def test_a_long_text_is_published_as_defined():
    (ours, written), (theirs, defined) = latch_of(NOTICE), latch_of(NOTICE)
    ours.publish(b"trains on")
    theirs.publish_by_python(NOTICE.pack(b"trains on"))
    assert bytes(defined) == bytes(written)


@pytest.mark.parametrize("num_bytes", [0, 8, CONTROL.size + 8, 1 << 20])
def test_a_body_of_another_size_is_refused(num_bytes):
    _, data = latch_of(CONTROL)
    with pytest.raises(ValueError, match="does not fit"):
        native.publish(data, bytes(num_bytes))
    assert not any(data)
