"""The checks of `holter doctor --gpu`, which try whether holter works on this machine's own devices.

    holter doctor --gpu ──starts──▶ python -m holter.rank.doctor NAME…      a process with torch, which may hang or die
                        ◀──lines──  {"began": "memory"}  {"progress": "…"}  {"check": "memory", "outcome": "ok", …}

    plan.py           ALL, the one list of checks: name, question, deadline, number of devices. Needs no torch
    outcome.py        what a check returns, and the form in which it is sent
    __main__.py       runs checks in turn, in a process of their own
    environment.py    kernels.py  training.py  cost.py  holding.py  two_devices.py      the checks
    subjects.py       what the checks work on: a small GPT, a monitor in this process, a stream that is busy
    jobs.py           runs real jobs (job_script.py) under `-m holter`, and reads the results from their run directories

A check is a function of one argument (`Say`, to report its progress) that returns a `CheckOutcome`. It does not depend on the kind of machine: on a
device that is slow or small it does less work, and says how much.
"""
