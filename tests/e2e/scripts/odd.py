"""Scripts that are no training jobs: each must behave as without holter."""

import sys

kind = sys.argv[1]
if kind == "crash":
    import no_such_module  # noqa: F401
    import torch
elif kind == "never_steps":
    import torch

    print("sum", torch.ones(3).sum().item())
elif kind == "no_torch":
    print("no torch here")
elif kind == "no_group":
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    print("done", flush=True)
elif kind == "exit":
    import torch

    sys.exit(5)
elif kind == "forever":
    import time

    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print("ready", flush=True)
    while True:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
elif kind == "pickle":
    import copy
    import io

    import torch

    class Model(torch.nn.Sequential):
        """Defined in the script: pickled by reference to __main__."""

    model = Model(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=False)
    assert torch.equal(again(torch.ones(1, 2)), copy.deepcopy(model)(torch.ones(1, 2)))
    torch.jit.script(model)
    print("pickled", __name__, sys.argv[1:])
