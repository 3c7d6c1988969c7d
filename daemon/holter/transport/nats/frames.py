"""What is around a message on its way.

Said    who says it: a number that a sidecar draws, so that two processes of one rank are told apart
Told    the coordinator's token: a sidecar that has heard a higher one does not listen to an older coordinator
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from holter.transport import wire


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag="greeting"):
    """The first word, and again whenever the coordinator is another one."""

    token: Annotated[str, Meta(max_length=wire.MAX_NAME)]
    """The secret to report."""
    hello: wire.Opening
    server: Annotated[str, Meta(max_length=wire.MAX_NAME)] = ""
    """Which NATS server it is connected to."""
    is_repeated: bool = False
    """Said again so that the stream still has it when old messages go; it asks for no answer."""
    is_known: bool = False
    """A coordinator of this run has heard it before: the job is in the life that one watched."""


class Beacon(msgspec.Struct, frozen=True, kw_only=True, tag="beacon"):
    """The coordinator is there; once a second."""


class TurnedAway(msgspec.Struct, frozen=True, kw_only=True, tag="turnedaway"):
    """The sidecar cannot be taken in."""

    reason: str
    is_replaced: bool = False
    """Another process speaks for this rank now."""


class LetGo(msgspec.Struct, frozen=True, kw_only=True, tag="letgo"):
    """The answer to Goodbye: nothing more will be asked."""


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Is anybody there? The server answers for one that is not."""


class Again(msgspec.Struct, frozen=True, kw_only=True, tag="again"):
    """Introduce yourself again."""


class Said(msgspec.Struct, frozen=True, array_like=True):
    """From a sidecar."""

    who: Annotated[bytes, Meta(max_length=16)]
    message: Greeting | wire.Upward


class _Enveloped(msgspec.Struct, frozen=True, array_like=True):
    """As `Said`, of a message that is encoded already."""

    who: bytes
    message: msgspec.Raw


class Told(msgspec.Struct, frozen=True, array_like=True):
    """To a sidecar."""

    token: int
    message: Beacon | TurnedAway | LetGo | Probe | Again | wire.Downward


_ENCODER = msgspec.msgpack.Encoder()
_SAID: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_TOLD: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


def encode(frame: Said | Told) -> bytes:
    """As it travels."""
    return _ENCODER.encode(frame)


def envelop(who: bytes, message: bytes) -> bytes:
    """The same as `encode(Said(...))` of the message that this is."""
    return _ENCODER.encode(_Enveloped(who, msgspec.Raw(message)))


def decode_said(content: bytes) -> Said:
    """What a sidecar said; raises msgspec.DecodeError or ValidationError."""
    return _SAID.decode(content)


def decode_told(content: bytes) -> Told:
    """What it was told; raises likewise."""
    return _TOLD.decode(content)
