"""How sidecars and the coordinator talk: an interface, the messages, and a folder for each way they travel.

    interface                        Uplink (the sidecar's end), Listener (the coordinator's end), Receiver (what a Listener hands words to)
    wire                             the messages, as msgpack
    outbox, clock_offset, limits     what every uplink needs: what is still to be said, whose clock is how far off, how much, how often, when again
    websocket/                       the default: one WebSocket a rank on the coordinator's own port
    choice                           which one is used, by the coordinator's address

To add a transport:

1. A folder beside `websocket/` with `uplink.py` and `listener.py`: two classes that fit `Uplink` and `Listener` (mypy checks it in step 2), made
   with the arguments that `choice.Transport` names. Encode with `wire.encode`; turn a sidecar away with `interface.refusal`; keep records in an
   `Outbox`, and after each new connection call its `begin` first. Nothing a peer does may raise out of either end, and every wait has a deadline.
2. One line in `choice.TRANSPORTS`: the scheme of its addresses. Sidecar and coordinator know nothing else of it.
3. Tests beside `tests/transport/websocket`: records arrive in order, a lost connection is found again, Goodbye is last, garbage is borne.
"""
