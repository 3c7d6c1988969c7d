"""The transport over NATS, a server that people run already, so that a coordinator can die without losing anything.

    subjects   names of subjects, of the stream and of the bucket
    frames     what is around a message on its way
    line       one connection to the servers: addresses, credentials, TLS
    tail       the stream, read from a position on
    lease      who may give orders: decided here, purely;  keeper carries it out, in a thread
    uplink, listener   the two ends
    fleet      all runs of a server, for who only reads

nats-py is imported when a line is opened, so that who uses no NATS needs none.
"""
