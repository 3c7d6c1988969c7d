"""The envelopes of messages over NATS.

Said    from a sidecar, with a random number that tells two processes of one rank apart
Told    from a coordinator, with its token: a sidecar that has heard a higher one ignores an older coordinator
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from holter.files import encoded
from holter.transport import wire


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag="greeting"):
    """The first message of a connection, sent again whenever the coordinator has changed."""

    token: Annotated[str, Meta(max_length=wire.MAX_NAME)]
    """The secret for reporting."""
    hello: wire.Opening
    server: Annotated[str, Meta(max_length=wire.MAX_NAME)] = ""
    """Id of the NATS server that the sender is connected to."""
    is_repeated: bool = False
    """Whether it is only repeated so that the stream still has it when old messages go; it needs no answer."""
    is_known: bool = False
    """Whether a coordinator of this run has welcomed the sender before, so that it belongs to a life that was already
    watched."""


class Beacon(msgspec.Struct, frozen=True, kw_only=True, tag="beacon"):
    """The coordinator says that it is there, once a second."""


class TurnedAway(msgspec.Struct, frozen=True, kw_only=True, tag="turnedaway"):
    """The sidecar is refused."""

    reason: str
    is_replaced: bool = False
    """Whether the reason is that another process speaks for this rank now."""


class LetGo(msgspec.Struct, frozen=True, kw_only=True, tag="letgo"):
    """The answer to Goodbye: nothing more will be asked."""


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Asks whether anybody is there; for an absent sidecar the server answers."""


class Again(msgspec.Struct, frozen=True, kw_only=True, tag="again"):
    """Asks the sender to introduce itself again."""


class Said(msgspec.Struct, frozen=True, array_like=True):
    """A message from a sidecar."""

    who: Annotated[bytes, Meta(max_length=16)]
    message: Greeting | wire.Upward


class _Enveloped(msgspec.Struct, frozen=True, array_like=True):
    """A `Said` whose message is encoded already."""

    who: bytes
    message: msgspec.Raw


class Told(msgspec.Struct, frozen=True, array_like=True):
    """A message to a sidecar."""

    token: int
    message: Beacon | TurnedAway | LetGo | Probe | Again | wire.Downward


_ENCODER = msgspec.msgpack.Encoder()
_SAID: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_TOLD: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


def encode(frame: Said | Told) -> bytes:
    """Encode a frame for sending."""
    return encoded(frame, _ENCODER.encode)


def envelop(who: bytes, message: bytes) -> bytes:
    """Return what `encode(Said(...))` would, for an already encoded message."""
    return _ENCODER.encode(_Enveloped(who, msgspec.Raw(message)))


def decode_said(content: bytes) -> Said:
    """Decode a sidecar's frame; raises msgspec.DecodeError or ValidationError."""
    return _SAID.decode(content)


def decode_told(content: bytes) -> Told:
    """Decode a coordinator's frame; raises msgspec.DecodeError or ValidationError."""
    return _TOLD.decode(content)
