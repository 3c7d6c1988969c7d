"""Hangs, slow ranks, dead ranks, memory."""

from collections.abc import Callable

from tests.campaign.grammar import Draw, Injected, Kind, Need
from tests.campaign.lines import BY_HAND, FROM, LOADER, ONCE, PLAIN, START, TWO, joined, measured, on_culprits

# Hangs, slow ranks, dead ranks, memory.


def _process(words: str, *lines: str) -> Callable[[Draw], Injected]:
    def make(d: Draw) -> Injected:
        said = f'effect(True, "{words} now")'
        return Injected(words, {"step": d.guard(said, *lines, ranks=True)}, ranks="culprits")

    return make


def script_raises(d: Draw) -> Injected:
    error = d.rng.choice(('KeyError("sample-17")', 'ValueError("vocabulary has 64 entries, got 65")', 'AssertionError("empty batch")', 'FileNotFoundError("shard-0003.bin")'))  # fmt: skip
    on_all, point = d.rng.random() < 0.3, d.rng.choice(("step", "batch", "loss", "reduced"))
    lines = d.guard('effect(True, "raises now")', f"raise {error}", ranks=not on_all)
    return Injected("the script raises" + (" on every rank" if on_all else " on one rank"), {point: lines}, ranks="all" if on_all else "culprits", magnitude=error)  # fmt: skip


def runs_out(d: Draw) -> Injected:
    call = d.rng.choice(("torch.empty(1 << 48)", "x.new_zeros(1 << 47)", "bytearray(1 << 60)"))
    lines = d.guard('effect(True, "asks for too much now")', call, ranks=True)
    return Injected("one rank runs out of memory", {"batch": lines}, ranks="culprits", magnitude=call)


def skipped_call(d: Draw) -> Injected:
    own, is_pair = d.rng.random() < 0.6, d.setting.ranks > 2 and d.rng.random() < 0.5
    made = "metrics, _ = dist.new_subgroups(2)" if is_pair else "metrics = dist.new_group()"
    group = ", group=metrics" if own or is_pair else ""
    operation = d.rng.choice(("all_reduce", "all_gather", "barrier"))
    call = {
        "all_reduce": f"dist.all_reduce(metric{group})",
        "all_gather": f"dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size({'metrics' if group else ''}))], metric{group})",
        "barrier": f"dist.barrier({group.removeprefix(', ')})",
    }[operation]
    base = {"made": [made] if group else [], "stepped": ["metric = torch.tensor([losses[-1]])", call]}
    words = "one rank leaves out a call" + (" of a pair" if is_pair else " of a group of its own" if own else "")
    return Injected(words, {"stepped": d.guard('effect(True, "skips its next call")', f'holter.testing.skip_collective("{operation}")', ranks=True)}, base_points=base, ranks="culprits", magnitude=operation)  # fmt: skip


def _mismatch(words: str, faulty: str) -> Callable[[Draw], Injected]:
    sound = "dist.all_reduce(torch.ones(100))"

    def make(d: Draw) -> Injected:
        points = {"step": d.guard('effect(True, "calls otherwise now")', ranks=True)}
        return Injected(words, points, {"metric": d.expression(faulty, sound, ranks=True)}, base_replaced={"metric": sound}, ranks="culprits")  # fmt: skip

    return make


def stalled_loader(d: Draw) -> Injected:
    lines = d.guard(f"holter.testing.stall_loader(loader, after={d.rng.randrange(8, 20)})", 'effect(True, "the loader will stall")', step=False, ranks=True)  # fmt: skip
    return Injected("the loader gives no more batches", {"loader": lines}, ranks="culprits")


def stalled_save(d: Draw) -> Injected:
    base = [
        "if step % 5 == 4:",
        '    torch.save(net.state_dict(), os.path.join(tempfile.gettempdir(), f"campaign-{os.getpid()}.pt"))',
    ]
    return Injected("a save hangs", {"step": d.guard('effect(True, "the next save will hang")', "holter.testing.stall_save()", ranks=True)}, base_points={"stepped": base}, ranks="culprits")  # fmt: skip


_WORK = {"step": ["time.sleep(0.02)"]}


def slow_pass(d: Draw) -> Injected:
    seconds, where = d.rng.choice((0.04, 0.06, 0.1)), d.rng.choice(("forward", "backward"))
    layer = d.model.layers[-1]
    points = joined(
        d.install(f'holter.testing.slow_{where}(net.get_submodule("{layer}"), {seconds})', ranks=True),
        {"batch": ["began = time.perf_counter()"]},
        measured(d, "reduced", "time.perf_counter() - began"),
    )
    effect = on_culprits(d, f'effect(typical(measured[True]) > {seconds}, "its passes take longer")')
    return Injected(f"one rank is slower in its {where} pass", points, effect=effect, base_points=_WORK, ranks="culprits", magnitude=f"{seconds} s")  # fmt: skip


def slow_batches(d: Draw) -> Injected:
    seconds = d.rng.choice((0.04, 0.06, 0.1))
    points = joined(
        {"loader": d.guard(f"holter.testing.slow_data(loader, {seconds})", step=False, ranks=True)},
        {"step": ["began = time.perf_counter()"]},
        measured(d, "batch", "time.perf_counter() - began"),
    )
    effect = on_culprits(d, f'effect(typical(measured[True]) > {seconds}, "its batches take longer")')
    return Injected("one rank's batches come late", points, effect=effect, base_points=_WORK, ranks="culprits", magnitude=f"{seconds} s")  # fmt: skip


def leak(d: Draw) -> Injected:
    megabytes = d.rng.choice((2, 4, 8))
    size = 'int(open("/proc/self/statm").read().split()[1]) * 4096'
    kept = d.rng.choice(
        (f"torch.ones({megabytes} << 18)", f'b"x" * ({megabytes} << 20)', f"list(range({megabytes} << 15))")
    )
    points = joined({"wrapped": ["kept_for_ever = []"], "step": d.guard(f"kept_for_ever.append({kept})", ranks=True)}, measured(d, "step", size))  # fmt: skip
    effect = on_culprits(
        d, f'effect(measured[True][-1] - measured[True][0] > {megabytes * 40 << 20}, "memory has grown")'
    )
    return Injected("one rank keeps what it should let go", points, effect=effect, ranks="culprits", magnitude=f"{megabytes} MB a step")  # fmt: skip


SHOWN_BY_TWO = (PLAIN, TWO)
KINDS = (
    Kind("spins", "rank_stuck_in_python", "hangs", _process("one rank loops", "holter.testing.spin()"), ONCE, (), within=None, ends="hangs", late_by=1),
    Kind("sleeps", "rank_stuck_in_python", "hangs", _process("one rank sleeps", "holter.testing.sleep_for_ever()"), ONCE, (), within=None, ends="hangs", late_by=1),
    Kind("deadlocks", "rank_stuck_in_python", "hangs", _process("one rank waits for its own lock", "holter.testing.wait_for_lock()"), ONCE, (), within=None, ends="hangs", late_by=1),
    Kind("keeps_the_lock", "interpreter_locked", "hangs", _process("one rank keeps the interpreter lock", "holter.testing.hold_interpreter_lock(3600)"), ONCE, (), within=None, ends="hangs", late_by=1),
    Kind("is_suspended", "rank_suspended", "hangs", _process("one rank is stopped", "holter.testing.suspend()"), ONCE, (), within=None, ends="hangs", late_by=1),
    Kind("is_killed", "rank_dead", "deaths", _process("one rank is killed", "holter.testing.kill()"), ONCE, (), within=None, ends="dies", late_by=1),
    Kind("aborts", "rank_dead", "deaths", _process("one rank aborts", "holter.testing.abort()"), ONCE, (), within=None, ends="dies", late_by=1),
    Kind("leaves", "rank_dead", "deaths", _process("one rank leaves without a word", "holter.testing.leave(7)"), ONCE, (), within=None, ends="dies", late_by=1),
    Kind("raises", "script_error", "deaths", script_raises, ONCE, (), within=None, ends="dies", late_by=1, severity="info"),
    Kind("runs_out_of_memory", "out_of_memory", "deaths", runs_out, ONCE, (), within=None, ends="dies", late_by=1),
    Kind("skipped_call", "rank_missing_from_collective", "hangs", skipped_call, ONCE, (PLAIN,), within=None, ends="either", late_by=2),
    Kind("other_operation", "collective_order_mismatch", "hangs", _mismatch("one rank calls another operation", "dist.broadcast(torch.ones(100), 0)"), ONCE, (BY_HAND,), within=None, ends="either", late_by=2),
    Kind("other_size", "collective_shape_mismatch", "hangs", _mismatch("one rank sends another size", "dist.all_reduce(torch.ones(200))"), ONCE, (BY_HAND,), within=None, ends="either", late_by=2),
    Kind("other_type", "collective_dtype_mismatch", "hangs", _mismatch("one rank sends another dtype", "dist.all_reduce(torch.ones(100, dtype=torch.int32))"), ONCE, (BY_HAND,), within=None, ends="any", late_by=2),
    Kind("stalled_loader", "stalled_data_loader", "hangs", stalled_loader, START, (PLAIN, LOADER), within=None, ends="hangs", late_by=30),
    Kind("stalled_save", "stalled_checkpoint", "hangs", stalled_save, ONCE, (BY_HAND,), within=None, ends="hangs", late_by=6),
    Kind("slow_pass", "slow_compute", "slowness", slow_pass, (*START, *FROM), (BY_HAND, TWO, Need("model", ("mlp", "gpt", "vit", "rnn", "policy"), "")), within=100, late_by=60),
    Kind("slow_batches", "slow_input", "slowness", slow_batches, START, (*SHOWN_BY_TWO, LOADER), within=100, late_by=60),
    Kind("leak", "host_memory_leak", "memory", leak, (*START, *FROM), (), within=100, late_by=80, one_culprit=False),
)  # fmt: skip
