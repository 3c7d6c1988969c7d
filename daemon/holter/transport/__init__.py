"""How sidecars and the coordinator communicate: an interface, the messages, and a folder for each transport.

    interface                        Carrier (the sidecar's or agent's end), Listener (the coordinator's end), Receiver (what a Listener hands words to)
    uplink, speech                   a sidecar's way to the coordinator, through the agent of its host or straight; what is still to be said
    host_line                        the coordinator's end of one agent, whatever carries it
    wire                             the messages, as msgpack
    outbox, clock_offset, limits     what every carrier needs: what is still to be said, whose clock is how far off, how much, how often, when again
    websocket/                       the default: one WebSocket a rank on the coordinator's own port
    choice                           which one is used, by the coordinator's address

To add a transport:

1. A folder beside `websocket/` with two classes that fit `Carrier` and `Listener` (mypy checks it in step 2), made with the arguments that
   `choice.Transport` names. Encode with `wire.encode`; turn a sidecar away with `interface.refusal`; send the frames of the `Speech`, and after
   each new connection call its `begin` first; hand an agent's messages to a `HostLine`. Nothing a peer does may raise out of either end, and
   every wait has a deadline.
2. One line in `choice.TRANSPORTS`: the scheme of its addresses. Sidecar and coordinator know nothing else of it.
3. Tests beside `tests/transport/websocket`: records arrive in order, a lost connection is found again, Goodbye is last, garbage is borne.
"""
