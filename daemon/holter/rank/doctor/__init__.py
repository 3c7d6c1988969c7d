"""The checks of `holter doctor --gpu`: the device path of this machine, on its own devices.

    holter doctor --gpu ──starts──▶ python -m holter.rank.doctor NAME…      a process with torch, which may hang or die
                        ◀──lines──  {"began": "memory"}  {"progress": "…"}  {"check": "memory", "outcome": "ok", …}

    plan.py           ALL, the one list: name, what it asks, deadline, devices needed. No torch
    outcome.py        what a check returns, and how it travels
    __main__.py       runs checks in turn, in a process of their own
    environment.py    kernels.py  training.py  cost.py  holding.py  two_devices.py      the checks
    subjects.py       what they are tried on: a small GPT, a monitor worn in this process, a stream that is busy
    jobs.py, jobs/    real jobs under `-m holter`, judged by their run directories

A check is a function of one argument (`Say`, to tell how far it is) that returns an `CheckOutcome`. It never judges by the kind of machine: on a
device that is slow or small it takes less work, and says how much.
"""
